"""Compare forms of the baselines, by their error on held-out queries: sparsekv's, and those of papers and their code.

Usage: baseline_forms.py INDEX OTHER [BUDGET]. Both are indices of the same model, which has no soft cap, no learned
sinks and no sliding window. The keys of OTHER are another text, for Loki's components. BUDGET is a share, by default
0.05. The queries of the tail's second half measure the forms. The queries of its first half are SnapKV's window.

With "own" each query head of a KV head selects for itself; otherwise the heads share one selection. Sinks, tail and
selected tokens are attended to. Prints a Markdown table with two means over layers: the relative error of the output,
and the rows that the query heads of a KV head select together, as a multiple of the budget.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean

import torch
from torch.nn import functional

from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import layer_file
from sparsekv.indexing.indexers.product_codes import decode, encode
from sparsekv.kernels.kmeans.kmeans import moved_centres, random_points
from sparsekv.kernels.scores.logits import attention_logits, best_tokens, softmax_beside

ITERATIONS, SEED, PAGE, CHANNELS = 10, 0, 16, 16
Form = tuple[str, torch.Tensor]
"""A form's name, and its scores [Hk, G or 1, Q or 1, M] of the M tokens between sinks and tail."""


@dataclass(frozen=True)
class Layer:
    """Rows of a layer: keys and values [Hk, N, D], window and queries [Hk, G, Q, D], and the softmax scale."""

    keys: torch.Tensor
    values: torch.Tensor
    window: torch.Tensor
    queries: torch.Tensor
    middle: slice
    scale: float

    @classmethod
    def read(cls, artifact: Artifact, layer: int) -> "Layer":
        split, facts = artifact.manifest.split, artifact.manifest.attending[layer]
        rows, tail = artifact.tensors(layer_file("context", layer)), artifact.queries(layer)["tail"]
        keys, values = rows["keys"].float(), rows["values"].float()
        window, queries = tail.float().unflatten(0, (len(keys), -1)).chunk(2, 2)
        return cls(keys, values, window, queries, slice(split.sinks, split.sinks + split.middle), facts.softmax_scale)

    @cached_property
    def context(self) -> torch.Tensor:
        """The keys [Hk, M, D] between sinks and tail."""
        return self.keys[:, self.middle].contiguous()

    def logits(self, queries: torch.Tensor, last: int) -> torch.Tensor:
        """Return the logits [Hk, G, Q, N] of consecutive queries, of which the last is at position `last`."""
        places = torch.arange(self.keys.shape[1])
        own = last + torch.arange(1 - queries.shape[2], 1)
        return attention_logits(queries, self.keys, self.scale).masked_fill(places > own[:, None], -torch.inf)

    @cached_property
    def exact(self) -> torch.Tensor:
        return self.logits(self.queries, self.keys.shape[1] - 1)

    def probability(self, estimates: torch.Tensor) -> torch.Tensor:
        """Return the probabilities [Hk, G, Q, M] of estimated logits, beside the exact logits of sinks and tail."""
        outside = torch.cat([self.exact[..., : self.middle.start], self.exact[..., self.middle.stop :]], -1)
        return softmax_beside(estimates, outside.logsumexp(-1))

    def attend(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.einsum("hgqn,hnd->hgqd", logits.softmax(-1), self.values)

    def measure(self, scores: torch.Tensor, budget: float) -> tuple[float, float]:
        """Return the relative error of attention to the best tokens, and their union over heads per budget."""
        tokens = max(1, round(budget * scores.shape[-1]))
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best_tokens(scores, tokens), True)
        chosen = chosen.expand(*self.exact.shape[:3], -1)
        logits = self.exact.clone()
        logits[..., self.middle] = logits[..., self.middle].masked_fill(~chosen, -torch.inf)
        dense = self.attend(self.exact)
        errors = (self.attend(logits) - dense).norm(dim=-1) / dense.norm(dim=-1)
        return float(errors.mean()), float(chosen.any(1).sum(-1).float().mean()) / tokens


def both(name: str, layer: Layer, estimates: torch.Tensor) -> Iterator[Form]:
    """Yield the form with a shared selection, by the mean probability, and the form in which each head selects."""
    yield name, layer.probability(estimates).mean(1, keepdim=True)
    yield f"{name}, own", estimates


