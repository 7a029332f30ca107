"""`generate --lossless`."""

import json
from pathlib import Path

import pytest
from support.command import run_here, with_options

ASK = ("generate", "--model", "model", "--max-new-tokens", "12", "-q", "--batch-file", "questions.txt")
QUESTIONS = ("What is 3 times 3?", "", "Which line says that 7 times 7 is 49?")


@pytest.fixture(autouse=True)
def questions(place: Path) -> None:
    Path("questions.txt").write_text("\n".join(QUESTIONS) + "\n")


def test_answers_are_those_of_dense_attention_and_resumed_as_such() -> None:
    dense = run_here(*with_options(ASK, "--method", "dense"))
    found = run_here(*with_options(ASK, "--lossless", "--stats"))
    assert (found.code, found.stdout) == (0, dense.stdout), found.stderr
    assert "drafted tokens accepted" in found.stderr.splitlines()[-1]
    lines = run_here(*with_options(ASK, "--lossless", "--json")).stdout
    assert all(json.loads(line)["settings"]["lossless"] is True for line in lines.splitlines())
    Path("some.jsonl").write_text(lines)
    assert run_here(*with_options(ASK, "--lossless", "--json", "--resume", "some.jsonl")).stdout == lines
    refused = run_here(*with_options(ASK, "--json", "--resume", "some.jsonl"))
    assert refused.code == 2
    assert "line 1 was answered with --lossless; give the settings of that line, or name another file" in refused.stderr
    plain = run_here(*with_options(ASK, "--json")).stdout
    assert all(json.loads(line)["settings"]["lossless"] is False for line in plain.splitlines())
    # Lines of a version without the option go on.
    Path("some.jsonl").write_text(plain.replace('"lossless": false, ', ""))
    assert run_here(*with_options(ASK, "--json", "--resume", "some.jsonl")).code == 0
    refused = run_here(*with_options(ASK, "--lossless", "--json", "--resume", "some.jsonl"))
    assert "line 1 was answered without --lossless; give" in refused.stderr


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--batch-size", "2"), "--batch-size 2: --lossless verifies drafts of one question at a time"),
        (("--sources", "2"), "--lossless cannot be used with --sources"),
        (("--prefill", "own"), "dense attention to all tokens and cannot be used with --prefill"),
        (("--gauge",), "dense attention to all tokens and cannot be used with --gauge"),
    ],
)
def test_what_does_not_go_with_it_is_named(options: tuple[str, ...], told: str) -> None:
    refused = run_here(*with_options(ASK, "--lossless", *options))
    assert refused.code == 2
    assert told in refused.stderr
