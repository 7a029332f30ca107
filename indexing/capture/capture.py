"""Capture keys, values and queries as a model attends to them, by a prefill in chunks."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers import Cache, PreTrainedModel

from sparsekv.formats.errors import SparsekvError
from sparsekv.formats.index.context_rows import Pair, context_rows, first_tokens, joined, quantise
from sparsekv.formats.index.schema import KVDtype, KVStorage, LayerFacts
from sparsekv.formats.models.rope import rope_depends_on_length
from sparsekv.indexing.prefill.prefills import DensePrefill, Prefill
from sparsekv.kernels.common.given_rows import RowLayer, tokens_at, with_cache
from sparsekv.kernels.common.hook import AttentionCall, route_attention
from sparsekv.kernels.common.mask import UnsupportedAttentionError
from sparsekv.kernels.common.states import State, copied_state, layer_kinds


class ContextLayer(RowLayer):
    """Keys and values of one layer, [1, Hk, N, D] each, allocated once and filled from the front.

    Args:
        tokens: number of tokens N.
        prefix: keys and values [Hk, P, D] of the first P tokens; None: no rows are known.
    """

    def __init__(self, tokens: int, prefix: Pair | None = None):
        super().__init__()  # type: ignore[no-untyped-call]
        self.tokens, self.seen, self._prefix = tokens, 0, prefix

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys = key_states.new_empty(*key_states.shape[:2], self.tokens, key_states.shape[-1])
        self.values = value_states.new_empty(*value_states.shape[:2], self.tokens, value_states.shape[-1])
        self.is_initialized = True
        if self._prefix is not None:
            self.seen = self._prefix[0].shape[1]
            self.keys[0, :, : self.seen], self.values[0, :, : self.seen] = self._prefix
            self._prefix = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object) -> Pair:
        """Return the rows unchanged. A model may compute its keys and values from these rows before it attends;
        `appended` stores the rows that are attended to."""
        return key_states, value_states

    def appended(self, call: AttentionCall) -> AttentionCall:
        """Append the keys and values [Hk, Q, D] of a call; return the call with the rows of all tokens [Hk, T, D].

        Raises:
            SparsekvError: there are more rows than prompt tokens, or the call lacks the queries of some of its tokens.
        """
        if not self.is_initialized:
            self.lazy_initialization(call.keys[None], call.values[None])
        assert self.keys is not None
        assert self.values is not None
        start, self.seen = self.seen, self.seen + call.keys.shape[1]
        if self.seen > self.tokens:
            raise SparsekvError("its layers attend several times for each token, which an index cannot represent")
        # Checked second, because a layer that attends again may do so over rows that an earlier pass has cached.
        if call.query.shape[1] != call.keys.shape[1]:
            raise SparsekvError(
                f"layer {call.layer} skips tokens whose logits are not needed, so an index would lack these tokens"
            )
        self.keys[0, :, start : self.seen] = call.keys
        self.values[0, :, start : self.seen] = call.values
        return replace(call, keys=self.keys[0, :, : self.seen], values=self.values[0, :, : self.seen])

    def get_seq_length(self) -> int:
        return self.seen if self._prefix is None else self._prefix[0].shape[1]

    def get_max_length(self) -> int:
        return self.tokens


Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class TakenOver:
    """Int8 rows of an earlier index's first `tokens` tokens, which the new index stores unchanged.

    Dequantising and rounding the rows again would add a second error. `tensors` returns a layer's int8 tensors.
    `storage` is the earlier index's record of its int8 storage.
    """

    tokens: int
    tensors: Callable[[int], Tensors]
    storage: KVStorage


def rows_as_stored(
    rows: Callable[[int], Pair], layer: int, kv_dtype: KVDtype | None, taken: TakenOver | None = None
) -> Pair:
    """Return keys and values [Hk, N, D] of a layer as readers of the index will get them, after int8 rounding if any.

    Args:
        rows: returns the exact keys and values of a layer.
        kv_dtype: the storage dtype; None for the model's dtype, which needs no rounding.
        taken: int8 rows of an earlier index, which replace the first rows.
    """
    exact = rows(layer)
    return exact if kv_dtype is None else context_rows(in_8_bits(exact, layer, taken), exact[0].dtype).part(slice(None))


def in_8_bits(rows: Pair, layer: int, taken: TakenOver | None) -> dict[str, torch.Tensor]:
    """Quantise a layer's keys and values [Hk, N, D] to the tensors of its int8 file.

    The rows in `taken` replace the first rows, and are not quantised again.
    """
    if taken is None:
        return quantise(*rows)
    first = first_tokens(taken.tensors(layer), taken.tokens)
    keys, values = (of[:, taken.tokens :] for of in rows)
    return joined(first, quantise(keys, values, like=first))


PrefixQueries = Callable[[int, torch.Tensor], torch.Tensor]
"""Function that returns a layer's queries [Hq, P, D] at positions [P] of a prefix that is not prefilled again."""
RowsDone = Callable[[int, torch.Tensor, torch.Tensor, int], None]
ChunkDone = Callable[[int, Mapping[str, torch.Tensor]], None]
StateDone = Callable[[int, State], None]


