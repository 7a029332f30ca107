"""Answer an evaluation's questions by the workers of a Ray cluster, each one context at a time."""

from dataclasses import replace

from sparsekv.cli.common.ray_cluster import RayCluster
from sparsekv.cli.common.ray_worker import RayWorker, whole_model
from sparsekv.cli.evaluating.recipe import EvalRecipe
from sparsekv.formats.errors import SparsekvError
from sparsekv.runtime.evaluation.answers import Answers
from sparsekv.runtime.evaluation.builder import Progress
from sparsekv.runtime.evaluation.comparison import Comparison
from sparsekv.runtime.evaluation.engine import evaluate, unanswered
from sparsekv.runtime.evaluation.parts import Parts
from sparsekv.runtime.evaluation.tasks import Context


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
