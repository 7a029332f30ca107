"""`sparsekv eval`: what each method's answers are worth beside dense attention's, with confidence intervals."""

from pathlib import Path
from typing import Annotated, Any

import typer

from sparsekv.cli.common.console import note, progress
from sparsekv.cli.common.help_panels import GroupedCommand
from sparsekv.cli.common.loading import load
from sparsekv.cli.common.method_options import with_method_options
from sparsekv.cli.common.options import DeviceOption, DtypeOption, JsonOption, ModelOption, QuietOption
from sparsekv.cli.common.plot_option import refuse_unwritable_plot
from sparsekv.cli.common.small_budgets import note_small_budgets
from sparsekv.cli.evaluating.output import print_rows
from sparsekv.formats.errors import UsageError
from sparsekv.indexing.indexers.interface import Indexer
from sparsekv.indexing.indexers.registry import choose_indexers, indexers
from sparsekv.indexing.models.identify import identify
from sparsekv.indexing.prefill.interface import choose_prefill, prefills
from sparsekv.runtime.attention.question import QUESTION_BUDGET, QuestionPrefill
from sparsekv.runtime.evaluation.comparison import Comparison, check_room
from sparsekv.runtime.evaluation.engine import evaluate
from sparsekv.runtime.evaluation.inputs import Inputs, read_contexts, work_folder
from sparsekv.runtime.evaluation.published import FORMATS
from sparsekv.runtime.evaluation.table import DENSE, cells, rows
from sparsekv.runtime.evaluation.tasks import tasks
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.configure import configure, refuse_unused
from sparsekv.runtime.selection.interface import Method
from sparsekv.runtime.selection.registry import choose_methods, methods

app = typer.Typer(rich_markup_mode=None, add_completion=False)

DEFAULT_BUDGETS = ["0.05", "0.1"]
BUILDING = {f"the index of {name}": indexer for name, indexer in indexers().items()} | {
    f"--prefill {name}": prefill for name, prefill in prefills().items()
}
"""What else has options, by the name that --help calls it."""