@dataclass
class CapturedQueries:
    """Captured queries of one layer.

    Args:
        tail: the queries [Hq, R, D] of the prompt's last R tokens.
        sink_logits: learned attention-sink logits [Hq]; None if the layer has none.
        sample: queries [Hq, P, D] at the sampled positions; None for a layer with a sliding window.
    """

    tail: torch.Tensor
    sink_logits: torch.Tensor | None
    sample: torch.Tensor | None

    @property
    def queries(self) -> dict[str, torch.Tensor]:
        """The tail's queries and the learned sink logits, by the names under which they are stored."""
        return {"tail": self.tail} | ({} if self.sink_logits is None else {"sink_logits": self.sink_logits})


@dataclass
class CapturedLayer(CapturedQueries):
    """Captured queries, keys and values [Hk, N, D] of one layer, as attended."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class BegunPrefill:
    """The leading chunks of the prompt, which an interrupted build has prefilled.

    Args:
        tokens: number of tokens in these chunks.
        rows: keys and values [Hk, tokens, D] by layer. `capture` removes each entry.
        queries: the queries of each chunk, as they were passed to `chunk_done`.
    """

    tokens: int
    rows: dict[int, Pair]
    queries: Sequence[Mapping[str, torch.Tensor]]

    def kept(self, kind: str, layer: int) -> torch.Tensor | None:
        """Return the stored queries [Hq, n, D] of a layer, of the kind `sample` or `tail`; None if there are none."""
        parts = [chunk[name] for chunk in self.queries if (name := _query_name(kind, layer)) in chunk]
        return torch.cat(parts, 1) if parts else None


def _query_name(kind: str, layer: int) -> str:
    return f"{kind}.{layer}"


@dataclass
class _Recorder:
    """Attention function of a capture, which attends as the prefill does, and stores keys, values and queries.

    The stored queries are those of the last `tail` tokens, and those at the ascending `positions` [P]. The first
    `prefix_tokens` tokens are not prefilled, and so `prefix_queries` returns the queries at their positions.
    """

    layers: Mapping[int, ContextLayer]
    prefill: Prefill
    sinks: int
    tokens: int
    tail: int
    positions: torch.Tensor
    prefix_tokens: int
    prefix_queries: PrefixQueries | None
    begun: BegunPrefill | None = None
    samples: dict[int, torch.Tensor] = field(default_factory=dict)
    tails: dict[int, torch.Tensor] = field(default_factory=dict)
    facts: dict[int, LayerFacts] = field(default_factory=dict)
    sink_logits: dict[int, torch.Tensor] = field(default_factory=dict)

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        call = self.layers[call.layer].appended(call)
        if self.begun is not None and call.layer not in self.facts:
            self._check_begun(call, self.begun)
        self.facts[call.layer] = LayerFacts(
            softmax_scale=call.softmax_scale,
            softcap=call.softcap,
            sliding_window=call.window,
            attention_sinks=call.sink_logits is not None,
        )
        if call.sink_logits is not None:
            self.sink_logits[call.layer] = call.sink_logits.detach()
        self._keep_tail(call)
        if call.window is None:
            self._keep_sample(call)
        # The prompt's last token attends densely in a sparse prefill, too. The index stores the logits of this token,
        # and opening the index compares these logits with those of dense attention over all stored rows.
        dense = call.keys.shape[1] == self.tokens and not self.prefill.exact
        return (DensePrefill() if dense else self.prefill).attend(call, self.sinks)

    def __post_init__(self) -> None:
        if self.begun is not None:
            tails = {layer: self.begun.kept("tail", layer) for layer in self.layers}
            self.tails = {layer: tail for layer, tail in tails.items() if tail is not None}

    def _check_begun(self, call: AttentionCall, begun: BegunPrefill) -> None:
        """Raise SparsekvError if a layer's queries in `begun` have another number, shape or dtype than this build's."""
        counts = {"tail": max(0, begun.tokens - self.tokens + self.tail)}
        counts["sample"] = 0 if call.window is not None else int((self.positions < begun.tokens).sum())
        for kind, count in counts.items():
            kept = begun.kept(kind, call.layer)
            empty = call.query[:, :0] if kept is None else kept
            shape = len(call.query), count, call.query.shape[2]
            if empty.shape != shape or empty.dtype != call.query.dtype:
                raise SparsekvError(
                    f"the queries of layer {call.layer} that an interrupted build has stored differ from those of "
                    "this build; give --force to begin anew"
                )

    def queries_of_chunk(self, first: int, end: int) -> dict[str, torch.Tensor]:
        """Return views of the stored queries of the tokens `first` to `end` (excluded), for all layers by name."""
        begin = self.tokens - self.tail
        tail = slice(max(0, first - begin), max(0, end - begin))
        low, high = torch.searchsorted(self.positions, torch.tensor([first, end])).tolist()
        found = {("tail", layer): rows[:, tail] for layer, rows in self.tails.items()}
        found |= {("sample", layer): rows[:, low:high] for layer, rows in self.samples.items()}
        return {_query_name(*name): rows for name, rows in found.items() if rows.shape[1]}

    def _keep_tail(self, call: AttentionCall) -> None:
        start = call.keys.shape[1] - call.query.shape[1]
        rows = call.query[:, max(0, self.tokens - self.tail - start) :]
        if rows.shape[1]:
            kept = self.tails.get(call.layer, rows[:, :0])
            self.tails[call.layer] = torch.cat([kept, rows], 1)

    def _keep_sample(self, call: AttentionCall) -> None:
        start, end = call.keys.shape[1] - call.query.shape[1], call.keys.shape[1]
        if call.layer not in self.samples:
            self.samples[call.layer] = self._first_sample(call)
        first, last = torch.searchsorted(self.positions, torch.tensor([start, end])).tolist()
        rows = (self.positions[first:last] - start).to(call.query.device)
        self.samples[call.layer][:, first:last] = call.query[:, rows]

    def _first_sample(self, call: AttentionCall) -> torch.Tensor:
        sample = call.query.new_empty(len(call.query), len(self.positions), call.query.shape[2])
        if self.begun is not None:
            if (begun := self.begun.kept("sample", call.layer)) is not None:
                sample[:, : begun.shape[1]] = begun
            return sample
        known = int((self.positions < self.prefix_tokens).sum())
        if known:
            assert self.prefix_queries is not None
            sample[:, :known] = self.prefix_queries(call.layer, self.positions[:known])
        return sample


@dataclass
class Capture:
    """A finished prefill: the rows of each layer that attends, and the last token's logits [vocabulary] in float32.

    `states` are copies of the layers' states, by the number of tokens after which each was copied. `take` returns a
    layer's keys, values and queries, and removes them from this object. `take_queries` returns only the queries, and
    frees the layer's keys and values.
    """

    logits: torch.Tensor
    states: dict[int, State]
    _layers: dict[int, ContextLayer]
    _recorder: _Recorder

    @property
    def layers(self) -> list[int]:
        """Indices of the layers that attend."""
        return list(self._layers)

    def facts(self, layer: int) -> LayerFacts:
        return self._recorder.facts[layer]

    def not_finite(self) -> str | None:
        """Name the first tensor that has an infinity or NaN, such as `keys of layer 3`; None if all are finite."""
        for number, layer in self._layers.items():
            recorder = self._recorder
            queries = [recorder.tails[number], recorder.samples.get(number)]
            for name, rows in (("keys", [layer.keys]), ("values", [layer.values]), ("queries", queries)):
                if not all(is_finite(some) for some in rows if some is not None):
                    return f"{name} of layer {number}"
        return None if is_finite(self.logits) else "logits"

    def rows(self, layer: int) -> Pair:
        """Return the keys and values [Hk, N, D] of a layer before `take` or `take_queries` has freed the rows."""
        keys, values = self._layers[layer].keys, self._layers[layer].values
        assert keys is not None
        assert values is not None
        return keys[0], values[0]

    def take(self, layer: int) -> CapturedLayer:
        keys, values = self.rows(layer)
        queries = self.take_queries(layer)
        return CapturedLayer(queries.tail, queries.sink_logits, queries.sample, keys, values)

    def take_queries(self, layer: int) -> CapturedQueries:
        rows = self._layers[layer]
        rows.keys = rows.values = None
        return CapturedQueries(
            tail=self._recorder.tails.pop(layer),
            sink_logits=self._recorder.sink_logits.get(layer),
            sample=self._recorder.samples.pop(layer, None),
        )


def is_finite(rows: torch.Tensor) -> bool:
    # One pass without a mask of the tensor's size: aminmax returns NaN if any value is NaN.
    return not rows.numel() or bool(torch.stack(torch.aminmax(rows)).isfinite().all())


@torch.inference_mode()
def capture(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    tail: int,
    positions: torch.Tensor | None = None,
    chunk_size: int = 512,
    prefill: Prefill | None = None,
    sinks: int = 0,
    prefix_tokens: int = 0,
    prefix: Callable[[int], Pair] | None = None,
    prefix_queries: PrefixQueries | None = None,
    prefix_state: State | None = None,
    marks: Collection[int] = (),
    stored: Collection[int] = (),
    begun: BegunPrefill | None = None,
    state_done: StateDone = lambda tokens, state: None,
    chunk_done: ChunkDone = lambda end, queries: None,
    rows_done: RowsDone = lambda layer, keys, values, end: None,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Capture:
    """Prefill `input_ids` in chunks and return every layer's keys, values and queries.

    Raises:
        SparsekvError: the model attends in a way that an index cannot reproduce, or the queries in `begun` do not fit
            this prefill.

    Args:
        input_ids: [N] int64.
        tail: R, the number of last tokens whose queries are captured.
        positions: [P] int64, ascending: positions of the query sample.
        chunk_size: tokens per forward pass. Apart from rounding, the result of a dense prefill does not depend on this
            number. If the model's RoPE depends on the sequence's length, the whole prompt is one chunk, and `begun` and
            the prefix are ignored.
        prefill: the attention of chunks; dense by default. With a sparse prefill, the last token runs separately, with
            dense attention.
        sinks: number of first tokens that every chunk of a sparse prefill attends to.
        prefix_tokens: number of leading tokens (the prefix) whose keys and values are known from an earlier index.
        prefix: returns keys and values [Hk, >= prefix_tokens, D] of a layer; needed with `prefix_tokens`.
        prefix_queries: returns a layer's queries at positions in the prefix; needed if `positions` has such positions.
        prefix_state: the state after the prefix, if layers keep a state.
        marks: numbers of tokens, at least `prefix_tokens`, after which a copy of the states is added to the capture.
        stored: numbers of tokens after which `state_done` is called with this number and a copy of the states. A chunk
            ends at each number in `stored` and in `marks`.
        begun: leading chunks that an interrupted build has prefilled. The prefill continues after these chunks, with
            the same chunk ends as without the interruption. Only for models without states.
        chunk_done: called after `rows_done` for each chunk except the last, with the number of tokens up to the chunk's
            end, and with the stored queries of the tokens since the previous call.
        rows_done: called for each layer after each chunk, with the layer's keys and values [Hk, N, D] and the number of
            tokens up to the chunk's end. The rows of these tokens are final.
        progress: called after each chunk with the number of tokens prefilled so far.
    """
    tokens = len(input_ids)
    positions = torch.zeros(0, dtype=torch.int64) if positions is None else positions
    if rope_depends_on_length(getattr(model.config.get_text_config(), "rope_parameters", None)):
        chunk_size, prefix_tokens, begun = tokens, 0, None
    prefill = prefill or DensePrefill()
    kinds, state = layer_kinds(model.config), prefix_state or {}
    layers = {
        layer: ContextLayer(tokens, _known_rows(layer, prefix, prefix_tokens, begun, model))
        for layer in kinds.attending
    }
    recorder = _Recorder(layers, prefill, sinks, tokens, tail, positions, prefix_tokens, prefix_queries, begun)
    noted = begun.tokens if begun else 0
    cache, states = Cache(layers=kinds.cache_layers(list(layers.values()), state)), dict[int, State]()
    if prefix_tokens in marks:
        states[prefix_tokens] = state
    if prefix_tokens in stored:
        state_done(prefix_tokens, state)
    with route_attention(model, recorder):
        chunks = _chunks(prefix_tokens, tokens, chunk_size, {*marks, *stored}, last_alone=not prefill.exact)
        for start, end in _after(noted, chunks):
            chunk = tokens_at(model, input_ids[start:end], start)
            try:
                logits = model(**chunk, **with_cache(model, cache), logits_to_keep=1).logits
            except UnsupportedAttentionError as error:
                raise SparsekvError(error.reason) from error
            if len(recorder.facts) < len(layers):
                raise SparsekvError(
                    f"{len(layers) - len(recorder.facts)} layers of the model do not attend through transformers' "
                    "AttentionInterface"
                )
            for layer, rows in layers.items():
                assert rows.keys is not None
                assert rows.values is not None
                rows_done(layer, rows.keys[0], rows.values[0], end)
            if end in marks:
                states[end] = copied_state(cache.layers)
            if end in stored:
                state_done(end, copied_state(cache.layers))
            if end < tokens:
                chunk_done(end, recorder.queries_of_chunk(noted, end))
                noted = end
            progress(end)
    return Capture(logits[0, -1].float(), states, layers, recorder)


def _chunks(
    first: int, tokens: int, chunk_size: int, marks: Collection[int], *, last_alone: bool
) -> Iterator[tuple[int, int]]:
    whole = tokens - 1 if last_alone else tokens
    ends = {*range(first + chunk_size, whole, chunk_size), whole, tokens, *marks}
    start = first
    for end in sorted(end for end in ends if end > first):
        yield start, end
        start = end


def _after(begun: int, chunks: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the parts of the chunks after the first `begun` tokens."""
    return ((max(start, begun), end) for start, end in chunks if end > begun)


def _known_rows(
    layer: int,
    prefix: Callable[[int], Pair] | None,
    prefix_tokens: int,
    begun: BegunPrefill | None,
    model: PreTrainedModel,
) -> Pair | None:
    if begun is not None:
        return _first_rows(begun.rows.pop(layer), begun.tokens, model)
    return _first_rows(prefix(layer), prefix_tokens, model) if prefix and prefix_tokens else None


def _first_rows(rows: Pair, tokens: int, model: PreTrainedModel) -> Pair:
    keys, values = rows
    return keys[:, :tokens].to(model.device), values[:, :tokens].to(model.device)
