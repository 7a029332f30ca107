"""Compare quantisations of keys and values to 8 bits, by the output error of dense attention.

    python docs/benchmarks/storing_forms.py topics.skv

The index must store unquantised keys and values. For each quantisation of keys, of values and of both, a row is
printed: the output error of dense attention for the tail's queries, as the mean over layers, and that of the worst
layer.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch

from sparsekv.formats.index.reader import Artifact
from sparsekv.kernels.attention.attention import Segment, attend, causal_mask

Form = Callable[[torch.Tensor], torch.Tensor]
LARGEST = {"int8": 127.0, "float8_e4m3": 448.0}


def stored(rows: torch.Tensor, dtype: str, tokens: int, channels: int, *, offsets: bool) -> torch.Tensor:
    """Quantise rows [Hk, N, D] to 8 bits and dequantise them, with a bfloat16 scale for each block.

    A block has `tokens` tokens and `channels` channels. With `offsets`, the middle of a block's range is subtracted
    first.
    """
    filling = rows[:, -1:].expand(-1, -rows.shape[1] % tokens, -1)
    blocks = torch.cat([rows, filling], 1).float().unflatten(1, (-1, tokens)).unflatten(3, (-1, channels))
    middle = (blocks.amin((2, 4), keepdim=True) + blocks.amax((2, 4), keepdim=True)) / 2 * offsets
    middle = middle.bfloat16().float()
    scales = ((blocks - middle).abs().amax((2, 4), keepdim=True) / LARGEST[dtype]).bfloat16().float()
    numbers = ((blocks - middle) / torch.where(scales == 0, 1.0, scales)).clamp(-LARGEST[dtype], LARGEST[dtype])
    numbers = numbers.round() if dtype == "int8" else numbers.to(torch.float8_e4m3fn).float()
    return (numbers * scales + middle).flatten(3, 4).flatten(1, 2)[:, : rows.shape[1]]


def in_channels(rows: torch.Tensor, dtype: str, exponent: float) -> torch.Tensor:
    """Quantise rows [Hk, N, D] to 8 bits and dequantise them, with a scale for each token.

    Before, each channel is shifted by the middle of its range, and divided by a power of half the range.
    """
    low, high = rows.float().aminmax(dim=1, keepdim=True)
    middle = ((low + high) / 2).bfloat16().float()
    scales = (torch.maximum(high - middle, middle - low) ** exponent).bfloat16().float()
    normalised = (rows.float() - middle) / torch.where(scales == 0, 1.0, scales)
    return stored(normalised, dtype, 1, rows.shape[2], offsets=False) * scales + middle


def forms(channels: int) -> dict[str, tuple[Form, Form]]:
    """Return pairs of functions that quantise and dequantise keys and values, by the name of the quantisation."""

    def same(rows: torch.Tensor) -> torch.Tensor:
        return rows

    def form(dtype: str, tokens: int, group: int, *, offsets: bool = False) -> Form:
        return lambda rows: stored(rows, dtype, tokens, group, offsets=offsets)

    def shared(dtype: str, exponent: float) -> Form:
        return lambda rows: in_channels(rows, dtype, exponent)

    found: dict[str, tuple[Form, Form]] = {"bfloat16, both": (torch.Tensor.bfloat16, torch.Tensor.bfloat16)}
    for dtype in LARGEST:
        keys, values = form(dtype, 64, 1, offsets=True), form(dtype, 1, channels)
        found |= {
            f"{dtype}, keys: a token": (form(dtype, 1, channels), same),
            f"{dtype}, keys: a channel of 64 tokens": (form(dtype, 64, 1), same),
            f"{dtype}, keys: the same with offsets": (keys, same),
            f"{dtype}, keys: of 256 tokens with offsets": (form(dtype, 256, 1, offsets=True), same),
            f"{dtype}, keys: a token, in channels of one scale, exponent 0.5": (shared(dtype, 0.5), same),
            f"{dtype}, keys: the same with exponent 0.75": (shared(dtype, 0.75), same),
            f"{dtype}, keys: the same with exponent 1": (shared(dtype, 1.0), same),
            f"{dtype}, values: a token": (same, values),
            f"{dtype}, values: 32 channels of a token": (same, form(dtype, 1, 32)),
            f"{dtype}, values: a channel of 64 tokens": (same, form(dtype, 64, 1)),
            f"{dtype}, both: keys of 64 tokens with offsets, values of a token": (keys, values),
            f"{dtype}, both: keys in channels, exponent 0.75, values of a token": (shared(dtype, 0.75), values),
        }
    return found


@torch.inference_mode()
def errors(artifact: Artifact, layer: int, kinds: dict[str, tuple[Form, Form]]) -> dict[str, float]:
    """Compute the output error of each quantisation in one layer."""
    facts, (keys, values) = artifact.manifest.layers[layer], artifact.context(layer)
    tail = artifact.queries(layer)["tail"]
    mask = causal_mask(tail.shape[1], keys.shape[1], facts.sliding_window, tail.device)

    def output(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        query = tail.float().unflatten(0, (len(keys), -1))
        return attend(query, [Segment(keys.float(), values.float(), mask)], facts.softmax_scale, facts.softcap)

    exact = output(keys, values)
    return {
        name: float(((output(of_keys(keys), of_values(values)) - exact).norm(dim=-1) / exact.norm(dim=-1)).mean())
        for name, (of_keys, of_values) in kinds.items()
    }


def main() -> None:
    artifact = Artifact(Path(sys.argv[1]))
    kinds = forms(artifact.context_rows(0).shape[2])
    found = [errors(artifact, layer, kinds) for layer in artifact.manifest.indexed_layers]
    for name in kinds:
        of_layers = [layer[name] for layer in found]
        print(f"{name:70} {sum(of_layers) / len(of_layers):.4f} {max(of_layers):.4f}")


if __name__ == "__main__":
    main()
