"""Times one chunk of a sparse prefill against dense attention, choice included: `python docs/time_prefill.py [TOKENS]`.

One layer of SmolLM2's shape on this machine's CPU, float32. Dense is the faster of torch's fused attention with grouped
heads and with keys and values repeated.
"""

import sys
import time
from collections.abc import Callable
from statistics import median, quantiles

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from sparsekv.indexing.prefill_quoka import QuokaPrefill
from sparsekv.indexing.prefill_sampleattention import SampleAttentionPrefill
from sparsekv.kernels.hook import AttentionCall

KV_HEADS, GROUP, HEAD_DIM, RUNS = 3, 3, 64, 15


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds: the median, and the distance between the quartiles."""
    run()
    found = []
    for _ in range(RUNS):
        started = time.perf_counter()
        run()
        found.append(1000 * (time.perf_counter() - started))
    low, _, high = quantiles(found, n=4)
    return median(found), high - low


def chunk_call(before: int, chunk: int) -> AttentionCall:
    """A chunk of random queries after so many random keys."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(KV_HEADS * GROUP, chunk, HEAD_DIM, generator=generator)
    keys, values = (torch.randn(KV_HEADS, before + chunk, HEAD_DIM, generator=generator) for _ in range(2))
    return AttentionCall(0, query, keys, values, HEAD_DIM**-0.5, None, None, None)


def dense(call: AttentionCall, *, grouped: bool) -> torch.Tensor:
    """Causal attention to everything."""
    keys, values = (rows if grouped else rows.repeat_interleave(GROUP, 0) for rows in (call.keys, call.values))
    mask = causal_lower_right(call.query.shape[1], keys.shape[1])
    return scaled_dot_product_attention(
        call.query[None], keys[None], values[None], attn_mask=mask, scale=call.softmax_scale, enable_gqa=grouped
    )


def main() -> None:
    before = int(sys.argv[1]) if len(sys.argv) > 1 else 32_768
    print(f"{before:,} keys, {torch.get_num_threads()} threads, torch {torch.__version__}; ms (between quartiles)")
    for chunk in (128, 512):
        call = chunk_call(before, chunk)
        forms = [timed(lambda call=call, grouped=grouped: dense(call, grouped=grouped)) for grouped in (True, False)]
        best = min(forms)
        print(f"chunk {chunk}: dense {forms[0][0]:.1f} ({forms[0][1]:.1f}), repeated {forms[1][0]:.1f}")
        for name, prefill in (("quoka", QuokaPrefill()), ("sampleattention", SampleAttentionPrefill())):
            took, spread = timed(lambda call=call, prefill=prefill: prefill.attend(call, 10))
            print(f"  {name}: {took:.1f} ({spread:.1f}), {best[0] / took:.1f} times as fast as dense")


if __name__ == "__main__":
    main()
