"""Deeds that compute printed numbers of `recall-report`, `tune` and `eval` again in float64.

A method's choice comes from its selector, and everything else from files alone.
"""

import json
import re
import string
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import torch
from support.command import run_here

from sparsekv.formats.documents.continuation import encode_question
from sparsekv.runtime.attention.config import DecodeConfig, Dense
from sparsekv.runtime.cache.kv_store import LayerRows
from sparsekv.runtime.decoding.answer import Sampling, question_ids
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.prepare import prepare_layer
from sparsekv.runtime.decoding.session import Session
from sparsekv.runtime.reporting.recall import chosen_positions, tail_block, truths
from sparsekv.runtime.reporting.report import forms
from sparsekv.runtime.selection.interface import Budget, MethodSpec, methods

from .case import draw_budget
from .commands import is_read_back, placed, ran, reading_options
from .deeds import deed
from .oracles import expect, expect_greedy, plain_over
from .reporting import APART, Truth
from .world import World, stored_rows

REFERENCE = Budget(0.05)
"""Budget for which `tune` counts the best tokens."""

BEGINNING = "Answer:"
"""Beginning of an answer of `--task qa`."""


class Choices:
    """Choices of methods for one half of the tail's queries, by layer.

    Methods whose layers share information choose as they do when all layers are asked in order.
    """

    def __init__(self, world: World, index: OpenIndex, *, calibration: bool):
        self.artifact, self.calibration = index.artifact, calibration
        self.layers, self.device = index.artifact.manifest.indexed_layers, index.model.device
        self.truth = {layer: Truth(world, layer, calibration=calibration) for layer in self.layers}

    def measured(
        self, form: MethodSpec, budget_of: Callable[[int], Budget], wanted: Budget | None
    ) -> list[dict[str, Any]]:
        """Return each measure's means [Hk] float64, by layer; `recall` is NaN for heads in which rounding decides the
        best tokens.

        Args:
            wanted: whose best tokens count for recall; None: the layer's own budget.
        """
        shared: dict[str, Any] = {}
        found = []
        for layer in self.layers:
            rows, truth = LayerRows(self.artifact, layer), self.truth[layer]
            selector = prepare_layer(rows, replace(form, residual=False), self.device, shared).selector
            (block,) = truths(rows, [tail_block(self.artifact, layer, calibration=self.calibration)], self.device)
            selection = selector.select(block.queries, budget_of(layer))
            heads, queries, middle = truth.probability.shape
            positions = chosen_positions(selection.rows, selector.layout, middle).cpu().expand(heads, queries, -1)
            chosen = torch.zeros(heads, queries, middle + 1, dtype=torch.bool).scatter_(-1, positions, True)[..., :-1]
            best = (wanted or budget_of(layer)).tokens(middle)
            oracle = torch.zeros_like(chosen).scatter_(-1, truth.probability.topk(best, -1).indices, True)
            recall = (chosen & oracle).sum(-1).double().mean(1) / best
            tied = torch.tensor([truth.ties(best, head) for head in range(heads)])
            read = (2 * chosen.sum(-1) + torch.as_tensor(selection.cost.index_rows).cpu()).double().mean(1) / (
                2 * middle
            )
            plainly = selection.rows.log_weights is None and (selection.rest is None or not selection.rest.attended)
            measures = truth.measured(chosen) | {"recall": recall.where(~tied, torch.nan), "kv_fraction": read}
            if not plainly:
                del measures["output_error"]
            found.append(measures)
        return found


def _agree(told: float | None, expected: float | None, kind: str, about: str) -> None:
    if told is None or expected is None:
        right = told is expected
    else:
        right = expected != expected or abs(told - expected) <= APART * max(1, abs(expected))
    expect(right, kind, f"{about}: {told}, and {expected} in float64")


