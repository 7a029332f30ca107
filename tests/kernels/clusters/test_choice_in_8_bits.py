"""Choosing clusters by centroids in 8 bits: against what these mean, in float64."""

import pytest
import torch
from support.eight_bits import EightBits, eight_bits, scales_on
from support.kernel_runs import DEVICE, compiled_or_interpreted, poisoned_memory, uneven_counts
from support.pairs import every_pair
from support.random_tensors import normal
from support.reference import assert_close

from sparsekv.kernels.clusters.cluster_choice import choose_clusters
from sparsekv.kernels.clusters.cluster_choice_triton import choose_clusters_triton
from sparsekv.kernels.common.kernel_inputs import Int8Kernel
from sparsekv.kernels.scores.logits import attention_logits, cluster_scores

pytestmark = compiled_or_interpreted
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
by_dtype = pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES.items(), ids=lambda value: str(value))


def on_device(rows: EightBits) -> Int8Kernel:
    return Int8Kernel(rows.keys.to(DEVICE), rows.values.to(DEVICE), scales_on(rows.scales, DEVICE))


def logits_of(query: torch.Tensor, rows: EightBits, counts: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """[H, G, C] float64; minus infinity for empty clusters."""
    logits = attention_logits(query.double()[:, :, None], rows.exact_keys, query.shape[2] ** -0.5, softcap)[:, :, 0]
    return logits.masked_fill(counts[:, None] == 0, -torch.inf)


@every_pair({"dtype, tolerance": TOLERANCES.items(), "D": [64, 96, 128, 256], "softcap": [None, 3.0]})
def test_logits_and_choice(softcap: float | None, D: int, dtype: torch.dtype, tolerance: float) -> None:
    counts, rows, query = uneven_counts(D, 2, 37), eight_bits(D, 2, 37, D), normal(0, 2, 3, D).to(dtype)
    starts, scale = (counts.cumsum(-1) - counts).to(DEVICE), D**-0.5
    given = query.to(DEVICE), on_device(rows), counts.to(DEVICE), starts, 50, scale, softcap
    with poisoned_memory():
        found = choose_clusters_triton(*given)
    exact, logits = logits_of(query, rows, counts, softcap), found.logits.cpu()
    assert bool((logits[..., 37:] == -torch.inf).all())
    assert torch.equal(logits[..., :37] == -torch.inf, exact == -torch.inf)
    assert_close(logits[..., :37].clamp(min=-1e3), exact.clamp(min=-1e3), tolerance)
    plain = choose_clusters.reference(*given)
    assert_close(plain.logits.cpu().clamp(min=-1e3), exact.clamp(min=-1e3), tolerance)
    assert found.lengths.sum(-1).tolist() == [50, 50]
    scores = cluster_scores(query.double()[:, :, None], rows.exact_keys, counts, scale, softcap)[:, 0]
    held = (scores * found.lengths.cpu() / counts.clamp(min=1)).sum(-1)
    best = (scores * plain.lengths.cpu() / counts.clamp(min=1)).sum(-1)
    assert_close(held, best, 2 * tolerance)


@pytest.mark.parametrize("G", range(1, 9))
def test_groups_of_any_size_and_a_threshold(G: int) -> None:
    counts, rows, query = uneven_counts(G, 2, 70), eight_bits(G, 2, 70, 64), normal(0, 2, G, 64)
    starts, total = (counts.cumsum(-1) - counts).to(DEVICE), int(counts.sum(-1)[0])
    with poisoned_memory():
        given = query.to(DEVICE), on_device(rows), counts.to(DEVICE), starts
        found = choose_clusters_triton(*given, total, 0.125, threshold=0.02)
    scores = cluster_scores(query.double()[:, :, None], rows.exact_keys, counts, 0.125, None)[:, 0]
    sure = (scores / 0.02).log().abs() > 1e-4
    assert torch.equal((found.lengths.cpu() > 0)[sure], ((scores >= 0.02) & (counts > 0))[sure])


@pytest.mark.parametrize("clusters", [1, 16, 17])
def test_few_clusters(clusters: int) -> None:
    counts, rows = torch.ones(2, clusters, dtype=torch.int32), eight_bits(1, 2, clusters, 64)
    given = normal(0, 2, 3, 64).to(DEVICE), on_device(rows), counts.to(DEVICE), (counts.cumsum(-1) - 1).to(DEVICE)
    with poisoned_memory():
        found = choose_clusters_triton(*given, 1, 0.125)
    assert torch.equal(found.lengths, choose_clusters.reference(*given, 1, 0.125).lengths)
