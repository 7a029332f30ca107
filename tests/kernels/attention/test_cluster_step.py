"""A decode step over clusters, compiled and in torch, against a choice and one softmax in float64."""

import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_runs import poisoned_memory, uneven_counts, with_threads
from support.random_tensors import normal
from support.reference import assert_close, random_attention, reference_attention

from sparsekv.kernels.attention.cluster_step import StepClusters, attend_to_best, compiled_kernels
from sparsekv.kernels.clusters.cluster_choice import CountedClusters, logs_and_shares
from sparsekv.kernels.common.runs import fill_budget

SCALE = 0.1
FORMS = {"compiled": attend_to_best, "torch": attend_to_best.reference}
every_form = pytest.mark.parametrize("form", FORMS)
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Step:
    """Inputs of a step: queries [H, G, D], clusters, rows and exact rows in larger buffers, and options."""

    query: torch.Tensor
    clusters: StepClusters
    rows: Pair
    exact: Pair
    budget: int
    replace: bool = True
    sinks: torch.Tensor | None = None

    def attend(self, form: str) -> torch.Tensor:
        rest = {"replace": self.replace, "sink_logits": self.sinks}
        return FORMS[form](self.query, self.clusters, self.rows, self.exact, self.budget, **rest)

    def scores(self) -> torch.Tensor:
        """S_i [H, C] float64 of Squeezed Attention's equation 1, averaged over the group."""
        counted, cap = self.clusters.counted, self.clusters.softcap
        logits = torch.einsum("hgd,hcd->hgc", self.query.double(), counted.centroids.double()) * SCALE
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        total = (logits + counted.counts[:, None].double().log()).logsumexp(-1, keepdim=True)
        return (logits - total).exp().mean(1).masked_fill(counted.counts == 0, 0)

    def expected(self) -> torch.Tensor:
        """Output [H, G, D] float64; a centroid that represents n tokens is attended like n copies of it."""
        counted, outputs = self.clusters.counted, []
        for head, order in enumerate(self.scores().argsort(dim=-1, descending=True, stable=True)):
            counts, taken = counted.counts[head].long(), torch.zeros_like(order)
            taken[order] = fill_budget(counts[order], self.budget)
            starts = self.clusters.starts[head].tolist()
            chosen = [row for start, n in zip(starts, taken.tolist(), strict=True) for row in range(start, start + n)]
            keys, values = (
                torch.cat([held[head, chosen], always[head]])
                for held, always in zip(self.rows, self.exact, strict=True)
            )
            if self.replace:
                assert self.clusters.values is not None
                copies = counts - taken
                keys = torch.cat([keys, counted.centroids[head].repeat_interleave(copies, 0)])
                values = torch.cat([values, self.clusters.values[head].repeat_interleave(copies, 0)])
            sinks = None if self.sinks is None else self.sinks[head : head + 1]
            query, how = self.query[head : head + 1, :, None], {"softcap": self.clusters.softcap, "sink_logits": sinks}
            outputs.append(reference_attention(query, keys[None], values[None], SCALE, **how)[0, :, 0])
        return torch.stack(outputs)


