"""A decode step of a model over a cache that keeps its lengths on the device, so that it can be a CUDA graph."""

import torch
from transformers import PreTrainedModel

from sparsekv.kernels.common.cache_argument import with_cache
from sparsekv.kernels.common.hook import route_attention
from sparsekv.runtime.cache.graphs import ModelGraph, captured, waits
from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.decoding.exclusive import exclusive
from sparsekv.runtime.decoding.few_rows_linear import all_cores

ROOM = 1024  # rows reserved for new tokens; when they are used up, buffers grow and the step is captured again


class DecodeStep:
    """Feeds each sequence's newest token to the model and returns the logits for the next.

    Call it within `route_attention` and after `begin`. The graph stays with the cache, for the next question.

    Args:
        cache: one that is `capturable`.
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
        """Reserve rows for up to `steps` steps; until `release` only this object may feed the cache."""
        self._ready = False
        self.cache.reserve(max(1, min(steps, ROOM)))
        self.position.fill_(self.cache.get_seq_length())

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [batch, V] after tokens [batch, 1]; the next call may overwrite them."""
        if not self._ready and not self.cache.room_left():
            self.begin(ROOM)
        self.tokens.copy_(tokens)
        logits = self._run()
        self.cache.advance()
        # Looked up while the device computes, so that it need not wait for this before the next step.
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
            cache.graph = self._captured()
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

    def _captured(self) -> ModelGraph | None:
        """The captured step; None if it syncs or cannot be captured, which is then not tried again. Restores all state
        that the trial steps change."""
        changed = [self.position, *self.cache.counters()]
        before = [tensor.clone() for tensor in changed]

        def again() -> torch.Tensor:
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)
            return self._forward()

        again()  # the first run may sync for one-time work, such as compiling
        found = None if waits(again, self.model.device) else captured(self._forward, self.model.device, again)
        for tensor, value in zip(changed, before, strict=True):
            tensor.copy_(value)
        self.capture = self.cache.capturing = found is not None
        return None if found is None else ModelGraph(*found, self.tokens, self.position, self.cache.buffers())


def captured_step(model: PreTrainedModel, cache: IndexCache, *, batch: int = 1) -> DecodeStep | None:
    """A step that is captured as a CUDA graph; None where there is no GPU or steps cannot be replayed."""
    return DecodeStep(model, cache, batch=batch) if model.device.type == "cuda" and cache.capturable else None


def one_step(model: PreTrainedModel, cache: IndexCache, token: torch.Tensor) -> None:
    """Decode one token [1] over the stored context and forget it: what a first step compiles and captures stays."""
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
