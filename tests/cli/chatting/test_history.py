"""Tests of the history of a chat's entries: any text comes back as one entry, and no history file stops a chat."""

import os
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparsekv.cli.chatting.loop import MOST_ENTRIES, History


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(entries=st.lists(st.text()))
def test_entries_come_back_as_they_were(tmp_path: Path, entries: list[str]) -> None:
    history = History(tmp_path / "made" / "history")
    history.file.unlink(missing_ok=True)
    for entry in entries:
        history.add(entry)
    assert history.entries() == entries


def test_a_long_file_is_cut_to_its_last_entries(tmp_path: Path) -> None:
    history = History(tmp_path / "history")
    history.file.write_text("".join(f'"{number}"\n' for number in range(2 * MOST_ENTRIES + 1)))
    last = [str(number) for number in range(MOST_ENTRIES + 1, 2 * MOST_ENTRIES + 1)]
    assert history.entries() == last
    assert len(history.file.read_text().splitlines()) == MOST_ENTRIES
    assert history.entries() == last


def test_what_is_no_entry_is_passed_over(tmp_path: Path) -> None:
    history = History(tmp_path / "history")
    history.file.write_text('"first"\n{"not": "text"}\n[[[\n\n"second"\n"half of a li')
    assert history.entries() == ["first", "second"]


def test_a_pipe_or_folder_in_its_place_is_an_empty_history(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for history in (History(tmp_path / "pipe"), History(tmp_path), History(tmp_path / "pipe" / "below")):
        history.add("entry")
        assert history.entries() == []
