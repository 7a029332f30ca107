"""Two processes of ranks: one sends tensors and, at the same time, messages on a channel; the other receives both."""

from pathlib import Path
from threading import Thread

import torch

from sparsekv.formats.distributed.group import Ranks, join
from sparsekv.formats.distributed.process import Place

GIVEN: dict[str, torch.Tensor] = {
    "strided": torch.arange(12).view(3, 4).T,
    "half": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "short": torch.arange(5, dtype=torch.int16),
    "truth": torch.tensor([True, False]),
    "number": torch.tensor(7.0),
    "nothing": torch.empty(0, 4),
}
TOLD, TIMES = bytes(range(32)), 50


def second(folder: Path) -> None:
    """Send tensors many times, once None instead, and send messages on a channel at the same time."""
    ranks = join(Place(1, 2, 1, 2, folder))
    channel = ranks.open_channel()
    telling = Thread(target=lambda: [channel.send(TOLD) for _ in range(TIMES)])
    telling.start()
    for number in range(TIMES):
        ranks.give(None if number == 1 else GIVEN)
    telling.join()


def _assert_given(ranks: Ranks) -> None:
    channel, told = ranks.open_channel(), list[bytes]()
    hearing = Thread(target=lambda: told.extend(channel.receive(len(TOLD), 1) for _ in range(TIMES)))
    hearing.start()
    for number in range(TIMES):
        found = list(ranks.take())
        assert len(found) == (number != 1)
        for tensors in found:
            assert [*tensors] == [*GIVEN]
            for name, tensor in tensors.items():
                assert (tensor.shape, tensor.dtype) == (GIVEN[name].shape, GIVEN[name].dtype)
                assert torch.equal(tensor, GIVEN[name])
    hearing.join()
    assert told == [TOLD] * TIMES


def first(folder: Path) -> None:
    """Receive what `second` sends, and fail if anything differs."""
    _assert_given(join(Place(0, 2, 0, 2, folder)))
