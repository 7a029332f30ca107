"""A trace as a JSON object: what each token of an answer attended to, by layer and KV head."""

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sparsekv.runtime.tracing.largest import MOST_IN_MEAN, Largest, largest_passages
from sparsekv.runtime.tracing.recorder import MEASURES
from sparsekv.runtime.tracing.tokens import TokenRecorder

SHARES = ("exact", "chosen", "stood_for", "missed")
LEAST = 1e-4
"""The smallest share that is listed."""


def recorded(recorder: TokenRecorder, layers: list[int], first_token: int) -> dict[str, Any]:
    """The means and the records of an answer; docs/how-to/trace.md says what each key holds.

    Args:
        layers: numbers of the layers.
        first_token: position of the middle's first token.
    """
    tokens = recorder.tokens
    totals = torch.stack([one.totals for one in tokens]).double().cpu()  # [T, 3 or 4, L, Hk]
    # The first token's step is the question's last, whose choice many tokens share; a step of its own has no question.
    of_steps = torch.stack([one.measures for one in tokens[1:] or tokens]).mean(0).cpu()
    heads = [(number, layer, head) for number, layer in enumerate(layers) for head in range(totals.shape[3])]
    of_head = _passages(largest_passages(recorder.sums / len(tokens), MOST_IN_MEAN))
    with _uncollected():
        records = list(_records(recorder, totals, layers, first_token))
    return {
        "measures": _named(of_steps.mean((1, 2)).tolist()),
        "by_head_measures": [
            {"layer": layer, "kv_head": head, **_named(of_steps[:, number, head].tolist())}
            for number, layer, head in heads
        ],
        "by_token": [
            _shares(of_token, _passages(one.mean))
            for of_token, one in zip(totals.mean((2, 3)).tolist(), tokens, strict=True)
        ],
        "by_head": [
            {"layer": layer, "kv_head": head, **_shares(of_head_totals, of_head[number][head])}
            for (number, layer, head), of_head_totals in zip(heads, totals.mean(0).flatten(1).T.tolist(), strict=True)
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


def _records(
    recorder: TokenRecorder, totals: torch.Tensor, layers: list[int], first_token: int
) -> Iterator[dict[str, Any]]:
    """By answer token, layer and KV head."""
    of_records = totals.movedim(1, -1).tolist()
    nothing: Any = [[[]] * totals.shape[3]] * totals.shape[2]
    for token, one in enumerate(recorder.tokens):
        passages, chosen = _passages(one.passages), _listed(one.chosen, first_token)
        missed = nothing if one.missed is None else _listed(one.missed, first_token)
        measured = _rounded(one.measures.cpu()).movedim(0, -1).tolist()
        for number, layer in enumerate(layers):
            for head, of_head in enumerate(of_records[token][number]):
                yield {
                    "token": token,
                    "layer": layer,
                    "kv_head": head,
                    **_shares(of_head, passages[number][head]),
                    **_named(measured[number][head]),
                    "chosen_tokens": chosen[number][head],
                    "missed_tokens": missed[number][head],
                }


def _shares(totals: list[float], passages: list[list[float]]) -> dict[str, Any]:
    """Of totals, 3 or 4: exact, chosen, stood for, missed."""
    return {**dict(zip(SHARES, [*totals, None], strict=False)), "passages": passages}


def _named(measures: list[float]) -> dict[str, float | None]:
    known = zip(MEASURES, measures, strict=True)
    return {name: None if math.isnan(value) else value for name, value in known}


def _passages(largest: Largest) -> Any:
    """`_listed`, with nothing missed where that is not known."""
    shares = largest.shares
    return _listed(Largest(largest.places, torch.cat([shares, shares.new_zeros(3 - len(shares), *shares.shape[1:])])))


def _listed(largest: Largest, first: int = 0) -> Any:
    """Lists as places [..., K] have them: each place, counted from `first`, with its shares, of at least `LEAST`."""
    counts = (largest.shares.sum(0) >= LEAST).sum(-1).tolist()
    shares = _rounded(largest.shares.double()).movedim(0, -1).tolist()
    return _joined((largest.places + first).tolist(), shares, counts)


def _joined(places: Any, shares: Any, counts: Any) -> Any:
    if isinstance(counts, list):
        return [_joined(*each) for each in zip(places, shares, counts, strict=True)]
    return [[place, *of_place] for place, of_place in zip(places[:counts], shares[:counts], strict=True)]


def _rounded(shares: torch.Tensor) -> torch.Tensor:
    """Shares, float64, in four significant digits, and at most 15 behind the point: the double nearest to the decimal,
    because both parts of the fraction are whole numbers."""
    behind = (3 - shares.clamp(min=1e-12).log10().floor()).clamp(max=15)
    whole = 10.0**behind
    return (shares * whole).round() / whole
