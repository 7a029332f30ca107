"""A budget for each layer: the last of a search, for the cheapest setting of all."""

from statistics import fmean

from sparsekv.runtime.tuning.allocation import Option, allocate
from sparsekv.runtime.tuning.budget_search import rounded
from sparsekv.runtime.tuning.candidates import Candidate
from sparsekv.runtime.tuning.fine_search import RAISES, uniform
from sparsekv.runtime.tuning.halves import Halves
from sparsekv.runtime.tuning.meter import AttentionMeter
from sparsekv.runtime.tuning.tuned import Tuned

CURVE = (0.1, 0.2, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0, 6.0)
"""The budgets that a single layer may get, as multiples of the budget for all layers."""
LEAST_SAVING = 0.97
"""Budgets by layer are kept if they read at most this share of what one budget for all layers reads."""


def by_layer(halves: Halves, one: Candidate) -> Tuned | None:
    """A candidate's setting with a budget for each layer; None if that is not worthwhile.

    It needs a separate curve for each layer, which neither forms with state shared by layers nor a perplexity have.
    """
    same, meter = uniform(halves, one), halves.calibration
    if not same.holds or not isinstance(meter, AttentionMeter) or one.form in meter.shared:
        return None
    curve = sorted({rounded(same.budget * times) for times in CURVE})
    halves.measure(meter, [(one.form, halves.everywhere(share)) for share in curve])
    points = [[meter.at(one.form, share, layer) for share in curve] for layer in halves.layers]
    options = [[Option(point.kv_fraction, halves.gain_at(point)) for point in layer] for layer in points]
    aim = one.search.target
    for _ in range(RAISES + 1):
        chosen = allocate(options, aim)
        if chosen is None:
            return None
        shares = {layer: curve[number] for layer, number in zip(halves.layers, chosen, strict=True)}
        halves.measure(halves.held_out, [(one.form, shares)])
        found = halves.tuned(one.form, fmean(shares.values()), shares, aim, by_layer=True)
        if found.kv_fraction > LEAST_SAVING * same.kv_fraction:
            return None
        if found.holds:
            return found
        aim += halves.gap(one.form, shares)
    return None
