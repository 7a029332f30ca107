"""Command-line options of `serve`. This module must not import torch, so that --help is fast."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from sparsekv.cli.common.options import (
    ATTENDED,
    PLACED,
    CompileOption,
    DeviceOption,
    DtypeOption,
    ModelOption,
    QuietOption,
    WeightsOption,
)
from sparsekv.formats.index.schema import AUTO

WHO, AT_ONCE, UNSAID = "Who may ask", "How much at once", "Defaults for requests that do not set them"


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Command-line options of `serve`."""

    indices: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="INDEX",
            help="Indices of one model. Each is served under its name, without .skv. Default: the current folder's "
            "only *.skv; with --indices-from, the first index of that folder.",
        ),
    ] = None
    indices_from: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Serve every *.skv in a folder, too. Each is opened at the first request for it; links are left out.",
        ),
    ] = None
    host: Annotated[
        str,
        typer.Option(help="Address to listen on; 0.0.0.0 means all addresses of this machine.", rich_help_panel=WHO),
    ] = "127.0.0.1"
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 means any free port.", rich_help_panel=WHO)
    ] = 8000
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=(
                "A file of API keys, one per line. A request must carry one of these keys. A line that begins "
                "with # is a comment. Default: no key is needed."
            ),
            rich_help_panel=WHO,
        ),
    ] = None
    cors: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help=(
                "Allow requests from web pages of this origin, such as https://chat.example.org; repeatable. "
                "Default: none."
            ),
            rich_help_panel=WHO,
        ),
    ] = None
    slots: Annotated[
        int,
        typer.Option(
            "--batch-size",
            "--slots",
            min=1,
            help="Maximum number of requests that are answered together over one index with one method and budget.",
            rich_help_panel=AT_ONCE,
        ),
    ] = 16
    max_queue: Annotated[
        int,
        typer.Option(
            min=1, help="Requests that may wait for a slot. More are refused with 429.", rich_help_panel=AT_ONCE
        ),
    ] = 64
    timeout: Annotated[
        float,
        typer.Option(
            min=0.1,
            metavar="SECONDS",
            help=(
                "Longest time of an answer, including its wait for a slot. After this time the answer ends with "
                "an error."
            ),
            rich_help_panel=AT_ONCE,
        ),
    ] = 600.0
    unread_timeout: Annotated[
        float,
        typer.Option(
            min=0.1,
            metavar="SECONDS",
            help=(
                "Disconnect a client that has not read its answer for this long while more of the answer is waiting."
            ),
            rich_help_panel=AT_ONCE,
        ),
    ] = 60.0
    drain: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="How long accepted requests may still take after SIGTERM or Ctrl-C.",
            rich_help_panel=AT_ONCE,
        ),
    ] = 30.0
    max_body: Annotated[
        int, typer.Option(min=1, metavar="BYTES", help="Largest body of a request.", rich_help_panel=AT_ONCE)
    ] = 1_000_000
    memory: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="GIB",
            help=(
                "Memory for the keys and values of documents. Above this limit, the idle index whose last request "
                "is the oldest is closed; the next request for it opens it again. Default: half of the free memory, "
                "that of the GPU if there is one and --placement is device."
            ),
            rich_help_panel=AT_ONCE,
        ),
    ] = None
    method: Annotated[
        str | None,
        typer.Option(
            help="Method that selects the tokens to attend to, `dense`, or `auto`: the default method, but dense "
            "attention in steps that serve so many answers that it is faster. auto times steps when an index is "
            "opened, and keeps the times. Default: the method that `tune` found, or the index's first method. On a GPU "
            "the default is auto, unless --budget, --prefill or --placement is given.",
            rich_help_panel=UNSAID,
        ),
    ] = None
    budget: Annotated[
        str | None,
        typer.Option(
            help="Share (0.1, 10%) or number of the document's tokens to attend to. Default: the budget that `tune` "
            "found, or the method's own.",
            rich_help_panel=ATTENDED,
        ),
    ] = None
    prefill: Annotated[
        str | None,
        typer.Option(
            metavar="dense|own|METHOD",
            help="Tokens that a question attends to, as in `generate`. Default: dense.",
            rich_help_panel=ATTENDED,
        ),
    ] = None
    placement: Annotated[
        str,
        typer.Option(
            metavar="device|host|disk",
            help="Where the documents' keys and values are kept, as in `generate`.",
            rich_help_panel=PLACED,
        ),
    ] = "device"
    max_new_tokens: Annotated[
        int,
        typer.Option(
            min=1,
            help="Longest answer, in tokens. An answer also ends where the model's context is full.",
            rich_help_panel=UNSAID,
        ),
    ] = 256
    temperature: Annotated[
        float,
        typer.Option(help="0: always the most likely token. Above 0: tokens are sampled.", rich_help_panel=UNSAID),
    ] = 0.0
    model: ModelOption = None
    weights: WeightsOption = "auto"
    compiled: CompileOption = "auto"
    device: DeviceOption = "auto"
    dtype: DtypeOption = "auto"
    quiet: QuietOption = False

    @property
    def by_time(self) -> bool:
        """Whether the method is `auto`."""
        return self.method == AUTO

    @property
    def attends_by_default(self) -> bool:
        """Whether the user set no option of the attention."""
        return (self.method, self.budget, self.prefill, self.placement) == (None, None, None, "device")
