"""The options of `eval`, and the methods and indexers that they select."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from sparsekv.cli.common.console import note
from sparsekv.cli.common.options import (
    TAIL_HELP,
    BuildWeightsOption,
    ChunkSizeOption,
    EncodingOption,
    FormatOptions,
    KVDtypeOption,
    ModelOption,
    RayOption,
    RopeScalingOption,
    RunOptions,
    SinksOption,
    WorkersOption,
    check_ray,
    names_of,
    refuse_unwritable_plot,
)
from sparsekv.cli.configuring.sources import note_idle_encoding, on_command_line
from sparsekv.cli.evaluating.output import refuse_unwritable_answers
from sparsekv.cli.pages.page import HtmlOption, refuse_unwritable_html
from sparsekv.formats.documents.document import UTF_8
from sparsekv.formats.errors import UsageError, any_of
from sparsekv.formats.index.schema import AUTO
from sparsekv.indexing.indexers.interface import Indexer, choose_indexers, indexers
from sparsekv.indexing.prefill.prefills import prefills
from sparsekv.runtime.attention.config import QUESTION_BUDGET, Own
from sparsekv.runtime.decoding.choose_config import refuse_beside_dense, refuse_residual
from sparsekv.runtime.evaluation.inputs import Inputs, unread_options
from sparsekv.runtime.selection.interface import DENSE, Method, methods
from sparsekv.runtime.selection.registry import choose_methods
from sparsekv.runtime.selection.token_choice import first_dense
from sparsekv.runtime.tasks.interface import tasks
from sparsekv.runtime.tasks.published import FORMATS

DEFAULT_BUDGETS = ["0.05", "0.1"]
BUILDING = {f"the index of {name}": indexer for name, indexer in indexers().items()} | {
    f"--prefill {name}": prefill for name, prefill in prefills().items()
}
"""Indexers and prefills by their names in --help. Their parameters become options, like the methods' parameters."""


QUESTION_OPTIONS = ("--question-prefill", "--question-budget")


def chosen_methods(names: list[str]) -> dict[str, type[Method]]:
    """Return the named methods. Without names or with `all`, return every method whose index, if any, can be built.

    `dense` is left out, because dense attention always runs. With `dense` as the only name, the result is empty. Raises
    the errors of `choose_methods`.
    """
    others = [name for name in names if name != DENSE]
    if names and not others:
        return {}
    chosen = choose_methods(others, list(indexers()), beside=[DENSE])
    return {name: methods()[name] for name in chosen}


def asking_method(name: str) -> dict[str, type[Method]]:
    """Return the method that `--question-prefill` names, as the only entry of a dict; no entry for `dense` and `own`.

    Raises UsageError for `all`, and for a method that does not exist or whose index cannot be built."""
    if name == "all":
        raise UsageError(
            f"{QUESTION_OPTIONS[0]} all: questions are prefilled with one method; name it, or give dense or own"
        )
    if name in (Own.name, DENSE):
        return {}
    try:
        choose_methods([name], list(indexers()), beside=[DENSE, Own.name])
    except UsageError as error:
        raise UsageError(f"{QUESTION_OPTIONS[0]} {name}: {error}") from None
    return {name: methods()[name]}


