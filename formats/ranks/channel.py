"""What threads of ranks tell the first one, while their main threads do something else."""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Channel:
    """A way of its own to the first rank, beside what `Ranks` sends; one thread of each rank may use it at a time.

    Raises, where the other rank is gone, what `is_lost_rank` knows.
    """

    group: dist.ProcessGroup

    def send(self, data: bytes) -> None:
        """Send some bytes to the first rank; returns once that takes them."""
        dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0, self.group)

    def receive(self, size: int, number: int) -> bytes:
        """Wait for so many bytes of a rank."""
        data = torch.empty(size, dtype=torch.uint8)
        dist.recv(data, number, self.group)
        return data.numpy().tobytes()
