"""Options of commands that answer questions: what is attended to, how tokens are sampled, how many at a time."""

from pathlib import Path
from typing import Annotated

import typer

from sparsekv.cli.common.options import names_of
from sparsekv.runtime.attention.config import QUESTION_BUDGET, Own
from sparsekv.runtime.cache.kv_store import PLACEMENTS
from sparsekv.runtime.decoding.compiled import WORTH_IT
from sparsekv.runtime.selection.registry import DENSE, methods

ATTENDED, SAMPLING = "What is attended to", "Sampling"

AT_ONCE = {"cpu": 16, "cuda": 64}
"""How many questions `--batch-size auto` answers at once; on a GPU fewer where they do not fit."""

BatchSizeOption = Annotated[
    str,
    typer.Option(
        metavar="N|auto",
        help="How many questions of --batch-file to answer at once. They share what each step reads of the document: "
        f"all attend to what any of them selects. auto: {AT_ONCE['cpu']} on a CPU, up to {AT_ONCE['cuda']} on a GPU, 1 "
        "where they cannot.",
    ),
]
AnswersJsonOption = Annotated[
    bool, typer.Option("--json", help="Print JSON, with unrounded numbers: an object, or with --batch-file one a line.")
]
ResumeOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.jsonl",
        help="With --batch-file and --json: answers that are in this file are printed and not asked for again; new "
        "ones are added to it as soon as they are whole. Its lines are of the first questions, in order, of the same "
        "index and with the same settings. Answers that share steps (--batch-size) depend on those beside them: not "
        "all are as in one run.",
    ),
]
CompileOption = Annotated[
    str,
    typer.Option(
        "--compile",
        metavar="auto|on|off",
        help="Compile the model's layers with torch, all but their attention: decoding is faster, and starts later by "
        f"ten to twenty seconds, from then on by five. auto: on a GPU, if {WORTH_IT:,} steps may be taken, each a "
        "token of every question that is answered at once.",
    ),
]
MethodOption = Annotated[
    str | None,
    typer.Option(
        help="Method that selects the tokens to attend to, or `dense` for dense attention to all of them. Default: "
        "what `tune` found, or the index's first.",
        autocompletion=names_of(methods, DENSE),
    ),
]
BudgetOption = Annotated[
    str | None,
    typer.Option(
        help="Share (0.1, 10%) or number of the document's tokens to attend to. Default: what `tune` found, or 0.1, "
        "for codes 0.05.",
        show_default=False,
        rich_help_panel=ATTENDED,
    ),
]
ResidualOption = Annotated[
    bool,
    typer.Option(
        "--residual",
        help="Attend to cluster centroids in place of the tokens not selected, where a method would drop these: codes "
        "and multipole attend to their own without it.",
        rich_help_panel=ATTENDED,
    ),
]
PrefillOption = Annotated[
    str | None,
    typer.Option(
        metavar="dense|own|METHOD",
        help="What the question's tokens attend to: everything (dense), what --method selects for them by --budget "
        "(own), or what METHOD does. Default: dense, which reads the document once a question; with own most methods "
        "lose answers.",
        rich_help_panel=ATTENDED,
        autocompletion=names_of(methods, DENSE, Own.name),
    ),
]
PrefillBudgetOption = Annotated[
    str | None,
    typer.Option(
        help="Share or number of the document's tokens that each 128 tokens of the question attend to, with --prefill "
        f"METHOD. Default: {QUESTION_BUDGET}.",
        rich_help_panel=ATTENDED,
    ),
]
PlacementOption = Annotated[
    str,
    typer.Option(
        metavar="|".join(PLACEMENTS),
        help="Where the document's keys and values are kept: in the memory of the model's device, in main memory "
        "(host), or in the index's files (disk).",
        rich_help_panel="Where the document lies",
    ),
]
MaxNewTokensOption = Annotated[int, typer.Option(help="Longest answer, in tokens.", rich_help_panel=SAMPLING)]
TemperatureOption = Annotated[
    float,
    typer.Option(
        help="0 takes the likeliest token each time; above 0 one is drawn, among those of --top-p and --top-k.",
        rich_help_panel=SAMPLING,
    ),
]
TopPOption = Annotated[
    float | None,
    typer.Option(
        help="Sample from the most likely tokens whose probabilities add up to this.", rich_help_panel=SAMPLING
    ),
]
TopKOption = Annotated[int | None, typer.Option(help="Sample from the K most likely tokens.", rich_help_panel=SAMPLING)]
SamplingSeedOption = Annotated[int, typer.Option(help="Seed of sampling.", rich_help_panel=SAMPLING)]
RawOption = Annotated[bool, typer.Option("--raw", help="Put no chat template around the question.")]
StatsOption = Annotated[
    bool, typer.Option("--stats", help="Print times, and the share of keys and values read; with --quiet, too.")
]
