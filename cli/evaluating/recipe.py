"""The options that decide how `eval` answers its questions, and the workers of a Ray cluster that answer them."""

from dataclasses import dataclass, replace
from pathlib import Path

from sparsekv.cli.common.loading import load
from sparsekv.cli.common.ray_cluster import RayCluster, RayWorker, whole_model
from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.formats.models.load import identify
from sparsekv.indexing.build import Builder
from sparsekv.indexing.indexers.interface import Indexer, choose_indexers, indexers
from sparsekv.indexing.plan import BuildConfig
from sparsekv.indexing.prefill.interface import Prefill
from sparsekv.runtime.attention.config import Dense, Own, QuestionPrefill
from sparsekv.runtime.evaluation.engine import Comparison, Parts, Progress, evaluate, unanswered
from sparsekv.runtime.evaluation.table import Answers
from sparsekv.runtime.evaluation.tasks import Context
from sparsekv.runtime.selection.interface import Budget, Method
from sparsekv.runtime.selection.registry import DENSE, choose_methods, methods

QUESTION_OPTIONS = ("--question-prefill", "--question-budget")


def chosen_methods(names: list[str]) -> dict[str, type[Method]]:
    """The methods named, or all whose index can be built; none where `dense`, which always runs, is named alone."""
    others = [name for name in names if name != DENSE]
    if names and not others:
        return {}
    chosen = choose_methods(others, list(indexers()), beside=[DENSE])
    return {name: methods()[name] for name in chosen}


def asking_method(name: str) -> dict[str, type[Method]]:
    """The method that `--question-prefill` names, by its name; none for `dense` and `own`."""
    if name == "all":
        raise UsageError(f"{QUESTION_OPTIONS[0]} all: name one method, or dense or own")
    if name in (Own.name, DENSE):
        return {}
    try:
        choose_methods([name], list(indexers()), beside=[DENSE, Own.name])
    except UsageError as error:
        raise UsageError(f"{QUESTION_OPTIONS[0]} {name}: {error}") from None
    return {name: methods()[name]}


def needed_indexers(names: list[str], *, residual: bool) -> dict[str, type[Indexer]]:
    """Indexers of the named methods that have one; for a residual also the default ones, whose centroids it uses."""
    known = indexers()
    wanted = [name for name in names if name in known] + (choose_indexers([]) if residual else [])
    return {name: known[name] for name in dict.fromkeys(wanted)}


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


class AnswerWorker(RayWorker[EvalRecipe, Context]):
    """Holds a model, and answers the questions of a context into a part of its own of the work folder."""

    command = "eval"
    comparison: Comparison

    def prepare(self) -> None:
        self.comparison = self.recipe.load()

    def work(self, job: Context) -> None:
        for _ in evaluate(self.comparison, [job], Parts(self.recipe.work).of(job), lambda stage, done, of: None):
            pass


def answer_by_ray(
    recipe: EvalRecipe,
    comparison: Comparison,
    contexts: list[Context],
    address: str,
    workers: int | None,
    show: Progress,
) -> None:
    """Have a cluster answer what is not answered yet; all of it is in the work folder then.

    Raises:
        SparsekvError: some contexts could not be answered; or what `RayCluster.run` raises.
    """
    parts, failures = Parts(recipe.work), list[str]()
    with Answers(recipe.work) as answers:
        for context in contexts:
            parts.take(context, answers)
        missing = unanswered(comparison, contexts, answers, recipe.work)
        for context in set(contexts) - set(missing):
            parts.finish(context)
        elsewhere = replace(recipe, work=recipe.work.absolute(), model=whole_model(recipe.model), quiet=True)
        cluster = RayCluster(AnswerWorker, elsewhere, address, workers)
        for done, (context, wrong) in enumerate(cluster.run(missing) if missing else (), 1):
            failures += [f"{context.name}: {wrong}"] if wrong else []
            parts.take(context, answers)
            if not wrong:
                parts.finish(context)
            show("contexts", done, len(missing))
        others = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        if failures:
            raise SparsekvError(f"{failures[0]}{others}; the same command asks again what is not answered")
        if unanswered(comparison, contexts, answers, recipe.work):
            raise SparsekvError(
                "the workers have another device or dtype than this process, so that their answers are not those asked "
                "for; give --device and --dtype"
            )
