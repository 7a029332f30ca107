"""Options that mean the same in every command."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import typer

from sparsekv.formats.errors import UsageError


def check_model(name: str | None) -> str | None:
    """The name unchanged; UsageError where it is empty, or begins with the `~user` of an unknown user."""
    if name is not None and not name.strip():
        raise UsageError("--model is empty; leave it out for the default, or name one of `sparsekv models list`")
    try:
        Path(name or "").expanduser()
    except RuntimeError:
        raise UsageError(f"model '{name}': there is no such user's folder here; write its whole path") from None
    return name


def names_of(registry: Callable[[], Iterable[str]], *more: str) -> Callable[[], list[str]]:
    """For `typer.Option(autocompletion=...)`: the names of a registry, read when completion learns them, and others."""
    return lambda: [*registry(), *more]


def _embedded() -> list[str]:
    from sparsekv.formats.models.embedded import EMBEDDED  # here: it imports torch

    return [EMBEDDED]


IndexOption = Annotated[
    Path | None,
    typer.Option(
        "--index",
        "-i",
        metavar="NAME.skv",
        help="The index. Default: the current folder's only *.skv.",
        envvar="SPARSEKV_INDEX",
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="A name of `sparsekv models list`, a Hugging Face id or a local folder.",
        callback=check_model,
        envvar="SPARSEKV_MODEL",
        autocompletion=_embedded,
    ),
]
DeviceOption = Annotated[
    str,
    typer.Option(
        help="auto (a GPU if there is one), cpu, cuda or cuda:N.",
        envvar="SPARSEKV_DEVICE",
        autocompletion=lambda: ["auto", "cpu", "cuda"],
    ),
]
DtypeOption = Annotated[
    str,
    typer.Option(
        help="Of the model, keys and values: auto, float32, float16 or bfloat16.",
        envvar="SPARSEKV_DTYPE",
        autocompletion=lambda: ["auto", "float32", "float16", "bfloat16"],
    ),
]
KVDtypeOption = Annotated[
    str,
    typer.Option(
        help="What keys and values are stored in: auto (the model's dtype) or int8: half of bfloat16, a quarter of "
        "float32. What that costs of attention's accuracy is measured and kept in the index.",
        autocompletion=lambda: ["auto", "int8"],
    ),
]
SpecialTokensOption = Annotated[
    bool,
    typer.Option(
        "--special-tokens", help="Let special tokens in the text keep their meaning. Only for text you wrote yourself."
    ),
]
EncodingOption = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Encoding of the text: utf-8, utf-16, latin-1, cp1252, ... (Python's names). Of UTF-16 and UTF-32 a byte "
        "order mark is enough.",
    ),
]
ChunkSizeOption = Annotated[
    int | None,
    typer.Option(
        help="Tokens per forward pass of the prefill. Default: 2,048 (8,192 on a GPU, 16,384 on several; a sparse "
        "prefill 512)."
    ),
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress and no notes.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, with unrounded numbers.")]
