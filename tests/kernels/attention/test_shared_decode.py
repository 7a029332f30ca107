"""Several sequences' attention by kernels that read shared rows in place: against plain torch, and its definition."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from support.eight_bits import eight_bits, scales_on
from support.kernel_runs import DEVICE, compiled_or_interpreted, poisoned_memory
from support.pairs import every_pair
from support.random_tensors import normal
from support.reference import assert_close

from sparsekv.kernels.attention import shared_decode_triton as module
from sparsekv.kernels.attention.attention import OwnRows
from sparsekv.kernels.attention.shared_decode import shared_decode
from sparsekv.kernels.attention.shared_decode_triton import shared_decode_triton
from sparsekv.kernels.attention.types import Centroids, RunRows

pytestmark = compiled_or_interpreted
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
M, E, C, S, T = 60, 7, 11, 5, 40


@dataclass(frozen=True)
class Case:
    """Tokens of sequences, each with some rows of its own, the last of a longer buffer poisoned; and what all share."""

    query: torch.Tensor
    runs: RunRows
    exact: tuple[torch.Tensor, torch.Tensor]
    centroids: list[Centroids]
    own: OwnRows
    sinks: torch.Tensor | None
    scale: float
    softcap: float | None

    def by_kernels(self) -> torch.Tensor:
        with poisoned_memory():
            return shared_decode_triton(
                self.query, self.runs, self.exact, self.centroids, self.own, self.scale, self.softcap, self.sinks
            ).cpu()

    def by_torch(self) -> torch.Tensor:
        return shared_decode.reference(
            self.query, self.runs, self.exact, self.centroids, self.own, self.scale, self.softcap, self.sinks
        ).cpu()

    def by_definition(self) -> torch.Tensor:
        """[Hk, G, B, D] float64, one query after another."""
        Hk, G, B, _ = self.query.shape
        output = torch.empty(self.query.shape, dtype=torch.float64)
        for h in range(Hk):
            used = self.runs.capacity if self.runs.used is None else int(self.runs.used[h])
            rows = self.runs.starts[h, :used].long()
            for b in range(B):
                slot, first, last = (int(one[b]) for one in (self.own.slots, self.own.first, self.own.used))
                keys = [self.runs.keys[h, rows], self.exact[0][h], self.own.keys[slot, h, first:last]]
                values = [self.runs.values[h, rows], self.exact[1][h], self.own.values[slot, h, first:last]]
                for g in range(G):
                    logits = torch.cat(keys).double() @ self.query[h, g, b].double() * self.scale
                    if self.softcap is not None:
                        logits = self.softcap * torch.tanh(logits / self.softcap)
                    of_value = [*values]
                    for part in self.centroids:
                        stood = part.keys[h].double() @ self.query[h, g, b].double() * self.scale
                        stood = stood if self.softcap is None else self.softcap * torch.tanh(stood / self.softcap)
                        logits = torch.cat([logits, stood + part.log_counts[h, :C].double()])
                        of_value = [*of_value, part.values[h]]
                    if self.sinks is not None:
                        logits = torch.cat([logits, self.sinks[h, g].double()[None]])
                        of_value = [*of_value, values[0].new_zeros(1, values[0].shape[1])]
                    output[h, g, b] = (logits.softmax(-1) @ torch.cat(of_value).double()).cpu()
        return output


def some_case(
    *, dtype: torch.dtype = torch.float32, Hk: int = 2, G: int = 3, B: int = 5, D: int = 64,
    used: tuple[int, ...] = (25,), exact: int = E, stands: bool = True, softcap: float | None = None,
    sinks: bool = False,
) -> Case:  # fmt: skip
    def rows(seed: int, *shape: int) -> torch.Tensor:
        return normal(seed, *shape, D).to(dtype).to(DEVICE)

    query = 2 * rows(0, B, Hk, G).permute(1, 2, 0, 3)  # token by token, as a model has it
    last = 1 + 7 * torch.arange(B, device=DEVICE) % T
    own = OwnRows(
        rows(1, S, Hk, T), rows(2, S, Hk, T), torch.arange(B, device=DEVICE) % S, (last - 9).clamp(min=0), last
    )
    chosen = torch.stack([torch.randperm(M, generator=torch.Generator().manual_seed(h)) for h in range(Hk)])
    counts = torch.tensor([used[h % len(used)] for h in range(Hk)], dtype=torch.int32, device=DEVICE)
    centroids, log_counts = rows(3, Hk, C), torch.full((Hk, C), math.log(3.0), device=DEVICE)
    log_counts[:, 2] = -torch.inf
    return Case(
        query=query,
        runs=RunRows(rows(4, Hk, M), rows(5, Hk, M), chosen.int().to(DEVICE), None, M, counts),
        exact=(rows(6, Hk, exact), rows(7, Hk, exact)),
        centroids=[Centroids(centroids, rows(8, Hk, C), log_counts)] if stands else [],
        own=own,
        sinks=normal(9, Hk, G).to(DEVICE) if sinks else None,
        scale=D**-0.5,
        softcap=softcap,
    )


@every_pair(
    {
        "dtype, tolerance": TOLERANCES.items(),
        "D": [64, 96, 128, 256],
        "Hk, G, B": [(1, 1, 1), (2, 3, 5), (2, 8, 2), (1, 7, 11)],
    }
)
def test_attention_by_its_definition(dtype: torch.dtype, tolerance: float, D: int, Hk: int, G: int, B: int) -> None:
    case = some_case(dtype=dtype, Hk=Hk, G=G, B=B, D=D, used=(25, 0, M))
    output, truth = case.by_kernels(), case.by_definition()
    assert (output.dtype, output.shape) == (dtype, truth.shape)
    assert_close(output, truth, tolerance)
    assert_close(case.by_torch(), truth, tolerance)


@pytest.mark.thinned
@pytest.mark.parametrize("softcap", [None, 3.0], ids=["uncapped", "capped"])
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("stands", [False, True], ids=["dropped", "centroids"])
def test_soft_caps_sinks_and_centroids(softcap: float | None, *, sinks: bool, stands: bool) -> None:
    case = some_case(softcap=softcap, sinks=sinks, stands=stands, used=(25, 0))
    assert_close(case.by_kernels(), case.by_definition(), 1e-5)
    assert_close(case.by_torch(), case.by_definition(), 1e-5)


@every_pair(
    {
        "dtype, tolerance": TOLERANCES.items(),
        "D": [64, 96, 128, 256],
        "Hk, G, B": [(1, 1, 1), (2, 3, 5), (2, 8, 2)],
        "softcap": [None, 3.0],
    }
)
def test_rows_in_8_bits(
    softcap: float | None, dtype: torch.dtype, tolerance: float, D: int, Hk: int, G: int, B: int
) -> None:
    case, rows = some_case(dtype=dtype, Hk=Hk, G=G, B=B, D=D, used=(25, 0, M), softcap=softcap), eight_bits(D, Hk, M, D)
    meant = replace(case.runs, keys=rows.exact_keys.to(DEVICE), values=rows.exact_values.to(DEVICE))
    stored = replace(
        case.runs, keys=rows.keys.to(DEVICE), values=rows.values.to(DEVICE), scales=scales_on(rows.scales, DEVICE)
    )
    truth, case = replace(case, runs=meant).by_definition(), replace(case, runs=stored)
    assert_close(case.by_kernels(), truth, tolerance)
    assert_close(case.by_torch(), truth, tolerance)


@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:All-NaN slice")  # of an infinite one
@pytest.mark.parametrize("loud", [1e8, torch.inf])
def test_one_tokens_query_takes_nothing_from_anothers_over_rows_in_8_bits(loud: float) -> None:
    case, rows = some_case(dtype=torch.bfloat16, used=(25, 0, M)), eight_bits(5, 2, M, 64)
    scales = scales_on(rows.scales, DEVICE)
    runs = replace(case.runs, keys=rows.keys.to(DEVICE), values=rows.values.to(DEVICE), scales=scales)
    among_loud = case.query.clone()
    among_loud[:, :, 1] *= loud
    quiet, found = (replace(case, runs=runs, query=query).by_kernels() for query in (case.query, among_loud))
    others = [0, 2, 3, 4]
    assert torch.equal(found[:, :, others], quiet[:, :, others])


def test_queries_that_do_not_fit_a_program_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    case = some_case(G=5, B=23)
    monkeypatch.setattr(module, "MOST_ROWS", 16)
    assert_close(case.by_kernels(), case.by_definition(), 1e-5)


@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
def test_with_nothing_shared_each_attends_to_its_own(*, sinks: bool) -> None:
    case = some_case(used=(0,), exact=0, stands=False, sinks=sinks)
    assert_close(case.by_kernels(), case.by_definition(), 1e-5)
