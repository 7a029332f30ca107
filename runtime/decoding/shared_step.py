"""A decode step of several sequences that share a document, replayed as a CUDA graph."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from sparsekv.kernels.common.cache_argument import with_cache
from sparsekv.runtime.cache.graphs import captured, waits
from sparsekv.runtime.cache.packed_cache import PackedCache
from sparsekv.runtime.cache.slots import PackedStep

FIRST_ROOM = 256  # own rows of a sequence, so that a graph lasts for a while


@dataclass(frozen=True)
class _Graph:
    """A captured step, its logits [B, V], and the room for own rows that there was."""

    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor
    room: int


class SharedStep:
    """Feeds one token of each of several sequences to a model; call it within `route_attention`.

    There are graphs for all sequences, for a quarter of them, and so on. Where there are fewer, the last one is fed
    several times, which changes nothing. Graphs are captured anew when the sequences' own rows have outgrown their
    buffers.

    Args:
        tokens: of the document; a sequence's own tokens follow them.
        slots: the most sequences of a step.
        capture: replay steps as CUDA graphs, if they can be captured and do not sync with the GPU.
    """

    def __init__(self, model: PreTrainedModel, cache: PackedCache, tokens: int, slots: int, *, capture: bool):
        self.model, self.cache, self.tokens, self.capture, self.slots = model, cache, tokens, capture, slots
        # Tokens, slots and rows of the sequences.
        self.inputs = torch.zeros(3, slots, dtype=torch.int64, device=model.device)
        self.graphs: dict[int, _Graph] = {}

    @torch.inference_mode()
    def __call__(self, tokens: list[int], slots: list[int], rows: list[int]) -> torch.Tensor:
        """Logits [B, V] after one token of each of B sequences, which becomes that row of its slot; the next call may
        overwrite them."""
        size, needed = self.size_of(len(slots)), max(rows) + 1
        room = self.cache.reserve(max(needed, FIRST_ROOM) if self.capture else needed)
        fed = torch.tensor([tokens, slots, rows])
        self.inputs[:, :size] = torch.cat([fed, fed[:, -1:].expand(3, size - len(slots))], 1)
        if self.capture and (size not in self.graphs or self.graphs[size].room != room):
            self._capture(size, room)
        if not self.capture:
            return self._forward(size, room)[: len(slots)]
        self.graphs[size].graph.replay()
        self.cache.advance()
        return self.graphs[size].logits[: len(slots)]

    def size_of(self, sequences: int) -> int:
        """How many tokens are fed for so many sequences."""
        if not self.capture:
            return sequences
        size = self.slots
        while sequences <= -(-size // 4) < size:
            size = -(-size // 4)
        return size

    def _forward(self, size: int, room: int) -> torch.Tensor:
        tokens, slots, rows = self.inputs[:, :size]
        everyone = torch.arange(size, device=slots.device)
        self.cache.begin(PackedStep(slots, rows, (everyone + 1).int(), everyone, (), room))
        logits: torch.Tensor = self.model(
            input_ids=tokens[None],
            position_ids=(self.tokens + rows)[None],
            **with_cache(self.model, self.cache),
        ).logits[0]
        return logits

    def _capture(self, size: int, room: int) -> None:
        """Capture the step; if it syncs or cannot be captured, no step is captured any more. Restores what trial steps
        count."""
        if any(graph.room != room for graph in self.graphs.values()):
            self.graphs.clear()  # their buffers are no longer in use
        counters = [one for read in self.cache.reads for one in read.counters()]
        before = [one.clone() for one in counters]

        def again() -> torch.Tensor:
            return self._forward(size, room)

        device = self.model.device
        with self.cache.uncounted():
            again()  # the first run may sync for one-time work, such as compiling
            found = None if waits(again, device) else captured(again, device)
        for counter, value in zip(counters, before, strict=True):
            counter.copy_(value)
        if found is None:
            self.capture = False
            self.graphs.clear()
        else:
            self.graphs[size] = _Graph(*found, room)
