"""One layer's captured heads, put together on the first rank."""

from sparsekv.formats.ranks.ranks import Ranks
from sparsekv.indexing.capture.capture import CapturedLayer


def join_layer(ranks: Ranks, own: CapturedLayer) -> CapturedLayer | None:
    """A layer with the heads of all ranks, on the first rank's device; None on the others.

    All ranks call it together, each with the same number of heads.
    """
    keys, values, tail = (ranks.join_heads(rows) for rows in (own.keys, own.values, own.tail))
    sinks, sample = (None if rows is None else ranks.join_heads(rows) for rows in (own.sink_logits, own.sample))
    if keys is None or values is None or tail is None:
        return None
    return CapturedLayer(keys, values, tail, sinks, sample)