@deed("report command", 2)
def report_command(world: World, index: OpenIndex) -> None:
    """Check each number of `recall-report --json` by head against the method's choice in float64, and the means."""
    if not is_read_back(world):
        return
    random, case = Random(world.case.more), world.case
    budgets = [draw_budget(random, case.middle) for _ in range(2)]
    name = random.choice([case.method, *dict(case.indexers)])
    asking = ["recall-report", "--index", "index.skv", "--method", name, "--json", "-q", "--device", world.device]
    asking += [part for budget in dict.fromkeys(budgets) for part in ("--budget", budget)]
    with placed(world):
        by_head, in_all = (ran(world, *asking, *by) for by in (("--by", "layer,head"), ()))
    if by_head.code or in_all.code:
        return
    rows = json.loads(by_head.stdout)["rows"]
    choices = Choices(world, index, calibration=False)
    for form in forms(index.artifact, name, residual=False):
        for budget in {repr(row["budget"]): row["budget"] for row in rows}.values():
            found = choices.measured(form, lambda layer, budget=budget: Budget(budget), None)
            for layer, measures in zip(choices.layers, found, strict=True):
                for row in rows:
                    if (row["variant"], repr(row["budget"]), row["layer"]) != (form.variant, repr(budget), layer):
                        continue
                    for measure, values in measures.items():
                        about = f"{measure} of {form.title} at {budget!r} of layer {layer}, head {row['kv_head']}"
                        _agree(row[measure], float(values[row["kv_head"]]), "report command", about)
    for mean in json.loads(in_all.stdout)["rows"]:
        key = (mean["variant"], repr(mean["budget"]))
        of = [row for row in rows if (row["variant"], repr(row["budget"])) == key]
        for measure in ("recall", "output_error", "kv_fraction", "attention_mass"):
            expected = sum(row[measure] for row in of) / len(of)
            _agree(mean[measure], expected, "report command", f"mean of {measure} of {key}")


@deed("tune command", 2)
def tune_command(world: World, index: OpenIndex) -> None:
    """Check that `tune --json` prints each setting's measures as in float64, and that the setting holds its target."""
    if not is_read_back(world):
        return
    random, case = Random(world.case.more), world.case
    measure = random.choice(["recall", "error"])
    target = random.choice([0.3, 0.5, 0.8, 0.95] if measure == "recall" else [0.05, 0.2, 0.5, 0.9])
    names = [*dict.fromkeys([*dict(case.indexers), *([] if case.method == "oracle" else [case.method])])]
    asking = ["tune", "--index", "index.skv", f"--target-{measure}", str(target), "--json", "-q", "--dry-run"]
    asking += [part for name in names for part in ("--method", name)]
    with placed(world):
        outcome = ran(world, *asking, "--device", world.device)
    if not outcome.stdout.strip():
        return
    halves = [Choices(world, index, calibration=first) for first in (True, False)]
    told = json.loads(outcome.stdout)
    known = {(form.name, form.variant): form for name in names for form in forms(index.artifact, name, residual=False)}
    holding = [row["kv_fraction"] for row in told["methods"] if row["holds"]]
    if holding:
        cheapest = told["methods"][0]
        expect(cheapest["holds"] and cheapest["kv_fraction"] <= min(holding), "tune", f"not the cheapest: {told}")
    expect((told["default"] is None) == (not holding), "tune", f"default {told['default']} of {holding}")
    for row in told["methods"]:
        form = known.get((row["method"], row["variant"]))
        if form is None or row["residual"]:
            continue
        shares = {int(layer): share for layer, share in (row["layer_budgets"] or {}).items()}

        def budget_of(layer: int, shares: dict[int, float] = shares, row: dict[str, Any] = row) -> Budget:
            return Budget(shares.get(layer, row["budget"]))

        found = [half.measured(form, budget_of, REFERENCE) for half in halves]
        means = [
            {name: float(torch.stack([one[name].mean() for one in layers]).mean()) for name in layers[0]}
            for layers in found
        ]
        name = "output_error" if measure == "error" else measure
        about = f"of {form.title} at {row['layer_budgets'] or row['budget']}"
        _agree(row["kv_fraction"], means[1]["kv_fraction"], "tune", f"kv_fraction {about}")
        _agree(row["recall"], means[1]["recall"], "tune", f"recall {about}")
        if "output_error" in means[1]:
            _agree(row["error"], means[1]["output_error"], "tune", f"error {about}")
        if name in means[0]:
            _agree(row["calibration"], means[0][name], "tune", f"calibration's {measure} {about}")
            _agree(row["held_out"], means[1][name], "tune", f"held out {measure} {about}")
        sign = 1 if measure == "recall" else -1
        meets = sign * (row["calibration"] - target) >= -1e-9
        close = sign * (row["held_out"] - target) >= -told["tolerance"] - 1e-9
        expect(row["holds"] == (meets and close and row["kv_fraction"] < 1), "tune", f"holds {about}: {row}")


