"""`sparsekv eval`: score each method's answers and those of dense attention, with confidence intervals.

Workers of a Ray cluster may answer the questions.
"""

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import typer

from sparsekv.cli.common.console import note, progress
from sparsekv.cli.common.method_options import note_budgets, with_options
from sparsekv.cli.configuring.sources import Command
from sparsekv.cli.evaluating.options import BUILDING, EvalCall, EvalOptions
from sparsekv.cli.evaluating.output import (
    evaluation_page,
    evaluation_record,
    note_few_contexts,
    note_unbuilt,
    note_wrong_baselines,
    print_rows,
    write_answers,
)
from sparsekv.cli.pages.page import write_html
from sparsekv.indexing.indexers.interface import Indexer
from sparsekv.runtime.selection.interface import methods

if TYPE_CHECKING:  # only annotations name them
    from sparsekv.runtime.evaluation.table import Cell, Score

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(cls=Command)
@with_options(EvalCall, methods() | BUILDING, preset=fields(Indexer))
def evaluate_methods(call: EvalCall) -> None:
    """Ask questions with known answers, with dense attention and with each method at each budget, and compare.

    Each context is indexed once for each --prefill. Brackets hold 95% confidence intervals, from a bootstrap over
    contexts and the questions within them, or exact binomial ones where all scores are equal. Differences from dense
    attention are paired by question. A stopped run continues when the same command is given again, and ends with the
    same numbers. docs/reference/measures.md explains the words.

    \b
    sparsekv eval manual.txt
    sparsekv eval book.txt --task niah-single --length 2048 --length 4096 --contexts 10 --plot depth.png
    sparsekv eval manual.txt --task qa --pairs questions.jsonl --method multipole --budget 5% --html qa.html
    sparsekv eval --data hotpotqa.jsonl --format longbench --questions 1 --json > hotpotqa.json
    """
    # Imported here, so that --help does not wait seconds for transformers.
    from sparsekv.cli.evaluating.recipe import EvalRecipe, answer_by_ray
    from sparsekv.runtime.evaluation.engine import check_room, evaluate, indexable, without_index
    from sparsekv.runtime.evaluation.inputs import answer_notes, cut_notes, read_contexts
    from sparsekv.runtime.evaluation.table import cells, expecting_dense, rows

    call.check()
    options = call.options
    recipe, inputs = EvalRecipe.of(options), options.inputs()
    call.refuse_idle(recipe.methods)
    call.note_unread()
    note_budgets(recipe.budgets, quiet=options.run.quiet)
    comparison = recipe.load()
    asked = read_contexts(inputs, comparison)
    check_room(comparison, asked)
    asked, left_out = indexable(comparison, asked)
    for line in left_out:
        note(f"left out: {line}", quiet=options.run.quiet)
    for line in cut_notes(inputs, comparison, asked) + answer_notes(comparison, asked):
        note(line, quiet=options.run.quiet)
    counted = f"contexts: {len(asked)}, questions: {sum(len(one.questions) for one in asked)}, each by"
    kept = f"answers are kept in {recipe.work}, and none is computed twice"
    variants = len(comparison.ways())
    note(f"{counted} {variants} variant{'s' * (variants != 1)} of attention; {kept}", quiet=options.run.quiet)
    with progress(quiet=options.run.quiet) as show:
        if options.ray is not None:
            answer_by_ray(recipe, comparison, asked, options.ray, options.workers, show)
        results = expecting_dense(list(evaluate(comparison, asked, recipe.work, show)))
    if options.keep_indices:
        note_unbuilt(without_index(comparison, asked, recipe.work), quiet=options.run.quiet)
    about: dict[str, Any] = {"model": comparison.loaded.name, "document": inputs.name, "kv_dtype": options.kv_dtype}
    about |= {"weights": options.weights, "rope_scaling": options.rope_scaling}
    about |= {"seed": options.seed, "work": str(recipe.work)}
    found, places = recipe.labelled(rows(results, options.seed)), recipe.labelled(cells(results))
    mapped = places if len(inputs.lengths) > 1 or len(inputs.request.depths) > 1 else []
    _write_files(options, found, places, mapped, about)
    if options.answers is not None:
        records = (recipe.answer_record(result, about) for result in results)
        write_answers(records, options.answers, quiet=options.run.quiet)
    print_rows(found, places, about, options.format)
    note_wrong_baselines(found, cut=options.max_new_tokens is not None, quiet=options.run.quiet)
    note_few_contexts(found, quiet=options.run.quiet)


def _write_files(
    options: EvalOptions, found: list["Score"], places: list["Cell"], mapped: list["Cell"], about: dict[str, Any]
) -> None:
    """Write the plot and the HTML page that the options name.

    Both show the scores `found`. The plot also shows the `mapped` cells by length and depth, and the page all `places`.
    """
    if options.plot is not None:
        from sparsekv.cli.evaluating.plots import plot_scores

        plot_scores(found, mapped, f"{about['model']} on {about['document']}", options.plot)
        note(f"plot: {options.plot}", quiet=options.run.quiet)
    if options.html is not None:
        write_html(evaluation_page(evaluation_record(found, places, about)), options.html, quiet=options.run.quiet)
