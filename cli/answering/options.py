"""Options of the commands that answer questions: attention, sampling, batch size, several ranks, checks before a model
is loaded, and changes within a chat."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from sparsekv.cli.common.options import names_of
from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.reader import Artifact
from sparsekv.runtime.attention.config import QUESTION_BUDGET, DecodeConfig, Dense, Own
from sparsekv.runtime.cache.kv_store import PLACEMENTS
from sparsekv.runtime.decoding.choose_config import attention_of, choose_config, refuse_beside_dense
from sparsekv.runtime.decoding.compiled import WORTH_IT
from sparsekv.runtime.selection.interface import Budget
from sparsekv.runtime.selection.registry import DENSE, methods

if TYPE_CHECKING:  # torch.distributed is for ranks alone, and transformers takes as long to import as all else
    from sparsekv.formats.distributed.group import Ranks
    from sparsekv.runtime.decoding.generate import Answer


def parse_schedule(text: str, budget: str | None, step: int | None) -> tuple[str, int]:
    """The budget as it was written, and the number of steps from one selection to the next.

    Args:
        budget, step: the options that it stands for.

    Raises:
        UsageError: it is not BUDGET-step-STEPS, or one of these options was given too.
    """
    if budget is not None or step is not None:
        raise UsageError("--schedule is --budget and --step in one; leave these out")
    found = re.fullmatch(r"(.+)-step-(\d+)", text)
    if found is None:
        raise UsageError(f"--schedule {text}: give BUDGET-step-STEPS, such as 0.15-step-4")
    return found[1], int(found[2])


T = TypeVar("T")


def refuse_merged_heads(config: DecodeConfig) -> None:
    """Raise UsageError if a method, of the answer or of the question, chooses once for the heads of all ranks."""
    for part in (config.attention, config.question):
        if not isinstance(part, Dense | Own) and part.method.merges_heads:
            others = sorted(name for name, method in methods().items() if not method.merges_heads)
            raise UsageError(
                f"{part.name} chooses once for all heads, and each rank has some of them; use one process, or one of "
                f"{', '.join(others)}"
            )


def one_at_a_time(batch_size: str, batch_file: str | None) -> str:
    """The `--batch-size` of ranks: 1, where there is a batch. UsageError for another number."""
    if batch_size not in ("auto", "1"):
        raise UsageError(f"--batch-size {batch_size}: ranks answer one question at a time; leave it out")
    return batch_size if batch_file is None else "1"


def for_all_ranks(ranks: "Ranks | None", read: Callable[[], T]) -> T:
    """A value that the first rank reads: it alone has the command's standard input."""
    if ranks is None:
        return read()
    return ranks.share(read() if ranks.first else None)


def joined_answers(ranks: "Ranks | None", answers: "Iterable[Answer]") -> "Iterable[Answer]":
    """The answers, with figures over the heads of all ranks."""
    if ranks is None:
        return answers
    from sparsekv.runtime.decoding.distributed import join_answer

    return (join_answer(ranks, answer) for answer in answers)


@dataclass
class Choices:
    """A budget (None: each method's own), the methods' options, and --residual."""

    artifact: Artifact
    budget: Budget | None
    parameters: Mapping[str, Any]
    residual: bool

    def other_method(self, before: DecodeConfig, name: str) -> DecodeConfig:
        """The config with another method, with those options that it has; raises UsageError if there is none."""
        name, kind = attention_of(self.artifact, name)
        own = {field.name for field in fields(kind)}
        kept, dense = {option: value for option, value in self.parameters.items() if option in own}, kind is Dense
        config = choose_config(self.artifact, name, kept, residual=self.residual and not dense)
        budget = config.budget if dense or self.budget is None else self.budget
        return replace(config, budget=budget, question=before.question, placement=before.placement)

    def other_budget(self, config: DecodeConfig, text: str) -> DecodeConfig:
        """A config with another budget; raises UsageError if it is none, or the config reads everything."""
        if isinstance(config.attention, Dense):
            refuse_beside_dense({"/budget": text})
        return replace(config, budget=Budget.parse(text, "/budget"), layer_budgets={}, origin="")


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
