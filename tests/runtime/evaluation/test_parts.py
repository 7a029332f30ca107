"""Tests of taking over the answers of other processes: each once, and their files stay until all are taken over."""

from pathlib import Path

from sparsekv.runtime.evaluation.engine import Parts
from sparsekv.runtime.evaluation.table import Answers, ScoredAnswer
from sparsekv.runtime.tasks.interface import Context

ONE, TWO = Context("niah", "one", "a text", ()), Context("niah", "two", "a text", ())


def _given(text: str) -> ScoredAnswer:
    return ScoredAnswer(text, None, 0.1, 1.5)


def test_a_parts_answers_are_taken_over_once(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    assert parts.of(ONE) != parts.of(TWO)
    with Answers(parts.of(ONE)) as theirs:
        theirs.add("known", _given("theirs"), {})
        theirs.add("new", _given("é\n"), {"task": "niah"})
    with Answers(tmp_path) as answers:
        answers.add("known", _given("ours"), {})
        for context in (ONE, TWO, ONE):
            parts.take(context, answers)
        assert answers.known == {"known": _given("ours"), "new": _given("é\n")}
    assert (tmp_path / "answers.jsonl").read_bytes().count(b"\n") == 2
    with Answers(tmp_path) as again:
        assert again.known["new"] == _given("é\n")


def test_a_finished_part_leaves_the_indices_that_were_kept(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    for name in ("new.skv", "there.skv"):
        (parts.of(ONE) / "indices" / name).mkdir(parents=True)
    (tmp_path / "indices" / "there.skv").mkdir(parents=True)
    parts.finish(ONE)
    parts.finish(TWO)
    assert sorted(one.name for one in (tmp_path / "indices").iterdir()) == ["new.skv", "there.skv"]
    assert not parts.of(ONE).exists()