def some_step(
    seed: int = 0,
    *,
    H: int = 3,
    G: int = 3,
    D: int = 64,
    C: int = 40,
    E: int = 20,
    share: float = 0.2,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Step:
    """A step over clusters of uneven sizes, whose rows are in random order; the budget is `share` of the tokens."""
    counts = uneven_counts(seed, H, C)
    M = int(counts[0].sum())
    query, centroids, stand_values = random_attention(Hk=H, G=G, Q=1, T=C, D=D, dtype=dtype, seed=seed)
    _, keys, values = random_attention(Hk=H, T=M + 5, D=D, dtype=dtype, seed=seed + 1)
    _, exact_keys, exact_values = random_attention(Hk=H, T=E + 3, D=D, dtype=dtype, seed=seed + 2)
    order = torch.randperm(C, generator=torch.Generator().manual_seed(seed))
    starts = torch.empty(H, C, dtype=torch.int64)
    starts[:, order] = counts[:, order].long().cumsum(-1) - counts[:, order]
    logs, shares = logs_and_shares(counts)
    counted = CountedClusters(centroids, counts, logs[:, None], shares, M)
    clusters = StepClusters(counted, starts, stand_values, SCALE, softcap)
    return Step(query[:, :, 0], clusters, (keys, values), (exact_keys[:, :E], exact_values[:, :E]), round(share * M))


@given(
    seed=st.integers(0, 1000),
    H=st.integers(1, 4),
    G=st.integers(1, 8),
    D=st.sampled_from([20, 64, 96, 128, 256]),
    C=st.integers(1, 60),
    E=st.integers(1, 40),
    share=st.sampled_from([0.0, 1.0]) | st.floats(0, 1),
    softcap=st.sampled_from([None, 3.0]),
    stands=st.booleans(),
    has_sinks=st.booleans(),
    threads=st.integers(1, 3),
    form=st.sampled_from(sorted(FORMS)),
)
@settings(max_examples=60, deadline=None)
def test_a_step_gives_what_its_definition_gives(
    seed: int,
    H: int,
    G: int,
    D: int,
    C: int,
    E: int,
    share: float,
    softcap: float | None,
    stands: bool,
    has_sinks: bool,
    threads: int,
    form: str,
) -> None:
    step = some_step(seed, H=H, G=G, D=D, C=C, E=E, share=share, softcap=softcap)
    step = replace(step, replace=stands, sinks=normal(seed, H, G) if has_sinks else None)
    with with_threads(threads), poisoned_memory():
        output = step.attend(form)
    assert_close(output, step.expected(), 5e-6)


def test_numba_is_there_to_be_tested() -> None:
    assert compiled_kernels("cluster_step_numba") is not None
    assert some_step().clusters.compiled is not None


@every_form
def test_nothing_but_chosen_rows_and_centroids_may_be_attended(form: str) -> None:
    """With no exact row, and more threads than rows."""
    step = some_step(C=3, E=0, share=0.1)
    with with_threads(3), poisoned_memory():
        assert_close(step.attend(form), step.expected(), 5e-6)


@every_form
def test_of_clusters_that_agree_the_output_is_that_of_some_of_them(form: str) -> None:
    """All scores are equal, and so are all rows, so that the choice does not matter."""
    step = some_step(H=1)
    counted = step.clusters.counted
    alike = replace(counted, centroids=torch.zeros_like(counted.centroids))
    rows = torch.zeros_like(step.rows[0]), torch.ones_like(step.rows[1])
    step = replace(step, clusters=replace(step.clusters, counted=alike), rows=rows, replace=False)
    assert_close(step.attend(form), step.expected(), 5e-6)


@every_form
@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("far", [3e3, -3e3])
def test_logits_far_from_each_other_neither_overflow_nor_vanish(form: str, far: float, share: float) -> None:
    """All clusters are chosen, or none: between, clusters whose score is 0 in float32 would have no order."""
    step = some_step(seed=4, share=share)
    counted = step.clusters.counted
    centroids = counted.centroids.clone()
    centroids[:, 5:] *= far
    step = replace(step, clusters=replace(step.clusters, counted=replace(counted, centroids=centroids)))
    assert_close(step.attend(form), step.expected(), 1e-4)


@every_form
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_no_number_is_not_lost(form: str, bad: float) -> None:
    """NaN must reach the output, so that a broken model does not produce text, nor a broken step a timing."""
    step = some_step()
    step.query[1, 2, 7] = bad
    assert not bool(step.attend(form)[1, 2].isfinite().any())
    step = some_step()
    step.exact[0][2, 3] = torch.nan
    assert not bool(step.attend(form)[2].isfinite().any())


def test_a_step_is_repeated_to_the_last_bit_by_as_many_threads() -> None:
    step = some_step(C=300)
    for threads in (1, 2, 3):
        with with_threads(threads):
            assert torch.equal(step.attend("compiled"), step.attend("compiled"))


def test_half_precision_and_gradients_go_another_way() -> None:
    step = some_step(dtype=torch.bfloat16)
    assert step.clusters.compiled is None
    assert step.attend("compiled").dtype == torch.bfloat16
    assert_close(step.attend("compiled"), step.expected(), 2e-2)
    step = some_step()
    step.query.requires_grad_()
    assert step.attend("compiled").grad_fn is not None


def test_heads_of_another_layout_go_another_way() -> None:
    """Rows that are not contiguous, such as every other row of a buffer, are computed in torch."""
    step = some_step()
    apart = tuple(held.repeat_interleave(2, 1)[:, ::2] for held in step.exact)
    moved = replace(step, exact=(apart[0], apart[1]))
    assert_close(moved.attend("compiled"), step.expected(), 5e-6)


WITHOUT_NUMBA = """
import sys

sys.modules["numba"] = None  # as `import` finds it where it is not installed
import torch

from sparsekv.kernels.clusters.cluster_choice import CountedClusters, logs_and_shares
from sparsekv.kernels.attention.cluster_step import StepClusters, attend_to_best
from sparsekv.kernels.attention.cluster_step import compiled_kernels

counts = torch.tensor([[2, 3]], dtype=torch.int32)
logs, shares = logs_and_shares(counts)
centroids, rows = torch.tensor([[[9.0], [-9.0]]]), torch.arange(5.0).view(1, 5, 1)
counted, starts = CountedClusters(centroids, counts, logs[:, None], shares, 5), torch.tensor([[3, 0]])
clusters, nothing = StepClusters(counted, starts, None, 1.0, None), rows[:, :0]
output = attend_to_best(torch.ones(1, 1, 1), clusters, (0 * rows, rows), (nothing, nothing), 2, replace=False)
assert compiled_kernels("cluster_step_numba") is None
assert compiled_kernels("code_step_numba") is None
print(float(output))
"""


def test_without_numba_a_step_is_one_of_torch() -> None:
    """The first of two clusters is the better one; its rows, 3 and 4, get equal weight."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_NUMBA], check=True, capture_output=True, text=True)
    assert float(done.stdout) == pytest.approx(3.5)
