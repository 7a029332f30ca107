"""Deeds (operations of a case that are checked) that run the command, and compare its output with the API's."""

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import torch
from support.command import Outcome, run_here
from transformers import AutoTokenizer

from sparsekv.formats.documents.continuation import BETWEEN
from sparsekv.formats.documents.document import UTF_8
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.models.load import tokenizer_identity
from sparsekv.runtime.decoding.answer import Sampling, question_ids
from sparsekv.runtime.decoding.load import load_and_open
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.session import Conversation
from sparsekv.runtime.selection.interface import DENSE, Budget, methods
from sparsekv.runtime.selection.token_choice import first_dense
from sparsekv.runtime.sources.places import Places

from .case import draw_budget
from .deeds import deed
from .options import Options
from .oracles import error_of, expect, expect_greedy
from .questions import fed_with
from .refusals import is_due
from .talking import follows, truth
from .world import EDGES, World, stored_rows


def as_arguments(options: Options) -> list[str]:
    """Return options as a user writes them."""
    found: list[str] = []
    for name, value in options:
        dashed = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{dashed}" if value else f"--no-{dashed}")
        else:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            found.append(f"--{dashed}={text}")
    return found


@contextlib.contextmanager
def placed(world: World) -> Iterator[None]:
    """Within the context, the case's folder is the current one, and has the model and the document."""
    if not (world.folder / "model").exists():
        world.checkpoint.save_pretrained(world.folder / "model")
        world.tokenizer.save_pretrained(world.folder / "model")
        (world.folder / "doc.txt").write_bytes(world.document.encode(world.case.encoding))
    with contextlib.chdir(world.folder):
        yield


def reading_options(world: World) -> list[str]:
    """Return the options by which commands get the documents' encoding; a byte order mark may replace the option."""
    encoding = world.case.encoding
    told = encoding == UTF_8 or (encoding in ("utf-16", "utf-32", "utf-8-sig") and world.case.more % 2)
    return [] if told else ["--encoding", encoding]


def is_read_back(world: World) -> bool:
    """Whether transformers loads the saved tokenizer, and not another one of the model's family."""
    with placed(world):
        loaded = AutoTokenizer.from_pretrained("model")
    return tokenizer_identity(loaded) == tokenizer_identity(world.tokenizer)


def ran(world: World, *arguments: str) -> Outcome:
    """Run the command; raise Wrong unless it ends well, or is refused as expected."""
    outcome = run_here(*arguments)
    told = outcome.stderr.strip().splitlines()[-1] if outcome.stderr.strip() else ""
    due = outcome.code in (1, 2) and is_due(world.case, told)
    expect(outcome.code == 0 or due, "command", f"{' '.join(arguments)}: ends with {outcome.code}: {told[:300]}")
    return outcome


def asking_options(world: World, budget: str) -> list[str]:
    """Return the case's settings as options of `generate`.

    `chat` has no --dense-layers, and `trace` has no --placement either.
    """
    case, dense = world.case, first_dense(methods()[world.case.method](), world.case.dense_layers)
    prefill = [] if case.question_prefill is None else ["--prefill", case.question_prefill]
    of_prefill = [] if case.prefill_budget is None else ["--prefill-budget", case.prefill_budget]
    return [
        *("--method", case.method, *as_arguments(case.options_read), *prefill, *of_prefill),
        *(("--budget", budget) if budget else ()),
        *("--placement", case.placement, "--max-new-tokens", str(case.answer), "--model", "model", "-q"),
        *("--residual",) * case.residual,
        *("--ahead",) * case.ahead,
        *(("--dense-layers", str(dense)) if dense else ()),
        *("--raw",) * case.raw,
        *("--device", world.device),
    ]


def as_loaded(world: World) -> OpenIndex:
    """Open the case's index with the model that commands load.

    The rounding of products depends on the addresses of weights. In a loud model, another last digit can select other
    clusters.
    """
    return load_and_open(Artifact(world.folder / "index.skv"), str(world.folder / "model"), world.device)


