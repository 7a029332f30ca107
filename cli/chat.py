"""`sparsekv chat`: one question after another over an index, in a terminal."""

import time
from itertools import chain
from typing import Any

import typer

from sparsekv.cli.answering.options import (
    BudgetOption,
    Choices,
    MaxNewTokensOption,
    MethodOption,
    PlacementOption,
    PrefillBudgetOption,
    PrefillOption,
    RawOption,
    ResidualOption,
    SamplingSeedOption,
    StatsOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
)
from sparsekv.cli.common.console import note
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
)
from sparsekv.cli.common.process import refuse_little_room
from sparsekv.runtime.attention.config import Dense
from sparsekv.runtime.decoding.choose_config import choose_config
from sparsekv.runtime.decoding.prepare import EarlyReading
from sparsekv.runtime.selection.registry import methods

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(cls=GroupedCommand)
@with_method_options(methods())
def chat(
    index: IndexOption = None,
    model: ModelOption = None,
    method: MethodOption = None,
    budget: BudgetOption = None,
    residual: ResidualOption = False,
    prefill: PrefillOption = None,
    prefill_budget: PrefillBudgetOption = None,
    placement: PlacementOption = "device",
    max_new_tokens: MaxNewTokensOption = 256,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    seed: SamplingSeedOption = 0,
    raw: RawOption = False,
    special_tokens: SpecialTokensOption = False,
    stats: StatsOption = False,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    quiet: QuietOption = False,
    **parameters: Any,
) -> None:
    """Ask one question after another over an index; each sees the document and the talk before it.

    Model and index are loaded once. At a terminal, lines that begin with / are commands (/help lists them), pasted
    lines are one question, Ctrl-C stops an answer and Ctrl-D leaves. Where standard input is no terminal, each of its
    lines is a question and none a command (one that looks like it is refused), and the answers go to stdout one after
    another, without a prompt.

    \b
    sparsekv chat --index manual.skv
    sparsekv chat --index manual.skv --method quest --budget 5% --stats
    printf 'What is this about?\\nSay it in one word.\\n' | sparsekv chat --index manual.skv
    """
    refuse_little_room()
    artifact = open_artifact(index)
    config = choose_config(
        artifact,
        method,
        parameters,
        budget=budget,
        residual=residual,
        prefill=prefill,
        prefill_budget=prefill_budget,
        placement=placement,
    )
    choices = Choices(artifact, None if budget is None else config.budget, parameters, residual)
    early, hold = EarlyReading.of(artifact, device, config), placement == "device"
    # Here, because they import transformers, which takes as long as all else: --help does not wait for it.
    from sparsekv.cli.chatting.loop import HOW, converse, is_piped, piped_questions
    from sparsekv.cli.chatting.session import Chat, describe
    from sparsekv.cli.common.loading import load_for
    from sparsekv.runtime.decoding.generate import Sampling
    from sparsekv.runtime.decoding.session import Conversation

    sampling = Sampling(max_new_tokens, temperature, top_p, top_k, seed)
    if isinstance(config.attention, Dense) and placement != "device":
        note(f"--placement {placement} counts after /method NAME: dense attention reads everything", quiet=quiet)
    piped, questions = is_piped(), piped_questions()
    first = [next(questions)] if piped else []
    started, loading = time.perf_counter(), list[float]()
    opened = load_for(artifact, model, device, dtype, quiet=quiet, hold=hold, loaded_in=loading.append, early=early)
    talk = Conversation(opened, config, raw=raw, special_tokens=special_tokens)
    took = time.perf_counter() - started - sum(loading)
    note_small_budgets([config.budget], quiet=quiet)
    if stats:
        if piped:  # at a terminal the first line says so
            note(f"answers by {describe(config)}", quiet=False)
        note(f"model loaded in {sum(loading):.2f} s, index opened in {took:.2f} s", quiet=False)
    session = Chat(talk, choices, sampling, stats=stats, quiet=quiet, dtype=dtype)
    if piped:
        for question in chain(first, questions):
            session.ask(question)
        return
    note(f"{artifact.folder}: {opened.split.tokens:,} tokens; {describe(config)}; {HOW}", quiet=quiet)
    converse(session)
