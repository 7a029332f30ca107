"""Notes about options that the user typed in this call and that change nothing in its answers."""

from dataclasses import fields
from typing import Any

from sparsekv.cli.common.console import note
from sparsekv.cli.configuring.project_file import long_name
from sparsekv.cli.configuring.sources import on_command_line, owners
from sparsekv.formats.device import choose_device
from sparsekv.runtime.attention.config import DecodeConfig, Dense, QuestionPrefill
from sparsekv.runtime.decoding.choose_config import idle_budget
from sparsekv.runtime.selection.interface import MethodSpec

DRAFTING = ("method", "budget", "schedule", "residual", "dense_layers")
"""Parameters of `generate` that determine only the drafts with --lossless, not the answer.

The methods' own options do so, too.
"""


def note_idle_method(ctx: Any, config: DecodeConfig, *, quiet: bool) -> None:
    """Print a note about each option of the method that the user typed and that has no effect.

    These are --residual with a method that represents unselected tokens itself, and a budget with a method that ignores
    it. With --lossless, a method only drafts tokens. On a CPU it drafts none, so no option of it has an effect.
    """
    attention = config.attention
    if config.lossless and choose_device(ctx.params["device"]).type == "cpu":
        of_method = [one for one in ctx.command.params if one.name in DRAFTING or owners(one)]
        if typed := [f"--{long_name(one)}" for one in of_method if on_command_line(ctx, one.name)]:
            told = f"{' and '.join(typed)} ha{'s' if len(typed) == 1 else 've'} no effect"
            note(f"{told}: on a CPU --lossless drafts tokens from earlier text, not by a method", quiet=quiet)
    elif isinstance(attention, MethodSpec) and attention.method.replaces() and on_command_line(ctx, "residual"):
        told = f"--residual has no effect on {attention.name}"
        note(f"{told}, which represents the tokens that it does not select without it", quiet=quiet)
    for name, one in (("budget", attention), ("prefill_budget", config.question)):
        option = f"--{name.replace('_', '-')} {ctx.params[name]}"
        if on_command_line(ctx, name) and (told := idle_budget(one, option)):
            note(told, quiet=quiet)


def note_prefill_alone(ctx: Any, config: DecodeConfig, *, quiet: bool) -> None:
    """Print a note about options of the method of --prefill that the user typed and that the answer's method has, too.

    If answers are by the index's default, these options apply only to the method of --prefill.
    """
    question, attention = config.question, config.attention
    if not (config.origin and isinstance(question, QuestionPrefill) and isinstance(attention, MethodSpec)):
        return
    shared = {one.name for one in fields(question.method)} & {one.name for one in fields(attention.method)}
    of_both = (one for one in ctx.command.params if one.name in shared and on_command_line(ctx, one.name))
    if typed := [f"--{long_name(one)}" for one in of_both]:
        told = f"{' and '.join(typed)} count{'s' * (len(typed) == 1)} for --prefill {question.name} alone"
        remedy = f"--method {attention.name} sets {'it' if len(typed) == 1 else 'them'} for both"
        note(f"{told}: answers are by the index's default, {attention.name}; {remedy}", quiet=quiet)


def note_idle_seed(ctx: Any, *, quiet: bool) -> None:
    """Print a note if the user typed --seed, and the temperature is 0."""
    if on_command_line(ctx, "seed") and not ctx.params["temperature"]:
        told = f"--seed {ctx.params['seed']} has no effect at --temperature 0"
        note(f"{told}, which always takes the most likely token", quiet=quiet)


def note_short_document(config: DecodeConfig, *, quiet: bool) -> None:
    """Print a note if dense attention answers by default, because the document is short (`dense_if_short`)."""
    if isinstance(config.attention, Dense) and config.origin:
        note(f"answers by {config.origin}", quiet=quiet)
