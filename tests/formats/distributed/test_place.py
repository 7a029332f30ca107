"""Which processes are ranks."""

from pathlib import Path

import pytest
import torch

from sparsekv.formats.distributed.group import is_first_to_tell, rank_device
from sparsekv.formats.distributed.process import FOLDER, Place, own_place
from sparsekv.formats.errors import UsageError

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
        (RANK | {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2"}, Place(1, 2, 1, 2, None)),
        (RANK | {FOLDER: "meeting"}, Place(1, 2, 1, 2, Path("meeting"))),
        ({"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, None),
    ],
    ids=["alone", "another-launcher", "torchrun", "gpus", "one-rank"],
)
def test_a_rank_knows_its_place(environment: pytest.MonkeyPatch, more: dict[str, str], place: Place | None) -> None:
    for name, value in more.items():
        environment.setenv(name, value)
    assert own_place() == place


@pytest.mark.parametrize("folder", [None, Path("meeting")], ids=["torchrun", "gpus"])
def test_every_rank_refuses_a_machine_with_fewer_gpus_than_ranks(folder: Path | None) -> None:
    """A rank that joined would wait half an hour for those without a GPU. Ranks of other machines do not count."""
    for local in range(4):
        place = Place(local, 6, local, 4, folder)
        with pytest.raises(UsageError, match=r"^4 ranks need as many GPUs, and this machine has 3; start fewer$"):
            rank_device(place, 3)
        assert rank_device(place, 4) == torch.device("cuda", local)
        assert rank_device(place, 0) == torch.device("cpu")


def test_the_first_rank_of_each_machine_tells_an_error_before_the_ranks_are_connected() -> None:
    places = [Place(number, 4, number % 2, 2, None) for number in range(4)]
    assert [is_first_to_tell(place) for place in places] == [True, False, True, False]
