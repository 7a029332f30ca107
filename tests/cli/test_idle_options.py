"""No option is ignored without a word: where it cannot have an effect, it is refused, or a note says so."""

import importlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from support.command import fails, run_here

from sparsekv.cli.common.commands import COMMANDS
from sparsekv.cli.configuring.sources import leaf_commands, owners
from sparsekv.indexing.indexers.interface import indexers
from sparsekv.indexing.prefill.prefills import prefills
from sparsekv.runtime.selection.interface import methods

ALWAYS = {
    "build-index": "from-file as-one model method max-tokens sinks tail chunk-size prefill rope-scaling raw "
    "special-tokens force watch ray device dtype kv-dtype weights quiet",
    "generate": "index prompt-file batch-file model method lossless prefill max-new-tokens temperature raw "
    "special-tokens sources stats compile json device dtype weights quiet",
    "chat": "index model weights method prefill max-new-tokens temperature raw special-tokens sources stats compile "
    "device dtype quiet",
    "serve": "indices-from host port api-key-file cors batch-size max-queue timeout unread-timeout drain max-body "
    "memory method prefill placement max-new-tokens temperature model weights compile device dtype quiet",
    "trace": "index prompt-file model weights output truth without method prefill max-new-tokens raw special-tokens "
    "json device dtype quiet",
    "recall-report": "index method budget queries together by json latex markdown csv plot html device quiet",
    "eval": "task data length turns method prefill sinks tail kv-dtype chunk-size rope-scaling seed work keep-indices "
    "json latex markdown csv plot html answers ray model weights device dtype quiet",
    "tune": "index target-recall target-error target-perplexity of method cheapest dry-run reset json latex markdown "
    "device quiet",
    "bench": "method variants shared budget index runs warm json latex markdown csv plot device dtype quiet",
    "bench-model": "config method context weights batch shared budget seed distinct-layers runs compile json latex "
    "markdown device dtype quiet",
    "append": "index rebuild again special-tokens model chunk-size device dtype weights quiet",
    "convert": "output kv-dtype device quiet",
    "inspect": "index method layer clusters by verify plot html json quiet",
    "start": "status quiet",
    "stop": "quiet",
    "models list": "json",
    "models pull": "quiet",
    "config": "json",
    "completion": "",
}
"""Options with an effect in every call, or whose effect is only that nothing is printed or written."""

