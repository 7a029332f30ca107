"""`sparsekv generate`: answer questions over an index."""

from functools import partial

import typer

from sparsekv.cli.answering.idle import note_idle_method, note_idle_seed, note_prefill_alone, note_short_document
from sparsekv.cli.answering.options import GenerateOptions
from sparsekv.cli.common.console import note, say
from sparsekv.cli.common.method_options import note_budgets, with_options
from sparsekv.cli.common.open_artifact import open_artifact
from sparsekv.cli.common.process import refuse_little_room
from sparsekv.cli.configuring.sources import Command
from sparsekv.cli.distributed.launch import join_ranks
from sparsekv.runtime.decoding.early import EarlyReading
from sparsekv.runtime.selection.interface import methods

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(cls=Command)
@with_options(GenerateOptions, methods())
def generate(options: GenerateOptions) -> None:
    """Answer a question over an index; the answer streams to stdout unless --json is given.

    Only the question is prefilled. The answer is about the text as it was indexed, even if its file was edited since:
    `build-index` updates the index. With --sources the passages that the answer attended to most follow on stderr.
    With --batch-file every line is a question, and --batch-size questions are answered at once. Each answer is then
    printed as one line: line breaks and runs of spaces become one space unless --json is given, and a blank line gets
    a blank answer. An index made by --save-to can be asked the next question; methods that cannot append tokens are
    rebuilt for it.

    \b
    sparsekv generate --index manual.skv "How is it installed?"
    echo "What is this about?" | sparsekv generate --index manual.skv --budget 5%
    sparsekv generate --index manual.skv "How is it installed?" --save-to talk.skv
    sparsekv generate --index manual.skv "How is it installed?" --sources 3
    sparsekv generate --index manual.skv --batch-file questions.txt --json > answers.jsonl
    """
    refuse_little_room()
    ranks, artifact = join_ranks(options.device), open_artifact(options.index)
    config, by_time = options.config(artifact, ranks), options.by_time(ranks)
    early = None if ranks is not None or by_time else EarlyReading.of(artifact, options.device, config)
    # Imported here, so that --help does not wait seconds for transformers.
    from sparsekv.cli.answering.answers import Questions, Schedule
    from sparsekv.cli.answering.faster import take_faster
    from sparsekv.cli.answering.output import Output
    from sparsekv.cli.common.loading import OpeningTimes, load_for

    sampling, at_once = options.sampling.make(), options.questions_at_once(config, ranks)
    options.check(artifact)
    note_idle_method(options.ctx, config, quiet=options.quiet)
    note_prefill_alone(options.ctx, config, quiet=options.quiet)
    note_idle_seed(options.ctx, quiet=options.quiet)
    questions, choice = Questions.read(options, ranks), None
    if by_time:
        choice = take_faster(
            artifact,
            config,
            questions.together(at_once, options.device),
            options.device,
            options.dtype,
            quiet=options.quiet and not options.with_stats,
        )
        config, early = choice.config, EarlyReading.of(artifact, options.device, choice.config)
    output = Output.open(options, config, sampling, artifact, questions.texts, choice)
    if len(output.done) == len(questions.texts):
        return say("\n".join(output.done))
    times = OpeningTimes()
    named = options.model, options.device, options.dtype
    load = partial(load_for, artifact, *named, quiet=options.quiet, weights=options.weights)
    opened = load(hold=config.placement == "device", loaded_in=times.loaded, ranks=ranks, early=early)
    output.note_eos_tokens(opened)
    asked = questions.encode(opened)[len(output.done) :]
    schedule = Schedule.open(opened, config, sampling, asked, at_once, ranks, options.sources or 0)
    note_budgets([config.budget], artifact.manifest.split.middle, quiet=options.quiet)
    note_short_document(config, quiet=options.quiet or options.with_stats)
    if options.with_stats:
        dense = f", the first {config.dense_layers} layers dense" if config.dense_layers else ""
        budget = config.budget.told(artifact.manifest.split.middle)
        how = f"{config.origin or f'answers by {config.attention.name}, budget {budget}'}{dense}"
        how = "answers by dense attention, from drafts (--lossless)" if config.lossless else how
        times.show(how, artifact.manifest, opened.dtype)
    schedule.compile(options.compiled, quiet=not options.with_stats)
    questions.note_plain(opened, len(output.done), quiet=options.quiet)
    answer = output.show(questions.texts, schedule.answers(output.piece), schedule.engine.slots)
    if options.with_stats and schedule.drafts:
        note(schedule.drafts, quiet=False)
    if options.save_to is not None:
        from sparsekv.cli.answering.session import save_session  # the module imports the code of builds

        turns = [schedule.turn(answer)]
        del schedule  # frees memory for the prefill of the new tokens
        save_session(opened, options.save_to, turns, config, **options.encoding, quiet=options.quiet)