@app.command(cls=GroupedCommand)
@with_method_options(methods() | BUILDING)
def evaluate_methods(
    document: Annotated[
        str | None, typer.Argument(metavar="DOC", help="A text to make tasks of; - for standard input.")
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option(help=f"Repeatable: {', '.join(tasks())}. Default: niah-facts.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="FILE.jsonl", help="Published tasks in place of DOC, in the --format given.")
    ] = None,
    data_format: Annotated[str | None, typer.Option("--format", metavar="|".join(FORMATS), help="Of --data.")] = None,
    pairs: Annotated[
        str | None,
        typer.Option(metavar="FILE.jsonl", help='For --task qa: a line is {"question": ..., "answers": [...]}.'),
    ] = None,
    length: Annotated[
        list[int] | None, typer.Option(help="Tokens of a context; repeatable. Default: 4096; of --data, as it is.")
    ] = None,
    depth: Annotated[
        list[float] | None,
        typer.Option(help="Where needles stand, in percent of the context; repeatable. Default: spread evenly."),
    ] = None,
    contexts: Annotated[int, typer.Option(help="Contexts for each task and length.")] = 3,
    questions: Annotated[
        int | None, typer.Option(help="Questions for each context. Default: 5, or all that a file has.")
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="A method; repeatable; `dense` alone for nothing else. Default: all.")
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(help="Share (0.05, 5%) or number of tokens; repeatable. Default: 5% and 10%."),
    ] = None,
    residual: Annotated[
        bool, typer.Option("--residual", help="Each method also with centroids for what it does not choose.")
    ] = False,
    prefill: Annotated[
        list[str] | None,
        typer.Option(metavar="|".join(prefills()), help="What prefills a context; repeatable. Default: dense."),
    ] = None,
    question_prefill: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="A method, or dense, for the question's tokens. Default: the answer's method."
        ),
    ] = None,
    question_budget: Annotated[
        str, typer.Option(help="Tokens that a chunk of the question attends to, with --question-prefill.")
    ] = QUESTION_BUDGET,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer, in tokens. Default: the task's.")
    ] = None,
    sinks: Annotated[int, typer.Option(help="First tokens that are always attended.")] = 10,
    tail: Annotated[int, typer.Option(help="Last tokens that are always attended.")] = 128,
    chunk_size: Annotated[int, typer.Option(help="Tokens a forward pass of the prefill.")] = 512,
    seed: Annotated[int, typer.Option(help="Seed of the tasks and of the intervals.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template around document and question.")] = False,
    work: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where answers and indices lie. Default: DOC with .eval as its ending."),
    ] = None,
    keep_indices: Annotated[
        bool, typer.Option("--keep-indices", help="Keep each context's index when its questions are answered.")
    ] = False,
    as_json: JsonOption = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV on stdout.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Score against rows read; of needles also by length and depth."),
    ] = None,
    model: ModelOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    quiet: QuietOption = False,
    **parameters: Any,
) -> None:
    """Ask questions with known answers, with dense attention and with each method at each budget, and compare.

    Each context is indexed once. Brackets hold 95% intervals, by bootstrap over contexts and the questions within
    them; differences from dense attention are paired, question by question. A run that was stopped goes on where it
    was when the same command is given again, and ends with the same numbers.

    \b
    sparsekv eval manual.txt
    sparsekv eval book.txt --task niah-single --length 2048 --length 4096 --contexts 10 --plot depth.png
    sparsekv eval manual.txt --task qa --pairs questions.jsonl --method multipole --budget 5%
    sparsekv eval --data hotpotqa.jsonl --format longbench --questions 1 --json > hotpotqa.json
    """
    if as_json and as_csv:
        raise UsageError("--json and --csv exclude each other: choose one")
    refuse_unwritable_plot(plot)
    budgets = [Budget.parse(text) for text in dict.fromkeys(budget or DEFAULT_BUDGETS)]
    chosen = _methods(method or [])
    ways = {name: choose_prefill(name) for name in dict.fromkeys(prefill or ["dense"])}
    asking = _methods([question_prefill]) if question_prefill else {}
    built = _indexers([*chosen, *asking], residual=residual)
    refuse_unused(
        chosen
        | {f"the index of {name}": indexer for name, indexer in built.items()}
        | {f"--prefill {name}": way for name, way in ways.items()}
        | {f"--question-prefill {name}": one for name, one in asking.items()},
        parameters,
    )
    configured = {name: configure(one, parameters) for name, one in chosen.items()}
    prefilled = {name: configure(way, parameters) for name, way in ways.items()}
    folder = work_folder(document, data, work)
    question = None
    if question_prefill is not None:
        method_of = next((configure(one, parameters) for one in asking.values()), None)
        question = QuestionPrefill(question_prefill, method_of, Budget.parse(question_budget, "--question-budget"))
    inputs = Inputs.read(
        document, task or [], data, data_format, pairs, length or [], depth or [], contexts, questions, seed
    )
    note_small_budgets(budgets, quiet=quiet)
    loaded = load(model, device, dtype, None, quiet=quiet)
    comparison = Comparison(
        loaded=loaded,
        identity=identify(loaded),
        methods=configured,
        indexers={name: configure(indexer, parameters) for name, indexer in built.items()},
        budgets=budgets,
        prefills=prefilled,
        question=question,
        residual=residual,
        raw=raw,
        keep=keep_indices,
        max_new_tokens=max_new_tokens,
        sinks=sinks,
        tail=tail,
        chunk_size=chunk_size,
    )
    asked = read_contexts(inputs, comparison)
    check_room(comparison, asked)
    total = sum(len(context.questions) for context in asked)
    note(f"{total} questions about {len(asked)} contexts, each in {len(comparison.ways())} ways", quiet=quiet)
    with progress(quiet=quiet) as show:
        results = list(evaluate(comparison, asked, folder, show))
    found, places = rows(results, seed), cells(results)
    if plot is not None:
        from sparsekv.cli.evaluating.plots import plot_scores

        mapped = places if len(inputs.lengths) > 1 or len(inputs.depths) > 1 else []
        plot_scores(found, mapped, f"{loaded.name} on {inputs.name}", plot)
        note(f"plot: {plot}", quiet=quiet)
    about = {"model": loaded.name, "document": inputs.name, "seed": seed, "work": str(folder)}
    print_rows(found, places, about, as_json=as_json, as_csv=as_csv)


def _methods(names: list[str]) -> dict[str, type[Method]]:
    """Every method whose index can be built, or those that are named; dense attention is always there, and may be
    named to have nothing beside it."""
    others = [name for name in names if name != DENSE]
    if names and not others:
        return {}
    return {name: methods()[name] for name in choose_methods(others, list(indexers()))}


def _indexers(names: list[str], *, residual: bool) -> dict[str, type[Indexer]]:
    """Of the methods that need one; for a residual also those that an index has by default, some with centroids."""
    known = indexers()
    wanted = [name for name in names if name in known] + (choose_indexers([]) if residual else [])
    return {name: known[name] for name in dict.fromkeys(wanted)}
