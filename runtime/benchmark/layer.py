"""Synthetic keys, values and queries of one layer for a batch of contexts, and decode steps over that data."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from sparsekv.formats.index.context_rows import context_rows, quantise, row_bytes, with_centroids_in_8_bits
from sparsekv.formats.index.schema import LayerFacts, RopeFacts, Split
from sparsekv.kernels.common.hook import AttentionCall
from sparsekv.kernels.scores.logits import attention_logits
from sparsekv.runtime.attention.config import DecodeConfig
from sparsekv.runtime.attention.plan import LayerParts, plan_layer
from sparsekv.runtime.attention.sparse_layer import SparseLayer, packed_layer
from sparsekv.runtime.cache.buffers import Run
from sparsekv.runtime.cache.kv_store import Int8Middle, MemoryRows, MiddleRows, of_tokens, read_centroids
from sparsekv.runtime.cache.packed_cache import PackedStep
from sparsekv.runtime.cache.stored_layer import DenseLayer, DenseLayerIn8Bits, StoredLayer
from sparsekv.runtime.selection.interface import LayerPosition, MiddleContext, Selector


@dataclass(frozen=True)
class LayerData:
    """Data of one layer for a batch of contexts. The batch is concatenated along the heads, which are independent.

    Attributes:
        keys, values: [batch Hk, N, D].
        query: [batch Hq, Q, D], queries of the step, for Q questions over each context.
        tail: [batch Hq, R, D], held-out queries. Methods may be calibrated on these queries, or may observe them.
        sampled: [batch Hq, P, D], queries of the contexts' tokens at `positions` [P], for methods built from queries.
        batch: number of contexts.
        split: sizes of sinks, middle and tail of each context.
        stored: int8 keys and values by name, which this project's attention reads. `keys` and `values` are then their
            dequantised rows, which torch's attention reads. None: all attention reads `keys` and `values`.
    """

    keys: torch.Tensor
    values: torch.Tensor
    query: torch.Tensor
    tail: torch.Tensor
    sampled: torch.Tensor
    positions: torch.Tensor
    batch: int
    split: Split
    facts: LayerFacts
    # The last of 32 layers. No other layer runs, so methods in which layers share a ranking rank in this layer.
    position: LayerPosition = field(default_factory=lambda: LayerPosition(31, 32))
    stored: Mapping[str, torch.Tensor] | None = None

    @property
    def questions(self) -> int:
        """Number of questions Q over each context."""
        return self.query.shape[1]

    @property
    def middle(self) -> slice:
        return slice(self.split.sinks, self.split.sinks + self.split.middle)

    def of_heads(self, heads: slice) -> "LayerData":
        """Return the data of some KV heads and of the query heads that use them."""
        group = len(self.query) // len(self.keys)
        own = slice(heads.start * group, heads.stop * group)
        some: dict[str, Any] = {name: getattr(self, name)[heads] for name in ("keys", "values")}
        if self.stored is not None:
            some["stored"] = {name: rows[heads] for name, rows in self.stored.items()}
        return replace(self, **some, **{name: getattr(self, name)[own] for name in ("query", "tail", "sampled")})

    def in_8_bits(self) -> "LayerData":
        """Return the layer with `stored` int8 keys and values."""
        stored = quantise(self.keys, self.values)
        keys, values = context_rows(stored, self.keys.dtype).part(slice(None))
        return replace(self, keys=keys, values=values, stored=stored)

    def row_bytes(self) -> int:
        """Return the bytes of one key or value of one head in the dtype of `keys`, also if int8 rows are stored."""
        return self.keys.shape[2] * self.keys.element_size()

    def saved(self, rows: float) -> float:
        """Return the bytes that int8 saves when `rows` rows of each head, keys or values, are read; 0 without int8."""
        return (
            0.0 if self.stored is None else len(self.keys) * rows * (self.row_bytes() - row_bytes(self.keys.shape[2]))
        )

    def context(
        self,
        tensors: dict[str, torch.Tensor],
        calibration: dict[str, object] | None = None,
        parameters: dict[str, object] | None = None,
    ) -> MiddleContext:
        """Build a method's input from the tensors of its indexer.

        In the indexer's tensor `token_order`, indices are counted from the prompt's first token. In the method's input
        the indices are counted from the first token after the sinks.
        """
        stored = tensors if self.stored is None else with_centroids_in_8_bits(tensors)
        tensors, in_8_bits = read_centroids(stored, self.keys.dtype)
        if "token_order" in tensors:
            tensors["token_order"] = tensors["token_order"] - self.split.sinks
        return MiddleContext(
            load_keys=lambda: self.keys[:, self.middle],
            load_values=lambda: self.values[:, self.middle],
            load_observed=lambda: self.tail.unflatten(0, (len(self.keys), -1)),
            facts=self.facts,
            tensors=tensors,
            calibration=calibration or {},
            parameters=parameters or {},
            first_token=self.split.sinks,
            position=self.position,
            centroids_in_8_bits=in_8_bits,
        )


def place_rows(data: LayerData, selector: Selector) -> MiddleRows:
    """Copy the keys and values of the tokens between sinks and tail to the layout that a selector requires."""
    if data.stored is not None:
        return Int8Middle(of_tokens(data.stored, data.middle), selector.layout, data.keys.dtype)
    keys, values = data.keys[:, data.middle], data.values[:, data.middle]
    return MemoryRows(keys, values, selector.layout, data.keys.device)


def dense_layer(data: LayerData) -> DenseLayer:
    """Create the cache layer of this project's dense attention, as decoding does."""
    if data.stored is not None:
        return DenseLayerIn8Bits(data.stored, data.keys[:, :0])
    return DenseLayer(data.keys, data.values)


