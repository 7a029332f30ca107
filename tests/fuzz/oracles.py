"""Oracles that share no code of ours: transformers with its own attention, over tokens or over rows of a file."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import DynamicCache, PreTrainedModel

from .models import EAGER_ONLY, WITH_STATES
from .world import Rows, World

ROUNDING = 2e-4
"""The largest relative error of logits, and of keys and values, in float32."""


class Wrong(AssertionError):
    """What the fuzzer looks for: two things that must agree do not. `kind` stays the same while a case is shrunk."""

    def __init__(self, kind: str, told: str):
        super().__init__(f"{kind}: {told}")
        self.kind = kind


def expect(right: bool, kind: str, told: str) -> None:
    """Raise Wrong where something is not right."""
    if not right:
        raise Wrong(kind, told)


def error_of(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """|actual - expected| / |expected|; infinite where the sizes differ, or `actual` is not finite."""
    if actual.shape != expected.shape:
        return float("inf")
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    if not bool(actual.isfinite().all()):
        return float("inf")
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))


@contextmanager
def own_attention(model: PreTrainedModel, family: str) -> Iterator[None]:
    """Within the context the model attends as transformers does without us.

    On a GPU eagerly: with a mask, in float32, one KV head and lengths such as 129 and 321 torch 2.11's own attention is
    wrong there by a tenth.
    """
    before, eager = model.config._attn_implementation, family in EAGER_ONLY or model.device.type != "cpu"
    model.set_attn_implementation("eager" if eager else "sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@torch.inference_mode()
def plain(world: World, ids: torch.Tensor) -> tuple[torch.Tensor, Rows]:
    """Logits [N, vocabulary] and each layer's keys and values of one plain pass over token ids [N]."""
    cache = _cache(world)
    with own_attention(world.model, world.case.family):
        logits = world.model(input_ids=ids[None].to(world.model.device), past_key_values=cache, use_cache=True).logits
    rows = {number: layer for number, layer in enumerate(cache.layers) if getattr(layer, "keys", None) is not None}
    return logits[0], {number: (layer.keys[0], layer.values[0]) for number, layer in rows.items()}


def _cache(world: World) -> DynamicCache:
    """transformers' cache; of a model whose layers do not all attend, one that keeps states."""
    return DynamicCache(config=world.model.config) if world.case.family in WITH_STATES else DynamicCache()


@torch.inference_mode()
def plain_over(world: World, rows: Rows, before: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Logits [T, vocabulary] of one plain pass over token ids [T] that follow rows [Hk, N, D] of the tokens `before`.

    States are those after a plain pass over these tokens.
    """
    device, cache, stored = world.model.device, _cache(world), len(before)
    if world.case.family in WITH_STATES:
        with own_attention(world.model, world.case.family):
            world.model(input_ids=before[None].to(device), past_key_values=cache, use_cache=True)
        for number, (keys, values) in rows.items():
            cache.layers[number].keys, cache.layers[number].values = keys[None].to(device), values[None].to(device)
    else:
        for number, (keys, values) in rows.items():
            cache.update(keys[None].to(device), values[None].to(device), number)
    places = torch.arange(stored, stored + len(ids), device=device)[None]
    with own_attention(world.model, world.case.family):
        output = world.model(input_ids=ids[None].to(device), position_ids=places, past_key_values=cache, use_cache=True)
    return output.logits[0]


def expect_greedy(logits: torch.Tensor, answer: list[int], kind: str, told: str) -> None:
    """Each token of an answer is the likeliest by an oracle's logits [A, vocabulary], or apart by rounding alone."""
    expect(bool(answer), kind, f"{told}: no answer")
    size = float(logits.abs().max())
    for step, (token, row) in enumerate(zip(answer, logits, strict=True)):
        apart = float(row.max() - row[token])
        if apart > 10 * ROUNDING * size:
            raise Wrong(
                kind, f"{told}: token {step} of {answer} is {apart:.3g} below the likeliest {int(row.argmax())}"
            )
