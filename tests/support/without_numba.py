"""Decode steps and products in a process without numba, which use torch."""

import sys

import pytest
import torch

from sparsekv.kernels.attention.cpu_steps import StepClusters, attend_to_best
from sparsekv.kernels.clusters.cluster_choice import CountedClusters, logs_and_shares
from sparsekv.kernels.common.on_cpu import compiled_kernels
from sparsekv.kernels.linear.quantised import multiply, round_to_int8


def check_step() -> None:
    """Check a step over two clusters: the first is the better one, and its rows, 3 and 4, get equal weight."""
    sys.modules["numba"] = None  # type: ignore[assignment]  # as `import` finds it where it is not installed
    counts = torch.tensor([[2, 3]], dtype=torch.int32)
    logs, shares = logs_and_shares(counts)
    centroids, rows = torch.tensor([[[9.0], [-9.0]]]), torch.arange(5.0).view(1, 5, 1)
    counted, starts = CountedClusters(centroids, counts, logs[:, None], shares, 5), torch.tensor([[3, 0]])
    clusters, nothing = StepClusters(counted, starts, None, 1.0, None), rows[:, :0]
    output = attend_to_best(torch.ones(1, 1, 1), clusters, (0 * rows, rows), (nothing, nothing), 2, replace=False)
    assert compiled_kernels("cluster_step_numba") is None
    assert compiled_kernels("code_step_numba") is None
    assert float(output) == pytest.approx(3.5)


def check_product() -> None:
    """Check the product of an int8 weight and a row."""
    sys.modules["numba"] = None  # type: ignore[assignment]  # as `import` finds it where it is not installed
    weight = round_to_int8(torch.tensor([[127.0, 1.0], [0.0, 254.0]]))
    assert compiled_kernels("quantised_numba", "linear") is None
    assert multiply(torch.tensor([[1.0, 2.0]]), weight, None).tolist() == [[129.0, 508.0]]
