"""Sums over ranks through memory that all of them see: the kernel against float64, between processes or streams."""

import pytest
import torch
from support.spawned import run_together
from support.summing_ranks import PARTS, as_seen_by, assert_sum, check_rank, part

from sparsekv.kernels.distributed.shared_memory import bytes_shared
from sparsekv.kernels.distributed.sum_triton import sum_triton


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_each_process_has_the_sum_of_all_parts_sum_after_sum(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # also where there is a GPU, for a CPU's memory
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    memory = [torch.zeros(bytes_shared(ranks), dtype=torch.uint8).share_memory_() for _ in range(ranks)]
    run_together(check_rank, [(number, memory) for number in range(ranks)], 100)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_stream_of_a_gpu_has_the_sum_of_all_parts_also_as_a_graph(ranks: int) -> None:
    memory = [torch.zeros(bytes_shared(ranks), dtype=torch.uint8, device="cuda") for _ in range(ranks)]
    views = [as_seen_by(number, memory) for number in range(ranks)]
    parts = [[part(rank, at).cuda() for at in range(len(PARTS))] for rank in range(ranks)]
    streams = [torch.cuda.Stream() for _ in range(ranks)]
    # A kernel may not be loaded while another waits; here all parts seem to have come, so that none waits.
    arrived = as_seen_by(0, [torch.ones_like(one) for one in memory])
    for one in parts[0]:
        sum_triton(one, arrived)

    def add_up(rank: int) -> list[torch.Tensor]:
        return [sum_triton(one, views[rank]) for one in parts[rank]]

    torch.cuda.synchronize()
    totals = []
    for rank, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            totals.append(add_up(rank))
    torch.cuda.synchronize()
    graphs, again = [torch.cuda.CUDAGraph() for _ in range(ranks)], []
    for rank, graph in enumerate(graphs):
        with torch.cuda.graph(graph):
            again.append(add_up(rank))
    for _ in range(3):
        for one in again:
            for total in one:
                total.fill_(torch.nan)
        torch.cuda.synchronize()
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for rank in range(ranks):
            for at in range(len(PARTS)):
                assert_sum(totals[rank][at], ranks, at)
                assert_sum(again[rank][at], ranks, at)
                assert torch.equal(again[rank][at], again[0][at])
