"""The coarse search: all forms of all methods on a sample of layers and queries, for what is worth a closer one.

A goal about the model itself cannot be measured on a sample of layers: an error of attention stands in its place.
"""

import torch

from sparsekv.formats.reader import Artifact
from sparsekv.runtime.selection.form import Form
from sparsekv.runtime.tuning.budget_search import BudgetSearch
from sparsekv.runtime.tuning.candidates import Candidate
from sparsekv.runtime.tuning.halves import Halves
from sparsekv.runtime.tuning.meter import AttentionMeter, Point

LAYER_STRIDE, QUERY_STRIDE = 3, 2
COARSE_START, COARSE_STEP, COARSE_RATIO = 0.1, 4.0, 1.3
FINE_STEP, FINE_RATIO = 1.2, 1.2
FORMS_KEPT, KEPT_WITHIN = 2, 1.05
"""How many forms of a method are searched on all layers, and their reads at most, as a multiple of its best form's."""


class CoarseSearch:
    """A rough search for every form; one that cannot be its method's cheapest is dropped."""

    def __init__(self, artifact: Artifact, halves: Halves, device: torch.device):
        self.halves, self.goal, self.rough = halves, halves.goal, halves.goal.rough()
        self.sample = halves.layers[::LAYER_STRIDE]
        self.meter = AttentionMeter(
            artifact,
            self.goal.reference,
            calibration=True,
            stride=QUERY_STRIDE,
            outputs=self.rough.outputs,
            device=device,
        )

    def promising(self, forms: list[Form]) -> list[Candidate]:
        """Each method's cheapest forms on the sample; the form of most gain if none meets the target there."""
        searches = self._searched(forms)
        by_method: dict[str, dict[Form, BudgetSearch]] = {}
        for form, search in searches.items():
            by_method.setdefault(form.name, {})[form] = search
        return [one for of_method in by_method.values() for one in self._best(of_method)]

    def _searched(self, forms: list[Form]) -> dict[Form, BudgetSearch]:
        # Slightly above the target, so that the first guess on all layers mostly meets it.
        target = self.rough.gain(self.rough.value) + self.rough.tolerance / 2
        searches = {form: BudgetSearch(target, COARSE_START, COARSE_STEP, COARSE_RATIO) for form in forms}
        while wanted := self._wanted(searches):
            settings = [(form, self.halves.everywhere(share)) for form, share in wanted]
            self.meter.measure(settings, self.halves.round(len(settings)), self.sample)
            for form, share in wanted:
                searches[form].gains[share] = self.rough.gain(self.rough.of(self._at(form, share)))
        return searches

    def _wanted(self, searches: dict[Form, BudgetSearch]) -> list[tuple[Form, float]]:
        """The next share to measure for each form that is still searched. A form is dropped when a share that fails the
        target already reads more than its method's best form."""
        best: dict[str, float] = {}
        for form, search in searches.items():
            if search.high is not None:
                best[form.name] = min(best.get(form.name, 1.0), self._at(form, search.high).kv_fraction)
        wanted = []
        for form, search in searches.items():
            failing = 0.0 if search.low is None else self._at(form, search.low).kv_fraction
            share = search.propose()
            if share is not None and failing < KEPT_WITHIN * best.get(form.name, 1.0):
                wanted.append((form, share))
        return wanted

    def _best(self, of_method: dict[Form, BudgetSearch]) -> list[Candidate]:
        """The candidates among one method's forms."""
        costs = {
            form: self._at(form, high).kv_fraction
            for form, search in of_method.items()
            if (high := search.high) is not None
        }
        order = sorted(costs, key=lambda form: costs[form])[:FORMS_KEPT]
        order = [form for form in order if costs[form] <= KEPT_WITHIN * costs[order[0]]]
        most = {form: max(search.gains.values()) for form, search in of_method.items()}
        hopeless = self.rough is self.goal and max(most.values()) < self.halves.target
        return [
            Candidate(form, self._fine(of_method[form]), hopeless)
            for form in order or [max(most, key=lambda form: most[form])]
        ]

    def _fine(self, coarse: BudgetSearch) -> BudgetSearch:
        return BudgetSearch(self.halves.target, coarse.guess(), FINE_STEP, FINE_RATIO, self.goal.tolerance)

    def _at(self, form: Form, share: float) -> Point:
        return self.meter.mean(form, self.halves.everywhere(share), self.sample)
