"""How an evaluation's questions are answered, as a command line says it: everything but the model itself."""

from dataclasses import dataclass
from pathlib import Path

from sparsekv.cli.common.loading import load
from sparsekv.formats.models.identify import identify
from sparsekv.indexing.builder import Builder
from sparsekv.indexing.plan import BuildConfig
from sparsekv.indexing.prefill.interface import Prefill
from sparsekv.runtime.attention.config import Dense, Own, QuestionPrefill
from sparsekv.runtime.evaluation.comparison import Comparison
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.interface import Method


@dataclass(frozen=True)
class EvalRecipe:
    """The options of `eval` that decide an answer, and where answers go; `work` is the folder."""

    work: Path
    model: str | None
    device: str
    dtype: str
    methods: dict[str, Method]
    budgets: list[Budget]
    build: BuildConfig
    prefills: dict[str, Prefill]
    question: Dense | Own | QuestionPrefill
    residual: bool
    raw: bool
    keep: bool
    max_new_tokens: int | None
    together: int
    quiet: bool

    def load(self) -> Comparison:
        """The comparison with its model; raises what `load_model` raises."""
        loaded = load(self.model, self.device, self.dtype, None, quiet=self.quiet)
        return Comparison(
            loaded=loaded,
            identity=identify(loaded),
            methods=self.methods,
            budgets=self.budgets,
            builder=Builder(loaded, self.build, self.prefills),
            question=self.question,
            residual=self.residual,
            raw=self.raw,
            keep=self.keep,
            max_new_tokens=self.max_new_tokens,
            together=self.together,
        )
