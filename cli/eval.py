"""`sparsekv eval`: score each method's answers against dense attention's, with confidence intervals."""

from pathlib import Path
from typing import Annotated, Any

import typer

from sparsekv.cli.common.console import note, progress
from sparsekv.cli.common.method_options import note_small_budgets, with_method_options
from sparsekv.cli.common.options import (
    ChunkSizeOption,
    DeviceOption,
    DtypeOption,
    EncodingOption,
    GroupedCommand,
    JsonOption,
    KVDtypeOption,
    ModelOption,
    QuietOption,
    RayOption,
    WorkersOption,
    check_ray,
    names_of,
    refuse_unwritable_plot,
)
from sparsekv.cli.evaluating.output import evaluation_page, evaluation_record, note_few_contexts, print_rows
from sparsekv.cli.evaluating.recipe import (
    QUESTION_OPTIONS,
    EvalRecipe,
    answer_by_ray,
    asking_method,
    chosen_methods,
    needed_indexers,
)
from sparsekv.cli.pages.page import HtmlOption, refuse_unwritable_html, write_html
from sparsekv.formats.documents.document import UTF_8
from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.schema import AUTO, kv_dtype_named
from sparsekv.indexing.indexers.interface import indexers
from sparsekv.indexing.plan import BuildConfig
from sparsekv.indexing.prefill.interface import choose_prefill, prefills
from sparsekv.runtime.attention.config import QUESTION_BUDGET, Own
from sparsekv.runtime.decoding.choose_config import question_prefill as how_prefilled
from sparsekv.runtime.evaluation.engine import check_room, evaluate
from sparsekv.runtime.evaluation.inputs import Inputs, read_contexts, work_folder
from sparsekv.runtime.evaluation.published import FORMATS
from sparsekv.runtime.evaluation.table import cells, rows
from sparsekv.runtime.evaluation.tasks import tasks
from sparsekv.runtime.selection.interface import Budget
from sparsekv.runtime.selection.registry import DENSE, configure, methods, refuse_unused

app = typer.Typer(rich_markup_mode=None, add_completion=False)
DEFAULT_BUDGETS = ["0.05", "0.1"]
BUILDING = {f"the index of {name}": indexer for name, indexer in indexers().items()} | {
    f"--prefill {name}": prefill for name, prefill in prefills().items()
}
"""Indexers and prefills by their names in --help: their parameters become options beside those of the methods."""