def sparse_layer(data: LayerData, rows: MiddleRows, selector: Selector, config: DecodeConfig) -> SparseLayer:
    """Create the sparse cache layer that decoding uses for a config; allocates a copy of sinks and tail."""
    exact = tuple(
        torch.cat([tokens[:, : data.middle.start], tokens[:, data.middle.stop :]], 1)
        for tokens in (data.keys, data.values)
    )
    device = data.keys.device
    parts = LayerParts(0, selector, rows, data.facts, data.split.sinks, len(exact[0]), device, device)
    return SparseLayer((exact[0], exact[1]), data.split, plan_layer(parts, config))


def layer_step(data: LayerData, layer: StoredLayer) -> Run:
    """Create a decode step that computes the attention output [batch Hq, Q, D] of `data.query`, selection included."""
    if data.questions > 1:
        return _shared_step(data, layer)
    nothing = data.keys[:, :0]
    call = AttentionCall(0, data.query, nothing, nothing, *data.facts.scaling, None, None)
    return lambda: layer.attend(call)


def _shared_step(data: LayerData, layer: StoredLayer) -> Run:
    """Create a step of several questions. The questions have no keys of their own; all attend only to the context."""
    packed, each = packed_layer(layer, data.questions), torch.arange(data.questions, device=data.keys.device)
    step = PackedStep(each, torch.full_like(each, -1), (each + 1).int(), each, (), 1)
    new = data.keys.new_zeros(len(data.keys), data.questions, data.keys.shape[2])
    call = AttentionCall(0, data.query, new, new, *data.facts.scaling, None, None)
    return lambda: packed.attend(call, step)


def exact_output(data: LayerData) -> torch.Tensor:
    """Compute the output of dense attention [batch Hq, Q, D] in float32, converting one head's rows at a time.

    The function uses plain torch, because it must not depend on the timed kernels.
    """
    grouped, scale = data.query.float().unflatten(0, (len(data.keys), -1)), data.facts.softmax_scale
    parts = [
        (query @ keys.float().T * scale).softmax(-1) @ values.float()
        for query, keys, values in zip(grouped, data.keys, data.values, strict=True)
    ]
    return torch.cat(parts)


def relative_error(output: torch.Tensor, exact: torch.Tensor) -> float:
    """Compute the mean of |output - exact| / |exact| over query heads and questions; both are [batch Hq, Q, D]."""
    return float(((output.float() - exact).norm(dim=-1) / exact.norm(dim=-1)).mean())