@deed("command", 4)
def command(world: World, index: OpenIndex) -> None:
    """Check that `build-index` and `generate` give the rows and the answer of the functions below them."""
    if not is_read_back(world) or not world.case.indexers:  # the command always builds a method
        return
    case = world.case
    name, options = case.indexers[0]
    from sparsekv.indexing.prefill.prefills import prefills

    build = ["build-index", "doc.txt", "-o", "cli.skv", "--model", "model", "-q", "--device", world.device]
    build += ["--sinks", str(case.sinks), "--tail", str(case.tail), "--chunk-size", str(case.chunk_size)]
    build += ["--method", name, *as_arguments(options), *("--raw",) * case.raw, "--prefill", case.prefill]
    build += reading_options(world)
    build += as_arguments(case.prefill_options_read) if case.prefill in prefills() else []
    build += [] if case.kv_dtype is None else ["--kv-dtype", case.kv_dtype]
    build += [] if case.rounded is None else ["--weights", case.rounded]
    with placed(world):
        if ran(world, *build).code:
            return
        by_command, by_plan = (stored_rows(Path(name), case.layers) for name in ("cli.skv", "index.skv"))
        for ours, theirs in zip(by_command.values(), by_plan.values(), strict=True):
            apart = max(error_of(*both) for both in zip(ours, theirs, strict=True))
            # The command reads the weights into other memory, and products of one row depend on its alignment. So the
            # last digit may differ, and move a number to the next int8.
            most = 1e-5 if case.kv_dtype is None else 1e-3
            expect(apart <= most, "command's rows", f"are {apart:.2e} from those of the plan")
        if case.guard is not None or len(case.indexers) > 1 or case.prefill_options:
            return
        question = world.question(0)
        outcome = ran(
            world, "generate", "--index", "index.skv", *asking_options(world, case.budget), "--json", "--", question
        )
        if outcome.code == 0:
            opened = as_loaded(world)
            expected = world.asker(opened).ask(question_ids(opened, question, raw=case.raw), Sampling(case.answer))
            found = json.loads(outcome.stdout)
            expect(found["text"] == expected.text, "command's answer", f"{found['text']!r}, not {expected.text!r}")
            read, wanted = found["kv_fraction"], expected.kv_fraction
            same = read == wanted if wanted is None else abs(read - wanted) <= 1e-6
            expect(same, "command's kv_fraction", f"{read}, not {wanted}")


@deed("resume", 4, asks=False)
def resume(world: World, index: OpenIndex) -> None:
    """Check that answers in a file are reused only for the same budget, in any notation."""
    if not is_read_back(world):
        return
    random = Random(world.case.more)
    clash = [*random.choice([("1", "100%"), ("1.0", "1"), ("1", "1.0"), ("100%", "1.0"), ("0.5", "50%"), ("2", "3")])]
    budgets = clash if random.random() < 0.6 else [draw_budget(random, world.case.middle) for _ in range(2)]
    random.shuffle(budgets)
    with placed(world):
        Path("q.txt").write_text("".join(f"q{number}\n" for number in range(2)))
        asking = [
            [
                *asking_options(world, budget),
                "--batch-file",
                "q.txt",
                "--batch-size",
                "1",
                "--json",
                "--resume",
                "a.jsonl",
            ]
            for budget in budgets
        ]
        first = ran(world, "generate", "--index", "index.skv", *asking[0])
        if first.code:
            return
        second = run_here("generate", "--index", "index.skv", *asking[1])
        same = Budget.parse(budgets[0]) == Budget.parse(budgets[1])
        told = f"{budgets[0]}, then {budgets[1]}: {second.code}, {second.stderr.strip()[-200:]}"
        expect((second.code == 0) == same, "resumed", told)
        if not same:
            return
        expect(second.stdout == first.stdout, "resumed", told)
        # With other EOS tokens the first answer might have ended elsewhere.
        Path("a.jsonl").write_text(first.stdout.splitlines(keepends=True)[0])
        settings = Path("model", "generation_config.json")
        ends = [*world.ends, next(one for one in range(len(world.ends) + 1) if one not in world.ends)]
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"eos_token_id": ends}))
        third = run_here("generate", "--index", "index.skv", *asking[1])
        expect(third.code == 2, "resumed", f"with other EOS tokens: {third.code}, {third.stderr.strip()[-200:]}")