ASK = ("Why?", "--model", "model", "--max-new-tokens", "2")
EVAL = ("doc.txt", "--model", "model", "--tail", "64")
FEW = (*EVAL, "--method", "dense", "--length", "500")
OF_ANSWERS = (("max-new-tokens", "2"), ("batch-size", "2"), ("raw", ""))
DENSE, QA = ("--method", "dense"), ("--pairs", "pairs.jsonl")
OF_QUESTIONS = ("--method", "window", "--prefill", "multipole")
REFUSED = [
    ("build-index", ("doc.txt",), "include", "*.py"),
    ("build-index", ("doc.txt",), "exclude", "*.py"),
    ("build-index", ("doc.txt",), "order", "path"),
    ("build-index", ("doc.skv",), "output", "new.skv"),
    ("build-index", ("doc.skv",), "checkpoints", "1"),
    ("build-index", ("doc.txt",), "workers", "2"),
    ("generate", ASK, "batch-size", "2"),
    ("generate", ASK, "resume", "answers.jsonl"),
    ("generate", (*ASK, "--batch-file", "doc.txt"), "save-to", "talk.skv"),
    *(("generate", (*ASK, *DENSE), name, value) for name, value in (("guard", "0.1"), ("dense-layers", "1"))),
    *(("generate", (*ASK, *DENSE), name, value) for name, value in (("placement", "host"), ("schedule", "0.1-step-2"))),
    *(("generate", (*ASK, *DENSE), name, "") for name in ("ahead", "gauge")),
    *((one, (*ask, *DENSE), "budget", "5%") for one, ask in (("generate", ASK), ("chat", ()), ("trace", ASK))),
    *((one, (*ask, *DENSE), "residual", "") for one, ask in (("generate", ASK), ("chat", ()), ("trace", ASK))),
    *((one, ask, "prefill-budget", "9") for one, ask in (("generate", ASK), ("chat", ()), ("trace", ASK))),
    *(
        (one, ask, name, value)
        for one, ask in (("generate", ASK), ("chat", ()))
        for name, value in (("top-p", "0.5"), ("top-k", "5"))
    ),
    ("serve", ("doc.skv", *DENSE), "budget", "5%"),
    ("recall-report", ("--method", "multipole"), "residual", ""),
    ("recall-report", ("--method", "window"), "guard", "0.1"),
    ("recall-report", ("--csv",), "within", "0.2"),
    ("recall-report", (), "special-tokens", ""),
    *(
        ("recall-report", (), name, value)
        for name, value in (("model", "model"), ("weights", "int8"), ("dtype", "float32"))
    ),
    *(
        ("tune", ("--target-recall", "0.9"), name, value)
        for name, value in (("model", "model"), ("weights", "int8"), ("dtype", "float32"))
    ),
    ("eval", (*EVAL, *DENSE), "budget", "5%"),
    ("eval", (*EVAL, *DENSE), "residual", ""),
    ("eval", (*EVAL, *DENSE), "dense-layers", "1"),
    ("eval", (*EVAL, "--method", "tidaldecode"), "dense-layers", "1"),
    ("eval", (*EVAL, *DENSE), "question-prefill", "own"),
    ("eval", (*EVAL, *DENSE), "question-budget", "9"),
    ("eval", (*EVAL, "--method", "multipole", "--method", "codes"), "residual", ""),
    ("eval", (*EVAL, "--task", "perplexity"), "depth", "50"),
    ("eval", (*EVAL, "--task", "perplexity"), "pairs", "pairs.jsonl"),
    ("eval", ("--task", "fwe", "--model", "model"), "encoding", "latin-1"),
    ("eval", EVAL, "format", "ruler"),
    ("eval", EVAL, "workers", "2"),
    ("bench", (), "layer", "1"),
    ("bench", ("--index", "doc.skv"), "seed", "1"),
    *(("bench", ("--index", "doc.skv"), name, "64") for name in ("heads", "kv-heads", "head-dim", "context", "batch")),
    *((one, ("--device", "cpu"), "kv-dtype", "int8") for one in ("bench", "bench-model")),
    ("start", ("--status",), "idle", "5"),
    # Options of methods.
    ("generate", ASK, "buffer", "9"),
    ("generate", ASK, "opened", "2"),
    ("generate", (*ASK, "--method", "squeezed", "--lookup", "hierarchical", "--selection", "threshold"), "opened", "2"),
    ("generate", (*ASK, "--method", "quoka"), "prefill-queries", "2"),
    ("trace", (*ASK, "--method", "quoka"), "quoka-across", "mean"),
    ("generate", (*ASK, "--method", "snapkv", "--pool-size", "1"), "pooling", "average"),
    ("generate", (*ASK, *OF_QUESTIONS), "stream", ""),
    ("trace", (*ASK, *OF_QUESTIONS), "stream", ""),
    ("eval", (*EVAL, "--method", "window", "--question-prefill", "csattention"), "step", "2"),
    ("eval", (*EVAL, "--method", "window", "--question-prefill", "multipole"), "stream", ""),
    ("eval", (*EVAL, "--method", "quoka"), "quoka-subset", "all"),
    ("recall-report", ("--method", "quoka"), "quoka-subset", "all"),
    ("recall-report", ("--method", "sampleattention"), "prefill-queries", "2"),
    ("recall-report", ("--method", "multipole"), "stream", ""),
    ("bench", ("--method", "multipole"), "buffer", "9"),
    ("bench-model", ("--method", "multipole"), "opened", "2"),
    ("build-index", ("doc.txt", "--model", "model"), "quoka-across", "mean"),
    *(
        (one, (*given, "--prefill", how, "--quoka-subset", "all"), "prefill-queries", "2")
        for one, given, how in (
            ("build-index", ("doc.txt", "--model", "model"), "quoka"),
            ("generate", (*ASK, "--method", "quoka"), "own"),
            ("generate", ASK, "quoka"),
        )
    ),
]
"""A command, arguments with which an option has no effect, the option, and its value."""
CONDITIONS = {"needs", "unless", "joint", "steps", "appends"}
"""Keys of a field's metadata that say where an option of a method is not read."""
ENCODED = [
    ("build-index", "manual.pdf", "letter.docx"),
    ("append", "manual.pdf"),
    ("eval", "manual.pdf", "--model", "model"),
]
"""A command with files that have encodings of their own."""
NOTED = [
    ("inspect", (), "model", "model"),
    ("generate", ASK, "seed", "3"),
    ("generate", ASK, "residual", ""),
    ("generate", (*ASK, "--lossless"), "budget", "20%"),
    *((one, (*ASK, "--method", "window"), "budget", "20%") for one in ("generate", "trace")),
    ("generate", (*ASK, "--prefill", "window"), "prefill-budget", "20%"),
    ("generate", (*ASK, "--lossless"), "lookup", "flat"),
    ("chat", ("--max-new-tokens", "2"), "seed", "3"),
    ("chat", ("--max-new-tokens", "2", "--method", "window"), "budget", "20%"),
    ("chat", ("--max-new-tokens", "2"), "residual", ""),
    ("chat", ("--max-new-tokens", "2", *DENSE), "placement", "host"),
    ("chat", ("--max-new-tokens", "2"), "residual", ""),
    ("chat", ("--max-new-tokens", "2", "--method", "window"), "budget", "20%"),
    ("chat", ("--max-new-tokens", "2", "--prefill", "window"), "prefill-budget", "20%"),
    ("trace", ASK, "residual", ""),
    ("eval", (*FEW, *QA), "contexts", "2"),
    ("eval", (*FEW, "--task", "niah-single", "--contexts", "1"), "questions", "2"),
    ("eval", (*FEW, "--task", "niah-single", "--contexts", "1"), "batch-size", "2"),
    *(("eval", (*FEW, "--task", "perplexity", "--contexts", "1"), *one) for one in OF_ANSWERS),
]
"""The same, for an option that is harmless: a note says that it has no effect, once."""
FILE = """
[build-index]
include = ["*.md"]
exclude = ["*.py"]
order = "stable"
encoding = "latin-1"
[generate]
seed = 3
buffer = 9
opened = 2.0
prefill-queries = 2
residual = true
budget = "20%"
[chat]
residual = true
[eval]
contexts = 2
budget = "20%"
question-prefill = "own"
residual = true
opened = 2.0
quoka-subset = "all"
length = 700
questions = 1
[recall-report]
within = 0.2
residual = true
"""


