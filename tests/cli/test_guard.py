"""`generate --stats`, `--gauge` and `--guard`, and the guard in a recall report."""

import json
from pathlib import Path

import pytest
from support.command import run_here

ASK = ("generate", "What is 7 times 7?", "--max-new-tokens", 6, "--model", "model")


def test_a_gauge_shows_each_layer_on_stderr_alone(place: Path) -> None:
    plain, told, gauged = (run_here(*ASK, *options) for options in ((), ("--stats",), ("--gauge",)))
    assert plain.code == told.code == gauged.code == 0
    assert plain.stdout == told.stdout == gauged.stdout
    assert "tokens at" not in plain.stderr
    assert "tokens at" in told.stderr
    assert "tokens at" in gauged.stderr
    assert "attention left to centroids or dropped" not in told.stderr
    assert "attention left to centroids or dropped" in gauged.stderr


def test_a_gauge_of_one_token_says_why_it_shows_nothing(place: Path) -> None:
    """The question's tokens attend to everything, and the first token of an answer comes of them."""
    one = (*ASK[:2], "--max-new-tokens", 1, *ASK[4:])
    said = run_here(*one, "--gauge").stderr
    assert "1 token at" in said
    assert "nothing to estimate: an answer of one token takes no step" in said
    assert "nothing to estimate" not in run_here(*one, "--gauge", "--prefill", "own").stderr


def test_a_gauge_of_what_cannot_be_told_is_refused(place: Path) -> None:
    # What MagicPIG drew stands for all, so that it takes no residual.
    for cannot in (("--method", "oracle"), ("--method", "magicpig", "--residual")):
        refused = run_here(*ASK, "--gauge", *cannot)
        assert refused.code == 2
        assert f"--gauge: {cannot[1]} cannot estimate how much attention it misses" in refused.stderr
        assert run_here(*ASK, "--stats", *cannot).code == 0


def test_json_has_the_layers_when_they_are_gauged(place: Path) -> None:
    assert "layers" not in json.loads(run_here(*ASK, "--json", "--stats").stdout)
    layers = json.loads(run_here(*ASK, "--json", "--gauge").stdout)["layers"]
    assert [one["layer"] for one in layers] == [0, 1, 2]
    assert all(0 < one["missed"] < 1 and one["raised"] == one["dense"] == 0 for one in layers)


def test_a_strict_guard_answers_as_dense_attention_does(place: Path) -> None:
    dense = json.loads(run_here(*ASK, "--budget", "100%", "--json").stdout)
    guarded = json.loads(run_here(*ASK, "--budget", "2", "--guard", "1e-6", "--json").stdout)
    assert guarded["text"] == dense["text"]
    assert guarded["kv_fraction"] > 1
    assert all(one["raised"] == one["dense"] == 1 for one in guarded["layers"])


def test_a_report_shows_what_a_guard_reads_and_saves(place: Path) -> None:
    command = ("recall-report", "--budget", "5%", "--guard", "0.1", "--method", "squeezed", "--method", "quest")
    outcome = run_here(*command, "--json")
    assert outcome.code == 0, outcome.stderr
    rows = {(row["method"], row["variant"]): row for row in json.loads(outcome.stdout)["rows"]}
    plain, guarded, quest = rows["squeezed", "flat"], rows["squeezed", "flat + guard"], rows["quest", ""]
    assert plain["raised"] is plain["dense"] is quest["missed_estimate"] is None
    assert 0 < guarded["dense"] <= guarded["raised"] < 1
    assert guarded["output_error"] < plain["output_error"]
    assert guarded["missed_mass"] < plain["missed_mass"]
    assert guarded["kv_fraction"] > plain["kv_fraction"]
    assert not [name for name in rows if name[0] == "quest" and "guard" in name[1]]
    told = run_here(*command)
    assert "estimate" in told.stdout
    line = "--guard leaves out quest: no step of these methods can estimate how much attention it misses; with"
    assert f"{line} --residual" in " ".join(told.stderr.split())
    assert "leaves out" not in run_here(*command, "--residual").stderr


def test_a_report_refuses_a_guard_or_a_residual_that_changes_no_method(place: Path) -> None:
    report = ("recall-report", "--budget", "5%")
    for options, reason in (
        (("--method", "quest", "--guard", "0.1"), "--guard 0.1 has no effect on quest, whose missed attention"),
        (("--method", "magicpig", "--residual"), "--residual has no effect on magicpig: the tokens that"),
    ):
        refused = run_here(*report, *options)
        assert refused.code == 2, refused.stdout
        assert reason in " ".join(refused.stderr.split())


@pytest.mark.usefixtures("place")
def test_a_limit_in_percent() -> None:
    shares = [run_here(*ASK, "--json", "--guard", share, "--method", "squeezed").stdout for share in ("0.029", "2.9%")]
    read = [json.loads(one)["kv_fraction"] for one in shares]
    assert read[0] == read[1]
    refused = run_here(*ASK, "--guard", "much", "--method", "squeezed")
    assert refused.code == 2
    assert "much is not a share; give one such as 0.9 or 90%" in refused.stderr
