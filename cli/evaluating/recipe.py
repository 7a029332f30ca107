"""A recipe of an evaluation, parsed from the options of `eval`, and its answers by workers of a Ray cluster."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from sparsekv.cli.common.console import note
from sparsekv.cli.common.loading import load
from sparsekv.cli.common.ray_cluster import RayCluster, RayWorker, whole_model
from sparsekv.cli.evaluating.options import (
    DEFAULT_BUDGETS,
    QUESTION_OPTIONS,
    EvalOptions,
    asking_method,
    chosen_methods,
    needed_indexers,
)
from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.formats.index.schema import kv_dtype_named, weights_named
from sparsekv.formats.models.load import identify
from sparsekv.indexing.build import Builder
from sparsekv.indexing.plan import BuildConfig
from sparsekv.indexing.prefill.prefills import Prefill, choose_prefill
from sparsekv.runtime.attention.config import Dense, Own, QuestionPrefill
from sparsekv.runtime.decoding.answer import unused_settings
from sparsekv.runtime.decoding.choose_config import question_prefill
from sparsekv.runtime.evaluation.engine import Comparison, Parts, Progress, evaluate, unanswered
from sparsekv.runtime.evaluation.inputs import work_folder
from sparsekv.runtime.evaluation.table import Answers, Cell, Result, Score
from sparsekv.runtime.selection.interface import Budget, Method
from sparsekv.runtime.selection.registry import configure, parameters_label, refuse_unused
from sparsekv.runtime.selection.token_choice import first_dense
from sparsekv.runtime.tasks.interface import Context

T = TypeVar("T", Score, Cell)


@dataclass(frozen=True)
class EvalRecipe:
    """The settings of an evaluation by `eval`, parsed from its options. Answers go to the folder `work`.

    `labels` has the options of each method and of its index that the user set, such as `page_size=8`.
    """

    options: EvalOptions
    work: Path
    labels: dict[str, str]
    methods: dict[str, Method]
    budgets: list[Budget]
    build: BuildConfig
    prefills: dict[str, Prefill]
    question: Dense | Own | QuestionPrefill

    @classmethod
    def of(cls, options: EvalOptions) -> Self:
        """Make the recipe that the options describe.

        Raises:
            UsageError: a method, prefill, budget or parameter is not valid, or there is no folder for the answers.
        """
        given, prefill, residual = options.parameters, options.question_prefill, options.residual
        budgets, chosen = Budget.parse_each(options.budget or DEFAULT_BUDGETS), chosen_methods(options.method or [])
        ways = {name: choose_prefill(name) for name in dict.fromkeys(options.prefill or ["dense"])}
        asking = asking_method(prefill)
        built = needed_indexers([*chosen, *asking], residual=residual)
        reading: dict[str, type] = {**chosen}
        reading |= {f"the index of {name}": indexer for name, indexer in built.items()}
        reading |= {f"the {name} prefill": way for name, way in ways.items()}
        questions = {f"--question-prefill {name}": one for name, one in asking.items()}
        refuse_unused(reading | questions, given, decoding=() if prefill == Own.name else chosen, asking=questions)
        return cls(
            options=options,
            work=work_folder(options.document, options.data, options.work),
            labels={
                name: parameters_label(given, one, *([built[name]] if name in built else []))
                for name, one in chosen.items()
            },
            methods={name: configure(one, given) for name, one in chosen.items()},
            budgets=budgets,
            build=BuildConfig(
                methods={name: configure(one, given) for name, one in built.items()},
                sinks=options.sinks,
                tail=options.tail,
                chunk_size=options.chunk_size,
                kv_dtype=kv_dtype_named(options.kv_dtype),
                rope_scaling=options.rope_scaling,
            ),
            prefills={name: configure(one, given) for name, one in ways.items()},
            question=question_prefill(prefill, options.question_budget, asking, given, QUESTION_OPTIONS),
        )

    def labelled(self, rows: list[T]) -> list[T]:
        """Return the rows, each with the options of its method at the beginning of its variant."""
        return [replace(row, variant=self._label(row.method, row.variant)) for row in rows]

    def answer_record(self, result: Result, about: dict[str, Any]) -> dict[str, Any]:
        """Return a result with model and settings as a JSON object; `about` is the output of `--json` without rows."""
        question, options = self.question, self.options
        return {
            **result.record(),
            "variant": self._label(result.way.method, result.way.variant),
            **{name: about[name] for name in ("model", "document", "weights", "kv_dtype", "rope_scaling", "seed")},
            "question_prefill": question.name,
            "question_budget": question.budget.value if isinstance(question, QuestionPrefill) else None,
            "dense_layers": first_dense(self.methods.get(result.way.method), options.dense_layers),
            "sinks": options.sinks,
            "tail": options.tail,
            "batch_size": options.batch_size,
        }

    def _label(self, method: str, variant: str) -> str:
        dense = first_dense(self.methods.get(method), self.options.dense_layers)
        first = f"dense_layers={dense}" if dense else ""
        return " + ".join(filter(None, (self.labels.get(method), first, variant)))

    def load(self) -> Comparison:
        """Load the model and return the comparison.

        Raises the errors of `cli.common.loading.load`, and UsageError for more dense layers than the model has.
        """
        options = self.options
        loaded = load(
            options.model,
            options.run.device,
            options.run.dtype,
            options.rope_scaling,
            quiet=options.run.quiet,
            weights=weights_named(options.weights),
        )
        if told := unused_settings(loaded.model):
            note(told, quiet=options.run.quiet)
        layers = loaded.model.config.get_text_config().num_hidden_layers
        if options.dense_layers > layers:
            given = f"--dense-layers {options.dense_layers}"
            raise UsageError(f"{given}: the model has {layers} layers; give a number from 0 to {layers}")
        return Comparison(
            loaded=loaded,
            identity=identify(loaded),
            methods=self.methods,
            budgets=self.budgets,
            builder=Builder(loaded, self.build, self.prefills),
            question=self.question,
            residual=options.residual,
            dense_layers=options.dense_layers,
            raw=options.raw,
            keep=options.keep_indices,
            max_new_tokens=options.max_new_tokens,
            together=options.batch_size,
            rope_scaling=options.rope_scaling,
        )


class AnswerWorker(RayWorker[EvalRecipe, Context]):
    """A Ray worker that has loaded a model and answers the questions of one context at a time. The answers of a context
    go to a separate subfolder of the work folder."""

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
    """Let a Ray cluster answer the questions that have no answer yet, and store all answers in the work folder.

    Raises:
        SparsekvError: the questions of some contexts could not be answered; the workers have another device or dtype
            than this process; or the errors of `RayCluster.run`.
    """
    parts, failures = Parts(recipe.work), list[str]()
    with Answers(recipe.work) as answers:
        for context in contexts:
            parts.take(context, answers)
        missing = unanswered(comparison, contexts, answers, recipe.work)
        for context in set(contexts) - set(missing):
            parts.finish(context)
        options = recipe.options
        options = replace(options, model=whole_model(options.model), run=replace(options.run, quiet=True))
        elsewhere = replace(recipe, options=options, work=recipe.work.absolute())
        cluster = RayCluster(AnswerWorker, elsewhere, address, workers)
        for done, (context, wrong) in enumerate(cluster.run(missing) if missing else (), 1):
            failures += [f"{context.name}: {wrong}"] if wrong else []
            parts.take(context, answers)
            if not wrong:
                parts.finish(context)
            show("contexts", done, len(missing))
        others = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        if failures:
            raise SparsekvError(f"{failures[0]}{others}; run the same command again to ask the other questions")
        if unanswered(comparison, contexts, answers, recipe.work):
            raise SparsekvError(
                "the workers have another device or dtype than this process, so their answers cannot be "
                "compared; give --device and --dtype"
            )
