"""Finds the cheapest setting that meets a target: chosen on one half of the tail's queries, verified on the other.

First, all forms of all methods are searched on every third layer with every second query. Then each method's cheapest
forms are searched on all layers with all calibration queries, until their budget is known within a factor or their gain
is little above the target. The results are measured on the held-out half, which no search has used; a result that
misses the target by more than a tolerance is searched again with a target raised by the gap. The cheapest settings are
then searched more closely, and the cheapest of all may get a separate budget for each layer.

A goal about the model itself cannot be measured on a sample of layers: the first search uses an error of attention in
its place, and the model runs only for the forms that remain.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from sparsekv.formats.reader import CPU, Artifact
from sparsekv.runtime.attention.config import DecodeConfig
from sparsekv.runtime.reporting.checked_rows import measured_files
from sparsekv.runtime.selection.form import Form
from sparsekv.runtime.tuning.candidates import candidates
from sparsekv.runtime.tuning.coarse_search import CoarseSearch
from sparsekv.runtime.tuning.fine_search import FineSearch
from sparsekv.runtime.tuning.goals import Goal
from sparsekv.runtime.tuning.halves import Halves, Progress
from sparsekv.runtime.tuning.layer_budgets import by_layer
from sparsekv.runtime.tuning.tuned import Tuned


@torch.inference_mode()
def tune(
    artifact: Artifact,
    goal: Goal,
    names: list[str],
    progress: Progress = lambda stage, done, of: None,
    device: torch.device = CPU,
    time: Callable[[Form, float], float] | None = None,
    present: DecodeConfig | None = None,
) -> tuple[list[Tuned], Tuned | None]:
    """Find each method's cheapest setting that meets a goal, sorted by reads, or by the time of a step.

    Needs the memory of one layer, with all methods prepared for it.

    Args:
        names: the methods; empty for all that can run on the index.
        progress: called with a round's name, the number of layers or settings done, and the total.
        device: where attention is measured.
        time: gives the milliseconds of a step of a form at a share, by which what was found is ranked; None: by reads.
        present: a config with shares for budgets; if it is of a method, it is measured beside what is found.

    Returns:
        One setting per method, those that miss the goal last, the nearest first; and the present one, as measured.

    Raises:
        UsageError: a method that cannot run, or that is a bound such as the oracle.
    """
    forms = candidates(artifact, names, residual=goal.residual)
    artifact.check_sums(measured_files(artifact, {form.name for form in forms}, artifact.manifest.indexed_layers))
    halves = Halves(artifact, goal, progress, device)
    search = FineSearch(halves, CoarseSearch(artifact, halves, device).promising(forms))
    contenders = search.run()
    tuned = search.settings()
    tuned += [one for first in search.contenders(contenders)[:1] if (one := by_layer(halves, first)) is not None]
    attention = None if present is None else present.attention
    before = halves.as_it_is(attention, present) if present and isinstance(attention, Form) else None
    if time is not None:
        tuned = [replace(one, step_ms=time(one.form, one.budget)) if one.holds else one for one in tuned]
        before = before and replace(before, step_ms=time(before.form, before.budget))
    return _best_of_each(tuned, goal), before


def _best_of_each(tuned: list[Tuned], goal: Goal) -> list[Tuned]:
    """Each method's best setting: those that meet the goal by their cost, then the others by their distance from it."""

    def rank(one: Tuned) -> tuple[bool, float]:
        return not one.holds, one.cost if one.holds else -goal.gain(one.held_out)

    best: dict[str, Tuned] = {}
    for one in sorted(tuned, key=rank):
        best.setdefault(one.form.name, one)
    return list(best.values())