@deed("tuned", 2, asks=False)
def tuned(world: World, index: OpenIndex) -> None:
    """Check that `generate` and `chat` use the setting that `tune --json` printed, until `tune --reset`."""
    if not is_read_back(world):
        return
    case, random = world.case, Random(world.case.more)
    names, question = [*dict(case.indexers), *(() if case.method == "oracle" else (case.method,))], world.question(0)
    tuning = ["tune", "--index", "index.skv", "--target-recall", random.choice(["0.2", "0.5", "0.8"]), "--json", "-q"]
    tuning += [part for name in dict.fromkeys(names) for part in ("--method", name)]
    asking = ["--index", "index.skv", "--model", "model", "--max-new-tokens", str(case.answer), "-q"]
    asking += ["--device", world.device, *("--raw",) * case.raw]
    with placed(world):
        told = ran(world, *tuning, "--device", world.device)
        setting = json.loads(told.stdout)["default"] if told.stdout.strip() else None
        by_default = ran(world, "generate", *asking, "--json", "--", question)
        if by_default.code or setting is None:
            return
        Path("questions.txt").write_text(f"{question}\n")
        with Path("questions.txt").open() as lines, mock.patch.object(sys, "stdin", lines):
            spoken = ran(world, "chat", *asking)
        run_here("tune", "--index", "index.skv", "--reset", "-q")
        after = json.loads(ran(world, "generate", *asking, "--json", "--", question).stdout)
    parameters = {
        name: tuple(value) if isinstance(value, list) else value for name, value in setting["parameters"].items()
    }
    form = MethodSpec(
        setting["method"], setting["variant"], methods()[setting["method"]](**parameters), setting["residual"]
    )
    layers = {int(layer): Budget(share) for layer, share in (setting["layer_budgets"] or {}).items()}
    config = DecodeConfig(form, Budget(setting["budget"]), layers, question=Dense())
    asked, found = question_ids(index, question, raw=case.raw), json.loads(by_default.stdout)
    expected = Session.open(index, config).ask(asked, Sampling(case.answer))
    expect(found["text"] == expected.text, "tuned answer", f"{found}, not {expected} by {setting}")
    _agree(found["kv_fraction"], expected.kv_fraction, "tuned answer", f"kv_fraction by {setting}")
    expect(spoken.stdout == f"{expected.text}\n", "tuned answer", f"{spoken.stdout!r} in a chat, not {expected.text!r}")
    first = [*dict(case.indexers), *(name for name, one in methods().items() if not one.needs_index)][0]
    plainly = methods()[first].default_budget(index.split.middle)
    right = after["method"] == first and repr(after["budget"]) == repr(plainly.value)
    expect(right, "after tune --reset", f"{after}, not {first} at {plainly}")


def f1(answer: str, expected: str) -> float:
    """Return SQuAD's F1 of two texts: of their words in lower case, without punctuation and articles."""

    def words(text: str) -> Counter[str]:
        plain = "".join(letter for letter in text.lower() if letter not in string.punctuation)
        return Counter(re.sub(r"\b(a|an|the)\b", " ", plain).split())

    ours, theirs = words(answer), words(expected)
    same = (ours & theirs).total()
    return 2 * same / (ours.total() + theirs.total()) if same else 0.0


