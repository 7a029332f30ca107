"""Oracles that share no code of ours: transformers with its own attention, over tokens or over rows of a file."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .models import EAGER_ONLY, WITH_STATES
from .world import Rows, World

ROUNDING = 2e-4
"""Largest relative error of logits, and of keys and values, in float32."""


class Wrong(AssertionError):
    """A disagreement of two results that must agree. `kind` stays the same while a case is simplified."""

    def __init__(self, kind: str, told: str):
        super().__init__(f"{kind}: {told}")
        self.kind = kind


def expect(right: bool, kind: str, told: str) -> None:
    """Raise Wrong, with the kind of failure and the text `told`, unless `right`."""
    if not right:
        raise Wrong(kind, told)


def error_of(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return |actual - expected| / |expected|; infinite if the sizes differ, or if `actual` is not finite."""
    if actual.shape != expected.shape:
        return float("inf")
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    if not bool(actual.isfinite().all()):
        return float("inf")
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))


@contextmanager
def own_attention(model: PreTrainedModel, family: str) -> Iterator[None]:
    """Within the context, the model attends as transformers does without sparsekv.

    On a GPU the attention is eager: torch 2.11's own attention is wrong there by a tenth, with a mask, in float32, for
    one KV head and lengths such as 129 and 321.
    """
    before, eager = model.config._attn_implementation, family in EAGER_ONLY or model.device.type != "cpu"
    model.set_attn_implementation("eager" if eager else "sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


Pairs = Callable[[int, torch.Tensor, torch.Tensor, Any], tuple[torch.Tensor, torch.Tensor, Any]]
"""Function that returns the keys, values and mask with which a layer attends, from its number, keys, values and
mask."""
_pairs: list[tuple[str, Pairs]] = []
"""The implementation that attends, and its function of pairs."""


def _attend(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **more: Any
) -> Any:
    (name, pairs), eager = _pairs[-1], vars(sys.modules[type(module).__module__]).get("eager_attention_forward")
    key, value, mask = pairs(module.layer_idx, key, value, mask)  # type: ignore[arg-type]
    return ALL_ATTENTION_FUNCTIONS.get(name, eager)(module, query, key, value, mask, **more)


AttentionInterface.register("fuzz-oracle", _attend)
AttentionMaskInterface.register(
    "fuzz-oracle", lambda *given, **more: ALL_MASK_ATTENTION_FUNCTIONS[_pairs[-1][0]](*given, **more)
)


@contextmanager
def _attending_to(world: World, pairs: Pairs) -> Iterator[None]:
    """Within the context, the model attends by transformers' functions to the keys and values that `pairs` returns."""
    with own_attention(world.model, world.case.family):
        _pairs.append((world.model.config._attn_implementation, pairs))
        world.model.set_attn_implementation("fuzz-oracle")
        try:
            yield
        finally:
            _pairs.pop()


class Counting(DynamicLayer):
    """A cache layer without rows, which knows the number of the tokens before."""

    def __init__(self, before: int):
        super().__init__()
        self.before = before

    def update(self, key_states: Any, value_states: Any, *more: Any, **named: Any) -> Any:
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.before

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return self.before + int(query_length), 0


@torch.inference_mode()
def plain(world: World, ids: torch.Tensor) -> tuple[torch.Tensor, Rows]:
    """Return the logits [N, vocabulary] of one plain pass over token ids [N], and the rows that each layer attends to.

    Values with fewer channels than keys are padded with zeros.
    """
    found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def record(layer: int, keys: torch.Tensor, values: torch.Tensor, mask: Any) -> Any:
        found[layer] = keys[0], torch.nn.functional.pad(values[0], (0, keys.shape[-1] - values.shape[-1]))
        return keys, values, mask

    with _attending_to(world, record):
        logits = world.model(input_ids=ids[None].to(world.model.device), use_cache=False).logits
    return logits[0], found


@dataclass(frozen=True)
class Seen:
    """A mask [Hq, T, N + T + C] of the rows that T tokens attend to over N stored rows in a layer.

    `further` has C more keys and values [Hk, C, D], which follow all other rows; it is empty if C is 0.
    """

    mask: torch.Tensor
    further: tuple[torch.Tensor, ...]


@torch.inference_mode()
def plain_over(
    world: World,
    rows: Rows,
    before: torch.Tensor,
    ids: torch.Tensor,
    hidden: dict[int, torch.Tensor] | None = None,
    seen: dict[int, Seen] | None = None,
) -> torch.Tensor:
    """Return the logits [T, vocabulary] of one plain pass over token ids [T] that follow rows [Hk, N, D] of `before`.

    States are those after a plain pass over the tokens `before`.

    Args:
        hidden: by layer, [N] bool, the rows that the layer does not attend to.
        seen: by layer, what it attends to instead of all that is before a token.
    """
    device, stored = world.model.device, len(before)

    def behind(layer: int, keys: torch.Tensor, values: torch.Tensor, mask: Any) -> Any:
        if world.case.family not in WITH_STATES:  # with states, the cache already has the rows
            earlier = (
                given[None, ..., : own.shape[-1]].to(own)
                for given, own in zip(rows[layer], (keys, values), strict=True)
            )
            keys, values = (torch.cat(pair, 2) for pair in zip(earlier, (keys, values), strict=True))
        if seen is not None and layer in seen:
            if further := seen[layer].further:
                more = (
                    given[None, ..., : own.shape[-1]].to(own)
                    for given, own in zip(further, (keys, values), strict=True)
                )
                keys, values = (torch.cat(pair, 2) for pair in zip((keys, values), more, strict=True))
            return keys, values, seen[layer].mask[None].to(keys)
        if hidden is None or layer not in hidden:
            return keys, values, mask
        shown = torch.cat([~hidden[layer], torch.ones(keys.shape[2] - stored, dtype=torch.bool)]).to(device)
        return keys[:, :, shown], values[:, :, shown], None if mask is None else mask[..., shown]

    places = torch.arange(stored, stored + len(ids), device=device)[None]
    if world.case.family in WITH_STATES:
        cache: Cache = DynamicCache(config=world.model.config)
        with own_attention(world.model, world.case.family):
            world.model(input_ids=before[None].to(device), past_key_values=cache, use_cache=True)
        for number, (keys, values) in rows.items():
            cache.layers[number].keys, cache.layers[number].values = keys[None].to(device), values[None].to(device)
    else:
        cache = Cache(layers=[Counting(stored) for _ in rows])
    with _attending_to(world, behind):
        output = world.model(input_ids=ids[None].to(device), position_ids=places, past_key_values=cache, use_cache=True)
    return output.logits[0]


def expect_greedy(logits: torch.Tensor, answer: list[int], kind: str, told: str) -> None:
    """Check that each token of an answer is the likeliest by an oracle's logits [A, vocabulary], up to rounding."""
    expect(bool(answer), kind, f"{told}: no answer")
    size = float(logits.abs().max())
    for step, (token, row) in enumerate(zip(answer, logits, strict=True)):
        apart = float(row.max() - row[token])
        if apart > 10 * ROUNDING * size:
            raise Wrong(
                kind, f"{told}: token {step} of {answer} is {apart:.3g} below the likeliest {int(row.argmax())}"
            )
