"""A decode step of a model over a cache, whose lengths lie on the device: launched as it is, or replayed as a graph."""

import torch
from transformers import PreTrainedModel

from sparsekv.runtime.cache.graphs import ModelGraph, captured, waits
from sparsekv.runtime.cache.index_cache import IndexCache

ROOM = 1024  # rows kept free for what comes; when they are used up, they double, and the step is captured anew


class DecodeStep:
    """Takes each sequence's newest token in and gives the logits of the next.

    Within `route_attention`, and after `begin`. The graph stays with the cache, for the next question.

    Args:
        cache: one that is `capturable`.
        batch: how many sequences lie in it, one after another along the heads.
        capture: replay the step as a CUDA graph, as far as it does not wait for the GPU.
    """

    def __init__(self, model: PreTrainedModel, cache: IndexCache, *, batch: int = 1, capture: bool = True):
        self.model, self.cache, self.capture = model, cache, capture
        held = cache.graph
        self.tokens = torch.zeros(batch, 1, dtype=torch.int64, device=model.device) if held is None else held.tokens
        self.position = torch.zeros_like(self.tokens[:1]) if held is None else held.position

    def begin(self, steps: int) -> None:
        """Make room for at most so many steps; from now on the cache is fed by this alone, until its `release`."""
        self.cache.reserve(max(1, min(steps, ROOM)))
        self.position.fill_(self.cache.get_seq_length())

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [batch, V] after tokens [batch, 1]; the next call overwrites them."""
        if not self.cache.room_left():
            self.begin(ROOM)
        self.tokens.copy_(tokens)
        logits = self._run()
        self.cache.advance()
        return logits

    def _run(self) -> torch.Tensor:
        if not self.capture:
            return self._forward()
        cache = self.cache
        if cache.graph is not None and cache.graph.buffers != cache.buffers():
            cache.graph = None  # its memory is free again before there is another
        if cache.graph is None:
            cache.graph = self._captured()
        if cache.graph is None:
            return self._forward()
        cache.graph.graph.replay()
        return cache.graph.logits

    def _forward(self) -> torch.Tensor:
        logits: torch.Tensor = self.model(
            input_ids=self.tokens, position_ids=self.position, past_key_values=self.cache, use_cache=True
        ).logits[:, -1]
        self.position += 1
        self.cache.advance_on_device()
        return logits

    def _captured(self) -> ModelGraph | None:
        """A graph; None, from now on, where a step waits or cannot be captured. Trying leaves no trace."""
        changed = [self.position, *self.cache.counters()]
        before = [tensor.clone() for tensor in changed]

        def again() -> torch.Tensor:
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)
            return self._forward()

        again()  # what is only done once, such as compiling, may wait
        found = None if waits(again, self.model.device) else captured(self._forward, self.model.device, again)
        for tensor, value in zip(changed, before, strict=True):
            tensor.copy_(value)
        self.capture = self.cache.captures = found is not None
        return None if found is None else ModelGraph(*found, self.tokens, self.position, self.cache.buffers())
