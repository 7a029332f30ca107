"""Added-up attention of queries to stored keys, by torch and by kernels, against its definition in float64."""

import pytest
import torch
from support.kernel_runs import DEVICE, compiled_or_interpreted, poisoned_memory
from support.random_tensors import normal
from support.reference import assert_close

from sparsekv.kernels.scores import shares as definition
from sparsekv.kernels.scores.shares import attention_shares
from sparsekv.kernels.scores.shares_triton import attention_shares_triton


def _drawn(rows: int, stored: int, own: int, channels: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries, stored keys and own keys, views with a stride; own keys that each query sees; weights."""
    query, keys, behind = (
        normal(number, size, 2, channels).to(dtype)[:, 1] for number, size in enumerate((rows, stored, own))
    )
    return [3 * query, keys, behind, torch.arange(rows) % own + 1, normal(3, rows).abs()]


def _exact(query: torch.Tensor, keys: torch.Tensor, own: torch.Tensor, seen: torch.Tensor, weights: torch.Tensor,
           scale: float, softcap: float | None, sink: torch.Tensor | None) -> torch.Tensor:  # fmt: skip
    logits = query.double() @ torch.cat([keys, own]).double().T * scale
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logits[:, len(keys) :][torch.arange(len(own)) >= seen[:, None]] = -torch.inf
    if sink is not None:
        logits = torch.cat([logits, sink.double().expand(len(query), 1)], -1)
    return weights.double() @ logits.softmax(-1)[:, : len(keys)]


pytestmark = compiled_or_interpreted
CASES = pytest.mark.parametrize(
    ("rows", "stored", "own", "channels"),
    [(1, 1, 1, 64), (3, 200, 2, 96), (70, 333, 65, 128), (130, 600, 40, 256), (5, 129, 300, 24)],
)


SINKS = pytest.mark.parametrize("sink", [None, torch.tensor(3.0, dtype=torch.bfloat16)], ids=["", "sink"])


@CASES
@SINKS
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_definition(
    rows: int,
    stored: int,
    own: int,
    channels: int,
    softcap: float | None,
    sink: torch.Tensor | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(definition, "LOGITS_AT_ONCE", 2000)  # several queries at a time, and not all
    drawn = _drawn(rows, stored, own, channels, torch.float32)
    found = attention_shares.reference(*drawn, channels**-0.5, softcap, sink)
    assert_close(found, _exact(*drawn, channels**-0.5, softcap, sink), 1e-5)


@CASES
@SINKS
@pytest.mark.thinned
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_kernels(
    rows: int,
    stored: int,
    own: int,
    channels: int,
    softcap: float | None,
    sink: torch.Tensor | None,
    dtype: torch.dtype,
) -> None:
    drawn = _drawn(rows, stored, own, channels, dtype)
    with poisoned_memory():
        on_device = None if sink is None else sink.to(DEVICE)
        tensors = (one.to(DEVICE) for one in drawn)
        found = attention_shares_triton(*tensors, channels**-0.5, softcap, on_device).cpu()
    assert_close(found, _exact(*drawn, channels**-0.5, softcap, sink), 2e-5)
