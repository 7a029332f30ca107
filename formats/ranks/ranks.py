"""Ranks that share one model: what they tell and send each other, through `torch.distributed`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from sparsekv.formats.errors import UsageError
from sparsekv.formats.ranks.channel import Channel
from sparsekv.formats.ranks.place import TOLD, Place

T = TypeVar("T")
Tensors = Mapping[str, torch.Tensor]
Form = tuple[torch.Size, torch.dtype, str]
"""A tensor's shape, dtype and kind of device."""
PATIENCE = timedelta(minutes=30)
"""How long a rank waits for another before it gives up: longer than any disk delays one layer, or one shard."""
_ANSWER = 60.0  # seconds after which a rank that waits for its disk tells the others that it is there
_STORE = "store"
_TOLD = "sparsekv/told"
_LOST = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "Connection refused",
    "Timed out waiting",
    "remote process exited",
    "Socket Timeout",
    "failed to recv",
)
"""Parts of what gloo, NCCL and their stores say where another process is gone; they have no error class for it."""


@dataclass(frozen=True)
class Ranks:
    """This process among those that share a model; every method but `first` is called by all of them, in one order."""

    number: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes, asks and prints."""
        return self.number == 0

    def share(self, value: T | None) -> T:
        """The first rank's value, which any Python object can be; those of the others are not looked at."""
        box: list[T | None] = [value]
        dist.broadcast_object_list(box, 0, device=torch.device("cpu"))
        return box[0]  # type: ignore[return-value]  # the first rank gives one

    def collect(self, value: T) -> list[T]:
        """Every rank's value, in their order."""
        found: list[T | None] = [None] * self.size
        dist.all_gather_object(found, value)
        return found  # type: ignore[return-value]  # each rank gives one

    def wait_for_all(self, done: Callable[[float], bool]) -> None:
        """Return once every rank's `done`, which is given seconds to wait for it, says so; it may take hours."""
        while not all(self.collect(done(_ANSWER))):
            pass

    def open_channel(self) -> Channel:
        """A way for threads of the ranks to tell the first one something meanwhile."""
        return Channel(dist.new_group(backend="gloo", timeout=PATIENCE))

    def spread(self, tensor: torch.Tensor) -> None:
        """Replace a tensor's numbers by those that the first rank has."""
        dist.broadcast(tensor, 0)

    def join_heads(self, own: torch.Tensor) -> torch.Tensor | None:
        """The heads of all ranks, [heads, ...] on the first rank's device; None on the others.

        Besides the result, nothing is allocated.

        Args:
            own: [heads / size, ...], of one shape on all ranks.
        """
        own = own.contiguous()
        if not self.first:
            dist.send(own, 0)
            return None
        heads = len(own)
        whole = own.new_empty(self.size * heads, *own.shape[1:])
        whole[:heads] = own
        for number in range(1, self.size):
            dist.recv(whole[number * heads : (number + 1) * heads], number)
        return whole

    def give(self, own: Tensors | None) -> None:
        """Send tensors of any shapes and types, or none, to the first rank, which calls `take` meanwhile."""
        self.collect(None if own is None else {name: _form(tensor) for name, tensor in own.items()})
        for tensor in (own or {}).values():
            if tensor.numel():
                dist.send(_bytes(tensor.contiguous()), 0)

    def take(self) -> Iterator[Tensors]:
        """Yields what each of the others gives, in their order, as it comes; all of it must be taken."""
        forms: list[dict[str, Form] | None] = self.collect(None)
        for number, given in enumerate(forms):
            if given is not None:
                yield self._received(given, number)

    def _received(self, given: Mapping[str, Form], number: int) -> Tensors:
        found = {}
        for name, (shape, dtype, kind) in given.items():
            # A backend sends within one kind of device: what was on a CPU there is on a CPU here.
            found[name] = torch.empty(shape, dtype=dtype, device=self.device if kind == self.device.type else kind)
            if found[name].numel():
                dist.recv(_bytes(found[name]), number)
        return found


def _form(tensor: torch.Tensor) -> Form:
    return tensor.shape, tensor.dtype, tensor.device.type


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes [n] uint8: a backend need not know each type."""
    return tensor.view(-1).view(torch.uint8)


def join(place: Place) -> Ranks:
    """Meet the other ranks: over gloo in host memory, over NCCL between GPUs, of which each rank takes its own.

    Raises:
        UsageError: there are fewer GPUs than ranks.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        if place.local >= torch.cuda.device_count():
            raise UsageError(
                f"{place.size} ranks need as many GPUs, and this machine has {torch.cuda.device_count()}; start fewer"
            )
        device = torch.device("cuda", place.local)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method="env://" if place.folder is None else f"file://{place.folder / _STORE}",
        rank=place.number,
        world_size=place.size,
        timeout=PATIENCE,
    )
    return Ranks(place.number, place.size, device)


def is_first_to_tell(place: Place) -> bool:
    """Whether no rank has told the user of an error yet; True once for all ranks together."""
    if place.folder is not None:
        try:
            with (place.folder / TOLD).open("x") as file:
                file.write(str(place.number))
        except OSError:  # also where the folder is gone, with the user's command
            return False
        return True
    if not dist.is_initialized():
        return place.number == 0
    store = dist.distributed_c10d._get_default_store()
    return int(store.add(_TOLD, 1)) == 1


def is_lost_rank(errors: Sequence[BaseException]) -> bool:
    """Whether an error, with its causes, is that another rank has ended or no longer answers."""
    return any(isinstance(one, RuntimeError) and any(part in str(one) for part in _LOST) for one in errors)