def needed_indexers(names: list[str], *, residual: bool) -> dict[str, type[Indexer]]:
    """Return the indexers of the named methods that have an index. With `residual`, also return the default indexers,
    because a residual uses their centroids."""
    known = indexers()
    wanted = [name for name in names if name in known] + (choose_indexers([]) if residual else [])
    return {name: known[name] for name in dict.fromkeys(wanted)}


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Command-line options of `eval`."""

    document: Annotated[
        str | None,
        typer.Argument(
            metavar="DOC",
            help="Plain text, PDF, DOCX or HTML to make tasks from; - for standard input. Some tasks need none.",
        ),
    ] = None
    task: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Task; repeatable: {', '.join(tasks())}. docs/how-to/evaluate.md describes them. "
            "Default: niah-facts; with --pairs, qa.",
            autocompletion=names_of(tasks),
        ),
    ] = None
    data: Annotated[
        str | None, typer.Option(metavar="FILE.jsonl", help="Published tasks to use instead of DOC; needs --format.")
    ] = None
    data_format: Annotated[
        str | None, typer.Option("--format", metavar="|".join(FORMATS), help="Format of --data.")
    ] = None
    pairs: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.jsonl", help='Questions of --task qa, each line {"question": ..., "answers": [...]}.'
        ),
    ] = None
    length: Annotated[
        list[int] | None, typer.Option(help="Tokens per context; repeatable. Default: 4096; with --data, uncut.")
    ] = None
    depth: Annotated[
        list[float] | None,
        typer.Option(help="Where needles are hidden, in percent of the context; repeatable. Default: evenly spread."),
    ] = None
    contexts: Annotated[int, typer.Option(help="Contexts per task and length.")] = 3
    questions: Annotated[
        int | None, typer.Option(help="Questions per context. Default: 5, or all that a file has.")
    ] = None
    turns: Annotated[
        bool,
        typer.Option(
            "--turns",
            help="Ask a context's questions as the turns of a conversation, in which each earlier question has its "
            "expected answer. The table has scores by turn, too.",
        ),
    ] = False
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="Method to compare with dense attention, which always runs; repeatable. `dense` alone: no method is "
            "compared. Default: all.",
            autocompletion=names_of(methods, "all", DENSE),
        ),
    ] = None
    budget: Annotated[
        list[str] | None,
        typer.Option(help="Share (0.05, 5%) or number of tokens to attend to; repeatable. Default: 5% and 10%."),
    ] = None
    residual: Annotated[
        bool,
        typer.Option(
            "--residual",
            help="Run each method that drops the tokens it does not select a second time, with centroids for these "
            "tokens.",
        ),
    ] = False
    dense_layers: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Let methods attend to all tokens in the model's first N layers; Quest's authors use 2. Methods with "
            "dense layers of their own, such as tidaldecode, keep those.",
        ),
    ] = 0
    prefill: Annotated[
        list[str] | None,
        typer.Option(
            metavar="|".join(prefills()),
            help=(
                "How contexts are prefilled, as in build-index; repeatable. All are compared with dense attention "
                "after the first of these prefills. Default: dense. generate's --prefill is --question-prefill here."
            ),
        ),
    ] = None
    question_prefill: Annotated[
        str,
        typer.Option(
            metavar="dense|own|METHOD",
            help=(
                "Tokens that questions attend to: all (dense), those that the answer's method selects (own), or "
                "those that METHOD selects. In generate this option is --prefill."
            ),
            autocompletion=names_of(methods, DENSE, Own.name),
        ),
    ] = DENSE
    question_budget: Annotated[
        str | None,
        typer.Option(
            help=f"Share or number of tokens a chunk attends to, with --question-prefill METHOD. Default: "
            f"{QUESTION_BUDGET}."
        ),
    ] = None
    batch_size: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="How many questions of a context to answer at once. Dense attention's answers stay as they are. "
            "With a method, each of these questions attends to the tokens that any of them selects, so answers differ.",
        ),
    ] = 1
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer, in tokens. Default: the task's.")
    ] = None
    sinks: SinksOption = 10
    tail: Annotated[int, typer.Option(help=TAIL_HELP)] = 128
    kv_dtype: KVDtypeOption = AUTO
    chunk_size: ChunkSizeOption = None
    rope_scaling: RopeScalingOption = None
    seed: Annotated[int, typer.Option(min=0, help="Seed of the tasks and of the confidence intervals.")] = 0
    encoding: EncodingOption = UTF_8
    raw: Annotated[bool, typer.Option("--raw", help="Put no chat template around document and question.")] = False
    work: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder for answers and indices. Default: the name of DOC or --data with the ending .eval.",
        ),
    ] = None
    keep_indices: Annotated[
        bool, typer.Option("--keep-indices", help="Keep each context's index after its questions are answered.")
    ] = False
    format: FormatOptions
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.png",
            help="Plot scores against the kv fraction; for tasks with a depth, also by length and depth.",
        ),
    ] = None
    html: HtmlOption = None
    answers: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="Also write every answer with its score: a line of JSON for each question, method and budget.",
        ),
    ] = None
    ray: RayOption = None
    workers: WorkersOption = None
    model: ModelOption = None
    weights: BuildWeightsOption = AUTO
    run: RunOptions
    parameters: dict[str, Any]

    def check(self) -> None:
        """Check the options and the names of the output files, before anything is loaded.

        Raises:
            UsageError: options contradict each other, or the name of an output file or of a Ray cluster is not valid.
            SparsekvError: an output file exists already, and was not written by sparsekv.
        """
        self.format.check()
        check_ray(self.ray, self.workers)
        refuse_unwritable_plot(self.plot)
        refuse_unwritable_html(self.html)
        refuse_unwritable_answers(self.answers)

    def inputs(self) -> Inputs:
        """Read the texts and the questions. Raises the errors of `Inputs.read`."""
        return Inputs.read(
            self.document,
            self.task or [],
            self.data,
            self.data_format,
            self.pairs,
            self.length or [],
            self.depth or [],
            self.contexts,
            self.questions,
            self.seed,
            self.encoding,
            turns=self.turns,
        )


@dataclass(frozen=True, kw_only=True)
class EvalCall:
    """A call of `eval`: its options, and typer's context, which knows which options the user typed.

    The options are a separate object, because they are sent to the workers of a Ray cluster.
    """

    ctx: typer.Context
    options: EvalOptions

    def check(self) -> None:
        """Raise the errors of `EvalOptions.check`, and UsageError for a typed option that has no effect."""
        options = self.options
        options.check()
        if set(options.method or ()) == {DENSE}:
            question = options.question_prefill != DENSE and options.question_prefill
            given = {"--budget": " --budget ".join(options.budget or ()), "--residual": options.residual}
            given |= {"--dense-layers": options.dense_layers > 0 and str(options.dense_layers)}
            given |= {"--question-prefill": question, "--question-budget": options.question_budget or False}
            refuse_beside_dense(self._typed(given))
        if options.document is None and self._typed({"--encoding": options.encoding}):
            raise UsageError(f"--encoding {options.encoding} has no effect without DOC, the text; leave it out")
        note_idle_encoding(self.ctx, [] if options.document is None else [options.document], quiet=options.run.quiet)

    def note_unread(self) -> None:
        """Print a note for each option that the user typed and that no task reads.

        This is no error, because a script may run many tasks with the same options.
        """
        options = self.options
        of_tasks = {
            "--contexts": options.contexts,
            "--questions": options.questions,
            "--max-new-tokens": options.max_new_tokens,
            "--batch-size": options.batch_size,
            "--raw": options.raw,
        }
        if options.data is None:
            for line in unread_options(options.task or [], options.pairs, self._typed(of_tasks)):
                note(line, quiet=options.run.quiet)

    def refuse_idle(self, methods: Mapping[str, Method]) -> None:
        """Raise UsageError if --residual or --dense-layers, which the user typed, has no effect on any of the methods.

        --residual needs a method that drops the tokens that it does not select. --dense-layers needs a method without
        dense layers of its own.
        """
        layers = self.options.dense_layers
        changed = any(first_dense(one, layers) for one in methods.values())
        if layers and methods and not changed and self._typed({"--dense-layers": layers}):
            told = f"--dense-layers {layers} has no effect on {any_of(methods)}"
            raise UsageError(f"{told}: dense layers are a part of the method; leave the option out")
        if methods and self._typed({"--residual": True}) and all(one.replaces() for one in methods.values()):
            refuse_residual(methods)

    def _typed(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the given options that are on the command line, with their values."""
        names = {option: option.removeprefix("--").replace("-", "_") for option in given}
        return {option: value for option, value in given.items() if on_command_line(self.ctx, names[option])}
