"""`sparsekv build-index`: prefill a document once and build sparse-attention indices over its keys and values."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from sparsekv.cli.common.console import note, note_plain, progress, say
from sparsekv.cli.common.help_panels import GroupedCommand
from sparsekv.cli.common.loading import load
from sparsekv.cli.common.method_options import with_method_options
from sparsekv.cli.common.options import (
    ChunkSizeOption,
    DeviceOption,
    DtypeOption,
    ModelOption,
    QuietOption,
    SpecialTokensOption,
    names_of,
)
from sparsekv.formats.documents.document import open_document
from sparsekv.formats.documents.prompt import encode_prompt
from sparsekv.formats.errors import ArtifactError, UsageError
from sparsekv.formats.manifest import read_manifest
from sparsekv.formats.ours import check_output
from sparsekv.indexing.build import build_index as build
from sparsekv.indexing.indexers.registry import choose_indexers, indexers
from sparsekv.indexing.plan import BuildPlan, choose_chunk_size
from sparsekv.indexing.prefill.interface import choose_prefill, prefills
from sparsekv.runtime.selection.configure import configure, refuse_unused

app = typer.Typer(rich_markup_mode=None, add_completion=False)

_LONGEST_NAME = 255  # bytes of a file's name


@app.command(cls=GroupedCommand)
@with_method_options(indexers() | {f"--prefill {name}": prefill for name, prefill in prefills().items()})
def build_index(
    document: Annotated[str, typer.Argument(metavar="DOC", help="A text file, or - for standard input.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of the index. Default: DOC with the ending .skv.")
    ] = None,
    model: ModelOption = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Method to build an index for, or `all`; repeatable. Default: {', '.join(choose_indexers([]))}.",
            autocompletion=names_of(indexers, "all"),
        ),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Index only the document's first N tokens.")] = None,
    sinks: Annotated[int, typer.Option(help="First tokens of the prompt: always attended, never indexed.")] = 10,
    tail: Annotated[
        int,
        typer.Option(
            help="Last tokens of the prompt: always attended, never indexed. Their queries are held out, to calibrate "
            "on and to measure with."
        ),
    ] = 128,
    chunk_size: ChunkSizeOption = None,
    prefill: Annotated[
        str,
        typer.Option(
            metavar="|".join(prefills()),
            help="What a chunk of the prefill attends to: all earlier tokens (dense), or those that a method selects.",
        ),
    ] = "dense",
    rope_scaling: Annotated[
        str | None,
        typer.Option(metavar="yarn|dynamic:FACTOR", help="Extend the model's context to FACTOR times its positions."),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Put no chat template around document and question.")] = False,
    special_tokens: SpecialTokensOption = False,
    force: Annotated[
        bool, typer.Option("--force", help="Build from scratch, and replace whatever index is in the folder.")
    ] = False,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    quiet: QuietOption = False,
    **parameters: Any,
) -> None:
    """Prefill DOC once, index it, and print the index's path.

    An interrupted build continues where it stopped when the same command runs again. If the folder holds the index of
    an earlier version of DOC, the unchanged beginning is not prefilled again, and that index's methods are rebuilt
    together with those named here. An index of another document, or for another model, is left alone unless --force is
    given.

    \b
    sparsekv build-index manual.txt
    sparsekv build-index report.txt -o q3.skv --model Qwen/Qwen3-0.6B --max-tokens 32000
    A=$(sparsekv build-index manual.txt) && sparsekv generate --index "$A" "What is this about?"
    """
    chosen = {name: indexers()[name] for name in choose_indexers(method or [])}
    way = choose_prefill(prefill)
    refuse_unused(chosen | {f"--prefill {prefill}": way}, parameters)
    methods = {name: configure(indexer, parameters) for name, indexer in chosen.items()}
    if document == "-" and output is None:
        raise UsageError("a document from standard input has no name: name the index with --output NAME.skv")
    with open_document(document, whole=max_tokens is None) as text:
        folder = output or _folder_of(document)
        check_output(folder)
        loaded = load(model, device, dtype, rope_scaling, quiet=quiet)
        prompt = encode_prompt(loaded.tokenizer, text, raw=raw, max_tokens=max_tokens, special_tokens=special_tokens)
    note_plain("the document", prompt.plain, quiet=quiet)
    if prompt.cut:
        note(f"the first {max_tokens:,} of more tokens are indexed: the document goes on", quiet=quiet)
    prefilling = configure(way, parameters)
    plan = BuildPlan(
        loaded=loaded,
        prompt=prompt,
        methods=methods,
        sinks=sinks,
        tail=tail,
        chunk_size=choose_chunk_size(chunk_size, loaded.model.device, prefilling),
        prefill=prefilling,
        rope_scaling=rope_scaling,
        force=force,
    )
    note(f"indexing {plan.split().tokens:,} tokens with {loaded.name}", quiet=quiet)
    tuned = _tuned(folder)
    with progress(quiet=quiet) as show:
        manifest = build(plan, folder, show)
    if tuned and manifest.defaults is None:
        note("what `tune` found was for the index before: run `sparsekv tune` again", quiet=quiet)
    say(str(folder))


def _folder_of(document: str) -> Path:
    folder = Path(document).with_suffix(".skv")
    if len(os.fsencode(folder.name)) > _LONGEST_NAME:
        raise UsageError(f"{document}: its name is too long for one with .skv; name the index with --output NAME.skv")
    return folder


def _tuned(folder: Path) -> bool:
    """Whether a folder holds an index with a default setting that `tune` wrote."""
    try:
        return read_manifest(folder).defaults is not None
    except ArtifactError:
        return False
