"""A trace as a JSON object: what each token of an answer attended to, by layer and KV head."""

import gc
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from sparsekv.runtime.tracing.recorder import MEASURES, Largest, LayerRecorder, largest_passages

MOST_PASSAGES = 64  # that a mean lists
SHARES = ("exact", "chosen", "stood_for", "missed")
LEAST = 1e-4
"""The smallest share that is listed."""


def recorded(layers: Mapping[int, LayerRecorder], by_token: list[Largest], first_token: int) -> dict[str, Any]:
    """The means and the records of layers, by their numbers; docs/how-to/trace.md says what each key holds.

    Args:
        by_token: the passages of each answer token, means over layers and KV heads.
        first_token: position of the middle's first token.
    """
    totals = torch.stack([torch.stack([one.totals for one in layer.records]) for layer in layers.values()])
    measures = torch.stack([torch.stack([one.measures for one in layer.records]) for layer in layers.values()])
    # The first token's step is the question's last, whose choice many tokens share; a step of its own has no question.
    measures = measures[:, 1:] if measures.shape[1] > 1 else measures
    totals, measures = totals.double().cpu(), measures.mean(1).cpu()  # [L, T, 3 or 4, Hk] and [L, 4, Hk]
    heads = [(number, layer, head) for number, layer in enumerate(layers) for head in range(totals.shape[3])]
    of_head = {layer: _passages([largest_passages(one.mean(), MOST_PASSAGES)])[0] for layer, one in layers.items()}
    means = totals.mean(1).transpose(1, 2).tolist()
    with _uncollected():
        records = list(_records(layers, totals, first_token))
    return {
        "measures": _measures(measures.mean((0, 2))),
        "by_head_measures": [
            {"layer": layer, "kv_head": head, **_measures(measures[number, :, head])} for number, layer, head in heads
        ],
        "by_token": [
            _shares(of_token, passages)
            for of_token, (passages,) in zip(totals.mean((0, 3)).tolist(), _passages(by_token), strict=True)
        ],
        "by_head": [
            {"layer": layer, "kv_head": head, **_shares(means[number][head], of_head[layer][head])}
            for number, layer, head in heads
        ],
        "records": records,
    }


@contextmanager
def _uncollected() -> Iterator[None]:
    """Within the context Python looks for no cycles of objects: numbers in lists make none, and looking through all
    objects again and again takes four times as long as making the lists."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _records(layers: Mapping[int, LayerRecorder], totals: torch.Tensor, first_token: int) -> Iterator[dict[str, Any]]:
    """By answer token, layer and KV head."""
    lists = {
        layer: (
            _passages([one.passages for one in recorder.records]),
            _listed([one.chosen for one in recorder.records], first_token),
            _listed([one.missed for one in recorder.records], first_token),
        )
        for layer, recorder in layers.items()
    }
    of_records = totals.transpose(2, 3).tolist()
    for token in range(totals.shape[1]):
        for number, (layer, (passages, chosen, missed)) in enumerate(lists.items()):
            for head, of_head in enumerate(of_records[number][token]):
                yield {
                    "token": token,
                    "layer": layer,
                    "kv_head": head,
                    **_shares(of_head, passages[token][head]),
                    "chosen_tokens": chosen[token][head],
                    "missed_tokens": missed[token][head],
                }


def _shares(totals: list[float], passages: list[list[float]]) -> dict[str, Any]:
    """Of totals, 3 or 4: exact, chosen, stood for, missed."""
    return {**dict(zip(SHARES, [*totals, None], strict=False)), "passages": passages}


def _measures(means: torch.Tensor) -> dict[str, float | None]:
    known = zip(MEASURES, means.tolist(), strict=True)
    return {name: None if math.isnan(value) else value for name, value in known}


def _passages(several: list[Largest]) -> list[list[list[list[float]]]]:
    """`_listed`, with nothing missed where that is not known."""
    known = [one.shares for one in several]
    padded = [torch.cat([one, one.new_zeros(3 - len(one), *one.shape[1:])]) for one in known]
    return _listed([Largest(one.places, shares) for one, shares in zip(several, padded, strict=True)])


def _listed(several: list[Largest], first: int = 0) -> list[list[list[list[float]]]]:
    """For each of several and each KV head its places, counted from `first`, with their shares [S, Hk, K], those of at
    least `LEAST`."""
    places = (torch.stack([one.places for one in several]) + first).tolist()
    shares = torch.stack([one.shares for one in several])
    counts = (shares.sum(1) >= LEAST).sum(-1).tolist()
    rounded = _rounded(shares.double()).movedim(1, -1).tolist()
    return [
        [
            [[place, *of_place] for place, of_place in zip(of_head[:count], share[:count], strict=True)]
            for of_head, share, count in zip(*of_step, strict=True)
        ]
        for of_step in zip(places, rounded, counts, strict=True)
    ]


def _rounded(shares: torch.Tensor) -> torch.Tensor:
    """Shares, float64, in four significant digits, and at most 15 behind the point: the double nearest to the decimal,
    because both parts of the fraction are whole numbers."""
    behind = (3 - shares.clamp(min=1e-12).log10().floor()).clamp(max=15)
    whole = 10.0**behind
    return (shares * whole).round() / whole
