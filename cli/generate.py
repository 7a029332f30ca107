"""`sparsekv generate`: answer questions over an index."""

import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from sparsekv.cli.answering.options import (
    AnswersJsonOption,
    BatchSizeOption,
    BudgetOption,
    CompileOption,
    MaxNewTokensOption,
    MethodOption,
    PlacementOption,
    PrefillBudgetOption,
    PrefillOption,
    RawOption,
    ResidualOption,
    ResumeOption,
    SamplingSeedOption,
    StatsOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    for_all_ranks,
    joined_answers,
    one_at_a_time,
    parse_schedule,
    refuse_merged_heads,
)
from sparsekv.cli.answering.resuming import AnswersFile, refuse_questions_file, refuse_redirected_to
from sparsekv.cli.common.console import note, progress, say
from sparsekv.cli.common.index_option import open_artifact
from sparsekv.cli.common.method_options import note_small_budgets, with_method_options
from sparsekv.cli.common.options import (
    DeviceOption,
    DtypeOption,
    GroupedCommand,
    IndexOption,
    ModelOption,
    QuietOption,
    SpecialTokensOption,
    share,
)
from sparsekv.cli.common.process import refuse_little_room
from sparsekv.cli.common.stats import note_cut
from sparsekv.cli.common.streams import outlive_reader
from sparsekv.cli.distributed.join import join_ranks, refuse_with_ranks
from sparsekv.formats.errors import UsageError, check_choice
from sparsekv.runtime.attention.config import Dense, QuestionPrefill
from sparsekv.runtime.attention.guard import Guard
from sparsekv.runtime.decoding.choose_config import choose_config, refuse_beside_dense
from sparsekv.runtime.decoding.compiled import MODES
from sparsekv.runtime.decoding.prepare import EarlyReading
from sparsekv.runtime.selection.registry import methods

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(cls=GroupedCommand)
@with_method_options(methods())
def generate(
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="The question; - for stdin.")] = None,
    index: IndexOption = None,
    prompt_file: Annotated[str | None, typer.Option(help="Read the question from a file.")] = None,
    batch_file: Annotated[
        str | None, typer.Option(help="Answer every line of a file (- for stdin), and print one line per answer.")
    ] = None,
    batch_size: BatchSizeOption = "auto",
    resume: ResumeOption = None,
    model: ModelOption = None,
    method: MethodOption = None,
    budget: BudgetOption = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="BUDGET-step-STEPS",
            help="--budget and --step in one: 0.15-step-4 is --budget 0.15 --step 4.",
            rich_help_panel="What is attended to",
        ),
    ] = None,
    residual: ResidualOption = False,
    guard: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            parser=share,
            help="Largest share of its attention, by estimate, that a head may leave to centroids or drop. Above it "
            "the head's budget is doubled, at most twice, and then the head reads everything.",
            rich_help_panel="What is attended to",
        ),
    ] = None,
    prefill: PrefillOption = None,
    prefill_budget: PrefillBudgetOption = None,
    placement: PlacementOption = "device",
    ahead: Annotated[
        bool,
        typer.Option(
            "--ahead",
            help="Prefetch: select the next step's tokens with this step's query, while this step runs.",
            rich_help_panel="Where the document lies",
        ),
    ] = False,
    max_new_tokens: MaxNewTokensOption = 256,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    seed: SamplingSeedOption = 0,
    raw: RawOption = False,
    special_tokens: SpecialTokensOption = False,
    save_to: Annotated[
        Path | None,
        typer.Option(
            metavar="NAME.skv", help="Save document, question and answer as a new index, to ask the next question of."
        ),
    ] = None,
    stats: StatsOption = False,
    gauge: Annotated[
        bool,
        typer.Option(
            "--gauge",
            help="Print what --stats prints and, by layer, an estimate of the attention that the answer's steps (with "
            "--prefill own also the question) leave to centroids or drop. "
            "Decoding is slower: each step computes its logits once more and is not captured as a CUDA graph.",
        ),
    ] = False,
    compiled: CompileOption = "auto",
    as_json: AnswersJsonOption = False,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    quiet: QuietOption = False,
    **parameters: Any,
) -> None:
    """Answer a question over an index; the answer streams to stdout.

    Only the question is prefilled. With --batch-file several questions are answered at once, line breaks in an answer
    become spaces unless --json is given, and a blank line gets a blank answer. An index made by --save-to can be asked
    the next question; methods that cannot append tokens are rebuilt for it.

    \b
    sparsekv generate --index manual.skv "How is it installed?"
    echo "What is this about?" | sparsekv generate --index manual.skv --budget 5%
    sparsekv generate --index manual.skv "How is it installed?" --save-to talk.skv
    sparsekv generate --index manual.skv --batch-file questions.txt --json > answers.jsonl
    """
    refuse_little_room()
    if schedule is not None:
        budget, parameters["step"] = parse_schedule(schedule, budget, parameters.get("step"))
    ranks = join_ranks(device)
    artifact = open_artifact(index)
    config = choose_config(
        artifact,
        method,
        parameters,
        budget=budget,
        residual=residual,
        prefill=prefill,
        prefill_budget=prefill_budget,
        guard=None if guard is None else Guard(guard),
        gauge=gauge,
        placement=placement,
        ahead=ahead,
    )
    if ranks is not None:
        refuse_with_ranks({"--resume": resume, "--save-to": save_to})
        refuse_merged_heads(config)
        batch_size = one_at_a_time(batch_size, batch_file)
    hold = placement == "device"
    early = None if ranks is not None else EarlyReading.of(artifact, device, config)
    # Here, because they import transformers, which takes as long as all else: --help does not wait for it.
    from sparsekv.cli.answering.answers import (
        batch_answers,
        batch_of,
        choose_batch_size,
        compile_for,
        encode_questions,
        note_plain_questions,
        parse_batch_size,
        questions_asked,
    )
    from sparsekv.cli.answering.output import Output, identity, settings_of
    from sparsekv.cli.answering.session import refuse_unsavable, save_session
    from sparsekv.cli.common.loading import load_for
    from sparsekv.runtime.decoding.generate import Answer, Sampling
    from sparsekv.runtime.decoding.session import Session, Turn

    sampling = Sampling(max_new_tokens, temperature, top_p, top_k, seed)
    if save_to is not None and batch_file is not None:
        raise UsageError("--save-to keeps one question and its answer; leave --batch-file out")
    if save_to is not None:
        refuse_unsavable(artifact, save_to, dtype)
        outlive_reader()
    check_choice("--compile", compiled, MODES)
    stats = stats or gauge
    if isinstance(config.attention, Dense):
        by_method = isinstance(config.question, QuestionPrefill) and prefill
        beside = {"--guard": guard, "--gauge": gauge, "--ahead": ahead, "--prefill": by_method}
        refuse_beside_dense(beside | {"--placement": placement != "device" and placement})
    wanted_size = parse_batch_size(batch_size, batch_file, config.measured)
    questions = for_all_ranks(ranks, lambda: questions_asked(prompt, prompt_file, batch_file))
    if resume is not None and not (batch_file and as_json):
        raise UsageError("--resume is for the lines of --batch-file with --json; give both")
    encoding = {"raw": raw, "special_tokens": special_tokens}
    settings = settings_of(config, sampling, artifact, dtype=dtype, **encoding)
    if resume is not None:
        refuse_redirected_to(resume)
        refuse_questions_file(resume, batch_file)
    resumed = None if resume is None else AnswersFile(resume, questions, identity(config), settings)
    done = [] if resumed is None else resumed.begin()
    if done:
        note(f"{len(done)} of {len(questions)} answers are in {resume}", quiet=quiet)
    if len(done) == len(questions):
        return say("\n".join(done))
    started, loading = time.perf_counter(), list[float]()
    opened = load_for(
        artifact, model, device, dtype, quiet=quiet, hold=hold, loaded_in=loading.append, ranks=ranks, early=early
    )
    asker = Session.open(opened, config)
    note_small_budgets([config.budget], quiet=quiet)
    took = time.perf_counter() - started - sum(loading)
    if stats:
        note(config.origin or f"answers by {config.attention.name}, budget {config.budget}", quiet=False)
        note(f"model loaded in {sum(loading):.2f} s, index opened in {took:.2f} s", quiet=False)
    left = sum(bool(one.strip()) for one in questions[len(done) :])
    together = batch_of(asker, sampling, choose_batch_size(wanted_size, asker, left, max_new_tokens))
    compile_for(asker, together, compiled, left * max_new_tokens, alone=ranks is None, quiet=not stats)
    batch = encode_questions(opened, questions, batch_file, **encoding)[len(done) :]
    note_plain_questions(opened, questions[len(done) :], batch_file, special_tokens=special_tokens, quiet=quiet)
    told = (stats, resumed, settings, batch_file is not None)
    output = Output(config, as_json, not (batch_file or as_json), bool(config.measured), *told)
    for line in done:
        say(line)
    if batch_file is None:
        answers: Iterable[Answer] = (asker.ask(one, sampling, output.piece) for one in batch if one is not None)
    else:
        answers = batch_answers(asker, together, batch, sampling)
    answers = joined_answers(ranks, answers)
    seen = sys.stdout.isatty() or (batch_file is None and (sys.stderr.isatty() or not as_json))  # as it streams
    with output.stream.ending_lines(), progress(quiet=quiet or seen) as tell:
        for number, (question, result) in enumerate(zip(questions[len(done) :], answers, strict=True), len(done) + 1):
            output.answer(question, result)
            note_cut(result, max_new_tokens, quiet=quiet or as_json or batch_file is not None)
            tell("answers", number, len(questions))
    output.total(quiet=quiet or batch_file is None)
    if save_to is not None and batch[0] is not None:
        del asker  # frees memory for the prefill of the new tokens
        save_session(opened, save_to, [Turn(batch[0], result.ids)], **encoding, quiet=quiet)
