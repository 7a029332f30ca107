"""Deeds of sampled answers: each token must be the one that the seed's random numbers draw from plain logits in
float64."""

import json
import math
from pathlib import Path
from random import Random

import torch
from support.command import run_here

from sparsekv.runtime.decoding.answer import Sampling, question_ids
from sparsekv.runtime.decoding.engine import why_alone
from sparsekv.runtime.decoding.open import OpenIndex

from .commands import asking_options, is_read_back, placed, ran
from .deeds import deed
from .oracles import ROUNDING, expect
from .questions import Checks, fed_with, takes_everything
from .world import World


def draw_sampling(random: Random, tokens: int) -> Sampling:
    """Return random settings of sampling: high and low temperatures, with a cut by number, by share, by both or by
    none."""
    return Sampling(
        max_new_tokens=tokens,
        temperature=random.choice([0.1, 0.5, 0.9, 1.0, 1.0, 2.5]),
        top_k=random.choice([None, None, 1, 2, 5, 40, 100_000]),
        top_p=random.choice([None, None, 0.01, 0.3, 0.9, 0.999, 1.0]),
        seed=random.choice([0, 1, random.randint(0, 2**40)]),
    )


def left_by(sampling: Sampling, logits: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities [V] float64 of the tokens that temperature, top-k and top-p leave; -inf for the
    others."""
    scores = logits.double().cpu() / sampling.temperature
    if sampling.top_k is not None:
        least = scores.topk(min(sampling.top_k, len(scores))).values[-1]
        scores = scores.masked_fill(scores < least, -math.inf)
    if sampling.top_p is not None:
        order = scores.argsort(descending=True, stable=True)
        share = scores[order].softmax(-1)
        scores[order[share.cumsum(-1) - share >= sampling.top_p]] = -math.inf
    return scores.log_softmax(-1)


def expect_drawn(sampling: Sampling, logits: torch.Tensor, answer: list[int], device: torch.device, told: str) -> None:
    """Check that each token of an answer is the one that the seed's random numbers draw from logits [A, V].

    A draw is a race of exponential times, as in torch.multinomial: the token whose probability divided by its random
    number is largest. If another token's value is equal up to rounding, either token may be drawn. So may a token at
    the border of a cut, if an error of the logits can move it.
    """
    random = torch.Generator(device).manual_seed(sampling.seed)
    error = 10 * ROUNDING * float(logits.abs().max()) / sampling.temperature
    for step, (token, row) in enumerate(zip(answer, logits, strict=True)):
        times = torch.empty(row.shape[-1], device=device).exponential_(1, generator=random).double().cpu().log()
        race, uncut = left_by(sampling, row) - times, row.double().cpu() / sampling.temperature - times
        winner = int(race.argmax())
        if token == winner or float(race[winner] - race[token]) <= 2 * error:
            continue
        near = _at_the_border(sampling, row, token, error) or _at_the_border(sampling, row, winner, error)
        right = near and float(uncut[winner] - uncut[token]) <= 2 * error + 1
        expect(right, "drawn token", f"{told}: token {step} of {answer} at {sampling}: {winner} is drawn")


def _at_the_border(sampling: Sampling, logits: torch.Tensor, token: int, error: float) -> bool:
    """Whether an error of the logits decides whether a cut keeps a token."""
    moved = logits.double().cpu().clone()
    found = set()
    for by in (-2, 0, 2):
        moved[token] = logits[token].double() + by * error * sampling.temperature
        found.add(bool(left_by(sampling, moved)[token].isfinite()))
    return len(found) > 1


@deed("sampled", 5)
def sampled(world: World, index: OpenIndex) -> None:
    """Check sampled answers against plain logits and the seed: again, by another session, and beside other
    questions."""
    case, random, checks = world.case, Random(world.case.more), Checks(world, index)
    sampling, device = draw_sampling(random, case.answer + random.choice([0, 4])), index.model.device
    asked = [question_ids(index, world.question(place), raw=case.raw) for place in range(2)]
    askers = {"dense": world.dense(index)}
    if takes_everything(world):
        askers["everything"] = world.asker(index, "100%", prefill_budget=checks.all_of_a_prefill())
    for kind, asker in askers.items():
        for ids in asked:
            answer = asker.ask(ids, sampling)
            steps = checks.truth(fed_with(ids, answer.ids))[len(ids) - 1 :]
            expect_drawn(sampling, steps, answer.ids, device, kind)
        if not why_alone(index, asker.config.attention, asker.cache):
            for ids, answer in zip(asked, asker.ask_all(asked, sampling, together=random.randint(1, 3)), strict=True):
                steps = checks.truth(fed_with(ids, answer.ids))[len(ids) - 1 :]
                expect_drawn(sampling, steps, answer.ids, device, f"{kind} batch")
    first = world.asker(index).ask(asked[0], sampling).ids
    asker = world.asker(index)
    asker.ask(asked[1], sampling)
    again = asker.ask(asked[0], sampling).ids
    expect(first == again, "sampled again", f"{first}, then {again} at {sampling}")


@deed("sampled command", 2, asks=False)
def sampled_command(world: World, index: OpenIndex) -> None:
    """Check that sampled answers of a resumed file equal those of an uninterrupted run, and of each question alone.

    With another seed no answer is reused.
    """
    if not is_read_back(world) or world.case.guard is not None:
        return
    case, random = world.case, Random(world.case.more)
    sampling, questions = draw_sampling(random, case.answer), [world.question(place).strip() for place in range(3)]
    options = ["--temperature", str(sampling.temperature), f"--seed={sampling.seed}"]
    options += [] if sampling.top_k is None else ["--top-k", str(sampling.top_k)]
    options += [] if sampling.top_p is None else ["--top-p", str(sampling.top_p)]
    asking = ["generate", "--index", "index.skv", *asking_options(world, case.budget), *options, "--json"]
    with placed(world):
        Path("q.txt").write_text("".join(f"{one}\n" for one in questions))
        resuming = [*asking, "--batch-file", "q.txt", "--batch-size", "1", "--resume", "a.jsonl"]
        whole = ran(world, *resuming)
        if whole.code:
            return
        lines = Path("a.jsonl").read_bytes()
        for cut in (random.randrange(len(lines)), lines.index(b"\n", random.randrange(len(lines) - 1)) + 1):
            Path("a.jsonl").write_bytes(lines[:cut])
            again = ran(world, *resuming)
            texts = [[json.loads(line)["text"] for line in one.stdout.strip().split("\n")] for one in (whole, again)]
            expect(
                again.code == 0 and texts[0] == texts[1], "resumed draw", f"cut at {cut}: {texts[1]}, not {texts[0]}"
            )
        other = [f"--seed={sampling.seed + 1}" if one.startswith("--seed") else one for one in resuming]
        refused = run_here(*other).code
        expect(refused == 2, "resumed draw", f"a file of another seed: ends with {refused}")
        alone = ran(world, *asking, "--", questions[1])
        found = [json.loads(whole.stdout.split("\n")[1])["text"], json.loads(alone.stdout)["text"]]
        expect(found[0] == found[1], "drawn alone", f"{found[1]!r}, and {found[0]!r} among others")