def _options() -> dict[str, set[str]]:
    """The options of each command, without those of methods."""
    found = {}
    for name in COMMANDS:
        group: Any = typer.main.get_command(importlib.import_module(f"sparsekv.cli.{name.replace('-', '_')}").app)
        for path, command in leaf_commands((name,), group):
            own = [one for one in command.params if one.param_type_name == "option" and not owners(one)]
            found[" ".join(path)] = {max(one.opts, key=len).removeprefix("--") for one in own}
    return found


def test_each_option_counts_in_every_call_or_is_refused_or_noted() -> None:
    for name, options in _options().items():
        tried = {option for command, _, option, _ in (*REFUSED, *NOTED) if command == name}
        tried |= {"encoding" for command, *_ in ENCODED if command == name}
        conditional = {option for option in tried if option in options}
        assert options == {*ALWAYS[name].split()} | conditional, name
        assert not {*ALWAYS[name].split()} & conditional, name


def test_each_condition_of_a_methods_option_is_tried() -> None:
    tried = {option.replace("-", "_") for _, _, option, _ in REFUSED}
    for registry in (methods(), indexers(), prefills()):
        for one in registry.values():
            fields = one.__dataclass_fields__.values()
            assert {field.name for field in fields if CONDITIONS & field.metadata.keys()} <= tried


@pytest.mark.parametrize(("command", "given", "option", "value"), REFUSED)
def test_an_option_without_an_effect_is_refused(
    place: Path, command: str, given: tuple[str, ...], option: str, value: str
) -> None:
    Path("pairs.jsonl").write_text(json.dumps({"question": "Why?", "answers": ["Line 3"]}))
    fails(2, command, *given, f"--{option}", *filter(None, [value]), says=(f"--{option}",))


@pytest.mark.parametrize(("command", "given", "option", "value"), NOTED)
def test_a_harmless_option_is_noted(
    place: Path, command: str, given: tuple[str, ...], option: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("pairs.jsonl").write_text(json.dumps({"question": "Why?", "answers": ["Line 3"]}))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Why?\n")))
    outcome = run_here(command, *given, f"--{option}", *filter(None, [value]))
    assert outcome.code == 0, outcome.stderr
    (line,) = (line for line in outcome.stderr.splitlines() if "no effect" in line)
    assert line.startswith(f"--{option}")


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("given", ENCODED)
def test_an_encoding_of_files_that_have_their_own_is_noted(given: tuple[str, ...]) -> None:
    """The option is noted, not refused: a loop over a folder gives it for each file. These files do not exist."""
    told = run_here(*given, "--encoding", "latin-1").stderr
    assert "--encoding latin-1 has no effect on manual.pdf: PDF and DOCX files have encodings of their own\n" in told


@pytest.mark.parametrize(
    "given",
    [
        ("build-index", "doc.txt", "--model", "model", "--method", "multipole", "-q"),
        ("generate", *ASK),
        ("generate", *ASK, "--method", "quoka"),
        ("chat", "--max-new-tokens", "2"),
        ("eval", *EVAL, *DENSE, "--max-new-tokens", "1"),
        ("eval", *EVAL, *QA, "--method", "quoka", "--max-new-tokens", "1", "--question-prefill", "dense"),
        ("recall-report", "--csv", "--method", "multipole"),
    ],
)
def test_defaults_of_a_project_are_neither_refused_nor_noted(
    place: Path, given: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Why?\n")))
    Path("pairs.jsonl").write_text(json.dumps({"question": "Why?", "answers": ["Line 3"]}))
    Path("sparsekv.toml").write_text(FILE)
    outcome = run_here(*given)
    assert outcome.code == 0, outcome.stderr
    assert "no effect" not in outcome.stderr


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (
            ("--page-size", "8"),
            "--page-size has no effect on multipole; leave it out, or choose a method that has it: quest",
        ),
        (
            ("--prefill", "squeezed", "--step", "4"),
            "--step has no effect on multipole or --prefill squeezed; leave it out, or add csattention, which "
            "has it and which the index lacks: `sparsekv build-index doc.skv --method csattention`",
        ),
        (("--method", "dense", "--page-size", "8"), "--page-size has no effect on dense; leave it out"),
    ],
)
@pytest.mark.usefixtures("place")
def test_a_refusal_names_a_method_that_has_the_option(asked: tuple[str, ...], told: str) -> None:
    """Only one that the index has, or one with the command that adds it."""
    assert told in run_here("generate", *ASK, *asked).error()