@deed("eval command", 1, asks=False)
def eval_command(world: World, index: OpenIndex) -> None:
    """Check the scores of `eval --json` against its stored answers, and dense answers against plain transformers."""
    if not is_read_back(world) or world.case.raw:
        return
    random, questions = Random(world.case.more), ["q?", "why so", "name it"]
    budgets, length = ["1", "100%"], min(world.case.tokens, 200)
    asking = ["eval", "doc.txt", "--task", "qa", "--pairs", "pairs.jsonl", "--length", str(length)]
    asking += ["--questions", "3", "--model", "model", "--method", "oracle", "--max-new-tokens", "8", "--sinks", "2"]
    asking += ["--tail", "4", "--json", "-q", "--keep-indices", "--work", "work", "--device", world.device]
    asking += [part for budget in budgets for part in ("--budget", budget)]
    asking += reading_options(world)
    asking += [] if world.case.rounded is None else ["--weights", world.case.rounded]
    with placed(world):
        expected = {question: ["nothing of it"] for question in questions}
        for _ in range(2):  # in the second pass with words of the answers, so that scores are not all zero
            lines = [json.dumps({"question": one, "answers": answers}) for one, answers in expected.items()]
            Path("pairs.jsonl").write_text("".join(f"{line}\n" for line in lines))
            outcome = ran(world, *asking)
            if outcome.code:
                return
            given = [json.loads(line) for line in Path("work/answers.jsonl").read_text().split("\n") if line]
            asked = {one["question"]: next(q for q in questions if one["question"].endswith(q)) for one in given}
            for one in given:
                words = one["text"].split()
                if one["method"] == "dense" and words:
                    some = random.sample(words, random.randint(1, len(words)))
                    expected[asked[one["question"]]] = [" ".join(some), "nothing of it"]
        lines = [json.loads(line) for line in Path("pairs.jsonl").read_text().split("\n") if line]
        answers = {one["question"]: one["answers"] for one in lines}
        wanted = {question: answers[short] for question, short in asked.items()}
        _eval_rows(json.loads(outcome.stdout)["rows"], given, wanted)
        for folder in Path("work").glob("*/*.skv"):
            _eval_answers(world, folder, [one for one in given if one["method"] == "dense"])


def _eval_rows(rows: list[dict[str, Any]], given: list[dict[str, Any]], expected: dict[str, list[str]]) -> None:
    scores = {}
    for row in rows:
        of = [one for one in given if (one["method"], repr(one["budget"])) == (row["method"], repr(row["budget"]))]
        latest = {one["question"]: one for one in of}.values()
        expect(len(latest) == row["questions"], "eval", f"{row['questions']} questions of {len(latest)}: {row}")
        scores[row["method"], repr(row["budget"])] = score = (
            100
            * sum(max(f1(one["text"], answer) for answer in expected[one["question"]]) for one in latest)
            / len(latest)
        )
        about = (
            f"of {row['method']} at {row['budget']!r}: {[(one['text'], expected[one['question']]) for one in latest]}"
        )
        _agree(row["score"], score, "eval", f"score {about}")
        read = [one["kv_fraction"] for one in latest if one["kv_fraction"] is not None]
        if read:
            _agree(row["kv_fraction"], sum(read) / len(read), "eval", f"kv_fraction {about}")
        if row["difference"] is not None:
            _agree(row["difference"], score - scores["dense", "None"], "eval", f"difference {about}")
    expect(scores["oracle", "1.0"] == scores["dense", "None"], "eval", f"100% is not dense: {scores}")


def _eval_answers(world: World, folder: Path, dense: list[dict[str, Any]]) -> None:
    opened = world.open(str(folder))
    rows, prompt = stored_rows(folder, world.case.layers), opened.artifact.manifest.prompt
    for one in {each["question"]: each for each in dense}.values():
        ids = torch.tensor(encode_question(opened.tokenizer, prompt.border, prompt.chat, one["question"], BEGINNING))
        answer = world.dense(opened).ask(ids, Sampling(8))
        expect(answer.text == one["text"], "eval answer", f"{one['text']!r}, not {answer.text!r}")
        fed = torch.cat([ids, torch.tensor(answer.ids[:-1], dtype=torch.long)])
        logits = plain_over(world, rows, opened.input_ids, fed)[len(ids) - 1 :]
        expect_greedy(logits, answer.ids, "eval answer", "against transformers")
