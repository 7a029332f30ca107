"""One layer's captured heads, put together on the first rank."""

from sparsekv.formats.ranks.ranks import Ranks
from sparsekv.indexing.capture.capture import CapturedLayer, CapturedQueries


def join_layer(ranks: Ranks, own: CapturedLayer) -> CapturedLayer | None:
    """A layer with the heads of all ranks, on the first rank's device; None on the others.

    All ranks call it together, each with the same number of heads.
    """
    keys, values = (ranks.join_heads(rows) for rows in (own.keys, own.values))
    queries = join_queries(ranks, own)
    if keys is None or values is None or queries is None:
        return None
    return CapturedLayer(queries.tail, queries.sink_logits, queries.sample, keys, values)


def join_queries(ranks: Ranks, own: CapturedQueries) -> CapturedQueries | None:
    """The same of its queries alone."""
    tail = ranks.join_heads(own.tail)
    sinks, sample = (None if rows is None else ranks.join_heads(rows) for rows in (own.sink_logits, own.sample))
    return None if tail is None else CapturedQueries(tail, sinks, sample)