SINKS, TAIL = 10, 128
TOKENS_A_TOPIC, TOPICS_A_THEME, RUN = 64, 16, 16
SIZE_SIGMA, RADIUS, RADIUS_SIGMA = 1.0, 0.6, 0.4
FOCUS = (1.0, 0.5, 0.25)  # weights of three topic centres in a query
ASTRAY, COMMON = 0.4, 0.5  # weights of noise, and of the KV head's common direction, in a query
BEST, MASS = 0.05, (0.65, 0.9)  # the 5% of tokens with the largest logits get 65% to 90% of the attention
VALUE_SHARE = 0.6  # weight of the topic in a value; the rest is noise, and the variance is 1
ALIKE = 0.9  # weight, in a query, of the part that is the same in all questions over a context
HELD_OUT = 64  # number of queries of the tail


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer: tokens per context, query heads, KV heads, channels per head."""

    context: int
    heads: int
    kv_heads: int
    head_dim: int

    def split(self) -> Split:
        """Return the default split of a context into sinks, middle and tail."""
        return Split(sinks=SINKS, middle=self.context - SINKS - TAIL, tail=TAIL)

    def facts(self) -> LayerFacts:
        """Return attention facts like a Llama's. RoPE is not applied to the data."""
        frequencies = [10_000.0 ** (-pair / (self.head_dim // 2)) for pair in range(self.head_dim // 2)]
        rope = RopeFacts(frequencies=frequencies, interleaved=False)
        return LayerFacts(
            softmax_scale=self.head_dim**-0.5, softcap=None, sliding_window=None, attention_sinks=False, rope=rope
        )


def mixture(
    shape: Shape, batch: int, seed: int, device: torch.device, dtype: torch.dtype, sampled: int = 0, questions: int = 1
) -> LayerData:
    """Generate the layer data of a batch of contexts, each from its own seed. Each context has `questions` queries.

    Allocates keys and values of all contexts in `dtype`, and temporarily four times one context's keys in float32.

    Args:
        sampled: number of queries of the context's tokens to generate per KV head, for indexers.
    """
    rows = batch * shape.kv_heads, shape.context, shape.head_dim
    keys, values = (torch.empty(rows, dtype=dtype, device=device) for _ in range(2))
    split, group = shape.split(), shape.heads // shape.kv_heads
    positions = torch.linspace(split.sinks, split.sinks + split.middle - 1, min(-(-sampled // group), split.middle))
    positions = positions.round().long().to(device)
    queries = []
    for number in range(batch):
        one = _Sequence(shape, seed + number, device)
        part = slice(number * shape.kv_heads, (number + 1) * shape.kv_heads)
        queries.append(one.queries(questions + HELD_OUT + len(positions), questions).to(dtype))
        keys[part], values[part] = one.keys(), one.values()
    step, tail, own = torch.cat(queries).split((questions, HELD_OUT, len(positions)), 1)
    parts = (step.contiguous(), tail.contiguous(), own.contiguous())
    return LayerData(keys, values, *parts, positions, batch, split, shape.facts())


class _Sequence:
    """Generates the keys, values and queries of one context: a Gaussian mixture whose components are called topics."""

    def __init__(self, shape: Shape, seed: int, device: torch.device):
        self.shape, self.generator = shape, torch.Generator(device).manual_seed(seed)
        self.topics = max(8, shape.context // TOKENS_A_TOPIC)
        self.labels = self._labels()
        self.centres = self._centres()
        self.common = torch.nn.functional.normalize(self._normal(1, shape.head_dim), dim=-1)
        self.middle_keys = self._keys()
        self.sink_size = torch.zeros(shape.kv_heads, device=device)

    def _normal(self, *shape: int) -> torch.Tensor:
        """Draw a tensor [Hk, ...] of standard normal numbers."""
        return torch.randn(
            self.shape.kv_heads, *shape, generator=self.generator, device=self.generator.device, dtype=torch.float32
        )

    def _uniform(self, *shape: int) -> torch.Tensor:
        """Draw a tensor [Hk, ...] of uniform numbers from 0 to 1."""
        return torch.rand(self.shape.kv_heads, *shape, generator=self.generator, device=self.generator.device)

    def _labels(self) -> torch.Tensor:
        """Draw the topic [Hk, N] of each token, in proportion to the topics' sizes. Runs of tokens share a topic."""
        begins = self._uniform(self.shape.context) < 1 / RUN
        begins[:, 0] = True
        sizes = (SIZE_SIGMA * self._normal(self.topics)).exp()
        runs = begins.long().cumsum(-1) - 1
        drawn = torch.multinomial(sizes, int(runs.max()) + 1, replacement=True, generator=self.generator)
        return drawn.gather(1, runs)

    def _centres(self) -> torch.Tensor:
        """Draw the topics' centres [Hk, topics, D]. The topics of a group (a theme) share half of their variance."""
        themes = max(2, self.topics // TOPICS_A_THEME)
        theme = torch.arange(self.topics, device=self.labels.device) % themes
        of_themes, own = self._normal(themes, self.shape.head_dim), self._normal(self.topics, self.shape.head_dim)
        return (of_themes[:, theme] + own) * math.sqrt(0.5)

    def _of_topics(self, rows: torch.Tensor) -> torch.Tensor:
        """Gather each token's row [Hk, N, D] from its topic's row in `rows` [Hk, topics, D]."""
        return rows.gather(1, self.labels[..., None].expand(-1, -1, rows.shape[2]))

    def _keys(self) -> torch.Tensor:
        radius = RADIUS * (RADIUS_SIGMA * self._normal(self.topics, 1)).exp()
        noise = self._normal(self.shape.context, self.shape.head_dim) * self._of_topics(radius)
        return noise.add_(self._of_topics(self.centres))

    def queries(self, count: int, questions: int = 1) -> torch.Tensor:
        """Generate queries [Hq, count, D]. The first `questions` queries of a head are similar.

        The first query of each head determines the scale of all queries of the head, and the norm of the sink's key.
        """
        Hk, group, D = self.shape.kv_heads, self.shape.heads // self.shape.kv_heads, self.shape.head_dim
        tokens = (self._uniform(group, count, len(FOCUS)) * self.shape.context).long()
        tokens[..., 0] = tokens[:, :1, :, 0]
        topics = self.labels.gather(1, tokens.flatten(1))
        pointed = self.centres.gather(1, topics[..., None].expand(-1, -1, D)).view(Hk, group, count, len(FOCUS), D)
        queries = (pointed * torch.tensor(FOCUS, device=pointed.device)[:, None]).sum(-2)
        queries += ASTRAY * self._normal(group, count, D)
        if questions > 1:
            others = queries[:, :, 1:questions]
            others.mul_(math.sqrt(1 - ALIKE**2)).add_(ALIKE * queries[:, :, :1])
        common = self.common[:, None]
        queries = queries - (queries * common).sum(-1, keepdim=True) * common
        queries = queries + COMMON * queries.norm(dim=-1, keepdim=True) * common
        return self._sized(queries).flatten(0, 1)

    def _sized(self, queries: torch.Tensor) -> torch.Tensor:
        """Scale the queries [Hk, G, count, D] of each head, so that the best tokens get a random share of attention.

        Also sets `sink_size`, the norm of the sink's key. Allocates four tensors of the size of the logits of each
        head's first query.
        """
        scale = self.shape.head_dim**-0.5
        # The first token is left out, because the sink's key will replace its key.
        logits = attention_logits(queries[:, :, :1], self.middle_keys[:, 1:], scale)[:, :, 0]
        low, high = MASS
        wanted = low + (high - low) * self._uniform(logits.shape[1])
        times = _sharpen(logits, wanted)
        drawn = (logits * times[..., None]).logsumexp(-1)
        queries = queries * times[..., None, None]
        met = (queries[:, :, 0] * self.common).sum(-1) * scale
        self.sink_size = drawn.mean(-1) / met.mean(-1)
        return queries

    def keys(self) -> torch.Tensor:
        """Return the keys [Hk, N, D] float32; `queries` must be called first."""
        keys = self.middle_keys
        keys[:, 0] = self.common[:, 0] * self.sink_size[:, None]
        return keys

    def values(self) -> torch.Tensor:
        """Generate the values [Hk, N, D] float32."""
        centres = VALUE_SHARE * self._normal(self.topics, self.shape.head_dim)
        noise = self._normal(self.shape.context, self.shape.head_dim).mul_(math.sqrt(1 - VALUE_SHARE**2))
        return noise.add_(self._of_topics(centres))


def _sharpen(logits: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Find factors [Hk, G] for logits [Hk, G, N], so that the best tokens get `share` [Hk, G] of the softmax.

    The share grows with the factor, so bisection finds the factor.
    """
    best = max(1, round(BEST * logits.shape[-1]))
    ordered = logits.sort(-1, descending=True).values
    low, high = torch.full_like(share, -8.0), torch.full_like(share, 8.0)
    for _ in range(30):
        middle = (low + high) / 2
        too_flat = (ordered * middle.exp()[..., None]).softmax(-1)[..., :best].sum(-1) < share
        low, high = torch.where(too_flat, middle, low), torch.where(too_flat, high, middle)
    return ((low + high) / 2).exp()