@app.command(cls=GroupedCommand)
@with_method_options(methods() | BUILDING)
def evaluate_methods(
    document: Annotated[
        str | None, typer.Argument(metavar="DOC", help="A text to make tasks from; - for standard input.")
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Task; repeatable: {', '.join(tasks())}. Default: niah-facts.", autocompletion=names_of(tasks)
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="FILE.jsonl", help="Published tasks to use instead of DOC; needs --format.")
    ] = None,
    data_format: Annotated[
        str | None, typer.Option("--format", metavar="|".join(FORMATS), help="Format of --data.")
    ] = None,
    pairs: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.jsonl", help='Questions of --task qa, each line {"question": ..., "answers": [...]}.'
        ),
    ] = None,
    length: Annotated[
        list[int] | None, typer.Option(help="Tokens per context; repeatable. Default: 4096; with --data, uncut.")
    ] = None,
    depth: Annotated[
        list[float] | None,
        typer.Option(help="Where needles are hidden, in percent of the context; repeatable. Default: evenly spread."),
    ] = None,
    contexts: Annotated[int, typer.Option(help="Contexts per task and length.")] = 3,
    questions: Annotated[
        int | None, typer.Option(help="Questions per context. Default: 5, or all that a file has.")
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="Method to compare with dense attention; repeatable; `dense` runs dense attention alone. Default: "
            "all.",
            autocompletion=names_of(methods, "all", DENSE),
        ),
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(help="Share (0.05, 5%) or number of tokens to attend to; repeatable. Default: 5% and 10%."),
    ] = None,
    residual: Annotated[
        bool,
        typer.Option(
            "--residual", help="Run each method a second time, with centroids for the tokens that it does not select."
        ),
    ] = False,
    prefill: Annotated[
        list[str] | None,
        typer.Option(metavar="|".join(prefills()), help="How contexts are prefilled; repeatable. Default: dense."),
    ] = None,
    question_prefill: Annotated[
        str,
        typer.Option(
            metavar="dense|own|METHOD",
            help="What questions attend to: everything, what the answer's method selects (own), or what METHOD does.",
            autocompletion=names_of(methods, DENSE, Own.name),
        ),
    ] = DENSE,
    question_budget: Annotated[
        str | None,
        typer.Option(
            help=f"Share or number of tokens a chunk attends to with --question-prefill. Default: {QUESTION_BUDGET}."
        ),
    ] = None,
    batch_size: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="How many questions of a context to answer at once. Dense attention's answers stay as they are; a "
            "method's questions then share what each step selects, and lose less.",
        ),
    ] = 1,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer, in tokens. Default: the task's.")
    ] = None,
    sinks: Annotated[int, typer.Option(help="First tokens of the prompt: always attended, never indexed.")] = 10,
    tail: Annotated[int, typer.Option(help="Last tokens of the prompt: always attended, never indexed.")] = 128,
    kv_dtype: KVDtypeOption = AUTO,
    chunk_size: ChunkSizeOption = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the tasks and of the confidence intervals.")] = 0,
    encoding: EncodingOption = UTF_8,
    raw: Annotated[bool, typer.Option("--raw", help="Put no chat template around document and question.")] = False,
    work: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Folder for answers and indices. Default: DOC's name with the ending .eval."
        ),
    ] = None,
    keep_indices: Annotated[
        bool, typer.Option("--keep-indices", help="Keep each context's index after its questions are answered.")
    ] = False,
    as_json: JsonOption = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.png", help="Plot scores against the kv fraction, and needles also by length and depth."
        ),
    ] = None,
    html: HtmlOption = None,
    ray: RayOption = None,
    workers: WorkersOption = None,
    model: ModelOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    quiet: QuietOption = False,
    **parameters: Any,
) -> None:
    """Ask questions with known answers, with dense attention and with each method at each budget, and compare.

    Each context is indexed once. Brackets hold 95% confidence intervals, from a bootstrap over contexts and the
    questions within them. Differences from dense attention are paired by question. A stopped run continues when the
    same command is given again, and ends with the same numbers. docs/reference/measures.md explains the words.

    \b
    sparsekv eval manual.txt
    sparsekv eval book.txt --task niah-single --length 2048 --length 4096 --contexts 10 --plot depth.png
    sparsekv eval manual.txt --task qa --pairs questions.jsonl --method multipole --budget 5% --html qa.html
    sparsekv eval --data hotpotqa.jsonl --format longbench --questions 1 --json > hotpotqa.json
    """
    if as_json and as_csv:
        raise UsageError("--json and --csv exclude each other: choose one")
    check_ray(ray, workers)
    refuse_unwritable_plot(plot)
    refuse_unwritable_html(html)
    budgets = Budget.parse_each(budget or DEFAULT_BUDGETS)
    chosen = chosen_methods(method or [])
    ways = {name: choose_prefill(name) for name in dict.fromkeys(prefill or ["dense"])}
    asking = asking_method(question_prefill)
    built = needed_indexers([*chosen, *asking], residual=residual)
    refuse_unused(
        chosen
        | {f"the index of {name}": indexer for name, indexer in built.items()}
        | {f"the {name} prefill": way for name, way in ways.items()}
        | {f"--question-prefill {name}": one for name, one in asking.items()},
        parameters,
    )
    folder = work_folder(document, data, work)
    inputs = Inputs.read(
        document, task or [], data, data_format, pairs, length or [], depth or [], contexts, questions, seed, encoding
    )
    note_small_budgets(budgets, quiet=quiet)
    recipe = EvalRecipe(
        work=folder,
        model=model,
        device=device,
        dtype=dtype,
        methods={name: configure(one, parameters) for name, one in chosen.items()},
        budgets=budgets,
        build=BuildConfig(
            methods={name: configure(indexer, parameters) for name, indexer in built.items()},
            sinks=sinks,
            tail=tail,
            chunk_size=chunk_size,
            kv_dtype=kv_dtype_named(kv_dtype),
        ),
        prefills={name: configure(way, parameters) for name, way in ways.items()},
        question=how_prefilled(question_prefill, question_budget, asking, parameters, QUESTION_OPTIONS),
        residual=residual,
        raw=raw,
        keep=keep_indices,
        max_new_tokens=max_new_tokens,
        together=batch_size,
        quiet=quiet,
    )
    comparison = recipe.load()
    asked = read_contexts(inputs, comparison)
    check_room(comparison, asked)
    counted = f"contexts: {len(asked)}, questions: {sum(len(one.questions) for one in asked)}, each in"
    told = f"{counted} {len(comparison.ways())} ways; answers are kept in {folder}, and none is computed twice"
    note(told, quiet=quiet)
    with progress(quiet=quiet) as show:
        if ray is not None:
            answer_by_ray(recipe, comparison, asked, ray, workers, show)
        results = list(evaluate(comparison, asked, folder, show))
    found, places = rows(results, seed), cells(results)
    if plot is not None:
        from sparsekv.cli.evaluating.plots import plot_scores

        mapped = places if len(inputs.lengths) > 1 or len(inputs.request.depths) > 1 else []
        plot_scores(found, mapped, f"{comparison.loaded.name} on {inputs.name}", plot)
        note(f"plot: {plot}", quiet=quiet)
    name, where = comparison.loaded.name, str(folder)
    about = {"model": name, "document": inputs.name, "kv_dtype": kv_dtype, "seed": seed, "work": where}
    if html is not None:
        write_html(evaluation_page(evaluation_record(found, places, about)), html, quiet=quiet)
    print_rows(found, places, about, as_json=as_json, as_csv=as_csv)
    note_few_contexts(found, quiet=quiet)
