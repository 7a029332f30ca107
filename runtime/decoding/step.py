"""Decode steps that can be captured as CUDA graphs, for one sequence or for several that share a document."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from sparsekv.kernels.common.given_rows import with_cache
from sparsekv.kernels.common.hook import route_attention
from sparsekv.runtime.cache.buffers import ModelGraph, Step, captured, waits
from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.cache.packed_cache import PackedCache, PackedStep
from sparsekv.runtime.decoding.threads import all_cores, exclusive

FIRST_ROOM = 256  # rows reserved for each sequence's own tokens, so that a captured graph stays valid for many steps


def _captured(
    step: Step, device: torch.device, changed: Sequence[torch.Tensor]
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor] | None:
    """Capture a step as a CUDA graph; return the graph and its logits.

    Returns None if the step syncs with the GPU or cannot be captured. Trial runs of the step change the tensors in
    `changed`; these are restored.
    """
    before = [tensor.clone() for tensor in changed]

    def restore() -> None:
        for tensor, value in zip(changed, before, strict=True):
            tensor.copy_(value)

    def again() -> torch.Tensor:
        restore()
        return step()

    again()  # the first run may sync for one-time work, such as compiling
    found = None if waits(again, device) else captured(step, device, again)
    restore()
    return found


@dataclass(frozen=True)
class _Graph:
    """A captured step, its logits [B, V], and the capacity for own rows per sequence at the time of capture."""

    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor
    room: int


class SharedStep:
    """Decode step that feeds one token of each of several sequences to a model; call it within `route_attention`.

    Graphs are captured for `slots` sequences, for a quarter of them, and so on. If a step has fewer sequences than its
    graph, the last sequence is fed several times, which does not change the result. Graphs are captured again when the
    buffers for the sequences' own rows have grown.

    Args:
        tokens: number of tokens of the document; a sequence's own tokens follow them.
        slots: maximum number of sequences in a step.
        capture: replay steps as CUDA graphs, if they can be captured and do not sync with the GPU.
    """

    def __init__(self, model: PreTrainedModel, cache: PackedCache, tokens: int, slots: int, *, capture: bool):
        self.model, self.cache, self.tokens, self.capture, self.slots = model, cache, tokens, capture, slots
        # [3, slots]: for each sequence its token id, its slot, and the row that the token gets in the slot.
        self.inputs = torch.zeros(3, slots, dtype=torch.int64, device=model.device)
        self.graphs: dict[int, _Graph] = {}

    @torch.inference_mode()
    def __call__(self, tokens: list[int], slots: list[int], rows: list[int]) -> torch.Tensor:
        """Feed one token of each of B sequences; return the logits [B, V], which the next call may overwrite.

        The keys and values of token i are stored in row `rows[i]` of slot `slots[i]`.
        """
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
        """Return the number of tokens that a step feeds for `sequences` sequences, padding included."""
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
        """Capture the step; after a failure no step is captured again."""
        if any(graph.room != room for graph in self.graphs.values()):
            self.graphs.clear()  # they refer to buffers that were replaced when these grew
        counters = [one for read in self.cache.reads for one in read.counters()]
        with self.cache.uncounted():
            found = _captured(lambda: self._forward(size, room), self.model.device, counters)
        if found is None:
            self.capture = False
            self.graphs.clear()
        else:
            self.graphs[size] = _Graph(*found, room)


ROOM = 1024  # rows reserved for new tokens; once they are used up, the buffers grow and the step is captured again


class DecodeStep:
    """Feeds each sequence's newest token to the model and returns the logits for the next token.

    Call it within `route_attention` and after `begin`. The cache keeps the captured graph for the next question.

    Args:
        cache: a cache that is `capturable`.
        batch: number of sequences in the cache, concatenated along the heads.
        capture: replay the step as a CUDA graph, if it can be captured and does not sync with the GPU.
    """

    def __init__(self, model: PreTrainedModel, cache: IndexCache, *, batch: int = 1, capture: bool = True):
        self.model, self.cache, self.capture = model, cache, capture
        self._ready = False
        held = cache.graph
        self.tokens = torch.zeros(batch, 1, dtype=torch.int64, device=model.device) if held is None else held.tokens
        self.position = torch.zeros_like(self.tokens[:1]) if held is None else held.position

    def begin(self, steps: int) -> None:
        """Reserve rows for up to `steps` steps; until the cache's `release` only this object may append to it."""
        self._ready = False
        self.cache.reserve(max(1, min(steps, ROOM)))
        self.position.fill_(self.cache.get_seq_length())

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Feed tokens [batch, 1]; return the logits [batch, V], which the next call may overwrite."""
        if not self._ready and not self.cache.room_left():
            self.begin(ROOM)
        self.tokens.copy_(tokens)
        logits = self._run()
        self.cache.advance()
        # Checked while the device computes this step, so that the next replay can start without these checks.
        graph = self.cache.graph
        self._ready = graph is not None and bool(self.cache.room_left()) and graph.buffers == self.cache.buffers()
        return logits

    def _run(self) -> torch.Tensor:
        cache = self.cache
        if self._ready and cache.graph is not None:
            cache.graph.graph.replay()
            return cache.graph.logits
        if not self.capture:
            return self._forward()
        if cache.graph is not None and cache.graph.buffers != cache.buffers():
            cache.graph = None  # frees its memory before another graph is captured
        if cache.graph is None:
            cache.graph = self._capture()
        if cache.graph is None:
            return self._forward()
        cache.graph.graph.replay()
        return cache.graph.logits

    def _forward(self) -> torch.Tensor:
        logits: torch.Tensor = self.model(
            input_ids=self.tokens, position_ids=self.position, **with_cache(self.model, self.cache)
        ).logits[:, -1]
        self.position += 1
        self.cache.advance_on_device()
        return logits

    def _capture(self) -> ModelGraph | None:
        """Capture the step; return None if that fails. After a failure capture is not tried again."""
        found = _captured(self._forward, self.model.device, [self.position, *self.cache.counters()])
        self.capture = self.cache.capturing = found is not None
        return None if found is None else ModelGraph(*found, self.tokens, self.position, self.cache.buffers())


def captured_step(model: PreTrainedModel, cache: IndexCache, *, batch: int = 1) -> DecodeStep | None:
    """Return a step that is captured as a CUDA graph; None if there is no GPU or steps cannot be replayed."""
    return DecodeStep(model, cache, batch=batch) if model.device.type == "cuda" and cache.capturable else None


def one_step(model: PreTrainedModel, cache: IndexCache, token: torch.Tensor) -> None:
    """Decode one token [1] over the stored context as a warm-up, then rewind the cache.

    Kernels that this step compiles and the graph that it captures stay.
    """
    with exclusive(model), route_attention(model, cache.attend), all_cores(model), torch.inference_mode():
        cache.rewind()
        step = captured_step(model, cache)
        if step is None:
            model(input_ids=token[None].to(model.device), **with_cache(model, cache))
        else:
            step.begin(ROOM)
            step(token[None].to(model.device))
            cache.release()
        cache.rewind()
