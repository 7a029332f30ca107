"""A chunk of a sparse prefill on a GPU: what it attends to, and that nothing is waited for."""

import pytest
import torch
from support.random_tensors import normal
from support.reference import assert_close, reference_attention

from sparsekv.formats.index.schema import LayerFacts
from sparsekv.indexing.prefill.prefills import QuokaPrefill
from sparsekv.kernels.attention.attention import causal_mask
from sparsekv.kernels.common.hook import AttentionCall

pytestmark = pytest.mark.gpu
HEADS, GROUP, BEFORE, CHUNK, DIMS, SINKS = 2, 4, 700, 200, 64, 5
FACTS = LayerFacts(softmax_scale=0.125, softcap=None, sliding_window=None, attention_sinks=False)
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-3}


def chunk_call(dtype: torch.dtype) -> AttentionCall:
    """Queries laid out as a model has them, a token's heads side by side."""
    query = (normal(0, CHUNK, HEADS * GROUP, DIMS) + 0.3).to(dtype).cuda().transpose(0, 1)
    keys, values = (normal(seed, HEADS, BEFORE + CHUNK, DIMS).to(dtype).cuda() for seed in (1, 2))
    return AttentionCall(0, query, keys, values, FACTS.softmax_scale, None, None, None)


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES.items(), ids=str)
@pytest.mark.parametrize("budget", [100, 500])
def test_a_chunk_attends_to_itself_and_to_the_keys_of_highest_score(
    budget: int, dtype: torch.dtype, tolerance: float
) -> None:
    call, prefill = chunk_call(dtype), QuokaPrefill(prefill_budget=budget)
    query, before, recent = call.query.unflatten(0, (HEADS, GROUP)), call.keys[:, :BEFORE], int(0.125 * budget)
    rows = prefill.choose(query, before, FACTS, SINKS, recent).cpu()
    chosen = torch.zeros(HEADS, BEFORE + CHUNK, dtype=torch.bool).scatter_(1, rows, True)
    assert chosen.sum(1).tolist() == [budget] * HEADS
    assert bool(chosen[:, :SINKS].all())
    assert bool(chosen[:, BEFORE - recent : BEFORE].all())
    scores = prefill.scores(query, before, FACTS).cpu()[:, SINKS : BEFORE - recent]
    free = chosen[:, SINKS : BEFORE - recent]
    worst = scores.masked_fill(~free, torch.inf).amin(1)
    assert bool((scores.masked_fill(free, -torch.inf).amax(1) <= worst + 2**-15 + 1e-5).all())
    chosen[:, BEFORE:] = True
    mask = causal_mask(CHUNK, BEFORE + CHUNK, None, chosen.device) & chosen[:, None, None]
    expected = reference_attention(query.cpu(), call.keys.cpu(), call.values.cpu(), call.softmax_scale, mask=mask)
    assert_close(prefill.attend(call, SINKS).cpu(), expected.flatten(0, 1), tolerance)


def test_a_chunk_waits_for_nothing() -> None:
    call, prefill = chunk_call(torch.bfloat16), QuokaPrefill(prefill_budget=100)
    prefill.attend(call, SINKS)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        prefill.attend(call, SINKS)
    finally:
        torch.cuda.set_sync_debug_mode("default")
