"""Measures settings by the model's perplexity on the document's tail, relative to dense attention's."""

from collections.abc import Iterable

from sparsekv.runtime.attention.config import DecodeConfig
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.perplexity import losses
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.form import Form
from sparsekv.runtime.tuning.meter import Meter, Point, Progress, Shares


class ModelMeter(Meter):
    """Perplexity of one half of the tail, each token predicted from sinks, chosen middle tokens and the tail before it.

    The tail is fed token by token, as in generation: for calibration only its first half, else all of it, with only the
    second half counted. Opens a cache for each setting and runs the model.
    """

    def __init__(self, index: OpenIndex, *, calibration: bool):
        split = index.split
        self.index, self.after = index, split.sinks + split.middle
        tail, half = index.input_ids[self.after :], split.tail // 2
        self.fed = tail[:half] if calibration else tail
        self.counted = slice(0 if calibration else half, None)
        self.dense: float | None = None
        self._known: dict[tuple[Form, tuple[float, ...]], Point] = {}

    def measure(self, wanted: Iterable[tuple[Form, Shares]], progress: Progress) -> None:
        new = [(form, shares) for form, shares in wanted if (form, tuple(shares.values())) not in self._known]
        for done, (form, shares) in enumerate(new, 1):
            self._known[form, tuple(shares.values())] = self._measured(form, shares)
            progress(done, len(new))

    def mean(self, form: Form, shares: Shares) -> Point:
        return self._known[form, tuple(shares.values())]

    def _measured(self, form: Form, shares: Shares) -> Point:
        if self.dense is None:
            whole = losses(self.index, self.index.dense_cache(self.after), self.fed, self.after)
            self.dense = float(whole[self.counted].mean())
        budgets = {layer: Budget(share) for layer, share in shares.items()}
        first = next(iter(budgets.values()))
        cache = self.index.cache(DecodeConfig(form, first, budgets), tail=False)
        found = losses(self.index, cache, self.fed, self.after)[self.counted].mean()
        return Point(kv_fraction=cache.kv_fraction(), perplexity=float((found - self.dense).exp()))
