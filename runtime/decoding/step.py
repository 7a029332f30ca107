"""Decode steps over a cache of sequences; on a GPU they are captured as CUDA graphs and replayed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from sparsekv.kernels.common.given_rows import with_cache
from sparsekv.runtime.cache.buffers import ModelGraph, Run, captured, waits
from sparsekv.runtime.cache.index_cache import Fed, SequenceCache


def step_sizes(slots: int) -> list[int]:
    """Return the numbers of sequences for which steps are captured: all slots, a quarter of them, a sixteenth, ..."""
    sizes = [slots]
    while (fewer := -(-sizes[-1] // 4)) < sizes[-1]:
        sizes.append(fewer)
    return sizes


class DecodeStep:
    """Feeds the newest token of each sequence to a model. Call a step within `route_attention`.

    On a GPU there are CUDA graphs for several numbers of sequences (`step_sizes`). A graph is captured when it is first
    needed, and again when the cache's buffers have changed. The cache stores the graphs. If a step has fewer sequences
    than its graph, the last sequence is fed several times, which does not change the result.

    Args:
        tokens: number of tokens of the stored context, which precede the tokens of each sequence.

    Attributes:
        captures: number of attempts to capture a step, each of which takes as long as many steps.
    """

    def __init__(self, model: PreTrainedModel, cache: SequenceCache, tokens: int):
        self.model, self.cache, self.tokens, self.captures = model, cache, tokens, 0
        # The graph of the last step, if its buffers were the cache's buffers after the step. The next step of the same
        # size replays this graph without comparing buffers again.
        self._valid: ModelGraph | None = None

    @torch.inference_mode()
    def __call__(self, fed: Sequence[Fed], newest: torch.Tensor, most: int) -> torch.Tensor:
        """Feed one token of each of B sequences; return the logits [B, V]. The next call may overwrite the logits.

        Args:
            fed: the token's slot and row index, for each sequence.
            newest: token ids [B], on any device.
            most: maximum number of rows that a sequence will have after the stored context, at the end of its answer.
        """
        cache, capture = self.cache, self._valid is not None or self.cache.capturable
        size = self.size_of(len(fed), capture=capture)
        if cache.reserve(max(one.first for one in fed) + 1, most, capture=capture):
            self._valid = None
        cache.place(fed, size)
        cache.tokens[: len(fed)] = newest
        cache.tokens[len(fed) : size] = newest[-1:]
        if not capture or (graph := self._graph(size)) is None:
            logits = self._forward(size)[: len(fed)]
            cache.advance()
            return logits
        graph.graph.replay()
        for read, counts in zip(cache.reads, graph.counts, strict=True):
            read.step = counts  # graphs of other sizes may read other numbers of rows
        cache.advance()
        # Buffers are compared while the device computes this step, so that the next replay can start at once.
        self._valid = graph if graph.buffers == cache.buffers() else None
        return graph.logits[: len(fed)]

    def size_of(self, sequences: int, *, capture: bool) -> int:
        """Return the number of tokens that a step feeds for `sequences` sequences, padding included."""
        return min(size for size in step_sizes(self.cache.slots) if size >= sequences) if capture else sequences

    def _forward(self, size: int) -> torch.Tensor:
        ids, positions = self.cache.step_input(size, self.tokens)
        with _experts_for_few_tokens(self.model, size):
            output = self.model(input_ids=ids, position_ids=positions, **with_cache(self.model, self.cache))
        self.cache.end_step()
        logits: torch.Tensor = output.logits.flatten(0, 1)
        return logits

    def _graph(self, size: int) -> ModelGraph | None:
        """Return the graph of a step of this size; capture the step if there is none. None if steps cannot be captured.

        After a failure, capturing is not tried again.
        """
        cache = self.cache
        if self._valid is not None and self._valid is cache.graphs.get(size):
            return self._valid
        if any(graph.buffers != cache.buffers() for graph in cache.graphs.values()):
            cache.graphs.clear()  # frees the graphs' memory before another graph is captured
        if size not in cache.graphs:
            self.captures += 1
            found = self._captured(lambda: self._forward(size))
            cache.capturing = found is not None
            if found is None:
                cache.graphs.clear()
                return None
            cache.graphs[size] = ModelGraph(*found, cache.buffers(), tuple(read.step for read in cache.reads))
        return cache.graphs[size]

    def _captured(self, step: Run) -> tuple[torch.cuda.CUDAGraph, torch.Tensor] | None:
        """Capture a step as a CUDA graph; return the graph and its logits.

        Returns None if the step synchronises with the GPU or cannot be captured. The step is run a few times for this.
        The counters that these runs change are restored.
        """
        changed, device = self.cache.counters(), self.model.device
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


@contextmanager
def _experts_for_few_tokens(model: PreTrainedModel, tokens: int) -> Iterator[None]:
    """Within the context, a model on a GPU computes its experts with batched_mm, not grouped_mm, if `tokens` is 1.

    Transformers makes the same choice when it decodes few tokens.
    """
    before = model.get_experts_implementation() if tokens == 1 and model.device.type != "cpu" else {}
    if "grouped_mm" not in before.values():
        yield
        return
    model.set_experts_implementation(
        {name: "batched_mm" if one == "grouped_mm" else one for name, one in before.items()}
    )
    try:
        yield
    finally:
        model.set_experts_implementation(before)
