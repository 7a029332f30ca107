"""`sparsekv chat`: ask one question after another over an index, in a terminal."""

from dataclasses import dataclass
from functools import partial

import typer

from sparsekv.cli.answering.idle import note_idle_method, note_idle_seed, note_prefill_alone, note_short_document
from sparsekv.cli.answering.options import (
    Choices,
    PlacementOption,
    RawOption,
    SamplingOptions,
    SourcesOption,
    StatsOption,
    TimedAttentionOptions,
)
from sparsekv.cli.common.console import note
from sparsekv.cli.common.method_options import note_budgets, with_options
from sparsekv.cli.common.open_artifact import open_artifact
from sparsekv.cli.common.options import (
    CompileOption,
    IndexOption,
    ModelOption,
    RunOptions,
    SpecialTokensOption,
    WeightsOption,
)
from sparsekv.cli.common.process import refuse_little_room
from sparsekv.cli.configuring.sources import Command, left_out
from sparsekv.formats.errors import check_choice
from sparsekv.runtime.attention.config import Dense
from sparsekv.runtime.decoding.compiled import MODES, WORTH_JOINING
from sparsekv.runtime.decoding.early import EarlyReading
from sparsekv.runtime.selection.interface import methods

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@dataclass(frozen=True, kw_only=True)
class ChatAttention(TimedAttentionOptions):
    """The attention options that `chat` offers."""

    placement: PlacementOption = "device"


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Command-line options of `chat`."""

    ctx: typer.Context
    index: IndexOption = None
    model: ModelOption = None
    weights: WeightsOption = "auto"
    compiled: CompileOption = "auto"
    attention: ChatAttention
    sampling: SamplingOptions
    raw: RawOption = False
    special_tokens: SpecialTokensOption = False
    sources: SourcesOption = None
    stats: StatsOption = False
    run: RunOptions


@app.command(cls=Command)
@with_options(ChatOptions, methods())
def chat(options: ChatOptions) -> None:
    """Ask one question after another over an index; each question follows the document and the talk so far.

    Model and index are loaded once. At a terminal, lines that begin with / are commands (/help lists them), pasted
    lines are one question, Ctrl-C stops an answer and Ctrl-D leaves. If standard input is no terminal, each of its
    lines is a question, and a line that looks like a command is refused. The answers then go to stdout one after
    another, and no `>` is printed.

    \b
    sparsekv chat --index manual.skv
    sparsekv chat --index manual.skv --method quest --budget 5% --stats
    printf 'What is this about?\\nSay it in one word.\\n' | sparsekv chat --index manual.skv
    """
    refuse_little_room()
    check_choice("--compile", options.compiled, MODES)
    artifact, quiet = open_artifact(options.index), options.run.quiet
    config = options.attention.for_one_question(artifact, options.run.device)
    choices = Choices.of(options.attention, artifact, config, left_out(options.ctx))
    if options.attention.by_time:
        from sparsekv.cli.answering.faster import take_faster  # the module imports transformers

        where, told = (options.run.device, options.run.dtype), options.stats or not quiet
        config = take_faster(artifact, config, 1, *where, quiet=not told).config
    early = EarlyReading.of(artifact, options.run.device, config)
    # Imported here, so that --help does not wait seconds for transformers.
    from sparsekv.cli.chatting.loop import HOW, converse, piped_questions
    from sparsekv.cli.chatting.session import Chat, describe
    from sparsekv.cli.common.compiling import compile_or_note
    from sparsekv.cli.common.loading import OpeningTimes, load_for
    from sparsekv.runtime.decoding.session import Conversation

    sampling, placement = options.sampling.make(), config.placement
    note_idle_method(options.ctx, config, quiet=quiet)
    note_prefill_alone(options.ctx, config, quiet=quiet)
    note_idle_seed(options.ctx, quiet=quiet)
    if isinstance(config.attention, Dense) and placement != "device":
        note(
            f"--placement {placement} has no effect before /method NAME: dense attention reads all keys and values",
            quiet=quiet,
        )
    piped, times = piped_questions(), OpeningTimes()
    named = options.model, options.run.device, options.run.dtype
    load = partial(load_for, artifact, *named, quiet=quiet, weights=options.weights)
    opened = load(hold=placement == "device", loaded_in=times.loaded, early=early)
    talk = Conversation(opened, config, raw=options.raw, special_tokens=options.special_tokens)
    compile_or_note(options.compiled, opened.model, talk.warm_up, WORTH_JOINING, quiet=not options.stats)
    note_budgets([config.budget], artifact.manifest.split.middle, quiet=quiet)
    note_short_document(config, quiet=quiet)
    if options.stats:  # at a terminal, the first line shows the method
        times.show("" if piped is None else f"answers by {describe(config)}", artifact.manifest, opened.dtype)
    sources, dtype = options.sources or 0, options.run.dtype
    session = Chat(talk, choices, sampling, stats=options.stats, quiet=quiet, dtype=dtype, sources=sources)
    if piped is None:
        note(f"{artifact.folder}: {opened.split.tokens:,} tokens; {describe(config)}; {HOW}", quiet=quiet)
        return converse(session)
    for question in piped:
        session.ask(question)
