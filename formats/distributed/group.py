"""Communication through `torch.distributed` between the processes (ranks) that share one model, and the split of the
model over the ranks."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from sparsekv.formats.distributed.process import TOLD, Place
from sparsekv.formats.errors import UsageError


@dataclass(frozen=True)
class Channel:
    """A connection to the first rank that is independent of the messages of `Ranks`.

    Only one thread of each rank may use it at a time. If the rank at the other end has ended, methods raise an error
    that `is_lost_rank` recognises.
    """

    group: dist.ProcessGroup

    def send(self, data: bytes) -> None:
        """Send bytes to the first rank. Return when the first rank has received them."""
        dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0, self.group)

    def receive(self, size: int, number: int) -> bytes:
        """Receive `size` bytes from rank `number`; blocks until they arrive."""
        data = torch.empty(size, dtype=torch.uint8)
        dist.recv(data, number, self.group)
        return data.numpy().tobytes()


_KEYS = ("k_proj", "qkv_proj", "query_key_value")  # projections whose output is or includes keys


_MIXERS = frozenset({"linear_attn", "mamba", "conv", "mixer"})
"""Names of modules in transformers' models. A layer with such a module has a recurrent or convolution state."""
_BOTH = frozenset({"hybrid", "hybrid_sliding"})
"""Layer types of transformers that attend and also have a recurrent or convolution state."""


def shares_of(config: PreTrainedConfig, name: str, size: int) -> DistributedConfig:
    """Choose how transformers splits a model over `size` ranks.

    The tensor-parallel plan that transformers has for the model is used. If it has a plan only for the experts, each
    rank has all other weights. A layer's recurrent or convolution state is whole on each rank.

    Raises:
        UsageError: the model has quantised weights or latent attention, transformers has no plan for the model, the
            plan would split the states, or the ranks cannot share the model's heads or experts evenly. Without this
            check, transformers would fail in the middle of a forward pass.
    """
    text: Any = config.get_text_config()
    if getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None):
        raise UsageError(f"model '{name}' has quantised weights, which are not split over ranks; use one GPU")
    if getattr(text, "kv_lora_rank", None):
        raise UsageError(f"model '{name}' has latent attention (MLA), which is not split over ranks; use one GPU")
    plan, experts = text.base_model_tp_plan or {}, text.base_model_ep_plan or {}
    if _splits_states(plan, {*(getattr(text, "layer_types", None) or ())}):
        raise UsageError(
            f"transformers' plan to split model '{name}' ({config.model_type}) also splits the states of its "
            "layers, and an index needs these states unsplit; use one GPU"
        )
    if plan:
        heads = text.num_key_value_heads
        if _splits_keys(plan) and heads % size:
            raise UsageError(
                f"model '{name}' has {heads} KV heads, which {size} ranks cannot share evenly; {_divisors(heads)}"
            )
        return DistributedConfig(tp_size=size)
    # If only experts are split, transformers also requires a plan of the model's class, such as for the output layer.
    if not experts or not getattr(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None), "_tp_plan", None):
        raise UsageError(f"transformers has no plan to split model '{name}' ({config.model_type}); use one GPU")
    if text.num_experts % size:
        raise UsageError(
            f"model '{name}' has {text.num_experts} experts, which {size} ranks cannot share evenly; "
            f"{_divisors(text.num_experts)}"
        )
    new = any(one.name == "ep_size" for one in fields(DistributedConfig))
    # transformers 5.17 has `enable_expert_parallel` instead of `ep_size`.
    experts_alone: dict[str, Any] = {"ep_size": size} if new else {"enable_expert_parallel": True}
    return DistributedConfig(tp_size=size, **experts_alone)


def _divisors(number: int) -> str:
    """Return the remedy for a number of heads or experts that is not divisible by the number of ranks."""
    found = [f"--gpus {one}" for one in range(2, number + 1) if number % one == 0]
    return f"give {' or '.join(found)}" if found else "use one GPU"


def splits_heads(model: PreTrainedModel) -> bool:
    """Whether the KV heads are split over the ranks. Otherwise each rank attends with all heads."""
    return _splits_keys(model.tp_plan or {})


def _splits_keys(plan: Mapping[str, str]) -> bool:
    """Whether a plan splits the keys over the ranks. Styles other than `colwise` gather the keys again on each rank."""
    return any(name.rsplit(".", 1)[-1] in _KEYS and style == "colwise" for name, style in plan.items())


def _splits_states(plan: Mapping[str, str], layer_types: Set[str]) -> bool:
    """Whether a plan may leave each rank with a part of a layer's state. Gathered outputs are whole on each rank."""
    if layer_types & _BOTH and _splits_keys(plan):
        return True
    split = (name.split(".") for name, style in plan.items() if not style.endswith(("gather_output", "split_input")))
    return any(_MIXERS & {*parts} and "experts" not in parts for parts in split)


T = TypeVar("T")
Tensors = Mapping[str, torch.Tensor]
TensorForm = tuple[torch.Size, torch.dtype, str]
"""A tensor's shape, dtype and type of device."""
PATIENCE = timedelta(minutes=30)
"""Timeout of a rank that waits for another rank. It allows for a slow disk that reads a layer or a shard of weights."""
_ANSWER = 60.0  # seconds between the messages of a rank that waits for its disk, which show that the rank still runs
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
"""Parts of the error messages of gloo, NCCL and their stores when another process has ended. This case has no exception
class."""


