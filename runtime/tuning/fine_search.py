"""The search on all layers: candidates are searched on calibration queries and verified on held-out ones."""

from sparsekv.runtime.tuning.candidates import Candidate
from sparsekv.runtime.tuning.halves import Halves
from sparsekv.runtime.tuning.tuned import Tuned

CONTENDERS, CONTENDING_WITHIN = 2, 1.25
"""How many settings are searched more closely, and their reads at most, as a multiple of the best one's."""
RAISES = 2
"""How often a target is raised when the held-out queries miss it."""


class FineSearch:
    """The candidates of one search, which it moves to their smallest share that meets the goal."""

    def __init__(self, halves: Halves, found: list[Candidate]):
        self.halves, self.found = halves, found

    def run(self) -> list[Candidate]:
        """Search all, then the cheapest more closely, which it returns."""
        self._verified(self.found)
        contenders = self.contenders(self.found)
        for one in contenders:
            one.search.ratio = one.search.step = self.halves.goal.precision
            one.search.slack = 0.0
        self._verified(contenders)
        return contenders

    def contenders(self, found: list[Candidate]) -> list[Candidate]:
        """The few candidates that meet the target and read least."""
        held_out = self.halves.held_out
        costs = [
            (held_out.mean(one.form, shares).kv_fraction, one)
            for one in found
            if self.halves.holds(one.form, shares := self.halves.everywhere(one.search.best))
        ]
        costs = sorted(costs, key=lambda of: of[0])[:CONTENDERS]
        return [one for cost, one in costs if cost <= CONTENDING_WITHIN * costs[0][0]]

    def settings(self) -> list[Tuned]:
        """Each candidate's setting with one budget for all layers, recall and error among its measures."""
        shares = [(one.form, self.halves.everywhere(one.search.best)) for one in self.found]
        self.halves.measure(self.halves.attention, shares)
        return [uniform(self.halves, one) for one in self.found]

    def _verified(self, found: list[Candidate]) -> None:
        """Search; measure on held-out queries; search those that miss again, with a target raised by the gap."""
        self._search(found)
        while found:
            best = [(one.form, self.halves.everywhere(one.search.best)) for one in found]
            self.halves.measure(self.halves.held_out, best)
            found = [one for one in found if self._raise(one)]
            self._search(found)

    def _search(self, found: list[Candidate]) -> None:
        while wanted := [(one, share) for one in found if (share := one.propose()) is not None]:
            settings = [(one.form, self.halves.everywhere(share)) for one, share in wanted]
            self.halves.measure(self.halves.calibration, settings)
            for (one, share), (form, shares) in zip(wanted, settings, strict=True):
                one.search.gains[share] = self.halves.gain(form, shares)

    def _raise(self, one: Candidate) -> bool:
        gap = self.halves.gap(one.form, self.halves.everywhere(one.search.best))
        hopeless = one.search.high is None or one.raised == RAISES or one.hopeless
        if gap <= self.halves.goal.tolerance or hopeless:
            return False
        # Raised from the measured gain, because this may exceed the old target by more than the gap.
        one.search.target = one.search.gains[one.search.best] + gap
        one.raised += 1
        return True


def uniform(halves: Halves, one: Candidate) -> Tuned:
    """A candidate's setting with one budget for all layers, as measured on both halves."""
    share = one.search.best
    return halves.tuned(one.form, share, halves.everywhere(share), one.search.target, by_layer=False)
