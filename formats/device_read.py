"""Reads the tensors of a file into a GPU's memory: by several threads, through page-locked buffers.

A copy from a memory mapping is slow: the driver faults its pages in one by one and copies them a second time. Here each
thread reads a piece of the file into page-locked memory, from which the GPU fetches it while others are read.
"""

import errno
import json
import os
from collections.abc import Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Lock

import torch

THREADS = 8
PIECE = 16 << 20
"""Bytes that one thread reads at a time. With each piece threads wait for Python's lock: in pieces of half the size,
39 GB take 0.4 s more."""
_BUFFERS = 2 * THREADS


@dataclass(frozen=True)
class _Buffer:
    """Page-locked memory [PIECE] uint8, and an event at the end of the last copy out of it; copies run in order."""

    memory: torch.Tensor
    copied: torch.cuda.Event
    stream: torch.cuda.Stream


class DeviceReader:
    """Reads files to one GPU. Holds 256 MiB of page-locked memory and `THREADS` threads for the life of the process."""

    def __init__(self, device: torch.device):
        self.device = device
        self._buffers: SimpleQueue[_Buffer] = SimpleQueue()
        with torch.cuda.device(device):
            # A thread begins on the first GPU, where a rank of another one would take half a gigabyte for its context.
            self._threads = ThreadPoolExecutor(
                THREADS, "sparsekv-read", initializer=torch.cuda.set_device, initargs=(torch.cuda.current_device(),)
            )
            memory = torch.empty(_BUFFERS * PIECE, dtype=torch.uint8, pin_memory=True)
            for piece in memory.split(PIECE):
                self._buffers.put(_Buffer(piece, torch.cuda.Event(), torch.cuda.Stream()))

    def read(
        self, descriptor: int, like: Mapping[str, torch.Tensor], skipped: Mapping[str, int]
    ) -> dict[str, torch.Tensor]:
        """Tensors of an open safetensors file that the safetensors library has accepted, or some rows of each.

        Returns once all of them are read; the current stream waits for the copies to the GPU. Whoever fails or is
        interrupted has no thread that still reads from the descriptor.

        Args:
            like: tensors of the same names, shapes and dtypes, such as views of the file's mapping.
            skipped: bytes that a tensor has in the file before those that are wanted, by name; none where not named.

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
            # Memory that is given back is not written to any more when the current stream uses it again.
            for job in ended:
                if job.exception() is None:
                    torch.cuda.current_stream(self.device).wait_event(job.result())
        for job in ended:
            job.result()
        return found

    def _copy(self, descriptor: int, start: int, target: torch.Tensor, ready: torch.cuda.Event) -> torch.cuda.Event:
        """Read bytes from `start` on to a target [n] uint8; returns an event at the end of the copy to the GPU."""
        buffer = self._buffers.get()
        try:
            buffer.copied.synchronize()
            piece = buffer.memory[: len(target)]
            _read_all(descriptor, piece.numpy().data, start)
            # The tensors may be made in inference mode, which is a thread's own.
            with torch.inference_mode(), torch.cuda.stream(buffer.stream):
                # The target's memory may still be in use by what the current stream was given before.
                buffer.stream.wait_event(ready)
                target.copy_(piece, non_blocking=True)
                buffer.copied.record()
            return buffer.copied
        finally:
            self._buffers.put(buffer)


_readers: dict[torch.device, DeviceReader] = {}
_making = Lock()


def device_reader(device: torch.device) -> DeviceReader:
    """The reader of a GPU, made at first use, by whichever thread wants it first."""
    with _making:
        if device not in _readers:
            _readers[device] = DeviceReader(device)
        return _readers[device]


def _starts(descriptor: int) -> dict[str, int]:
    """Where the bytes of each tensor of a safetensors file begin."""
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
