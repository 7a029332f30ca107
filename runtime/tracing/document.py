"""A trace as a JSON object: what each token of an answer attended to, by layer and KV head."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from sparsekv.runtime.tracing.recorder import MEASURES, Largest, LayerRecorder, largest_passages

MOST_PASSAGES = 64  # that a mean lists
SHARES = ("exact", "chosen", "stood_for", "missed")
LEAST = 1e-4
"""The smallest share that is listed."""


def recorded(
    layers: Mapping[int, LayerRecorder], by_token: list[Largest], first_token: int, *, truth: bool
) -> dict[str, Any]:
    """The means and the records of layers, by their numbers; docs/how-to/trace.md says what each key holds.

    Args:
        by_token: the passages of each answer token, means over layers and KV heads.
        first_token: position of the middle's first token.
        truth: shares are dense attention's, so that something can be missed.
    """
    totals = torch.stack([torch.stack([one.totals for one in layer.records]) for layer in layers.values()])
    measures = torch.stack([torch.stack([one.measures for one in layer.records]) for layer in layers.values()])
    # The first token's step is the question's last, whose choice many tokens share; a step of its own has no question.
    measures = measures[:, 1:] if measures.shape[1] > 1 else measures
    totals, measures = totals.double().cpu(), measures.mean(1).cpu()  # [L, T, 4, Hk] and [L, 4, Hk]
    heads = [(number, layer, head) for number, layer in enumerate(layers) for head in range(totals.shape[3])]
    of_head = {layer: _listed(largest_passages(one.mean(), MOST_PASSAGES)) for layer, one in layers.items()}
    means = totals.mean(1)
    return {
        "measures": _measures(measures.mean((0, 2))),
        "by_head_measures": [
            {"layer": layer, "kv_head": head, **_measures(measures[number, :, head])} for number, layer, head in heads
        ],
        "by_token": [
            _shares(of_token, *_listed(passages), truth=truth)
            for of_token, passages in zip(totals.mean((0, 3)), by_token, strict=True)
        ],
        "by_head": [
            {"layer": layer, "kv_head": head, **_shares(means[number, :, head], of_head[layer][head], truth=truth)}
            for number, layer, head in heads
        ],
        "records": list(_records(layers, totals, first_token, truth=truth)),
    }


def _records(
    layers: Mapping[int, LayerRecorder], totals: torch.Tensor, first_token: int, *, truth: bool
) -> Iterator[dict[str, Any]]:
    """By answer token, layer and KV head."""
    for token in range(totals.shape[1]):
        for number, (layer, recorder) in enumerate(layers.items()):
            record = recorder.records[token]
            passages = _listed(record.passages)
            chosen, missed = (_listed(one, first_token) for one in (record.chosen, record.missed))
            for head, of_head in enumerate(totals[number, token].T):
                yield {
                    "token": token,
                    "layer": layer,
                    "kv_head": head,
                    **_shares(of_head, passages[head], truth=truth),
                    "chosen_tokens": chosen[head],
                    "missed_tokens": missed[head],
                }


def _shares(totals: torch.Tensor, passages: list[list[float]], *, truth: bool) -> dict[str, Any]:
    """Of totals [4]: exact, chosen, stood for, missed."""
    shares = dict(zip(SHARES, totals.tolist(), strict=True))
    return {**shares, "missed": shares["missed"] if truth else None, "passages": passages}


def _measures(means: torch.Tensor) -> dict[str, float | None]:
    known = zip(MEASURES, means.tolist(), strict=True)
    return {name: None if math.isnan(value) else value for name, value in known}


def _listed(largest: Largest, first: int = 0) -> list[list[list[float]]]:
    """For each KV head its places, counted from `first`, each with its shares, in 4 significant digits."""
    places = largest.places
    shares = largest.shares.view(-1, *places.shape).permute(1, 2, 0)
    return [
        [
            [first + place, *(float(f"{share:.4g}") for share in of_place)]
            for place, of_place in zip(*of_head, strict=True)
            if sum(of_place) >= LEAST
        ]
        for of_head in zip(places.tolist(), shares.tolist(), strict=True)
    ]
