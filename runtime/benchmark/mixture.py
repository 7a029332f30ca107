"""Synthetic keys, values and queries of one layer, with the statistics that matter for selecting rows.

As in a real model:

- keys are clustered around centres (topics). Topic sizes are log-normal with sigma 1, so that a few topics are many
  times larger than most; topics belong to themes, which a hierarchy can find, and have log-normal radii;
- neighbours in position tend to share a topic: runs of 16 tokens on average;
- a query points at a few topics, one of them common to its group, and partly in a direction common to all queries of
  its KV head. Its norm is such that the best 5% of the tokens have 65 to 90% of the attention, a share drawn per head;
- the first token, a sink, gets about half of the attention;
- values of a topic are similar, but less so than its keys;
- questions over one context attend to the same tokens in part: of 128K tokens, the best 5% and 1% of each of 64
  questions are 30% and 8% together, of 16 questions 18% and 4%. SmolLM2-135M: 26% and 8.5%, 17.5% and 4.7%.
"""

import math
from dataclasses import dataclass

import torch

from sparsekv.formats.schema import LayerFacts, RopeFacts, Split
from sparsekv.kernels.scores.logits import attention_logits
from sparsekv.runtime.benchmark.layer import LayerData

SINKS, TAIL = 10, 128
TOKENS_A_TOPIC, TOPICS_A_THEME, RUN = 64, 16, 16
SIZE_SIGMA, RADIUS, RADIUS_SIGMA = 1.0, 0.6, 0.4
FOCUS = (1.0, 0.5, 0.25)  # how strongly a query points at each of its topics
ASTRAY, COMMON = 0.4, 0.5  # of a query: noise, and the part along its KV head's common direction
BEST, MASS = 0.05, (0.65, 0.9)  # this share of the tokens, the best, has between these shares of the attention
VALUE_SHARE = 0.6  # weight of a value's topic; the rest is noise, with unit variance in all
ALIKE = 0.9  # of a question's query: the part that all questions over a context have in common
HELD_OUT = 64  # queries of the tail


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer: tokens per context, query heads, KV heads, channels per head."""

    context: int
    heads: int
    kv_heads: int
    head_dim: int

    def split(self) -> Split:
        """The default split of an index."""
        return Split(sinks=SINKS, middle=self.context - SINKS - TAIL, tail=TAIL)

    def facts(self) -> LayerFacts:
        """Facts like a Llama's; no RoPE is applied to the data."""
        frequencies = [10_000.0 ** (-pair / (self.head_dim // 2)) for pair in range(self.head_dim // 2)]
        rope = RopeFacts(frequencies=frequencies, interleaved=False)
        return LayerFacts(
            softmax_scale=self.head_dim**-0.5, softcap=None, sliding_window=None, attention_sinks=False, rope=rope
        )


def mixture(
    shape: Shape,
    batch: int,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    sampled: int = 0,
    questions: int = 1,
) -> LayerData:
    """A batch of contexts, each from a seed of its own, with one or more questions over each.

    Allocates keys and values of all contexts in `dtype`, and temporarily four times one context's keys in float32.

    Args:
        sampled: how many of the contexts' own queries to make for indexers, per KV head.
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
    """One context's mixture."""

    def __init__(self, shape: Shape, seed: int, device: torch.device):
        self.shape, self.generator = shape, torch.Generator(device).manual_seed(seed)
        self.topics = max(8, shape.context // TOKENS_A_TOPIC)
        self.labels = self._labels()
        self.centres = self._centres()
        self.common = torch.nn.functional.normalize(self._normal(1, shape.head_dim), dim=-1)
        self.middle_keys = self._keys()
        self.sink_size = torch.zeros(shape.kv_heads, device=device)

    def _normal(self, *shape: int) -> torch.Tensor:
        """[Hk, ...] standard normal."""
        return torch.randn(
            self.shape.kv_heads, *shape, generator=self.generator, device=self.generator.device, dtype=torch.float32
        )

    def _uniform(self, *shape: int) -> torch.Tensor:
        """[Hk, ...] uniform from 0 to 1."""
        return torch.rand(self.shape.kv_heads, *shape, generator=self.generator, device=self.generator.device)

    def _labels(self) -> torch.Tensor:
        """[Hk, N]: the topic of each token; each run of tokens draws a topic with probability by size."""
        begins = self._uniform(self.shape.context) < 1 / RUN
        begins[:, 0] = True
        sizes = (SIZE_SIGMA * self._normal(self.topics)).exp()
        runs = begins.long().cumsum(-1) - 1
        drawn = torch.multinomial(sizes, int(runs.max()) + 1, replacement=True, generator=self.generator)
        return drawn.gather(1, runs)

    def _centres(self) -> torch.Tensor:
        """[Hk, topics, D]: centres, half of whose variance is their theme's."""
        themes = max(2, self.topics // TOPICS_A_THEME)
        theme = torch.arange(self.topics, device=self.labels.device) % themes
        of_themes, own = self._normal(themes, self.shape.head_dim), self._normal(self.topics, self.shape.head_dim)
        return (of_themes[:, theme] + own) * math.sqrt(0.5)

    def _of_topics(self, rows: torch.Tensor) -> torch.Tensor:
        """[Hk, N, D]: for each token its topic's row of rows [Hk, topics, D]."""
        return rows.gather(1, self.labels[..., None].expand(-1, -1, rows.shape[2]))

    def _keys(self) -> torch.Tensor:
        radius = RADIUS * (RADIUS_SIGMA * self._normal(self.topics, 1)).exp()
        noise = self._normal(self.shape.context, self.shape.head_dim) * self._of_topics(radius)
        return noise.add_(self._of_topics(self.centres))

    def queries(self, count: int, questions: int = 1) -> torch.Tensor:
        """[Hq, count, D]; the first query of each head determines their norm, and the norm of the sink's key. Those of
        the first `questions` are alike."""
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
        """Queries [Hk, G, count, D], rescaled per head; allocates four times the logits of each head's first query."""
        scale = self.shape.head_dim**-0.5
        # Not of the first token, whose key becomes the sink's.
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
        """[Hk, N, D] float32, after `queries`."""
        keys = self.middle_keys
        keys[:, 0] = self.common[:, 0] * self.sink_size[:, None]
        return keys

    def values(self) -> torch.Tensor:
        """[Hk, N, D] float32."""
        centres = VALUE_SHARE * self._normal(self.topics, self.shape.head_dim)
        noise = self._normal(self.shape.context, self.shape.head_dim).mul_(math.sqrt(1 - VALUE_SHARE**2))
        return noise.add_(self._of_topics(centres))


def _sharpen(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Factors [Hk, G] for logits [Hk, G, N] that give the best of them a share `wanted` [Hk, G] of the softmax.

    Found by bisection, because the share rises with the factor.
    """
    best = max(1, round(BEST * logits.shape[-1]))
    ordered = logits.sort(-1, descending=True).values
    low, high = torch.full_like(wanted, -8.0), torch.full_like(wanted, 8.0)
    for _ in range(30):
        middle = (low + high) / 2
        too_flat = (ordered * middle.exp()[..., None]).softmax(-1)[..., :best].sum(-1) < wanted
        low, high = torch.where(too_flat, middle, low), torch.where(too_flat, high, middle)
    return ((low + high) / 2).exp()
