"""Exact attention over several segments of keys and values as one softmax, for one sequence, a batch or a prefill
chunk."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from sparsekv.kernels.attention.types import ScoredCentroids
from sparsekv.kernels.scores.logits import attention_logits, softmax_with_logsumexp


def takes_chunk(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether `chunk_causal` computes these: torch's kernel does not look whether it can."""
    rows = query, keys, values
    alike = query.shape[-1] == values.shape[-1] and query.dtype != torch.float64
    return alike and all(one.device.type == "cpu" and one.stride(-1) == 1 for one in rows)


def chunk_causal(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, softmax_scale: float) -> torch.Tensor:
    """Causal attention of queries at the last positions of the keys, in three quarters of the time that torch's takes
    with a mask.

    Torch's kernel without a mask reads none for each head, and the queries of all heads that share keys are rows of one
    product. The softmax is that of the two parts, joined by their log-sum-exps, which torch gives below its public
    function alone.

    Args:
        query: [Hq, Q, D]; keys, values: [Hk, T, D] of its dtype, T at least Q, as `takes_chunk` allows.

    Returns:
        [Hq, Q, D]. Allocates the outputs twice, and the chunk's own keys and values once for each query head.
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
    """Keys and values [Hk, T, D] of some of the rows that a query attends to.

    `mask` broadcasts to [Hk, G, Q, T] and is True where a row is attended; None attends to all rows. Masked keys may
    hold anything; masked values must be finite, because they are multiplied by a weight of 0. `bias` broadcasts like
    the mask and is added to the logits; it is the logarithm of how many tokens a row represents. Keys and values may
    have another dtype than the query: centroids have the index's dtype, not the model's.
    """

    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor | None = None
    bias: torch.Tensor | None = None


def causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Causal mask [queries, keys] bool of queries at the last positions of the keys; a window includes the query."""
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
    """Attention of grouped queries over all segments together, softmax in float32.

    Args:
        query: [Hk, G, Q, D].
        sink_logits: [Hk, G] learned logits that take part in the softmax and carry no value (GPT-OSS).

    Returns:
        [Hk, G, Q, D] in the query's dtype. Allocates the logits [Hk, G, Q, sum of T] float32 twice.
    """
    return attend_with_weights(query, segments, softmax_scale, softcap, sink_logits).output


