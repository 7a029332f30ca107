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

    An index is a model of that API: manual.skv is `manual`, and `manual:codes@5%` also names method and budget.
    Requests are answered together. The address goes to stdout once it can be asked. SIGTERM or Ctrl-C ends the server
    after the answers that have begun; a second signal ends them with an error. Exit codes: 0 after a signal, and 130
    if Ctrl-C ended answers that were not complete. Only this machine can ask it, unless --host says otherwise. It needs
    pip install 'sparsekv[serve]'.

    \b
    sparsekv serve manual.skv
    sparsekv serve manual.skv contract.skv --port 8080 --api-key-file keys.txt
    """
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise SparsekvError(f"serve needs {', '.join(missing)}, which is not installed; pip install 'sparsekv[serve]'")
    # Imported here, because it imports torch and transformers; --help need not wait for them.
    from sparsekv.cli.serving.run import run

    run(options)
