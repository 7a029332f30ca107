"""Compare forms of codes, by their recall at a budget on held-out queries: some rows are taken off keys before coding.

Usage: code_forms.py INDEX [BUDGET [LAYER,LAYER...]]. INDEX has the method codes, and its model no soft cap. BUDGET is a
share, by default 0.05. Codes are trained again for each form, from the index's own sample of queries. The queries of
the tail measure them.

- as stored: nothing is taken off.
- cluster: the mean key of the token's cluster. Its product with a query is known from the step's clusters.
- rotated mean: the mean of the keys before RoPE, rotated to each token's position.
- twice the bytes: nothing is taken off, and each key has twice as many bytes of codes.

Prints a Markdown table with two means over layers: recall of the oracle's tokens, and their share of its attention.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import torch

from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import LayerFacts, RopeFacts, layer_file
from sparsekv.indexing.indexers.cluster_indexer import finest_labels
from sparsekv.indexing.indexers.product_codes import (
    attended,
    decode,
    encode,
    key_turn,
    query_turn,
    train_codebooks,
)
from sparsekv.indexing.methods.codes import ATTENDED_EVERY, FLOOR, CodesIndexer
from sparsekv.kernels.scores.logits import attention_logits, best_tokens

Form = tuple[str, torch.Tensor, int]
"""A form's name, what is taken off the keys [Hk, M, D], and the bytes of a key's code."""


def rotated(rows: torch.Tensor, first: int, rope: RopeFacts, sign: int) -> torch.Tensor:
    """Rotate rows [Hk, M, D] at positions from `first` on; with sign -1 take the rotation back."""
    pairs = len(rope.frequencies)
    positions = torch.arange(first, first + rows.shape[1], dtype=torch.float64)
    angles = sign * positions[:, None] * torch.tensor(rope.frequencies, dtype=torch.float64)
    cos, sin, result = angles.cos().float(), angles.sin().float(), rows.clone()
    one, other = (
        (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))
        if rope.interleaved
        else (slice(0, pairs), slice(pairs, 2 * pairs))
    )
    result[..., one] = rows[..., one] * cos - rows[..., other] * sin
    result[..., other] = rows[..., other] * cos + rows[..., one] * sin
    return result


def cluster_means(rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return for each row [Hk, M, D] the mean of the rows with its label [Hk, M]."""
    places = labels[..., None].expand_as(rows)
    sums = torch.zeros(len(rows), int(labels.max()) + 1, rows.shape[2]).scatter_add_(1, places, rows)
    counts = torch.zeros(sums.shape[:2]).scatter_add_(1, labels, torch.ones(labels.shape))
    return (sums / counts.clamp(min=1)[..., None]).gather(1, places)


def forms(keys: torch.Tensor, labels: torch.Tensor, first: int, facts: LayerFacts, size: int) -> Iterator[Form]:
    nothing = torch.zeros_like(keys)
    yield "as stored", nothing, size
    yield "cluster", cluster_means(keys, labels), size
    if facts.rope is not None and facts.rope.frequencies:
        mean = rotated(keys, first, facts.rope, -1).mean(1, keepdim=True)
        yield "rotated mean", rotated(mean.expand_as(keys).contiguous(), first, facts.rope, 1), size
    yield "twice the bytes", nothing, 2 * size


def recalls(artifact: Artifact, layer: int, budget: float) -> dict[str, tuple[float, float]]:
    """Return recall and attention mass of each form in a layer, in percent."""
    manifest, facts = artifact.manifest, artifact.manifest.attending[layer]
    first, middle = manifest.split.sinks, manifest.split.middle
    keys = artifact.tensors(layer_file("context", layer))["keys"][:, first : first + middle].float()
    sample, tail = (
        artifact.tensors(layer_file(folder, layer))[name].float().unflatten(0, (len(keys), -1))
        for folder, name in (("samples", "queries"), ("queries", "tail"))
    )
    stored = artifact.tensors(layer_file("codes", layer))
    matter = attended(keys, sample[:, :, ::ATTENDED_EVERY], facts)
    weights = matter + FLOOR * matter.mean(1, keepdim=True)
    exact = attention_logits(tail, keys, *facts.scaling)
    total = exact.logsumexp(-1, keepdim=True)
    probability = (exact - total).exp().mean(1)
    wanted = max(1, round(budget * middle))
    best = best_tokens(probability, wanted)
    chosen_by_oracle = torch.zeros_like(probability, dtype=torch.bool).scatter_(-1, best, True)
    found = {}
    for name, off, size in forms(keys, finest_labels(stored), first, facts, stored["codes"].shape[2]):
        turn = query_turn(keys - off, sample.flatten(1, 2), size, weights)
        rest = (keys - off) @ key_turn(turn)
        books = train_codebooks(rest, size, CodesIndexer.iterations, CodesIndexer.seed, weights)
        coded = decode(encode(rest, books), books)
        logits = attention_logits(tail @ turn.float()[:, None], coded, *facts.scaling)
        logits += attention_logits(tail, off, *facts.scaling)
        chosen = best_tokens((logits - total).clamp(max=60).exp().mean(1), wanted)
        recall = chosen_by_oracle.gather(-1, chosen).float().mean()
        mass = (probability.gather(-1, chosen).sum(-1) / probability.gather(-1, best).sum(-1)).mean()
        found[name] = (100 * float(recall), 100 * float(mass))
    return found


def main() -> None:
    artifact, budget = Artifact(Path(sys.argv[1])), float(sys.argv[2]) if len(sys.argv) > 2 else 0.05
    layers = [int(one) for one in sys.argv[3].split(",")] if len(sys.argv) > 3 else artifact.manifest.indexed_layers
    found = [recalls(artifact, layer, budget) for layer in layers]
    print("| taken off | recall, % | attention mass, % |\n|---|---:|---:|")
    for name in found[0]:
        recall, mass = (fmean(one[name][place] for one in found) for place in (0, 1))
        print(f"| {name} | {recall:.1f} | {mass:.1f} |")


if __name__ == "__main__":
    main()
