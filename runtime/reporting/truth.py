"""Dense attention of some queries, which reports compare methods with."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count

import torch

from sparsekv.formats.schema import LayerFacts
from sparsekv.kernels.scores.logits import attention_logits
from sparsekv.kernels.scores.softmax import softmax_with_logsumexp
from sparsekv.runtime.cache.layer_rows import LayerRows
from sparsekv.runtime.reporting.queries import QueryBlock
from sparsekv.runtime.selection.queries import Queries

LOGITS_AT_ONCE = 64 * 2**20  # elements of [Hq, Q, N] float32 logits: 256 MB
PIECE = 4096  # tokens of one sum


@dataclass(frozen=True)
class Truth:
    """Queries and their dense attention.

    logits [Hk, G, Q, M] and probability [Hk, Q, M] (the group's mean) are of the middle; exact_logsumexp [Hk, G, Q] and
    exact_output [Hk, G, Q, D] are the log-sum-exp and the output of attention to exact rows and learned sinks alone;
    output [Hk, G, Q, D] is of everything. `oracles` caches the oracle's choices by number of tokens.
    """

    queries: Queries
    logits: torch.Tensor
    exact_logsumexp: torch.Tensor
    exact_output: torch.Tensor
    probability: torch.Tensor
    output: torch.Tensor
    values: torch.Tensor
    facts: LayerFacts
    oracles: dict[int, torch.Tensor] = field(default_factory=dict)

    def oracle(self, tokens: int) -> torch.Tensor:
        """[Hk, Q, M] bool: the `tokens` tokens of highest probability."""
        if tokens not in self.oracles:
            best = self.probability.topk(tokens, -1).indices
            self.oracles[tokens] = torch.zeros_like(self.probability, dtype=torch.bool).scatter_(-1, best, True)
        return self.oracles[tokens]


def truths(rows: LayerRows, blocks: Iterable[QueryBlock], device: torch.device, at_least: int = 1) -> Iterator[Truth]:
    """Dense attention of all blocks' queries, numbered as batches: as many at a time as `LOGITS_AT_ONCE` allows, and
    `at_least` so many."""
    batches, tokens = count(), rows.artifact.manifest.split.tokens
    for block in blocks:
        Hq, queries, _ = block.queries.shape
        step = max(at_least, LOGITS_AT_ONCE // (Hq * tokens))
        for start in range(0, queries, step):
            yield _truth(rows, block.part(slice(start, start + step), device), next(batches))


def _truth(rows: LayerRows, block: QueryBlock, batch: int) -> Truth:
    manifest = rows.artifact.manifest
    facts, split = manifest.layers[rows.layer], manifest.split
    keys, values = rows.on(block.queries.device)
    middle = slice(split.sinks, split.sinks + split.middle)
    exact = [
        torch.cat([stored[:, : split.sinks], stored[:, middle.stop :], new.to(stored)], 1)
        for stored, new in ((keys, block.keys), (values, block.values))
    ]
    grouped = block.queries.unflatten(0, (keys.shape[0], -1)).to(keys)
    visible = torch.arange(exact[0].shape[1], device=keys.device) < split.sinks + block.visible[:, None]
    exact_logits = attention_logits(grouped, exact[0], facts.softmax_scale, facts.softcap)
    exact_logits = exact_logits.masked_fill(~visible, -torch.inf)
    weights = exact_logits.softmax(-1)
    exact_lse = exact_logits.logsumexp(-1)
    if block.sink_logits is not None:
        sinks = block.sink_logits.view(keys.shape[0], -1)[..., None].float()
        with_sinks = torch.logaddexp(exact_lse, sinks)
        weights = weights * (exact_lse - with_sinks).exp()[..., None]
        exact_lse = with_sinks
    logits = attention_logits(grouped, keys[:, middle], facts.softmax_scale, facts.softcap)
    (probability, beside), _ = joint_softmax([logits, exact_lse[..., None]])
    exact_output = weighted(weights, exact[1])
    output = weighted(probability, values[:, middle]) + exact_output * beside
    positions = middle.stop - 1 + block.visible
    queries = Queries(grouped, lambda: positions, lambda: exact_lse, joint=False, batch=batch)
    return Truth(queries, logits, exact_lse, exact_output, probability.mean(1), output, values[:, middle], facts)


def joint_softmax(parts: list[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """The weights of one softmax over several parts [..., T] of the logits, part by part, and its log-sum-exp."""
    weights, total = softmax_with_logsumexp(torch.cat(parts, -1))
    return weights.split([part.shape[-1] for part in parts], -1), total


def weighted(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[Hk, G, Q, D]: values [Hk, T, D] summed with weights [Hk, G, Q, T], in float32."""
    Hk, G, Q, tokens = weights.shape
    # A GPU gives one long sum to a dozen of its many units.
    piece = PIECE if weights.is_cuda else tokens
    return sum_in_pieces(weights.flatten(1, 2), values.float(), piece).view(Hk, G, Q, -1)


def sum_in_pieces(weights: torch.Tensor, values: torch.Tensor, piece: int) -> torch.Tensor:
    """[Hk, R, D]: values [Hk, T, D] summed with weights [Hk, R, T], `piece` tokens at a time and then these sums."""
    whole = values.shape[1] // piece * piece if piece < values.shape[1] else 0
    sums = torch.bmm(weights[..., whole:], values[:, whole:])
    if whole:
        pieces = weights[..., :whole].unflatten(-1, (-1, piece)).transpose(1, 2)  # [Hk, P, R, piece]
        sums += torch.matmul(pieces, values[:, :whole].unflatten(1, (-1, piece))).sum(1)
    return sums
