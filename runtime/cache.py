"""The cache of a model that decodes over a stored context: dense layers, sparse layers, and what comes after."""

from dataclasses import dataclass

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from sparsekv.formats.schema import LayerFacts, Split
from sparsekv.kernels.attention import Segment, attend, causal_mask
from sparsekv.kernels.hook import AttentionCall
from sparsekv.kernels.lookup import attention_logits
from sparsekv.kernels.runs import expand_runs
from sparsekv.runtime.budget import Budget
from sparsekv.runtime.growing import GrowingRows
from sparsekv.runtime.methods import Asked, Selector

FIRST_NEW_ROWS = 256


class StoredLayer(CacheLayerMixin):
    """One layer whose first tokens are stored: `stored` of them, then the new ones in a buffer that doubles.

    The buffer's first rows may be stored ones that are attended like new ones (`first_keys`, `first_values`
    [Hk, E, D]: sinks and tail of a sparse layer); `rewind` forgets everything after them.
    """

    is_sliding = False

    def __init__(self, stored: int, first_keys: torch.Tensor, first_values: torch.Tensor):
        super().__init__()  # type: ignore[no-untyped-call]
        self.stored, self.first, self.used = stored, first_keys.shape[1], first_keys.shape[1]
        rows = self.first + FIRST_NEW_ROWS
        self.keys = first_keys.new_empty(first_keys.shape[0], rows, first_keys.shape[2])
        self.values = first_values.new_empty(first_values.shape[0], rows, first_values.shape[2])
        self.keys[:, : self.first], self.values[:, : self.first] = first_keys, first_values
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the rows were allocated with the stored ones."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new rows [1, Hk, Q, D]; the attention function reads the layer itself, not what is returned."""
        assert self.keys is not None
        assert self.values is not None
        start, self.used = self.used, self.used + key_states.shape[2]
        if self.used > self.keys.shape[1]:
            self.keys, self.values = _grow(self.keys, start, self.used), _grow(self.values, start, self.used)
        self.keys[:, start : self.used] = key_states[0]
        self.values[:, start : self.used] = value_states[0]
        return key_states, value_states

    def rewind(self) -> None:
        """Forget the tokens that came after the stored ones."""
        self.used = self.first

    def exact_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [Hk, E + new, D] that are always attended."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys[:, : self.used], self.values[:, : self.used]

    def get_seq_length(self) -> int:
        return self.stored + self.used - self.first

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Attention of the queries [Hq, Q, D] that were appended last; returns [Hq, Q, D]."""
        raise NotImplementedError


def _grow(rows: torch.Tensor, used: int, needed: int) -> torch.Tensor:
    grown = rows.new_empty(rows.shape[0], max(needed, 2 * rows.shape[1]), rows.shape[2])
    grown[:, :used] = rows[:, :used]
    return grown


class DenseLayer(StoredLayer):
    """Attends to the whole stored context, or to what a sliding window leaves of it.

    keys, values [Hk, T, D] are its last rows; the `out_of_sight` tokens before them are in no query's window any more.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, out_of_sight: int = 0):
        super().__init__(out_of_sight + keys.shape[1], keys[:, :0], values[:, :0])
        self.stored_keys, self.stored_values, self.out_of_sight = keys, values, out_of_sight

    def attend(self, call: AttentionCall) -> torch.Tensor:
        keys, values = self.exact_rows()
        queries, Hk = call.query.shape[1], keys.shape[0]
        mask = causal_mask(queries, self.stored + self.used, call.window, keys.device)
        first = 0 if call.window is None else max(0, self.get_seq_length() - queries - call.window + 1)
        first = min(first, self.stored)
        rows = slice(first - self.out_of_sight, None)
        segments = [
            Segment(self.stored_keys[:, rows], self.stored_values[:, rows], mask[:, first : self.stored]),
            Segment(keys, values, mask[:, self.stored :]),
        ]
        return _grouped_attend(call, Hk, segments)


@dataclass
class ReadRows:
    """Rows of size D that decode steps have read for the middle, summed over KV heads, and those dense would read."""

    sparse: torch.Tensor
    dense: int = 0


