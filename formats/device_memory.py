"""A GPU's memory: what a command will take of it, told before it starts, and whether there is as much."""

from dataclasses import dataclass

import torch

from sparsekv.formats.errors import SparsekvError

GIB = 2**30


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a GPU's memory: all of them, and those that this process can still get."""

    total: int
    left: int


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that torch takes of a GPU's memory: the model, which is there already; `rows`, keys and values with the
    queries that are kept beside them; and what is needed to work with them, an estimate."""

    model: int
    rows: int
    work: int = 0

    @property
    def total(self) -> int:
        return self.model + self.rows + self.work

    def told(self, memory: DeviceMemory) -> str:
        """One line: what is needed, of what, and what a user can do where it may not be there."""
        needed = (
            f"needs some {_gib(self.total)} GiB of the GPU's {_gib(memory.total)}: {_gib(self.model)} the model, "
            f"{_gib(self.rows)} keys and values, {_gib(self.work)} to work with them"
        )
        if self.rows + self.work <= memory.left:
            return needed
        return f"{needed}; {_gib(memory.left)} are left beside the model, so that it may run out"

    def check(self, memory: DeviceMemory, remedy: str) -> None:
        """Raise SparsekvError, which ends with a remedy, if not even keys and values fit beside the model."""
        if self.rows > memory.left:
            raise SparsekvError(
                f"keys and values take {_gib(self.rows)} GiB, and beside the model {_gib(memory.left)} of the GPU's "
                f"{_gib(memory.total)} are left; {remedy}"
            )


def device_memory(model: torch.nn.Module) -> DeviceMemory | None:
    """The memory of the GPU that a model is on; None where it is on a CPU, or on several devices."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or (device := devices.pop()).type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    # What torch has got and does not use is this process's too.
    return DeviceMemory(total, free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def model_bytes(model: torch.nn.Module) -> int:
    """Bytes of a model's parameters and buffers; of what modules share once."""
    return sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])


def peak_told(model: torch.nn.Module) -> str | None:
    """What torch has taken at most of the GPU that a model is on; None where it is on none, or on several."""
    if device_memory(model) is None:
        return None
    most = torch.cuda.max_memory_reserved(next(model.parameters()).device)
    return f"took at most {_gib(most)} GiB of the GPU's memory"


def _gib(size: int) -> str:
    return f"{size / GIB:,.1f}"
