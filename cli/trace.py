"""`sparsekv trace`: answer a question, and show what each token of the answer attended to."""

from pathlib import Path
from typing import Annotated, Any

import typer

from sparsekv.cli.answering.options import (
    BudgetOption,
    MaxNewTokensOption,
    MethodOption,
    PrefillBudgetOption,
    PrefillOption,
    RawOption,
    ResidualOption,
)
from sparsekv.cli.common.console import note, waiting
from sparsekv.cli.common.index_option import open_artifact
from sparsekv.cli.common.method_options import note_small_budgets, with_method_options
from sparsekv.cli.common.options import (
    DeviceOption,
    DtypeOption,
    GroupedCommand,
    IndexOption,
    JsonOption,
    ModelOption,
    QuietOption,
    SpecialTokensOption,
)
from sparsekv.cli.common.process import refuse_little_room
from sparsekv.cli.common.questions import AnswerStream, answer_may_meet_notes, read_question
from sparsekv.cli.pages.trace import describe_size, describe_without, refuse_unwritable, say_json, write
from sparsekv.runtime.decoding.choose_config import choose_config
from sparsekv.runtime.decoding.prepare import EarlyReading
from sparsekv.runtime.selection.registry import methods

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(cls=GroupedCommand)
@with_method_options(methods())
def trace(
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="The question; - for stdin.")] = None,
    index: IndexOption = None,
    prompt_file: Annotated[str | None, typer.Option(help="Read the question from a file.")] = None,
    model: ModelOption = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write the trace to this file: a page for any browser (.html), or JSON (.json).",
        ),
    ] = None,
    truth: Annotated[
        bool,
        typer.Option(
            "--truth",
            help="Show what dense attention weighs, for the queries of each step, and what the step missed of it. It "
            "reads all of the document's keys and values for each token.",
        ),
    ] = False,
    without: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PASSAGE",
            help="Answer again without this passage of the document; repeatable. Its tokens get no weight where they "
            "are chosen or attended exactly, and centroids that stand for some of them count as many tokens less; what "
            "other tokens took over from it when the document was prefilled stays.",
        ),
    ] = None,
    method: MethodOption = None,
    budget: BudgetOption = None,
    residual: ResidualOption = False,
    prefill: PrefillOption = None,
    prefill_budget: PrefillBudgetOption = None,
    max_new_tokens: MaxNewTokensOption = 256,
    raw: RawOption = False,
    special_tokens: SpecialTokensOption = False,
    as_json: JsonOption = False,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    quiet: QuietOption = False,
    **parameters: Any,
) -> None:
    """Answer a question over an index and show what each token of the answer attended to, by layer and KV head.

    The answer streams to stdout, or with --json the trace is printed there: which passages were chosen, what centroids
    stood for and, with --truth, what was missed. Attention is no explanation; --without tests one.

    \b
    sparsekv trace --index manual.skv "How is it installed?" --truth -o trace.html
    sparsekv trace --index manual.skv "How is it installed?" --without "Run make." -o without.html
    sparsekv trace --index manual.skv "How is it installed?" --truth --json | python3 -m json.tool
    """
    refuse_little_room()
    refuse_unwritable(output)
    artifact = open_artifact(index)
    config = choose_config(
        artifact, method, parameters, budget=budget, residual=residual, prefill=prefill, prefill_budget=prefill_budget
    )
    question = read_question(prompt, prompt_file)
    early = EarlyReading.of(artifact, device, config)
    # Here, because they import transformers, which takes as long as all else: --help does not wait for it.
    from sparsekv.cli.common.loading import load_for
    from sparsekv.runtime.decoding.generate import Sampling, question_ids
    from sparsekv.runtime.tracing.trace import TracedIndex

    Sampling(max_new_tokens)
    opened = load_for(artifact, model, device, dtype, quiet=quiet, hold=True, early=early)
    ids = question_ids(opened, question, raw=raw, special_tokens=special_tokens)
    traced = TracedIndex(opened, config)
    hidden = traced.hide(without) if without else None
    note_small_budgets([config.budget], quiet=quiet)
    if config.origin:
        note(config.origin, quiet=quiet)
    stream = AnswerStream()
    with stream.ending_lines():
        with waiting("tracing", quiet=quiet or (not as_json and answer_may_meet_notes())):
            answer, document = traced.trace(ids, max_new_tokens, _discard if as_json else stream.add, truth=truth)
        if not as_json:
            stream.end()
    document["question"] = question
    if without and hidden is not None:
        with waiting("answering without the passage", quiet=quiet):
            again = traced.without(hidden, ids, max_new_tokens, answer, truth=truth)
        document["without"] = {"passages": without, **again}
        note(describe_without(again), quiet=quiet)
    size = None if output is None else write(document, output)
    printed = say_json(document) if as_json else None
    told = describe_size(document, printed if size is None else size)
    note(told if output is None else f"{output}: {told}", quiet=quiet)


def _discard(text: str) -> None:
    pass
