"""`--method auto`: the faster of dense attention and the index's default answers; the times are told and kept."""

import json
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
from support.command import fails, run_here, sparsekv, with_options

from sparsekv.cli.answering.options import GenerateAttention
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import layer_file
from sparsekv.runtime.attention.config import Dense
from sparsekv.runtime.benchmark import faster_attention
from sparsekv.runtime.decoding.choose_config import SHORT, choose_config, dense_if_short
from sparsekv.runtime.selection.interface import Budget

ASK = ("generate", "--model", "model", "--max-new-tokens", "5", "--json", "--method", "auto")
FAST, SLOW = 0.25, 4.5


@pytest.fixture
def times(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of kept times, in a cache of its own. Other load does not matter."""
    monkeypatch.setenv("SPARSEKV_CACHE", str(place / "cache"))
    monkeypatch.setattr(faster_attention, "STEADY", inf)
    return place / "cache" / "step-times"


def answered(*options: str) -> tuple[dict[str, Any], str]:
    """The first answer, and what stderr says."""
    outcome = run_here(*with_options(ASK, *options))
    assert outcome.code == 0, outcome.stderr
    return json.loads(outcome.stdout.splitlines()[0]), outcome.stderr


def keep(times: Path, dense: float, method: float) -> None:
    """Change the only kept times."""
    (file,) = times.iterdir()
    changes = {"day": "2026-01-31", "dense_ms": dense, "method_ms": method}
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_the_faster_one_answers_by_times_that_are_measured_once(times: Path) -> None:
    budget = ("Why?", "--budget", "30%", "--dense-layers", "1")
    first, told = answered(*budget)
    assert "; measured now and kept)\n" in told
    auto = first["auto"]
    assert (auto["compared_with"], auto["batch_size"], auto["taken"]) == ("multipole", 1, first["method"])
    assert auto["taken"] == ("multipole" if auto["compared_ms"] < auto["dense_ms"] else "dense")
    keep(times, SLOW, FAST)
    sparse, told = answered(*budget)
    assert (
        "--method auto: multipole (1 question: 0.25 ms a layer, dense attention 4.5 ms; measured on 2026-01-31)\n"
        in told
    )
    assert (sparse["auto"]["dense_ms"], sparse["auto"]["compared_ms"]) == (SLOW, FAST)
    keep(times, FAST, SLOW)
    dense, told = answered(*budget)
    assert (
        "--method auto: dense attention (1 question: 0.25 ms a layer, multipole 4.5 ms; measured on 2026-01-31)\n"
        in told
    )
    for found, options in ((sparse, ("--method", "multipole", *budget)), (dense, ("Why?", "--method", "dense"))):
        named, _ = answered(*options)
        kept = ("text", "kv_fraction", "method", "budget", "settings")
        assert [found[key] for key in kept] == [named[key] for key in kept]
        assert "auto" not in named
    assert len([*times.iterdir()]) == 1


def test_a_batch_has_times_of_its_own(times: Path) -> None:
    Path("questions.txt").write_text("Why?\n\nHow?\nWhat?\n")
    batch = ("--batch-file", "questions.txt")
    sizes = [answered(*batch, *size)[0]["auto"]["batch_size"] for size in ((), ("--batch-size", "2"))]
    assert sizes == [3, 2]
    assert len([*times.iterdir()]) == 2


def test_a_resumed_run_whose_choice_has_changed_says_how_to_go_on(times: Path) -> None:
    Path("questions.txt").write_text("Why?\nHow?\n")
    batch = ("--batch-file", "questions.txt", "--resume", "answers.jsonl")
    answered(*batch)
    for kept, then, taken, remedy in (
        ((SLOW, FAST), (FAST, SLOW), "dense", "leave --method out"),
        ((FAST, SLOW), (SLOW, FAST), "multipole", "give --method dense"),
    ):
        Path("answers.jsonl").unlink()
        keep(times, *kept)
        before, _ = answered(*batch)
        keep(times, *then)
        now = f"line 1 was answered with --method {before['method']}, and --method auto takes {taken} now; {remedy}, or"
        fails(2, *with_options(ASK, *batch, "-q"), says=(now,))
        named = () if remedy.startswith("leave") else ("--method", "dense")
        outcome = run_here(*with_options(ASK[:-2], *batch, *named))
        assert (outcome.code, len(outcome.stdout.splitlines())) == (0, 2), outcome.stderr


def test_answers_of_auto_are_resumed_by_the_method_that_the_message_names(times: Path) -> None:
    Path("questions.txt").write_text("Why?\nHow?\n")
    batch = ("--batch-file", "questions.txt", "--resume", "answers.jsonl")
    answered(*batch)
    keep(times, FAST, SLOW)
    Path("answers.jsonl").unlink()
    assert answered(*batch)[0]["method"] == "dense"
    told = "with --method dense, not multipole; give --method dense, or name another file"
    fails(2, *ASK[:-2], *batch, "-q", says=(told,))
    assert run_here(*ASK[:-2], *batch, "--method", "dense").code == 0


def test_the_choice_is_told_unless_quiet_and_with_stats_even_then(times: Path) -> None:
    assert answered("Why?", "-q")[1] == ""
    assert answered("Why?", "-q", "--stats")[1].startswith("--method auto: ")


@pytest.mark.gpu
@pytest.mark.usefixtures("times", "place")
def test_a_batch_on_a_gpu_is_answered_by_the_faster_one_unless_the_attention_is_named() -> None:
    Path("questions.txt").write_text("Why?\nHow?\nWhat?\n")
    ask = ("generate", "--model", "model", "--max-new-tokens", "5", "--json", "--device", "cuda")
    batch = (*ask, "--batch-file", "questions.txt")
    found = {options: run_here(*batch, *options) for options in ((), ("--budget", "30%"), ("--method", "dense"))}
    assert all(one.code == 0 for one in found.values())
    chosen = {options: "auto" in json.loads(one.stdout.splitlines()[0]) for options, one in found.items()}
    assert chosen == {options: not options for options in found}
    assert "auto" not in json.loads(run_here(*ask, "Why?").stdout)


@pytest.mark.parametrize(
    ("given", "is_default"),
    [
        ({}, True),
        ({"method": "codes"}, False),
        ({"budget": "5%"}, False),
        ({"parameters": {"step": 4}}, False),
        ({"parameters": {"step": None}}, True),
        ({"lossless": True}, False),
        ({"placement": "host"}, False),
    ],
    ids=str,
)
def test_an_attention_without_options_is_the_default(given: dict[str, Any], *, is_default: bool) -> None:
    assert GenerateAttention(**{"parameters": {}} | given).is_default == is_default


@pytest.mark.usefixtures("times")
def test_a_chat_answers_by_the_faster_one(place: Path) -> None:
    ask = ("chat", "--model", "model", "--max-new-tokens", "5")
    done = sparsekv(*ask, "--method", "auto", "--stats", cwd=place, stdin="Why?\nHow?\n")
    assert done.returncode == 0, done.stderr
    taken = "dense" if "--method auto: dense attention (1 question: " in done.stderr else "multipole"
    assert f"answers by {taken}" in done.stderr
    assert done.stdout == sparsekv(*ask, "--method", taken, cwd=place, stdin="Why?\nHow?\n").stdout


@pytest.mark.parametrize(
    "option",
    [
        ("--guard", "0.2"),
        ("--gauge",),
        ("--ahead",),
        ("--lossless",),
        ("--placement", "host"),
        ("--prefill", "quoka"),
    ],
    ids=lambda option: option[0],
)
def test_what_needs_a_named_method_is_refused(place: Path, option: tuple[str, ...]) -> None:
    fails(2, *ASK, "Why?", *option, says=(option[0], "cannot be combined with --method auto", "name a m"))


@pytest.mark.parametrize(
    "command",
    [
        ("recall-report",),
        ("bench", "--context", "512"),
        ("tune", "--target-recall", "0.9"),
        ("build-index", "doc.txt"),
        ("eval", "doc.txt"),
        ("trace", "Why?"),
    ],
    ids=lambda command: command[0],
)
def test_other_commands_say_where_auto_works(place: Path, command: tuple[str, ...]) -> None:
    says = "auto works only as --method of the commands `generate`, `chat` and `serve`; name "
    fails(2, *command, "--method", "auto", says=(says,))


def test_over_a_short_document_dense_attention_is_the_default_of_a_gpu(place: Path) -> None:
    """By the bytes of a layer's keys and values; neither a long document nor a setting of `tune` changes its method."""
    artifact = Artifact(place / "doc.skv")
    config = choose_config(artifact)
    short = dense_if_short(artifact, config)
    assert isinstance(short.attention, Dense)
    assert short.budget == Budget(1.0)
    assert "--method multipole selects tokens" in short.origin
    tuned = replace(config, origin="the index's default")
    assert dense_if_short(artifact, tuned) == tuned
    record = artifact.manifest.files[layer_file("context", 0)]
    object.__setattr__(record, "bytes", SHORT)
    assert dense_if_short(artifact, config) == config


@pytest.mark.gpu
def test_a_gpus_default_is_told(place: Path) -> None:
    """With any option of the attention, or on a CPU, the index's method answers."""
    ask = ("generate", "--model", "model", "--max-new-tokens", "5", "--json", "Why?")
    for options, method in ((), "dense"), (("--budget", "30%"), "multipole"), (("--device", "cpu"), "multipole"):
        outcome = run_here(*ask, *options)
        assert outcome.code == 0, outcome.stderr
        assert json.loads(outcome.stdout)["method"] == method
        assert ("answers by dense attention, which is as fast on a GPU" in outcome.stderr) == (method == "dense")
