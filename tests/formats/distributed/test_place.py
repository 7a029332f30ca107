"""Which processes are ranks."""

from pathlib import Path

import pytest

from sparsekv.formats.distributed.process import FOLDER, Place, own_place

RANK = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*RANK, FOLDER, "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("more", "place"),
    [
        ({}, None),
        (RANK, None),  # of some other launcher
        (RANK | {"TORCHELASTIC_RUN_ID": "none"}, Place(1, 2, 1, None)),
        (RANK | {FOLDER: "meeting"}, Place(1, 2, 1, Path("meeting"))),
        ({"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, None),
    ],
    ids=["alone", "another-launcher", "torchrun", "gpus", "one-rank"],
)
def test_a_rank_knows_its_place(environment: pytest.MonkeyPatch, more: dict[str, str], place: Place | None) -> None:
    for name, value in more.items():
        environment.setenv(name, value)
    assert own_place() == place
