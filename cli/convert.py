"""`sparsekv convert`: copy an index with the same prompt and methods, and store its keys and values in int8."""

import os
from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from sparsekv.cli.common.console import note, progress, say
from sparsekv.cli.common.open_artifact import open_artifact
from sparsekv.cli.common.options import DeviceOption, QuietOption
from sparsekv.cli.common.process import refuse_little_room
from sparsekv.cli.common.stats import stored_line
from sparsekv.cli.configuring.sources import Command
from sparsekv.formats.device import choose_device
from sparsekv.formats.documents.document_hints import tune_hint
from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.build_folder import check_output
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import KVDtype

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(cls=Command)
def convert(
    index: Annotated[Path, typer.Argument(metavar="INDEX", help="The index to convert; it is left as it is.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the new index.")],
    kv_dtype: Annotated[
        str, typer.Option(help="Storage of keys and values: int8.", autocompletion=lambda: ["int8"])
    ] = "int8",
    device: DeviceOption = "auto",
    quiet: QuietOption = False,
) -> None:
    """Copy INDEX with keys and values in int8, which takes less room, and print the copy's path.

    The prompt, its queries and the probe (the logits that a model must give over the index) are copied. Keys and values
    are rounded, and every method is built anew from the rounded keys and values, with its old parameters. Keys, values
    and methods are those of build-index --kv-dtype int8. No model is loaded, so the probe keeps the logits over the
    exact keys and values. The copy has the text that was appended to INDEX, too, but methods are built as if all of the
    text had been there at once. A default that tune found for INDEX is not kept.

    \b
    sparsekv convert manual.skv --kv-dtype int8 -o manual-int8.skv
    """
    artifact = open_artifact(index, thorough=True, called="INDEX")
    _refuse_rounded(artifact)
    if kv_dtype not in get_args(KVDtype):
        raise UsageError(
            f"--kv-dtype {kv_dtype}: int8 is the only storage that an index can be converted to; give int8"
        )
    if os.path.lexists(output):
        raise UsageError(f"{output} exists already; choose another name with --output")
    check_output(output)
    where = choose_device(device)
    # Imported here, so that --help does not wait seconds for transformers.
    from sparsekv.indexing.convert import convert_index

    refuse_little_room()
    with progress(quiet=quiet) as show:
        manifest = convert_index(artifact, cast(KVDtype, kv_dtype), output, where, show)
    if (stored := stored_line(manifest)) is not None:
        note(stored, quiet=quiet)
    if artifact.manifest.defaults is not None:
        again = tune_hint(output, artifact.manifest.defaults.target)
        told = "the default that tune found was for the earlier index and is not copied"
        note(f"{told}; run {again} to find one for the copy", quiet=quiet)
    say(str(output))


def _refuse_rounded(artifact: Artifact) -> None:
    """Raise UsageError for an index that no longer has its exact keys and values."""
    stored = artifact.manifest.kv_storage
    if stored is not None:
        raise UsageError(
            f"{artifact.folder} stores its keys and values in {stored.dtype} already, and not the unquantised "
            "ones; copy the folder, or build the index again from its document"
        )
