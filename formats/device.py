"""Choose a command's device, measure a GPU's memory, read files into it, and run threads that read ahead."""

import ctypes
import errno
import json
import mmap
import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from queue import SimpleQueue
from threading import Lock, Thread, main_thread
from typing import TypeVar

import torch

from sparsekv.formats.errors import SparsekvError, UsageError, choose_one

GIB = 2**30


@dataclass(frozen=True)
class DeviceMemory:
    """Size of a GPU's memory in bytes: `total`, and `left`, the bytes that this process can still allocate."""

    total: int
    left: int


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of GPU memory that torch needs for each purpose.

    Args:
        model: the model's weights, which are on the GPU already.
        rows: keys and values, and stored queries.
        work: temporary memory, an estimate.
        states: copies of recurrent and convolution states.
    """

    model: int
    rows: int
    work: int = 0
    states: int = 0

    @property
    def total(self) -> int:
        return self.model + self.rows + self.states + self.work

    def told(self, memory: DeviceMemory) -> str:
        """Return one line that reports the memory needed, and warns if it may exceed the free memory."""
        needed = (
            f"needs some {_gib(self.total)} GiB of the GPU's {_gib(memory.total)}: {_gib(self.model)} the model, "
            f"{_gib(self.rows)} keys and values, {self._states_told()}{_gib(self.work)} to work with them"
        )
        if self.rows + self.states + self.work <= memory.left:
            return needed
        return f"{needed}; {_gib(memory.left)} are left beside the model, so that memory may run out"

    def check(self, memory: DeviceMemory, remedy: str) -> None:
        """Raise SparsekvError if the keys, values and states alone do not fit into the free memory.

        Args:
            remedy: what the user can do, as the end of the error message.
        """
        if self.rows + self.states > memory.left:
            what = "keys, values and states" if self.states else "keys and values"
            raise SparsekvError(
                f"{what} take {_gib(self.rows + self.states)} GiB, and beside the model {_gib(memory.left)} of the "
                f"GPU's {_gib(memory.total)} are left; {remedy}"
            )

    def _states_told(self) -> str:
        return f"{_gib(self.states)} states, " if self.states else ""


def device_memory(model: torch.nn.Module) -> DeviceMemory | None:
    """Return the memory of the GPU that holds a model; None if the model is on a CPU or on several devices."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or (device := devices.pop()).type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    # Memory that torch has reserved but not allocated is also free for this process.
    return DeviceMemory(total, free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def model_bytes(model: torch.nn.Module) -> int:
    """Count the bytes of a model's parameters and buffers. A tensor that modules share counts once."""
    return sum(_tensor_bytes(tensor) for tensor in [*model.parameters(), *model.buffers()])


def _tensor_bytes(tensor: torch.Tensor) -> int:
    """Count a tensor's bytes. For a tensor that wraps other tensors, such as quantised weights, count their bytes."""
    inner = getattr(tensor, "__tensor_flatten__", None)
    if inner is None:
        return tensor.nbytes
    return sum(_tensor_bytes(getattr(tensor, part)) for part in inner()[0])


def peak_told(model: torch.nn.Module) -> str | None:
    """Return a line with torch's peak GPU memory; None if the model is on a CPU or on several devices."""
    if device_memory(model) is None:
        return None
    most = torch.cuda.max_memory_reserved(next(model.parameters()).device)
    return f"took at most {_gib(most)} GiB of the GPU's memory"


def _gib(size: int) -> str:
    return f"{size / GIB:,.1f}"


THREADS = 8
PIECE = 16 << 20
"""Bytes that a thread reads at a time. The threads wait for Python's global lock at each piece: with half the size,
reading 39 GB takes 0.4 s longer."""
_BUFFERS = 2 * THREADS


@dataclass(frozen=True)
class _Buffer:
    """Page-locked memory [PIECE] uint8, its own stream, and an event at the end of the last copy from it."""

    memory: torch.Tensor
    copied: torch.cuda.Event
    stream: torch.cuda.Stream


class DeviceReader:
    """Reads files into the memory of one GPU.

    The reader holds 256 MiB of page-locked memory and `THREADS` threads until the process ends.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._buffers: SimpleQueue[_Buffer] = SimpleQueue()
        with torch.cuda.device(device):
            # A new thread uses GPU 0 by default. Without the initializer, a rank of another GPU would create a CUDA
            # context there, which takes half a gigabyte.
            self._threads = ThreadPoolExecutor(
                THREADS, "sparsekv-read", initializer=torch.cuda.set_device, initargs=(torch.cuda.current_device(),)
            )
            memory = torch.empty(_BUFFERS * PIECE, dtype=torch.uint8, pin_memory=True)
            for piece in memory.split(PIECE):
                self._buffers.put(_Buffer(piece, torch.cuda.Event(), torch.cuda.Stream()))

    def read(
        self, descriptor: int, like: Mapping[str, torch.Tensor], skipped: Mapping[str, int]
    ) -> dict[str, torch.Tensor]:
        """Read tensors, or some rows of each, from an open safetensors file that the safetensors library has accepted.

        Returns once all bytes are read. The current stream waits for the copies to the GPU. After a failure or an
        interruption, no thread still reads from the descriptor.

        Args:
            like: tensors of the names, shapes and dtypes to read, such as views of the mapped file.
            skipped: bytes to skip at the start of a tensor in the file, by name; a name without an entry has 0.

        Raises:
            OSError: the file ends early or cannot be read.
        """
        starts = _starts(descriptor)
        found = {name: torch.empty_like(tensor, device=self.device) for name, tensor in like.items()}
        ready = torch.cuda.current_stream(self.device).record_event()
        jobs = []
        for name, tensor in found.items():
            flat, start = tensor.flatten().view(torch.uint8), starts[name] + skipped.get(name, 0)
            for first in range(0, len(flat), PIECE):
                target = flat[first : first + PIECE]
                jobs.append(self._threads.submit(self._copy, descriptor, start + first, target, ready))
        try:
            wait(jobs, return_when=FIRST_EXCEPTION)
        finally:
            for job in jobs:
                job.cancel()
            ended = [job for job in wait(jobs).done if not job.cancelled()]
            # After a failure the target tensors are freed. The copies must end before the current stream reuses them.
            for job in ended:
                if job.exception() is None:
                    torch.cuda.current_stream(self.device).wait_event(job.result())
        for job in ended:
            job.result()
        return found

    def _copy(self, descriptor: int, start: int, target: torch.Tensor, ready: torch.cuda.Event) -> torch.cuda.Event:
        """Read bytes from offset `start` into a target [n] uint8, and return an event at the end of the GPU copy."""
        buffer = self._buffers.get()
        try:
            buffer.copied.synchronize()
            piece = buffer.memory[: len(target)]
            _read_all(descriptor, piece.numpy().data, start)
            # The target may be an inference tensor. Inference mode is set per thread, so it is entered here, too.
            with torch.inference_mode(), torch.cuda.stream(buffer.stream):
                # Earlier work on the current stream may still use the target's memory.
                buffer.stream.wait_event(ready)
                target.copy_(piece, non_blocking=True)
                buffer.copied.record()
            return buffer.copied
        finally:
            self._buffers.put(buffer)


_readers: dict[torch.device, DeviceReader] = {}
_making = Lock()


def device_reader(device: torch.device) -> DeviceReader:
    """Return the reader of a GPU, which is created at the first call. Any thread may call this."""
    with _making:
        if device not in _readers:
            _readers[device] = DeviceReader(device)
        return _readers[device]


def _starts(descriptor: int) -> dict[str, int]:
    """Return the file offset at which each tensor of a safetensors file begins, by name."""
    size = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    header = json.loads(os.pread(descriptor, size, 8))
    return {name: 8 + size + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}


def _read_all(descriptor: int, into: memoryview, start: int) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], start + done)
        if not count:
            raise OSError(errno.EIO, "it is shorter than it was when it was opened")
        done += count


AT_ONCE = 64 << 20
DONTNEED, POPULATE_READ = 4, 22  # MADV_DONTNEED and, since 5.14, MADV_POPULATE_READ of Linux


def release_pages(mapped: torch.Tensor) -> None:
    """Release the memory pages of a tensor, which must be a view of a mapped file and never written to.

    The kernel reads the pages from the file again when they are accessed. A tensor in any other memory would lose its
    content. Does nothing outside Linux.
    """
    _advise(*_whole_pages(mapped), DONTNEED)


def map_pages(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Map all memory pages of tensors that are views of mapped files, at most AT_ONCE bytes before each yield.

    Otherwise the first access would cause a page fault for every sixteen pages. Has no effect on systems without
    MADV_POPULATE_READ. Other threads can run while pages are mapped.
    """
    for tensor in tensors:
        first, length = _whole_pages(tensor)
        for start in range(first, first + length, AT_ONCE):
            _advise(start, min(AT_ONCE, first + length - start), POPULATE_READ)
            yield


def _whole_pages(mapped: torch.Tensor) -> tuple[int, int]:
    """Return the address and the length in bytes of the whole pages inside a tensor's storage."""
    storage = mapped.untyped_storage()
    start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    return first, max(0, end // mmap.PAGESIZE * mmap.PAGESIZE - first)


def _advise(first: int, length: int, advice: int) -> None:
    madvise = _madvise()
    if madvise is not None and length:
        madvise(first, length, advice)


@cache
def _madvise() -> "ctypes._NamedFuncPointer | None":
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


S = TypeVar("S")
T = TypeVar("T")


def read_ahead(
    items: Iterable[S], read: Callable[[S], T], count: int, begin: Callable[[], None] = lambda: None
) -> Generator[T, None, None]:
    """Yield `read(item)` for each item, in order, while threads prefetch the next `count` items.

    A caller that closes the generator early, or is interrupted, does not wait for reads that have begun.

    Args:
        begin: called once in each thread, when it starts.
    """
    threads = ThreadPoolExecutor(count, initializer=begin)
    ahead, whole = deque[Future[T]](), False
    try:
        for item in items:
            ahead.append(threads.submit(read, item))
            if len(ahead) > count:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
        whole = True
    finally:
        threads.shutdown(wait=whole, cancel_futures=True)


def run_beside(steps: Iterator[object], name: str) -> None:
    """Run steps in a background thread until they are done or the program ends.

    The thread is no daemon: Python keeps daemons running during its shutdown, and aborts if one of them is in torch.
    Instead, a program that ends waits for the current step, so each step should be short.

    Args:
        name: the thread's name.
        steps: an iterator that does its work as it is iterated, and raises nothing.
    """
    Thread(target=_run, args=[steps], name=name).start()


def _run(steps: Iterator[object]) -> None:
    for _ in steps:
        if not main_thread().is_alive():
            return


def choose_device(text: str) -> torch.device:
    """Return the device of a name such as `cpu`, `cuda` or `cuda:1`; `auto` is a GPU if there is one, else the CPU.

    A GPU is returned with its index.

    Raises:
        UsageError: the name is unknown, or the machine lacks this GPU.
    """
    if text == "auto":
        text = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(text)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {text}: {choose_one(text, ('auto', 'cpu', 'cuda', 'cuda:N'))}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"--device {text}: this machine (or this build of torch) has {torch.cuda.device_count()} CUDA devices; "
            "use --device cpu or auto"
        )
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device
