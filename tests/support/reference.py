"""Attention by its definition in float64, and the comparison of tensors with it that all tests use."""

import torch


def random_attention(
    *, Hk: int = 2, G: int = 3, Q: int = 4, T: int = 50, D: int = 64, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a query [Hk, G, Q, D], and keys and values [Hk, T, D].

    With a scale of D ** -0.5 the logits have a standard deviation of 4.
    """
    generator = torch.Generator().manual_seed(seed)
    query, keys, values = (torch.randn(shape, generator=generator) for shape in ((Hk, G, Q, D), (Hk, T, D), (Hk, T, D)))
    return (2 * query).to(dtype), (2 * keys).to(dtype), values.to(dtype)


def attention_probabilities(
    query: torch.Tensor,
    keys: torch.Tensor,
    softmax_scale: float,
    *,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the softmax of grouped queries over keys.

    Args:
        query: [Hk, G, Q, D].
        keys: [Hk, T, D].
        mask: True where attended, broadcasts to [Hk, G, Q, T].
        sink_logits: [Hk, G], part of the softmax only.

    Returns:
        [Hk, G, Q, T] float64.
    """
    logits = torch.einsum("hgqd,htd->hgqt", query.double(), keys.double()) * softmax_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    if sink_logits is not None:
        sinks = sink_logits.double()[:, :, None, None].expand(*logits.shape[:3], 1)
        return torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]
    return logits.softmax(-1)


def reference_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    softmax_scale: float,
    *,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute dense attention [Hk, G, Q, D] float64 of grouped queries [Hk, G, Q, D] to keys and values [Hk, T, D]."""
    weights = attention_probabilities(query, keys, softmax_scale, mask=mask, softcap=softcap, sink_logits=sink_logits)
    return torch.einsum("hgqt,htd->hgqd", weights, values.double())


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Compute ‖actual - expected‖ / ‖expected‖ over all entries, in float64; infinite where `actual` is not finite."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    actual, expected = actual.detach().double(), expected.detach().double()
    if not bool(torch.isfinite(actual).all()):
        return float("inf")
    return float((actual - expected).norm() / expected.norm().clamp(min=torch.finfo(torch.float64).tiny))


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Fail unless the relative error is at most `tolerance`."""
    error = relative_error(actual, expected)
    assert error <= tolerance, (
        f"relative error {error:.2e} is above {tolerance:.0e} "
        f"(largest entry {float(expected.double().abs().max()):.3g}, "
        f"largest difference {float((actual.double() - expected.double()).abs().max()):.3g})"
    )
