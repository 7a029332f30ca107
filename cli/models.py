"""`sparsekv models`: the models that are ready to run offline."""

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from sparsekv.cli.common.console import note, say, show
from sparsekv.cli.common.options import JsonOption, QuietOption
from sparsekv.indexing.models.embedded import EMBEDDED
from sparsekv.indexing.models.load import known_models
from sparsekv.indexing.models.load import pull as fetch

app = typer.Typer(rich_markup_mode=None, add_completion=False, help="List models that are ready, and fetch one.")


@app.command("list")
def list_models(as_json: JsonOption = False) -> None:
    """The models that come along, and whether they are in the cache.

    \b
    sparsekv models list
    """
    known = known_models()
    if as_json:
        say(json.dumps([asdict(model) for model in known], default=str, indent=1))
        return
    table = Table()
    for name in ("name", "what it is", "licence", "in the cache"):
        table.add_column(name)
    for model in known:
        size = f"{model.bytes / 1e6:.0f} MB in {model.folder}" if model.cached else "no: sparsekv models pull"
        table.add_row(model.name, model.description, model.licence, size)
    show(table, width=200)


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help="An embedded name or a Hugging Face id.")] = EMBEDDED,
    quiet: QuietOption = False,
) -> None:
    """Fetch a model into the cache, checked in full, and print its folder.

    \b
    sparsekv models pull
    """
    say(str(fetch(name, lambda text: note(text, quiet=quiet))))