@dataclass(frozen=True)
class Ranks:
    """Communication of this process, one of the ranks that share a model, with the other ranks.

    All ranks must call the methods in the same order; where the first rank calls `take`, the others call `give`.

    Attributes:
        number: number of this rank, from 0.
        size: number of ranks.
        device: the device of this rank.
    """

    number: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this is the rank that creates and names files, directs the other ranks and prints results."""
        return self.number == 0

    def share(self, value: T | None) -> T:
        """Broadcast the first rank's value, any Python object, to all ranks; the other ranks' values are ignored."""
        box: list[T | None] = [value]
        dist.broadcast_object_list(box, 0, device=torch.device("cpu"))
        return box[0]  # type: ignore[return-value]  # the first rank's value is never None

    def collect(self, value: T) -> list[T]:
        """Gather the values of all ranks, in the order of the ranks."""
        found: list[T | None] = [None] * self.size
        dist.all_gather_object(found, value)
        return found  # type: ignore[return-value]  # every rank has filled its entry

    def wait_for_all(self, done: Callable[[float], bool]) -> None:
        """Wait, possibly for hours, until `done` returns True on every rank.

        Args:
            done: waits at most the given number of seconds, and returns whether this rank is done.
        """
        while not all(self.collect(done(_ANSWER))):
            pass

    def open_channel(self) -> Channel:
        """Open a connection on which threads of the ranks can send to the first rank, independently of other calls."""
        return Channel(dist.new_group(backend="gloo", timeout=PATIENCE))

    def spread(self, tensor: torch.Tensor) -> None:
        """Overwrite a tensor on every rank with the first rank's values."""
        dist.broadcast(tensor, 0)

    def join_heads(self, own: torch.Tensor) -> torch.Tensor | None:
        """Gather the heads of all ranks as [heads, ...] on the first rank's device; return None on the other ranks.

        Allocates the result, and a copy of this rank's heads if they are not contiguous.

        Args:
            own: this rank's heads [heads / size, ...], with the same shape on all ranks.
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
        """Send tensors of any shapes and dtypes to the first rank, which must call `take`; None: send no tensors."""
        self.collect(
            None
            if own is None
            else {name: (tensor.shape, tensor.dtype, tensor.device.type) for name, tensor in own.items()}
        )
        for tensor in (own or {}).values():
            if tensor.numel():
                dist.send(_bytes(tensor.contiguous()), 0)

    def take(self) -> Iterator[Tensors]:
        """Yield, in rank order, the tensors of each other rank whose `give` has not sent None. Exhaust the iterator."""
        forms: list[dict[str, TensorForm] | None] = self.collect(None)
        for number, given in enumerate(forms):
            if given is not None:
                yield self._received(given, number)

    def _received(self, given: Mapping[str, TensorForm], number: int) -> Tensors:
        found = {}
        for name, (shape, dtype, kind) in given.items():
            # A backend sends only between devices of one type, so a CPU tensor is received in CPU memory.
            found[name] = torch.empty(shape, dtype=dtype, device=self.device if kind == self.device.type else kind)
            if found[name].numel():
                dist.recv(_bytes(found[name]), number)
        return found


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's memory as bytes [n] uint8, because backends do not support every dtype."""
    return tensor.view(-1).view(torch.uint8)


def rank_device(place: Place, gpus: int) -> torch.device:
    """Return the GPU of a rank's local number, or the CPU on a machine without GPUs.

    Args:
        gpus: number of GPUs that this rank finds.

    Raises:
        UsageError: the machine has fewer GPUs than ranks. Every rank of the machine raises, because a rank that joined
            would wait for the others.
    """
    if not gpus:
        return torch.device("cpu")
    if place.local_size > gpus:
        raise UsageError(f"{place.local_size} ranks need as many GPUs, and this machine has {gpus}; start fewer")
    return torch.device("cuda", place.local)


def join(place: Place) -> Ranks:
    """Connect to the other ranks, with gloo for host memory and NCCL for GPUs.

    Raises:
        UsageError: as `rank_device`.
    """
    device = rank_device(place, torch.cuda.device_count() if torch.cuda.is_available() else 0)
    if device.type == "cuda":
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
    """Whether this rank is the first of all ranks to report an error to the user.

    Of all calls in all ranks at most the first returns True; none does if the folder of `place` is gone. Under
    torchrun, before the ranks are connected, every call of a machine's first rank returns True instead.
    """
    if place.folder is not None:
        try:
            with (place.folder / TOLD).open("x") as file:
                file.write(str(place.number))
        except OSError:  # another rank has created the file; or the folder is gone, because the user's command ended
            return False
        return True
    if not dist.is_initialized():
        return place.local == 0
    store = dist.distributed_c10d._get_default_store()
    return int(store.add(_TOLD, 1)) == 1


def is_lost_rank(errors: Sequence[BaseException]) -> bool:
    """Whether one of these errors (an error and its causes) means that another rank has ended or does not answer."""
    return any(isinstance(one, RuntimeError) and any(part in str(one) for part in _LOST) for one in errors)