@deed("many commands", 2, asks=False)
def many_commands(world: World, index: OpenIndex) -> None:
    """Check that reports, traces, tuning and evaluation end well, with finite numbers, and distinguish 1 from 100%."""
    if not is_read_back(world):
        return
    random, case = Random(world.case.more), world.case
    with placed(world):
        kind = random.choice(["recall-report", "trace", "tune", "eval", "inspect"])
        where, quiet = ("--index", "index.skv"), ("-q", "--json")
        if kind == "recall-report":
            outcome = ran(world, kind, *where, *quiet, "--budget", "1", "--budget", "100%", "--method", case.method)
            budgets = (
                {repr(row["budget"]) for row in _json(outcome).get("rows", [])} if outcome.code == 0 else {"1", "1.0"}
            )
            expect(budgets == {"1", "1.0"}, "report's budgets", f"{budgets}")
        elif kind == "trace":
            asking = [*asking_options(world, case.budget)]
            for left_out in ("--ahead",):
                asking = [one for one in asking if one != left_out]
            for name in {"--placement", "--dense-layers"} & {*asking}:
                place = asking.index(name)
                del asking[place : place + 2]
            truth = ("--truth",) * random.randint(0, 1)
            ran(world, kind, *where, *asking, "--json", *truth, "--", world.question(0))
        elif kind == "tune":
            ran(world, kind, *where, *quiet, "--target-recall", "0.5", "--method", case.method, "--dry-run")
        elif kind == "inspect":
            found = _json(ran(world, kind, *where, "--json"))
            tokens = len(world.prompt().input_ids)
            expect(str(tokens) in json.dumps(found), "inspect", "does not have the tokens of the prompt")
        else:
            evaluated(world)


def evaluated(world: World) -> None:
    """Check that an evaluation at 1 token and at everything has a row for each, the second like dense attention's."""
    pairs = Path("pairs.jsonl")
    pairs.write_text(json.dumps({"question": "q?", "answers": ["forty-two"]}) + "\n")
    outcome = ran(
        world,
        *("eval", "doc.txt", "--task", "qa", "--pairs", "pairs.jsonl", "--length", str(min(world.case.tokens, 150))),
        *("--questions", "1", "--model", "model", "--method", "oracle", "--budget", "1"),
        *("--budget", "100%", "--max-new-tokens", "3", "--sinks", "2", "--tail", "4", "--json", "-q"),
        *("--device", world.device, *reading_options(world)),
    )
    if outcome.code == 0:
        rows = outcome.stdout
        expect(rows.count('"oracle"') >= 2, "eval", f"has not two rows of the oracle: {rows[:400]}")


def _json(outcome: Outcome) -> Any:
    return json.loads(outcome.stdout) if outcome.code == 0 else {}


@deed("compiled", 0.05, asks=False)
def compiled(world: World, index: OpenIndex) -> None:
    """Check that a compiled model answers like the model itself; rarely drawn, because compiling takes long."""
    if not is_read_back(world) or world.case.guard is not None:
        return
    question = world.question(0)
    with placed(world):
        asking = [*asking_options(world, world.case.budget), "--json"]
        outcome = ran(world, "generate", "--index", "index.skv", *asking, "--compile", "on", "--", question)
    if outcome.code == 0:
        opened = as_loaded(world)
        asked = question_ids(opened, question, raw=world.case.raw)
        expected = world.asker(opened).ask(asked, Sampling(world.case.answer))
        found = json.loads(outcome.stdout)["text"]
        expect(found == expected.text, "compiled answer", f"{found!r}, not {expected.text!r}")


@deed("chat command", 3, asks=False)
def chat_command(world: World, index: OpenIndex) -> None:
    """Check that `chat` with questions on standard input prints the answers of a conversation."""
    case = world.case
    if not is_read_back(world) or case.ahead or case.guard is not None or case.dense_layers:
        return
    questions = [world.question(0), world.question(1)]
    with placed(world):
        Path("questions.txt").write_text("".join(f"{one}\n" for one in questions))
        with Path("questions.txt").open() as lines, mock.patch.object(sys, "stdin", lines):
            outcome = ran(world, "chat", "--index", "index.skv", *asking_options(world, case.budget))
    if outcome.code == 0:
        opened = as_loaded(world)
        one = Conversation(opened, world.config(opened), raw=case.raw)
        expected = "".join(f"{one.ask(question, Sampling(case.answer)).text}\n" for question in questions)
        expect(outcome.stdout == expected, "chat's answers", f"{outcome.stdout!r}, not {expected!r}")


