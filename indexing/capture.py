"""Capture of keys, values and queries as a model attends to them, by a dense prefill in chunks.

The model runs as it is, chunk after chunk, into a cache that is allocated once: N rows of keys and values a layer.
Beside that, one layer's chunk of attention is in memory at a time, and of each layer the last R queries and those of a
sample of positions, where one is asked for.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from sparsekv.formats.schema import LayerFacts, Probe
from sparsekv.indexing.rope import rope_depends_on_length
from sparsekv.kernels.attention import causal_attention
from sparsekv.kernels.hook import AttentionCall, route_attention

PROBE_LOGITS = 32
PrefixQueries = Callable[[int, torch.Tensor], torch.Tensor]
"""Queries [Hq, P, D] of a layer at positions [P] of a prefix that is not run."""


class _ContextLayer(CacheLayerMixin):
    """Keys and values of one layer, [1, Hk, N, D] each, filled from the front."""

    is_sliding = False

    def __init__(self, tokens: int, prefix: tuple[torch.Tensor, torch.Tensor] | None):
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

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        start, self.seen = self.seen, self.seen + key_states.shape[2]
        self.keys[:, :, start : self.seen] = key_states
        self.values[:, :, start : self.seen] = value_states
        return self.keys[:, :, : self.seen], self.values[:, :, : self.seen]

    def get_seq_length(self) -> int:
        return self.seen if self._prefix is None else self._prefix[0].shape[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return self.tokens


@dataclass
class CapturedLayer:
    """One layer: keys, values [Hk, N, D] as attended, the last R queries [Hq, R, D], sink logits [Hq], and the queries
    [Hq, P, D] of the sampled positions; None for a layer with a sliding window."""

    keys: torch.Tensor
    values: torch.Tensor
    tail: torch.Tensor
    sink_logits: torch.Tensor | None
    sample: torch.Tensor | None


@dataclass
class _Recorder:
    """The attention function of a capture: dense causal attention that keeps the last R queries, and those of some
    positions [P], rising; `prefix_queries` gives those of the ones before the prefix's end."""

    tokens: int
    tail: int
    positions: torch.Tensor
    prefix_tokens: int
    prefix_queries: PrefixQueries | None
    samples: dict[int, torch.Tensor] = field(default_factory=dict)
    tails: dict[int, torch.Tensor] = field(default_factory=dict)
    facts: dict[int, LayerFacts] = field(default_factory=dict)
    sink_logits: dict[int, torch.Tensor] = field(default_factory=dict)

    def __call__(self, call: AttentionCall) -> torch.Tensor:
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
        return causal_attention(
            call.query,
            call.keys,
            call.values,
            call.softmax_scale,
            call.softcap,
            call.window,
            call.sink_logits,
        )

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
        known = int((self.positions < self.prefix_tokens).sum())
        if known:
            assert self.prefix_queries is not None
            sample[:, :known] = self.prefix_queries(call.layer, self.positions[:known])
        return sample


@dataclass
class Capture:
    """A whole prefill: one entry a layer, and the probe; `take` hands a layer over and frees its cache rows."""

    probe: Probe
    _layers: list[_ContextLayer]
    _recorder: _Recorder

    def facts(self, layer: int) -> LayerFacts:
        return self._recorder.facts[layer]

    def take(self, layer: int) -> CapturedLayer:
        rows = self._layers[layer]
        keys, values = rows.keys, rows.values
        assert keys is not None
        assert values is not None
        rows.keys = rows.values = None
        return CapturedLayer(
            keys=keys[0],
            values=values[0],
            tail=self._recorder.tails.pop(layer),
            sink_logits=self._recorder.sink_logits.get(layer),
            sample=self._recorder.samples.pop(layer, None),
        )


@torch.inference_mode()
def capture(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    tail: int,
    positions: torch.Tensor | None = None,
    chunk_size: int = 512,
    prefix_tokens: int = 0,
    prefix: Callable[[int], tuple[torch.Tensor, torch.Tensor]] | None = None,
    prefix_queries: PrefixQueries | None = None,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Capture:
    """Prefill `input_ids` densely in chunks, keeping what each layer attends to.

    Args:
        input_ids: [N] int64.
        tail: R, the number of last queries to keep.
        positions: [P] int64, rising: where to keep the queries too, allocated at once.
        chunk_size: tokens a forward pass; the result does not depend on it beyond rounding. A model whose RoPE depends
            on the length of the sequence is run over the whole prompt at once, whatever is given here.
        prefix_tokens: leading tokens whose keys and values are already known (an edited document).
        prefix: gives keys and values [Hk, >= prefix_tokens, D] of a layer; needed with `prefix_tokens`.
        prefix_queries: gives the queries at those positions that are not run; needed where there are any.
        progress: called with the number of tokens done after each chunk.
    """
    tokens = len(input_ids)
    positions = torch.zeros(0, dtype=torch.int64) if positions is None else positions
    if rope_depends_on_length(getattr(model.config.get_text_config(), "rope_parameters", None)):
        chunk_size, prefix_tokens = tokens, 0
    recorder = _Recorder(tokens, tail, positions, prefix_tokens, prefix_queries)
    layers = [
        _ContextLayer(tokens, _first_rows(prefix(layer), prefix_tokens, model) if prefix and prefix_tokens else None)
        for layer in range(model.config.get_text_config().num_hidden_layers)
    ]
    cache = Cache(layers=list(layers))
    with route_attention(model, recorder):
        for start in range(prefix_tokens, tokens, chunk_size):
            chunk = input_ids[None, start : start + chunk_size].to(model.device)
            logits = model(input_ids=chunk, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            progress(min(start + chunk_size, tokens))
    top = logits[0, -1].float().topk(min(PROBE_LOGITS, logits.shape[-1]))
    return Capture(Probe(token_ids=top.indices.tolist(), logits=top.values.tolist()), layers, recorder)


def _first_rows(
    rows: tuple[torch.Tensor, torch.Tensor], tokens: int, model: PreTrainedModel
) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = rows
    return keys[:, :tokens].to(model.device), values[:, :tokens].to(model.device)