class SparseLayer(StoredLayer):
    """Attends to sinks, tail and new tokens exactly, and to the rows of the middle that a selector chooses.

    A selector that takes tokens in gets the oldest exact ones but the sinks while the model decodes: the middle grows.
    Allocates the middle's keys and values once more where the selector wants them cluster by cluster.
    """

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        split: Split,
        facts: LayerFacts,
        selector: Selector,
        budget: Budget,
    ):
        middle = slice(split.sinks, split.sinks + split.middle)
        first_keys, first_values = (
            torch.cat([rows[:, : split.sinks], rows[:, middle.stop :]], 1) for rows in (keys, values)
        )
        super().__init__(split.tokens, first_keys, first_values)
        self.facts, self.selector, self.budget, self.split = facts, selector, budget, split
        self.first_keys, self.first_values = first_keys, first_values
        self.middle_keys = GrowingRows(lay_out(keys[:, middle], selector.token_order))
        self.middle_values = GrowingRows(lay_out(values[:, middle], selector.token_order))
        self.heads = torch.arange(keys.shape[0], device=keys.device)[:, None, None]
        self.read = self._nothing_read()

    def _nothing_read(self) -> ReadRows:
        return ReadRows(torch.zeros((), dtype=torch.float64, device=self.heads.device))

    def rewind(self) -> None:
        super().rewind()
        self.read = self._nothing_read()
        self._take_back()

    @torch.inference_mode()
    def _take_back(self) -> None:
        # In inference mode, because rows that grew while a model decoded may be written in no other.
        order = self.selector.forget()
        if order is None:
            return
        self.stored, start = self.split.tokens, self.selector.open_row
        for middle in (self.middle_keys, self.middle_values):
            middle.write(start, lay_out(middle.rows[:, start:], order))
        keys, values = self.exact_rows()
        keys.copy_(self.first_keys)
        values.copy_(self.first_values)

    def _hand_over(self) -> None:
        """Leave the newest rows exact, fewer than twice what the selector takes at a time, and hand it those before."""
        step, start = self.selector.takes, self.split.sinks
        if not step or self.used - start < 2 * step:
            return
        keys, values = self.exact_rows()
        moved = ((self.used - start) // step - 1) * step
        for first in range(start, start + moved, step):
            self._join(keys[:, first : first + step], values[:, first : first + step])
        for rows in (keys, values):
            rows[:, start : self.used - moved] = rows[:, start + moved :].clone()
        self.used, self.stored = self.used - moved, self.stored + moved

    def _join(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        start = self.selector.open_row
        keys = torch.cat([self.middle_keys.rows[:, start:], keys], 1)
        values = torch.cat([self.middle_values.rows[:, start:], values], 1)
        taken = self.selector.take(keys, values)
        self.middle_keys.write(start, lay_out(keys, taken.order))
        self.middle_values.write(start, lay_out(values, taken.order))
        self.read.sparse += len(keys) * (taken.index_rows + 2 * keys.shape[1])

    def attend(self, call: AttentionCall) -> torch.Tensor:
        queries = call.query.shape[1]
        if queries == 1:
            # Not within a question: its first tokens must not see what its last ones did to the clusters.
            self._hand_over()
        keys, values = self.exact_rows()
        Hk = keys.shape[0]
        mask = None if queries == 1 else causal_mask(queries, self.used, None, keys.device)
        grouped = call.query.unflatten(0, (Hk, -1))

        def exact_logsumexp() -> torch.Tensor:
            logits = attention_logits(grouped, keys, call.softmax_scale, call.softcap)
            return (logits if mask is None else logits.masked_fill(~mask, -torch.inf)).logsumexp(-1)

        tokens = self.get_seq_length()
        positions = torch.arange(tokens - queries, tokens, device=keys.device)
        chosen = self.selector.select(Asked(grouped, positions, exact_logsumexp, shared=queries > 1), self.budget)
        rows, valid = expand_runs(chosen.starts, chosen.lengths, chosen.capacity)
        if queries == 1:
            self._count(chosen.lengths, chosen.index_rows, Hk)
        segments = [
            Segment(self._gather(self.middle_keys, rows), self._gather(self.middle_values, rows), valid[:, None]),
            Segment(keys, values, mask),
            *(Segment(part.keys, part.values, bias=part.log_counts[:, None]) for part in chosen.replacements),
        ]
        return _grouped_attend(call, Hk, segments)

    def _gather(self, middle: GrowingRows, rows: torch.Tensor) -> torch.Tensor:
        """[Hk, Q or 1 times S, D] for rows [Hk, Q or 1, S]."""
        flat = (rows + self.heads * middle.buffer.shape[1]).flatten()
        return middle.buffer.flatten(0, 1).index_select(0, flat).view(len(rows), -1, middle.buffer.shape[2])

    def _count(self, lengths: torch.Tensor, index_rows: torch.Tensor | float, Hk: int) -> None:
        # A number stays one: made a tensor, its copy to a GPU would wait for all that the GPU has still to do.
        read = index_rows.expand(Hk, 1).sum() if isinstance(index_rows, torch.Tensor) else Hk * index_rows
        self.read.sparse += 2 * lengths.sum() + read
        self.read.dense += 2 * Hk * self.middle_keys.used


def lay_out(rows: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """Rows [Hk, M, D] in an order [Hk, M or fewer], such as the one that makes each cluster a run; contiguous."""
    order = None if order is None else order[..., None].expand(-1, -1, rows.shape[2])
    return (rows if order is None else rows.gather(1, order)).contiguous()


def _grouped_attend(call: AttentionCall, Hk: int, segments: list[Segment]) -> torch.Tensor:
    sinks = None if call.sink_logits is None else call.sink_logits.view(Hk, -1)
    grouped = call.query.unflatten(0, (Hk, -1))
    return attend(grouped, segments, call.softmax_scale, call.softcap, sinks).flatten(0, 1)


class IndexCache(Cache):
    """Stored layers as a transformers cache; `attend` is the attention function to route a model's calls to."""

    def __init__(self, layers: list[StoredLayer]):
        super().__init__(layers=list(layers))
        self.stored_layers = layers

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return self.stored_layers[call.layer].attend(call)

    def rewind(self) -> None:
        """Back to the stored context, ready for the next question."""
        for layer in self.stored_layers:
            layer.rewind()

    def kv_fraction(self) -> float:
        """Rows read for the middle over those dense attention reads, over all decode steps since `rewind`; one sync."""
        counts = [layer.read for layer in self.stored_layers if isinstance(layer, SparseLayer)]
        dense = sum(count.dense for count in counts)
        return float(sum(count.sparse.item() for count in counts)) / dense if dense else 0.0
