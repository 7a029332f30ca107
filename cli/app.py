"""The `sparsekv` command group. The module of a subcommand is imported when the subcommand is looked up."""

import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from sparsekv.cli.common.commands import COMMANDS, HELP, asks_for_help
from sparsekv.cli.common.options import refuse_repeated
from sparsekv.cli.common.process import raise_lost_interrupt, refuse_little_room, refuse_lost_folder, refuse_small_limit
from sparsekv.cli.configuring.sources import apply_defaults
from sparsekv.cli.distributed.launch import GpusOption
from sparsekv.formats.errors import UsageError


class _LazyGroup(TyperGroup):
    """The group of commands. `get_command` imports a command's module, so `sparsekv --help` does not wait for torch."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            _refuse_unknown(cmd_name)
            return None
        refuse_lost_folder()
        refuse_small_limit()
        module = importlib.import_module(f"sparsekv.cli.{cmd_name.replace('-', '_')}")
        raise_lost_interrupt()
        refuse_little_room()
        return typer.main.get_command(module.app)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and not asks_for_help(rest):
            apply_defaults(ctx, name, command, COMMANDS)
        return name, command, rest

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        refuse_repeated(self, ctx, args)  # first, because parsing --gpus starts processes
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _refuse_unknown(name: str) -> None:
    """Raise UsageError for a name that is no command. Nothing is raised for a name that begins with a dash, because
    it may be an option."""
    if not name.startswith("-"):
        from sparsekv.formats.errors import suggestion

        meant = " (help is --help)" if name == "help" else suggestion(name, COMMANDS)
        raise UsageError(f"no command '{name}'{meant}; there are: {', '.join(COMMANDS)}")


app = typer.Typer(
    cls=_LazyGroup, rich_markup_mode=None, add_completion=False, context_settings={"help_option_names": HELP}
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"sparsekv {version('sparsekv')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def main(
    ctx: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
    gpus: GpusOption = None,
) -> None:
    """Sparse-attention indices for long, fixed prompts: build once, answer many times, measure what is lost.

    \b
    sparsekv build-index manual.txt     # writes manual.skv
    sparsekv generate --index manual.skv "How is it installed?"
    sparsekv recall-report --index manual.skv

    `sparsekv COMMAND --help` has each command's options and examples. Without --model, indices are built with a small
    embedded model, which is for trying things out. In the repository docs/newcomers.md says where to begin.

    Results go to stdout, notes and errors to stderr. When the reader of stdout closes the pipe (`| head -1`), the
    command ends silently and the shell reports 141; `generate --save-to` saves all the same.

    \b
    Exit codes:
      0    done
      1    failure
      2    wrong usage, or an input that is missing, unreadable, empty, too short
           or not text
      130  Ctrl-C
    """
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
