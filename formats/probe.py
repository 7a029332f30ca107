"""How far the logits of a token may be from those that an index stores."""

import torch

from sparsekv.formats.kv_storage import KVDtype
from sparsekv.formats.schema import Probe

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
    """The largest difference of logits [vocabulary] from a probe's, relative to the probe's largest; may be NaN."""
    stored = torch.tensor(probe.logits)
    return float((logits[probe.token_ids] - stored).abs().max() / stored.abs().max())
