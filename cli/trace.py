"""`sparsekv trace`: answer a question, and show what each token of the answer attended to."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from sparsekv.cli.answering.idle import note_idle_method, note_prefill_alone
from sparsekv.cli.answering.options import AttentionOptions, MaxNewTokensOption, RawOption, SamplingOptions
from sparsekv.cli.common.console import note, waiting
from sparsekv.cli.common.method_options import note_budgets, with_options
from sparsekv.cli.common.open_artifact import open_artifact
from sparsekv.cli.common.options import (
    IndexOption,
    JsonOption,
    ModelOption,
    RunOptions,
    SpecialTokensOption,
    WeightsOption,
)
from sparsekv.cli.common.process import refuse_little_room
from sparsekv.cli.common.questions import AnswerStream, answer_may_meet_notes, read_question
from sparsekv.cli.configuring.sources import Command, typed_options
from sparsekv.cli.pages.trace import describe_size, describe_without, refuse_unwritable, say_json, write
from sparsekv.runtime.decoding.early import EarlyReading
from sparsekv.runtime.selection.interface import methods

if TYPE_CHECKING:  # the modules import transformers, for which --help does not wait
    from sparsekv.runtime.decoding.answer import Answer
    from sparsekv.runtime.tracing.trace import TracedIndex

app = typer.Typer(rich_markup_mode=None, add_completion=False)

NOT_OF_THE_ANSWER = ("index", "prompt_file", "output", "truth", "without", "as_json", "quiet")
"""Parameters that are left out of the options stored in a trace.

They do not change the answer, or the page sets them itself in its command to answer without a passage.
"""


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """Command-line options of `trace`."""

    ctx: typer.Context
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="The question; - for stdin.")] = None
    index: IndexOption = None
    prompt_file: Annotated[str | None, typer.Option(help="Read the question from a file in UTF-8.")] = None
    model: ModelOption = None
    weights: WeightsOption = "auto"
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write the trace to this file: a page for any browser (.html), or JSON (.json).",
        ),
    ] = None
    truth: Annotated[
        bool,
        typer.Option(
            "--truth",
            help="Also compute dense attention for the queries of each step, and show how much of it the step missed. "
            "This reads all of the document's keys and values for each token.",
        ),
    ] = False
    without: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PASSAGE",
            help="Answer again without this passage of the document; repeatable. Its tokens get no weight, and "
            "centroids that represent some of them count for fewer tokens. Information from the passage that other "
            "tokens took over during the prefill stays.",
        ),
    ] = None
    attention: AttentionOptions
    max_new_tokens: MaxNewTokensOption = 256
    raw: RawOption = False
    special_tokens: SpecialTokensOption = False
    as_json: JsonOption = False
    run: RunOptions


@app.command(cls=Command)
@with_options(TraceOptions, methods())
def trace(options: TraceOptions) -> None:
    """Answer a question over an index and show what each token of the answer attended to, by layer and KV head.

    The answer streams to stdout; with --json the trace is printed there instead. The trace has the attention that each
    passage gets by selected tokens, and by centroids that represent other tokens. With --truth it also has the
    attention that is missed. Page and JSON name the answer's sources: up to eight passages of the document, with file
    and lines. Attention does not explain an answer; --without tests whether a passage matters.

    \b
    sparsekv trace --index manual.skv "How is it installed?" --truth -o trace.html
    sparsekv trace --index manual.skv "How is it installed?" --without "Run make." -o without.html
    sparsekv trace --index manual.skv "How is it installed?" --truth --json | python3 -m json.tool
    """
    refuse_little_room()
    refuse_unwritable(options.output)
    artifact = open_artifact(options.index)
    config = options.attention.config(artifact)
    question = read_question(options.prompt, options.prompt_file)
    note_idle_method(options.ctx, config, quiet=options.run.quiet)
    note_prefill_alone(options.ctx, config, quiet=options.run.quiet)
    early = EarlyReading.of(artifact, options.run.device, config)
    # Imported here, so that --help does not wait seconds for transformers.
    from sparsekv.cli.common.loading import load_for
    from sparsekv.runtime.decoding.answer import question_ids
    from sparsekv.runtime.tracing.trace import TracedIndex

    SamplingOptions(max_new_tokens=options.max_new_tokens).make()
    named = options.model, options.run.device, options.run.dtype
    load = partial(load_for, artifact, *named, weights=options.weights)
    opened = load(quiet=options.run.quiet, hold=True, early=early)
    ids = question_ids(opened, question, raw=options.raw, special_tokens=options.special_tokens)
    traced = TracedIndex(opened, config)
    hidden = traced.hide(options.without) if options.without else None
    note_budgets([config.budget], artifact.manifest.split.middle, quiet=options.run.quiet)
    note(config.origin, quiet=options.run.quiet or not config.origin)
    answer, document = _traced(options, traced, ids)
    document["question"] = question
    document["options"] = typed_options(options.ctx, NOT_OF_THE_ANSWER)
    if hidden is not None:
        with waiting("answering without the passage", quiet=options.run.quiet):
            again = traced.without(hidden, ids, options.max_new_tokens, answer, truth=options.truth)
        document["without"] = {"passages": options.without, **again}
        note(describe_without(again), quiet=options.run.quiet)
    _show(options, document)


def _traced(options: TraceOptions, traced: "TracedIndex", question: torch.Tensor) -> "tuple[Answer, dict[str, Any]]":
    """Return the answer to a question [Q] and its trace. The answer streams to stdout unless --json is given."""
    stream, quiet = AnswerStream(), options.run.quiet or (not options.as_json and answer_may_meet_notes())
    on_text = (lambda text: None) if options.as_json else stream.add
    with stream.ending_lines():
        with waiting("tracing", quiet=quiet):
            found = traced.trace(question, options.max_new_tokens, on_text, truth=options.truth)
        if not options.as_json:
            stream.end()
    return found


def _show(options: TraceOptions, document: dict[str, Any]) -> None:
    """Write the trace to the file of --output, print it with --json, and note its size."""
    size = None if options.output is None else write(document, options.output)
    printed = say_json(document) if options.as_json else None
    told = describe_size(document, printed if size is None else size)
    note(told if options.output is None else f"{options.output}: {told}", quiet=options.run.quiet)