def attend_with_logsumexp(
    query: torch.Tensor,
    segments: Sequence[Segment],
    softmax_scale: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of `attend` with the log-sum-exp [Hk, G, Q] float32 of all its logits, sinks included."""
    logits = _logits(query, segments, softmax_scale, softcap, sink_logits)
    weights, total = softmax_with_logsumexp(torch.cat(logits, -1))
    return _output(weights, segments, query), total


@dataclass(frozen=True)
class Weighed:
    """Attention output [Hk, G, Q, D], and the weights [Hk, G, Q, sum of T] float32 that gave it: of each segment's rows
    in turn, then of the learned sink logits, if there are any; of one query without Q."""

    output: torch.Tensor
    weights: torch.Tensor


def attend_with_weights(
    query: torch.Tensor,
    segments: Sequence[Segment],
    softmax_scale: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> Weighed:
    """The output of `attend` with the weights of all that is attended."""
    logits = _logits(query, segments, softmax_scale, softcap, sink_logits)
    weights = torch.cat(logits, -1).softmax(-1)
    return Weighed(_output(weights, segments, query), weights)


def segment_logits(
    query: torch.Tensor, segments: Sequence[Segment], softmax_scale: float, softcap: float | None
) -> list[torch.Tensor]:
    """Logits [Hk, G, Q, T] float32 of queries [Hk, G, Q, D] on each segment, with its bias and its mask."""
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
    """Attention's output [Hk, G, Q, D] of weights [Hk, G, Q, sum of T]."""
    Hk, G, Q, _ = query.shape
    rows = weights.to(query.dtype).view(Hk, G * Q, weights.shape[3])
    return weigh(rows, [segment.values for segment in segments]).view(Hk, G, Q, -1)


def weigh(weights: torch.Tensor, values: Sequence[torch.Tensor]) -> torch.Tensor:
    """[Hk, R, D]: values [Hk, T, D] of all segments, summed by weights [Hk, R, sum of T]; weights of sink logits come
    last, without values."""
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
    """`attend` for one query on a CPU, in few torch operations: with cold caches their number decides the time.

    Args:
        query: [Hk, G, D].
        rows: keys and values [Hk, T, D] of segments without mask or bias.
        centroids: centroids with their logits, attended in the same softmax.
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
    """The output of `attend_once` with the weights of all that is attended."""
    wide = query.float()
    # beta=0 ignores this argument whatever it holds; baddbmm is used because it scales the product as well.
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
    """Dense causal attention of queries at the last positions of the keys, by the fastest kernel that computes it.

    Args:
        query: [Hq, Q, D].
        keys, values: [Hk, T, D].
        sink_logits: [Hq].

    Returns:
        [Hq, Q, D].
    """
    Hk, (Hq, Q, D) = keys.shape[0], query.shape
    if window is not None:
        # The first query sees furthest back: nothing before its window is read.
        keys, values = keys[:, -(window + Q - 1) :], values[:, -(window + Q - 1) :]
    if softcap is None and sink_logits is None:
        if window is None and takes_chunk(query, keys, values):
            return chunk_causal(query, keys, values, softmax_scale)
        # Here, because it brings torch's compiler, 0.7 s, and `--help` imports this file.
        from torch.nn.attention.bias import causal_lower_right

        # A tensor as mask rules out torch's flash kernels on a GPU; `causal_lower_right` does not.
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
    """Keys and values [S, Hk, T, D] of S sequences, a head's rows contiguous; and T' tokens that attend to them: the
    sequence `slots` [T'] int64 of each, and the rows that it sees, from first [T'] up to used [T'] int64."""

    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor
    first: torch.Tensor
    used: torch.Tensor

    @property
    def seen(self) -> torch.Tensor:
        """[T', T] bool."""
        rows = torch.arange(self.keys.shape[2], device=self.used.device)
        return (rows >= self.first[:, None]) & (rows < self.used[:, None])


def of_last(keys: torch.Tensor, values: torch.Tensor, tokens: int) -> OwnRows:
    """One sequence's keys and values [Hk, T, D], and its last tokens, each of which sees itself and all before it."""
    used = torch.arange(keys.shape[1] - tokens, keys.shape[1], device=keys.device) + 1
    nothing = torch.zeros_like(used)
    return OwnRows(keys[None], values[None], nothing, nothing, used)


def own_logits(query: torch.Tensor, own: OwnRows, softmax_scale: float, softcap: float | None) -> torch.Tensor:
    """Logits [Hk, G, B, T] float32 of each token's query [Hk, G, B, D] on its own rows; -inf for the others.

    Copies the rows.
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
    """One softmax for each query, over the shared segments and the rows of its own sequence, in float32.

    Args:
        query: [Hk, G, B, D].
        shared: their masks and biases broadcast to [Hk, G, B, T].
        sink_logits: [Hk, G] learned logits without values (GPT-OSS).

    Returns:
        [Hk, G, B, D] in the query's dtype. Allocates the logits twice.
    """
    logits = [*segment_logits(query, shared, softmax_scale, softcap), own_logits(query, own, softmax_scale, softcap)]
    if sink_logits is not None:
        logits.append(sink_logits.float()[:, :, None, None].expand(*query.shape[:3], 1))
    weights = torch.cat(logits, -1).softmax(-1).to(query.dtype)
    sizes = [sum(part.shape[-1] for part in logits[: len(shared)]), own.keys.shape[2]]
    everyones, each = weights[..., : sizes[0]], weights[..., sizes[0] : sum(sizes)]
    output = weigh(everyones.flatten(1, 2), [segment.values for segment in shared]).view(*query.shape[:3], -1)
    return output + torch.einsum("hgbt,bhtd->hgbd", each, own.values[own.slots].to(query.dtype))
