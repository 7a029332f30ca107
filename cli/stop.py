"""`sparsekv stop`: end the server that `sparsekv start` left in the background."""

import typer

from sparsekv.cli.common.console import note
from sparsekv.cli.common.options import QuietOption
from sparsekv.cli.configuring.sources import Command
from sparsekv.cli.daemon.messages import socket_path
from sparsekv.cli.daemon.messages import stop as end_server

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(cls=Command)
def stop(quiet: QuietOption = False) -> None:
    """End the server that `sparsekv start` has started. Commands that run in its forks are completed.

    The exit code is 0, also if no server is running.

    \b
    sparsekv stop
    """
    path = socket_path()
    ended = path is not None and end_server(path)
    note("the server has ended" if ended else "no server is running", quiet=quiet)
