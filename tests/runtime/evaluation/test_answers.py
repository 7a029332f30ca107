"""Answers on disk: what was written is there after any crash, and a torn last line is not."""

import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsekv.formats.checksums import hash_json
from sparsekv.formats.errors import SparsekvError
from sparsekv.runtime.evaluation.table import FILE, Answers, ScoredAnswer


def _write(folder: Path, number: int) -> dict[str, ScoredAnswer]:
    with Answers(folder) as answers:
        for one in range(number):
            answers.add(hash_json({"question": one}), ScoredAnswer(f"text\n{one} é", None, 0.1, 1.5), {"task": "niah"})
        return dict(answers.known)


def test_answers_come_back_as_they_were(tmp_path: Path) -> None:
    written = _write(tmp_path, 3)
    with Answers(tmp_path) as answers:
        assert answers.known == written
        answers.add("more", ScoredAnswer("", 2.5, 1.0, 0.1), {})
    with Answers(tmp_path) as answers:
        assert answers.known == written | {"more": ScoredAnswer("", 2.5, 1.0, 0.1)}


@given(st.integers(0, 10_000))
def test_a_line_that_was_torn_anywhere_is_dropped_and_written_anew(
    tmp_path_factory: pytest.TempPathFactory, at: int
) -> None:
    folder = tmp_path_factory.mktemp("torn")
    written = _write(folder, 3)
    data = (folder / FILE).read_bytes()
    kept = at % (len(data) + 1)
    (folder / FILE).write_bytes(data[:kept])
    with Answers(folder) as answers:
        assert len(answers.known) == data[:kept].count(b"\n")
        assert answers.known.items() <= written.items()
    assert _write(folder, 3) == written


def test_a_line_that_is_damaged_is_named(tmp_path: Path) -> None:
    _write(tmp_path, 2)
    lines = (tmp_path / FILE).read_bytes().splitlines(keepends=True)
    (tmp_path / FILE).write_bytes(b"{nonsense}\n" + lines[1])
    with pytest.raises(SparsekvError, match=r"line 1 of .*answers.jsonl is damaged"), Answers(tmp_path):
        pass


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ('"text": "text\\n0 é"', '"text": 7'),
        ('"text": "text\\n0 é"', '"text": null'),
        ('"loss": null', '"loss": "x"'),
        ('"loss": null', '"loss": NaN'),
        ('"kv_fraction": 0.1', '"kv_fraction": Infinity'),
        ('"kv_fraction": 0.1', '"kv_fraction": "0.1"'),
        ('"seconds": 1.5', '"seconds": null'),
        ('"seconds": 1.5', '"seconds": true'),
    ],
)
def test_a_field_with_a_value_of_another_kind_is_damage(tmp_path: Path, field: str, value: str) -> None:
    """Scores and means of such values would be wrong, or not JSON."""
    _write(tmp_path, 2)
    text = (tmp_path / FILE).read_text()
    edited = text.replace(field, value, 1)
    assert edited != text
    (tmp_path / FILE).write_text(edited)
    with pytest.raises(SparsekvError, match=r"line 1 of .*answers.jsonl is damaged"), Answers(tmp_path):
        pass


def test_a_last_line_without_an_end_that_is_no_answer_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"id": 1, "said": "a file of another program"}')
    with pytest.raises(SparsekvError, match=r"line 1 of .*answers.jsonl is damaged"), Answers(tmp_path):
        pass
    assert (tmp_path / FILE).read_text() == '{"id": 1, "said": "a file of another program"}'


def test_a_full_disk_is_told_with_the_file_and_the_folder_is_free_again(tmp_path: Path) -> None:
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, most[1]))
    try:
        with pytest.raises(SparsekvError, match=r"cannot write .*answers.jsonl: File too large"):
            _write(tmp_path, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert len(_write(tmp_path, 3)) == 3


def test_two_runs_do_not_write_at_once(tmp_path: Path) -> None:
    with Answers(tmp_path), pytest.raises(SparsekvError, match="in use by another run"), Answers(tmp_path):
        pass


def test_a_key_is_of_the_values_and_not_of_their_order() -> None:
    assert hash_json({"a": 1, "b": [2, None]}) == hash_json({"b": [2, None], "a": 1})
    assert hash_json({"a": 1}) != hash_json({"a": 1.0})
