"""`sparsekv config`: show which defaults are set, and where each is set."""

import json
from dataclasses import asdict
from typing import Any

import typer
from rich.table import Table

from sparsekv.cli.common.console import note, say, show
from sparsekv.cli.common.options import JsonOption
from sparsekv.cli.configuring.project_file import variable
from sparsekv.cli.configuring.sources import Command, SetDefault, set_defaults

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(cls=Command)
def config(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """Show which defaults are set, and where: in the project's sparsekv.toml, and in the environment.

    A sparsekv.toml is looked for in the current folder and those above it, up to the home folder; the first one counts.
    It has index, model, device and dtype for all commands, and below a command's name in brackets any of its options:

    \b
    index = "manual.skv"
    [generate]
    budget = "5%"
    max-new-tokens = 64

    A value is taken from the first of these that has one: the command line, the environment (SPARSEKV_INDEX,
    SPARSEKV_MODEL, SPARSEKV_DEVICE, SPARSEKV_DTYPE), the file, what `tune` found, the built-in defaults. The file
    cannot set options that name other files, nor options that must be given with each call, such as --force, --ray and
    --host. The index must be inside the file's folder, and the model one that you have named with --model before.

    \b
    sparsekv config
    sparsekv config --json
    """
    root: Any = ctx.find_root().command
    path, defaults = set_defaults(root.list_commands(ctx), lambda name: root.get_command(ctx, name))
    if as_json:
        say(json.dumps({"file": path, "defaults": [asdict(one) for one in defaults]}, indent=1))
    elif defaults:
        show(_table(defaults))
    else:
        where = "no sparsekv.toml is here or above" if path is None else f"{path} is empty"
        beside = f"no variable such as {variable('index')} is set; inspect shows what tune found for an index"
        note(f"no defaults are set: {where}, and {beside}", quiet=False)


def _table(defaults: list[SetDefault]) -> Table:
    table = Table()
    for name in ("command", "option", "value", "from"):
        table.add_column(name, overflow="fold")
    for one in defaults:
        outranked = "" if one.used else f"; {variable(one.option)} outranks it"
        values = one.value if isinstance(one.value, list) else [one.value]
        text = ", ".join(json.dumps(value) if isinstance(value, bool) else str(value) for value in values)
        table.add_row(one.command or "all", one.option, text, f"{one.origin}{outranked}")
    return table
