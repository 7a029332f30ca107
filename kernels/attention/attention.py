"""Exact attention to several segments of keys and values in one softmax, for a sequence, a batch or a prefill chunk.

A chunk may also attend to itself and to a few selected earlier keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from sparsekv.kernels.common.kernel_inputs import ScoredCentroids
from sparsekv.kernels.common.on_gpu import on_gpu
from sparsekv.kernels.scores.logits import attention_logits, softmax_with_logsumexp


def takes_chunk(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether `chunk_causal` supports these tensors.

    `chunk_causal` needs CPU tensors with a contiguous last axis, and queries that are not float64. Queries and values
    must have the same number of channels, which torch's kernel does not check.
    """
    rows = query, keys, values
    alike = query.shape[-1] == values.shape[-1] and query.dtype != torch.float64
    return alike and all(one.device.type == "cpu" and one.stride(-1) == 1 for one in rows)


def chunk_causal(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, softmax_scale: float) -> torch.Tensor:
    """Compute causal attention of a chunk of Q queries to T keys, of which the last Q are the chunk's keys.

    The chunk's keys and the earlier keys are attended separately, and so torch's kernel needs no mask for the earlier
    keys. The log-sum-exps of both parts merge the two softmaxes into one. Torch's public function does not return
    log-sum-exps, and so its internal operator is called. The queries of all heads that share earlier keys are rows of
    one matrix product. This function takes three quarters of the time of torch's attention with a mask.

    Args:
        query: [Hq, Q, D].
        keys, values: [Hk, T, D] of the query's dtype, T at least Q, as `takes_chunk` allows.

    Returns:
        [Hq, Q, D]. Allocates the output a few times, and a copy of the chunk's keys and values for each query head.
    """
    (Hq, Q, D), (Hk, T, _) = query.shape, keys.shape
    before, attend = T - Q, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    own = (rows[None, :, before:].repeat_interleave(Hq // Hk, 1) for rows in (keys, values))
    chunk, chunk_total = attend(query[None], *own, is_causal=True, scale=softmax_scale)
    if not before:
        of_itself: torch.Tensor = chunk[0]
        return of_itself
    grouped = query.reshape(1, Hk, -1, D)
    earlier, earlier_total = attend(grouped, keys[None, :, :before], values[None, :, :before], scale=softmax_scale)
    of_chunk = torch.sigmoid(chunk_total - earlier_total.reshape(1, Hq, Q))[0, ..., None]
    return torch.lerp(earlier.reshape(Hq, Q, D).float(), chunk[0].float(), of_chunk).to(query.dtype)


@dataclass(frozen=True)
class Segment:
    """Keys and values [Hk, T, D] of some of the rows that a query attends to, such as all centroids.

    `mask` broadcasts to [Hk, G, Q, T] and is True where a query attends to a row. With None, all queries attend to all
    rows. Masked keys may hold anything. Masked values must be finite, because they are multiplied by a weight of 0.

    `bias` broadcasts like the mask and is added to the logits. It is the log of the number of tokens that a row
    represents; None: no bias. Keys and values may differ from the query in dtype: centroids have the index's dtype,
    not the model's.
    """

    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor | None = None
    bias: torch.Tensor | None = None


def causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Build the causal mask [queries, keys] bool of queries at the last positions of the keys.

    With a sliding window, a query attends to the last `window` keys up to its own. None means no window.
    """
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    mask = distance >= 0
    return mask if window is None else mask & (distance < window)


def attend(
    query: torch.Tensor,
    segments: Sequence[Segment],
    softmax_scale: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with grouped queries to all segments in one softmax, computed in float32.

    Args:
        query: [Hk, G, Q, D].
        segments: keys and values of T rows each. T may differ between segments.
        sink_logits: [Hk, G] learned logits that take part in the softmax and have no value row (GPT-OSS).

    Returns:
        [Hk, G, Q, D] in the query's dtype. Allocates the logits [Hk, G, Q, sum of T] float32 three times.
    """
    return attend_with_weights(query, segments, softmax_scale, softcap, sink_logits).output


def attend_with_logsumexp(
    query: torch.Tensor,
    segments: Sequence[Segment],
    softmax_scale: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of `attend` and the log-sum-exp [Hk, G, Q] float32 of all logits, including sinks."""
    logits = _logits(query, segments, softmax_scale, softcap, sink_logits)
    weights, total = softmax_with_logsumexp(torch.cat(logits, -1))
    return _output(weights, segments, query), total


@dataclass(frozen=True)
class Weighed:
    """Attention output [Hk, G, Q, D] and its softmax weights [Hk, G, Q, sum of T] float32.

    T is the number of rows of a segment. The weights are in the order of the segments, and of the rows of a segment. If
    there are learned sink logits, one further weight for them comes last. Functions for a single query omit the axis Q.
    """

    output: torch.Tensor
    weights: torch.Tensor


def attend_with_weights(
    query: torch.Tensor,
    segments: Sequence[Segment],
    softmax_scale: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> Weighed:
    """Return the output of `attend` and the softmax weights of all rows and sinks."""
    logits = _logits(query, segments, softmax_scale, softcap, sink_logits)
    weights = torch.cat(logits, -1).softmax(-1)
    return Weighed(_output(weights, segments, query), weights)


def segment_logits(
    query: torch.Tensor, segments: Sequence[Segment], softmax_scale: float, softcap: float | None
) -> list[torch.Tensor]:
    """Compute the logits [Hk, G, Q, T] float32 of queries [Hk, G, Q, D] for each segment.

    The segment's bias is added. Masked logits are minus infinity.
    """
    logits = []
    for segment in segments:
        part = attention_logits(query, segment.keys, softmax_scale, softcap)
        part = part if segment.bias is None else part + segment.bias
        logits.append(part if segment.mask is None else part.masked_fill(~segment.mask, -torch.inf))
    return logits


def _logits(
    query: torch.Tensor,
    segments: Sequence[Segment],
    softmax_scale: float,
    softcap: float | None,
    sink_logits: torch.Tensor | None,
) -> list[torch.Tensor]:
    logits = segment_logits(query, segments, softmax_scale, softcap)
    if sink_logits is not None:
        logits.append(sink_logits.float()[:, :, None, None].expand(*query.shape[:3], 1))
    return logits


def _output(weights: torch.Tensor, segments: Sequence[Segment], query: torch.Tensor) -> torch.Tensor:
    """Compute the attention output [Hk, G, Q, D] from softmax weights [Hk, G, Q, sum of T]."""
    Hk, G, Q, _ = query.shape
    rows = weights.to(query.dtype).view(Hk, G * Q, weights.shape[3])
    return weigh(rows, [segment.values for segment in segments]).view(Hk, G, Q, -1)


def weigh(weights: torch.Tensor, values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum the values [Hk, T, D] of all segments with weights [Hk, R, sum of T]; return [Hk, R, D].

    Weights of sink logits come last and are ignored, because sinks have no values.
    """
    output, start = None, 0
    for each in values:
        part = weights.narrow(2, start, each.shape[1])
        each = each.to(weights.dtype)
        output = torch.bmm(part, each) if output is None else output.baddbmm_(part, each)
        start += part.shape[2]
    assert output is not None
    return output


def attend_once(
    query: torch.Tensor,
    rows: Sequence[tuple[torch.Tensor, torch.Tensor]],
    centroids: Sequence[ScoredCentroids],
    softmax_scale: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend like `attend`, for one query on a CPU, in few torch operations.

    With cold CPU caches, the time depends on the number of torch operations.

    Args:
        query: [Hk, G, D].
        rows: keys and values [Hk, T, D] of segments without a mask or a bias.
        centroids: centroids with their logits, which take part in the same softmax. Their `rows`, `scales` and
            `clusters` are None.
        sink_logits: [Hk, G].

    Returns:
        [Hk, G, D] in the query's dtype.
    """
    return attend_once_with_weights(query, rows, centroids, softmax_scale, softcap, sink_logits).output


def attend_once_with_weights(
    query: torch.Tensor,
    rows: Sequence[tuple[torch.Tensor, torch.Tensor]],
    centroids: Sequence[ScoredCentroids],
    softmax_scale: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> Weighed:
    """Return the output of `attend_once` and the softmax weights of all rows, centroids and sinks."""
    wide = query.float()
    # With beta=0, baddbmm ignores this tensor. baddbmm is used because it also scales the product.
    ignored = wide.narrow(2, 0, 1)
    logits = [
        torch.baddbmm(ignored, wide, keys.float().transpose(1, 2), beta=0, alpha=softmax_scale) for keys, _ in rows
    ]
    if softcap is not None:
        logits = [softcap * torch.tanh(part / softcap) for part in logits]
    logits += [one.logits + one.log_counts.unsqueeze(1) for one in centroids]
    if sink_logits is not None:
        logits.append(sink_logits.float().unsqueeze(2))
    weights = torch.cat(logits, -1).softmax(-1)
    values = [values for _, values in rows] + [one.values for one in centroids]
    return Weighed(weigh(weights.to(query.dtype), values), weights)


def causal_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    softmax_scale: float,
    softcap: float | None = None,
    window: int | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute dense causal attention of queries at the last positions of the keys, with the fastest suitable kernel.

    Args:
        query: [Hq, Q, D].
        keys, values: [Hk, T, D].
        window: number of keys that a query attends to, its own key the last of them; None: no window.
        sink_logits: [Hq] learned logits that take part in the softmax and have no value row.

    Returns:
        [Hq, Q, D].
    """
    Hk, (Hq, Q, D) = keys.shape[0], query.shape
    if window is not None:
        # The first query attends furthest back, and so keys before its window are never read.
        keys, values = keys[:, -(window + Q - 1) :], values[:, -(window + Q - 1) :]
    if softcap is None and sink_logits is None:
        if window is None and takes_chunk(query, keys, values):
            return chunk_causal(query, keys, values, softmax_scale)
        # Imported late, because this import loads torch's compiler in 0.7 s, and `--help` imports this file.
        from torch.nn.attention.bias import causal_lower_right

        # With a tensor as the mask, torch cannot use its flash kernels on a GPU. With `causal_lower_right` it can.
        mask = causal_mask(Q, keys.shape[1], window, query.device) if window else causal_lower_right(Q, keys.shape[1])
        return scaled_dot_product_attention(
            query[None], keys[None], values[None], attn_mask=mask, scale=softmax_scale, enable_gqa=Hq != Hk
        )[0]
    mask = causal_mask(Q, keys.shape[1], window, query.device)
    sinks = None if sink_logits is None else sink_logits.view(Hk, Hq // Hk)
    grouped = query.view(Hk, Hq // Hk, Q, D)
    return attend(grouped, [Segment(keys, values, mask)], softmax_scale, softcap, sinks).view(Hq, Q, -1)


@dataclass(frozen=True)
class OwnRows:
    """Keys and values [S, Hk, T, D] of S sequences, and the rows that each of B tokens attends to.

    The rows of a head are contiguous. `slots` [B] int64 is the index of each token's sequence. A token attends to rows
    of its own sequence, from `first` [B] int64 up to, but not including, `used` [B] int64.
    """

    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor
    first: torch.Tensor
    used: torch.Tensor

    @property
    def seen(self) -> torch.Tensor:
        """Mask [B, T] bool of the rows that each token attends to."""
        rows = torch.arange(self.keys.shape[2], device=self.used.device)
        return (rows >= self.first[:, None]) & (rows < self.used[:, None])


def of_last(keys: torch.Tensor, values: torch.Tensor, tokens: int) -> OwnRows:
    """Wrap one sequence's keys and values [Hk, T, D] and its last `tokens` tokens as `OwnRows`.

    Each token attends to itself and to all tokens before it.
    """
    used = torch.arange(keys.shape[1] - tokens, keys.shape[1], device=keys.device) + 1
    nothing = torch.zeros_like(used)
    return OwnRows(keys[None], values[None], nothing, nothing, used)


def own_logits(query: torch.Tensor, own: OwnRows, softmax_scale: float, softcap: float | None) -> torch.Tensor:
    """Compute the logits [Hk, G, B, T] float32 of B tokens' queries [Hk, G, B, D] for the rows of their sequences.

    Logits of rows that a token does not attend to are minus infinity. Copies a sequence's keys for each of its tokens.
    """
    Hk, G, B, _ = query.shape
    each = query.permute(2, 0, 1, 3).flatten(0, 1)[:, :, None]
    logits = attention_logits(each, own.keys[own.slots].flatten(0, 1), softmax_scale, softcap)
    seen = own.seen[:, None, None].expand(-1, Hk, G, -1)
    return logits.view(B, Hk, G, -1).masked_fill(~seen, -torch.inf).permute(1, 2, 0, 3)


def shared_attention(
    query: torch.Tensor,
    shared: Sequence[Segment],
    own: OwnRows,
    softmax_scale: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with each query to the shared segments and to the rows of its own sequence, in one float32 softmax.

    Args:
        query: [Hk, G, B, D].
        shared: segments whose masks and biases broadcast to [Hk, G, B, T].
        sink_logits: [Hk, G] learned logits without values (GPT-OSS).

    Returns:
        [Hk, G, B, D] in the query's dtype. Allocates the logits three times, and copies a sequence's keys and values
        for each of its tokens.
    """
    logits = [*segment_logits(query, shared, softmax_scale, softcap), own_logits(query, own, softmax_scale, softcap)]
    if sink_logits is not None:
        logits.append(sink_logits.float()[:, :, None, None].expand(*query.shape[:3], 1))
    weights = torch.cat(logits, -1).softmax(-1).to(query.dtype)
    sizes = [sum(part.shape[-1] for part in logits[: len(shared)]), own.keys.shape[2]]
    everyones, each = weights[..., : sizes[0]], weights[..., sizes[0] : sum(sizes)]
    output = weigh(everyones.flatten(1, 2), [segment.values for segment in shared]).view(*query.shape[:3], -1)
    return output + torch.einsum("hgbt,bhtd->hgbd", each, own.values[own.slots].to(query.dtype))


@on_gpu("sparsekv.kernels.attention.chunk_rows_triton:chunk_rows_triton")
def chunk_rows(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, chosen: torch.Tensor, *, padded: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return copies of the chosen rows of keys and values, followed by the last B rows, those of a chunk of B tokens.

    On a GPU this is one kernel.

    Args:
        query: [Hq, B, D], the chunk's queries.
        keys, values: [Hk, T, D].
        chosen: [Hk, K] int64, indices of the chosen rows of each head, all before the chunk.
        padded: prepend K uninitialised queries, one for each chosen row.

    Returns:
        queries [Hq, K + B, D] if padded, else `query` itself; copies of keys and values [Hk, K + B, D].
    """
    places, chunk = chosen[..., None].expand(-1, -1, keys.shape[2]), query.shape[1]
    of_keys, of_values = (torch.cat([rows.gather(1, places), rows[:, -chunk:]], 1) for rows in (keys, values))
    anything = query.new_empty(len(query), chosen.shape[1], query.shape[2])
    return torch.cat([anything, query], 1) if padded else query, of_keys, of_values


def spaced_places(total: int, count: int) -> torch.Tensor:
    """Return `count` evenly spaced int64 indices below `total`, including the last; all indices if `total` is less."""
    count = min(count, total)
    return torch.arange(1, count + 1) * total // count - 1


def sampled_attention(
    query: torch.Tensor, keys: torch.Tensor, softmax_scale: float, softcap: float | None = None
) -> torch.Tensor:
    """Compute each key's attention probability, averaged over the queries and over the query heads of its KV head.

    The softmax is over the T keys alone, without a causal mask.

    Args:
        query: [Hk, G, Q, D].
        keys: [Hk, T, D].

    Returns:
        [Hk, T] float32. Allocates the logits [Hk, G, Q, T] float32, twice.
    """
    return attention_logits(query, keys, softmax_scale, softcap).softmax(-1).mean((1, 2))


def chunk_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    chosen: torch.Tensor,
    softmax_scale: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with a chunk's queries to chosen earlier keys and, causally, to the chunk itself.

    The chunk's keys are the last B of the T keys. On a GPU, `padded_attention` computes this for half precision without
    soft cap or sink logits, if K is at most B.

    Args:
        query: [Hq, B, D].
        keys, values: [Hk, T, D].
        chosen: [Hk, K] int64, indices of the chosen keys of each head, all before the chunk.
        sink_logits: [Hq] learned logits that take part in the softmax and have no value row.

    Returns:
        [Hq, B, D]. Copies the attended rows.
    """
    plain = softcap is None and sink_logits is None
    if query.is_cuda and query.dtype != torch.float32 and plain and chosen.shape[1] <= query.shape[1]:
        return padded_attention(query, keys, values, chosen, softmax_scale)
    query, keys, values = chunk_rows(query, keys, values, chosen)
    return causal_attention(query, keys, values, softmax_scale, softcap, sink_logits=sink_logits)


def padded_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, chosen: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    """Compute `chunk_attention` with dummy queries in front, so that the mask is square and causal.

    There is one dummy query for each chosen key. cuDNN's kernel is the fastest that torch has on Hopper, but supports
    only square causal masks. This kernel saves more time than the dummy queries cost. The attended rows and the queries
    are copied.
    """
    query, keys, values = chunk_rows(query, keys, values, chosen, padded=True)
    output = scaled_dot_product_attention(
        query[None], keys[None], values[None], is_causal=True, scale=softmax_scale, enable_gqa=len(query) != len(keys)
    )
    return output[0, :, chosen.shape[1] :]