@deed("append to a talk", 4, asks=False)
def append_to_a_talk(world: World, index: OpenIndex) -> None:
    """Check that `append` to the index of a saved conversation begins the next message.

    The token ids must be those of the template's conversation, and the next answer that of plain transformers.
    """
    if not is_read_back(world):
        return
    case = world.case
    random, question, last = Random(case.more), world.question(0), world.question(1)
    more = world.padded(world.some_text(random.choice([1, 9, 64, 250]), case.more), EDGES[0])
    rebuild = ["--rebuild"] if random.random() < 0.7 else []
    model = ["--model", "model", "-q", "--device", world.device]
    asking = [*model, "--method", DENSE, "--max-new-tokens", str(case.answer), "--json", *("--raw",) * case.raw]
    with placed(world):
        Path("more.txt").write_bytes(more.encode(case.encoding))
        saving = ran(world, "generate", "--index", "index.skv", *asking, "--save-to", "talk.skv", "--", question)
        if saving.code:
            return
        spoken = world.open("talk.skv").input_ids
        if ran(world, "append", "--index", "talk.skv", *rebuild, *model, *reading_options(world), "more.txt").code:
            return
        outcome = ran(world, "generate", "--index", "talk.skv", *asking, "--", last)
    talk = world.open("talk.skv")
    asked = question_ids(talk, last, raw=case.raw)
    ids = torch.cat([talk.input_ids, asked])
    expect(ids[: len(spoken)].tolist() == spoken.tolist(), "appended to a talk", "the talk before it has other tokens")
    follows(world, ids[len(spoken) :], f"{BETWEEN}{more}{last}" if case.raw else f"{more}{BETWEEN}{last}")
    _in_lines(Places(talk.artifact, world.tokenizer), len(spoken), len(talk.input_ids), more, random)
    if outcome.code:
        return
    answer = world.dense(talk).ask(asked, Sampling(case.answer))
    told = json.loads(outcome.stdout)["text"]
    expect(told == answer.text, "answer to a talk", f"{told!r}, not {answer.text!r}")
    stored = stored_rows(world.folder / "talk.skv", case.layers)
    logits = truth(world, talk, fed_with(ids, answer.ids), stored)[-len(answer.ids) :]
    expect_greedy(logits, answer.ids, "answer to a talk", "against plain transformers")


def _in_lines(places: Places, start: int, stop: int, text: str, random: Random) -> None:
    """Check that a source among the tokens [start, stop), which were appended, is in the lines of their text that it
    names."""
    for token in random.sample(range(start, stop), min(5, stop - start)):
        shares = torch.zeros(stop)
        shares[token] = 1
        for source in places.sources(shares, 1):
            first, last = source.lines
            known = "\n".join(text.split("\n")[max(0, first - 1) : last])
            right = first >= 1 and source.text.strip("\ufffd") in known
            expect(right, "lines of a talk", f"{source} is not in {known!r}")


@deed("api", 3)
def api(world: World, index: OpenIndex) -> None:
    """Check that the Python API answers like the functions below it."""
    from sparsekv.runtime import api as front

    case = world.case
    if case.guard is not None or case.raw or case.ahead or not is_read_back(world):
        return
    method, prefill = methods()[case.method](**dict(case.options_read)), methods().get(case.question_prefill or "")
    with placed(world):
        opened = front.open_index("index.skv", "model", device=world.device)
        setting = {"prefill": case.question_prefill, "placement": case.placement}
        if not (prefill and prefill.ignores_budget):
            setting["prefill_budget"] = case.prefill_budget
        answer = opened.ask(
            world.question(0),
            Sampling(case.answer),
            method=case.method,
            budget=None if method.ignores_budget else case.budget or None,
            residual=case.residual and not method.replaces(),
            **setting,
            **dict(case.options_read),
        )
    asker = world.asker(index, dense_layers=0)
    expected = asker.ask(question_ids(index, world.question(0)), Sampling(case.answer))
    expect(answer.ids == expected.ids, "API", f"{answer.ids}, not {expected.ids}")
