"""`sparsekv serve`: answer questions over indices by HTTP, as OpenAI's API does."""

from importlib.util import find_spec

import typer

from sparsekv.cli.common.method_options import with_options
from sparsekv.cli.configuring.sources import Command
from sparsekv.cli.serving.options import ServeOptions
from sparsekv.formats.errors import SparsekvError

app = typer.Typer(rich_markup_mode=None, add_completion=False)
NEEDED = ("starlette", "uvicorn", "prometheus_client")


@app.command(cls=Command)
@with_options(ServeOptions)
def serve(options: ServeOptions) -> None:
    """Serve indices by HTTP, as OpenAI's API: its clients can ask them, and so can curl.

    A request names an index as its model: `manual` for manual.skv, or `manual:codes@5%` to choose method and budget as
    well. Requests over one index with one method and budget share their decode steps. Other settings of a request go
    into the field "sparsekv", as in {"sparsekv": {"budget": "5%"}}; GET /openapi.json describes all paths and fields.

    The server prints its address on stdout once it listens. Only this machine can ask it, unless --host says otherwise.
    On SIGTERM or Ctrl-C it refuses new requests, completes the requests that it has accepted, for --drain seconds at
    most, and ends; a second signal ends their answers with an error. The exit code is 0, or 130 if Ctrl-C cut answers
    short.

    It needs pip install 'sparsekv[serve]'.

    \b
    sparsekv serve manual.skv
    sparsekv serve manual.skv contract.skv --port 8080 --api-key-file keys.txt
    """
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise SparsekvError(f"serve needs {', '.join(missing)}, which is not installed; pip install 'sparsekv[serve]'")
    # Imported here, so that --help does not wait seconds for torch and transformers.
    from sparsekv.cli.serving.server import run

    run(options)
