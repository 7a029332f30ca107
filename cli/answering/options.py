"""Options of `generate` that say how many questions are answered at a time, and how fast."""

from pathlib import Path
from typing import Annotated

import typer

from sparsekv.runtime.decoding.compiled import WORTH_IT

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
        "index and with the same settings.",
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
