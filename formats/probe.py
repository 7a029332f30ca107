"""How far the logits of a token may be from those that an index stores."""

import math

import torch

from sparsekv.formats.kv_storage import KVDtype
from sparsekv.formats.schema import Manifest, Probe

PROBE_LOGITS = 32

# Largest difference of a probe's logits, relative to the largest logit, that rounding can cause.
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}

# The same for what storing in 8 bits changes: 0.003 for the embedded model over 6,144 tokens, at most 0.02 for random
# models of every family. Other weights are further off: 0.15 where each of the embedded model's is off by 10% of their
# standard deviation (docs/reference/eight-bits.md).
STORING_TOLERANCE: dict[KVDtype, float] = {"int8": 5e-2}


def top_logits(logits: torch.Tensor) -> Probe:
    """The PROBE_LOGITS highest of a token's finite logits [vocabulary]."""
    top = logits.topk(min(PROBE_LOGITS, len(logits)))
    return Probe(token_ids=top.indices.tolist(), logits=top.values.tolist())


def difference(probe: Probe, logits: torch.Tensor) -> float:
    """The largest difference of logits [vocabulary] from a probe's, relative to the probe's largest; may be NaN, and is
    infinite where the probe names tokens beyond the vocabulary."""
    if max(probe.token_ids) >= len(logits):
        return math.inf
    stored = torch.tensor(probe.logits)
    return float((logits[probe.token_ids] - stored).abs().max() / stored.abs().max())


def probe_tolerance(manifest: Manifest, dtype: torch.dtype, *, over_exact: bool) -> float:
    """Largest difference of logits over an index's rows from the stored ones, for the same model in a dtype.

    Args:
        over_exact: the stored logits are those over the rows before they were rounded to 8 bits.
    """
    rounding = max(PROBE_TOLERANCE[dtype], PROBE_TOLERANCE[_dtype(manifest.dtype)])
    if manifest.kv_storage is None or not over_exact:
        return rounding
    return max(rounding, STORING_TOLERANCE[manifest.kv_storage.dtype])


def is_over_exact(manifest: Manifest) -> bool:
    """Whether the logits of probe and canary are those over the rows before they were rounded to 8 bits."""
    return manifest.kv_storage is not None and manifest.kv_storage.exact_probe


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