def quest(layer: Layer) -> Iterator[Form]:
    middle, queries = layer.context.shape[1], layer.queries
    pages = -(-middle // PAGE)
    padding = layer.context[:, -1:].expand(-1, pages * PAGE - middle, -1)
    paged = torch.cat([layer.context, padding], 1).unflatten(1, (pages, PAGE))
    bounds = attention_logits(queries.clamp(min=0), paged.amax(2), layer.scale)
    bounds = bounds + attention_logits(queries.clamp(max=0), paged.amin(2), layer.scale)
    tokens = bounds.repeat_interleave(PAGE, -1)[..., :middle]
    # Of a page that the budget divides, the first tokens are taken.
    tokens = tokens - 1e-6 * torch.arange(middle)
    yield "quest", tokens.softmax(-1).mean(1, keepdim=True)
    yield "quest, own", tokens


def snapkv(layer: Layer) -> Iterator[Form]:
    last = layer.keys.shape[1] - layer.queries.shape[2] - 1
    summed = layer.logits(layer.window[:, :, -32:], last).softmax(-1)[..., layer.middle].sum(2)
    for name, pooled in {
        "maximum of 7": functional.max_pool1d(summed, 7, 1, 3),
        "average of 5": functional.avg_pool1d(summed, 5, 1, 2),
    }.items():
        yield f"snapkv, {name}", pooled.mean(1)[:, None, None]
        yield f"snapkv, {name}, own", pooled[:, :, None]


def pqcache(layer: Layer) -> Iterator[Form]:
    Hk, M, D = layer.context.shape
    for parts, centroids in ((8, 256), (2, 64)):
        points = layer.context.view(Hk, M, parts, D // parts).transpose(1, 2).flatten(0, 1)
        first = random_points(points, centroids, torch.Generator().manual_seed(SEED))
        _, books = moved_centres(points, first, ITERATIONS + 1, None)
        books = books.view(Hk, parts, centroids, -1)
        estimates = attention_logits(layer.queries, decode(encode(layer.context, books), books), layer.scale)
        yield f"pqcache, {parts} parts of {centroids}", layer.probability(estimates).mean(1, keepdim=True)


def sparq(layer: Layer) -> Iterator[Form]:
    size = layer.queries.abs()
    best = size.sum(1, keepdim=True).topk(CHANNELS, -1).indices.expand(-1, size.shape[1], -1, -1)
    kept = torch.zeros_like(size).scatter_(-1, best, layer.queries.gather(-1, best))
    share = kept.abs().sum(-1, keepdim=True) / size.sum(-1, keepdim=True)
    estimates = attention_logits(kept / share.sqrt(), layer.context, layer.scale)
    yield "sparq, mean probability", layer.probability(estimates).mean(1, keepdim=True)
    yield "sparq, sum of logits", estimates.sum(1, keepdim=True)


def loki(layer: Layer, other: Layer) -> Iterator[Form]:
    mean = layer.context.mean(1, keepdim=True)
    for name, keys in {"this document": layer.context, "another document": other.context}.items():
        centred = (keys - keys.mean(1, keepdim=True)).double()
        turn = torch.linalg.eigh(centred.transpose(1, 2) @ centred).eigenvectors.flip(-1)[..., :CHANNELS].float()
        rest = (layer.context - mean) @ turn
        estimates = attention_logits(layer.queries @ turn[:, None], rest, layer.scale)
        yield from both(f"loki, {name}", layer, estimates + attention_logits(layer.queries, mean, layer.scale))


def forms(layer: Layer, other: Layer) -> Iterator[Form]:
    yield from both("oracle", layer, layer.exact[..., layer.middle])
    yield from quest(layer)
    yield from snapkv(layer)
    yield from pqcache(layer)
    yield from sparq(layer)
    yield from loki(layer, other)


def main() -> None:
    artifacts = [Artifact(Path(folder)) for folder in sys.argv[1:3]]
    budget = float(sys.argv[3]) if len(sys.argv) > 3 else 0.05
    found: dict[str, list[tuple[float, float]]] = {}
    for number in artifacts[0].manifest.indexed_layers:
        layer, other = (Layer.read(artifact, number) for artifact in artifacts)
        for name, scores in forms(layer, other):
            found.setdefault(name, []).append(layer.measure(scores, budget))
    print("| form | error | rows, in budgets |\n|---|---:|---:|")
    for name, measured in found.items():
        error, rows = (fmean(one[place] for one in measured) for place in (0, 1))
        print(f"| {name} | {error:.4f} | {rows:.2f} |")


if __name__ == "__main__":
    main()
