"""`sparsekv completion`: print the script that completes commands and options in a shell."""

from typing import Annotated, Literal

import typer

from sparsekv.cli.common.console import say
from sparsekv.cli.completing.candidates import SCRIPTS, program
from sparsekv.cli.completing.learn import learn
from sparsekv.cli.configuring.sources import Command

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(cls=Command)
def completion(
    ctx: typer.Context,
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(metavar="SHELL", help="bash, zsh or fish.")],
) -> None:
    """Print the script that completes commands, options, methods, models and indices in a shell.

    The commands below write the script to the file that each shell reads. Shells that you start from then on complete
    `sparsekv`. The folders must exist, and zsh needs fpath=(~/.zfunc $fpath) before compinit in ~/.zshrc. For the shell
    that is already open, run eval "$(sparsekv completion bash)", or zsh instead of bash.

    \b
    sparsekv completion bash > ~/.local/share/bash-completion/completions/sparsekv
    sparsekv completion zsh > ~/.zfunc/_sparsekv
    sparsekv completion fish > ~/.config/fish/completions/sparsekv.fish
    """
    root = ctx.find_root()
    program(lambda: learn(root.command, root))  # fills the cache, so that the first completion is fast
    say(SCRIPTS[shell], end="")
