"""`sparsekv start`: leave a process in the background, in whose forks later commands begin at once."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from sparsekv.cli.common.console import note, say
from sparsekv.cli.common.open_artifact import open_artifact
from sparsekv.cli.common.options import QuietOption
from sparsekv.cli.configuring.sources import Command, on_command_line
from sparsekv.cli.daemon.likeness import differing, likeness
from sparsekv.cli.daemon.messages import (
    SERVE,
    VARIABLE,
    refuse_missing_folder,
    refuse_occupied,
    socket_path,
    status,
    stop,
)
from sparsekv.formats.errors import UsageError

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(cls=Command)
def start(
    ctx: typer.Context,
    indices: Annotated[
        list[Path] | None,
        typer.Argument(metavar="INDEX", help="Indices to open now; their models are loaded too, except with a GPU."),
    ] = None,
    idle: Annotated[
        float,
        typer.Option(metavar="MINUTES", min=0.01, help="The server ends when no command has begun for this long."),
    ] = 60.0,
    show_status: Annotated[
        bool, typer.Option("--status", help="Only show the server, its memory, and whether it serves this shell.")
    ] = False,
    quiet: QuietOption = False,
) -> None:
    """Start a server in the background, so that later commands of this user begin at once.

    The server has imported the libraries and opened the named indices. On a machine without a GPU it has also loaded
    their models. Each command runs in a fork of the server, with the shell's own folder, environment and streams, and
    so prints and returns what it would without a server. A command does not use the server if its environment, limits
    (ulimit) or installed packages differ from the server's; --status names the difference.

    A running server is ended first, but stays if an index is missing or incomplete. `start` is for the shell's
    commands; `sparsekv serve` is for programs that ask by HTTP. --status exits with 1 if there is no server, or if
    it does not serve this shell.

    SPARSEKV_SERVER=off turns servers off, and SPARSEKV_SERVER=PATH names a socket elsewhere.

    \b
    sparsekv start manual.skv
    sparsekv generate --index manual.skv "How is it installed?"
    sparsekv start --status
    sparsekv stop
    """
    if show_status and on_command_line(ctx, "idle"):
        raise UsageError(f"--status only shows the server; leave --idle {idle:g} or --status out")
    path = socket_path()
    if path is None:
        raise UsageError(f"{VARIABLE} is off, so no command would use a server; unset this variable first")
    path = os.path.abspath(path)
    refuse_occupied(path)
    refuse_missing_folder(path)
    if show_status:
        if indices:
            raise UsageError(f"--status shows the server, and opens no index; leave {indices[0]} or --status out")
        return _show(path)
    folders = list({index.resolve(): index.absolute() for index in indices or []}.values())
    replaces = status(path) is not None
    if replaces:
        for folder in folders:  # before the old server ends; the new server also checks the models and their probes
            open_artifact(folder, called="INDEX")
        stop(path)
    program = [sys.executable, *sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]]
    server = subprocess.Popen(
        [*program, SERVE, path, str(60 * idle), *map(str, folders)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert server.stdout is not None
    if server.stdout.readline() != b"ready\n":
        code = server.wait()
        note("the server that ran before has ended too; commands run without a server", quiet=quiet or not replaces)
        raise typer.Exit(code)
    note("commands begin at once now; `sparsekv stop` ends the server", quiet=quiet)


def _show(path: str) -> None:
    """Print the state of the server; exit with 1 if this shell's commands do not use it."""
    server = status(path)
    if server is None:
        say("no server is running; `sparsekv start` starts one")
        raise typer.Exit(1)
    minutes, left = (time.time() - server["began"]) / 60, (server["ends"] - time.monotonic()) / 60
    commands = f"{server['commands']:,} command{'s' * (server['commands'] != 1)}"
    say(f"server: process {server['pid']}, for {minutes:.0f} minutes, {commands}")
    say(f"memory: {server['memory'] / 1e6:,.0f} MB")
    say(f"ends in {left:.0f} minutes unless a command begins")
    for index in server["indices"]:
        say(f"loaded: {index}")
    other = differing(server["likeness"], likeness())
    if server["changed"]:
        say(f"not used: {server['changed']} has changed; run `sparsekv start` again")
    elif other is not None:
        say(f"not used by this shell, which differs in its {other}")
    else:
        say("used by this shell's commands")
    if server["changed"] or other is not None:
        raise typer.Exit(1)
