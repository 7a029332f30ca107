"""`sparsekv models`: list the models that need no model hub, and download models into the cache."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from sparsekv.cli.common.console import note, say
from sparsekv.cli.common.options import JsonOption, QuietOption
from sparsekv.cli.common.process import refuse_little_room
from sparsekv.cli.common.tables import show_fitting, titled_table
from sparsekv.cli.configuring.sources import Command
from sparsekv.formats.models.find import EMBEDDED, known_models
from sparsekv.formats.models.find import pull as fetch

app = typer.Typer(rich_markup_mode=None, add_completion=False, help="List the built-in models, and download models.")


@app.command("list", cls=Command)
def list_models(as_json: JsonOption = False) -> None:
    """List the models that need no model hub.

    These are the built-in model, and GGUF files that were given with --model and are converted. The table says which of
    them are in the cache, and in which folder. Files that have moved or changed since are left out, and so are other
    models of the hub's cache.

    \b
    sparsekv models list
    """
    known = known_models()
    if as_json:
        say(json.dumps([asdict(model) for model in known], default=str, indent=1))
        return
    columns = ("name", "description", "licence", "downloaded")
    table = titled_table("Models for --model that need no model hub", columns, ())
    for model in known:
        size = f"{model.bytes / 1e6:.0f} MB in {model.folder}" if model.cached else "not yet: sparsekv models pull"
        table.add_row(model.name, model.description, model.licence, size)
    show_fitting(table, ("licence", "description"), width=200)


@app.command(cls=Command)
def pull(
    name: Annotated[
        str,
        typer.Argument(
            help="A name of `sparsekv models list`, a Hugging Face id (org/name), or org/name:FILE.gguf for one GGUF "
            "file of a repository there.",
            autocompletion=lambda: [EMBEDDED],
        ),
    ] = EMBEDDED,
    quiet: QuietOption = False,
) -> None:
    """Download a model into the cache and print its folder.

    Without a name, this is the built-in model. If it is there already, all its files are checked against their
    checksums.

    \b
    sparsekv models pull
    """
    import transformers  # noqa: F401  # listing models does not need it; the check below counts its memory

    refuse_little_room()
    say(str(fetch(name, lambda text: note(text, quiet=quiet))))
