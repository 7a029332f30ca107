"""`sparsekv append`: add text to the end of an index's document."""

from collections.abc import Collection
from functools import partial
from typing import Annotated

import typer

from sparsekv.cli.common.console import note, note_plain, progress, say
from sparsekv.cli.common.open_artifact import open_artifact
from sparsekv.cli.common.options import (
    AppendChunkSizeOption,
    DeviceOption,
    DtypeOption,
    EncodingOption,
    IndexOption,
    ModelOption,
    QuietOption,
    SpecialTokensOption,
    WeightsOption,
)
from sparsekv.cli.common.process import refuse_little_room
from sparsekv.cli.configuring.sources import Command, note_idle_encoding
from sparsekv.formats.documents.document import UTF_8, open_document
from sparsekv.formats.documents.document_hints import tune_hint
from sparsekv.formats.documents.extracted import told_blank_pages
from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import AdditionRecord

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(cls=Command)
def append(
    ctx: typer.Context,
    document: Annotated[
        str, typer.Argument(metavar="MORE", help="A text, PDF, DOCX or HTML file, or - for standard input.")
    ],
    index: IndexOption = None,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Rebuild the methods that cannot append tokens, from all tokens.")
    ] = False,
    again: Annotated[bool, typer.Option("--again", help="Append the text even if it was appended before.")] = False,
    encoding: EncodingOption = UTF_8,
    special_tokens: SpecialTokensOption = False,
    model: ModelOption = None,
    chunk_size: AppendChunkSizeOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    weights: WeightsOption = "auto",
    quiet: QuietOption = False,
) -> None:
    """Add a blank line and MORE to the end of an index's document, and print the index's path.

    In most cases, only the last tokens of the old document and the new tokens are prefilled. The old index stays in
    place until the longer index is complete, and an interrupted run continues where it stopped when the same command
    runs again. A text that was appended before (same sha256) is not appended again, so repeating a command is safe.
    Some methods cannot append tokens to what they have built: squeezed, h2o, a method that an earlier version of
    sparsekv built in another way, and all methods if the model's RoPE depends on the prompt's length. If the index has
    such a method, the command stops before any work unless --rebuild is given.

    \b
    sparsekv append --index manual.skv chapter2.txt
    sparsekv append --index with-squeezed.skv --rebuild chapter2.txt
    git log -3 | sparsekv append --index manual.skv -
    """
    note_idle_encoding(ctx, [document], quiet=quiet)
    artifact = open_artifact(index)
    # Imported here, so that --help does not wait seconds for transformers.
    from sparsekv.cli.common.loading import load_for
    from sparsekv.indexing.append import (
        addition_record,
        clear_finished,
        encode_addition,
        growing_plan,
        learning_line,
        online_methods,
        refuse_other_dtype,
    )
    from sparsekv.indexing.build import build_index

    refuse_little_room()
    refuse_other_dtype(artifact.manifest, dtype)
    if not rebuild:
        _refuse_fixed_methods(artifact, online_methods(artifact.manifest))
    with open_document(document, whole=True, encoding=encoding) as opened:
        text = opened.whole()
        blank = told_blank_pages([(document, text, opened.pages)])
    loaded = load_for(artifact, model, device, dtype, quiet=quiet, weights=weights).loaded
    prompt = artifact.manifest.prompt
    addition = encode_addition(loaded.tokenizer, text, prompt.chat, prompt.border, special_tokens=special_tokens)
    record = addition_record(addition)
    there = next((one for one in artifact.manifest.additions if one.sha256 == record.sha256), None)
    if there is not None and not again:
        _refuse_other_reading(artifact, there, record)
        note(f"{artifact.folder} holds this text already ({_named(there)}); --again adds it once more", quiet=quiet)
        clear_finished(artifact.folder)
        return say(str(artifact.folder))
    if blank:
        note(blank, quiet=quiet)
    note_plain("the added text", addition.plain, quiet=quiet)
    plan = growing_plan(artifact, loaded, addition, chunk_size=chunk_size)
    note(f"adding {len(addition.input_ids):,} tokens to {artifact.manifest.split.tokens:,}", quiet=quiet)
    if learning := learning_line(artifact.manifest, len(addition.input_ids)):
        note(learning, quiet=quiet)
    with progress(quiet=quiet) as show:
        build_index(plan, artifact.folder, show, tell=partial(note, quiet=quiet))
    note(f"added {_named(record)}", quiet=quiet)
    if artifact.manifest.defaults is not None:
        again_with = tune_hint(artifact.folder, artifact.manifest.defaults.target)
        told = (
            "the default that tune found was for the shorter text and is no longer used; find a new one with "
            f"{again_with}"
        )
        note(told, quiet=quiet)
    say(str(artifact.folder))


def _refuse_other_reading(artifact: Artifact, there: AdditionRecord, record: AdditionRecord) -> None:
    """Raise UsageError if only one of two additions of the same text let its special tokens keep their meaning."""
    if None in (there.special_tokens, record.special_tokens) or there.special_tokens == record.special_tokens:
        return
    read, option = ("with their meaning", "give") if there.special_tokens else ("as plain text", "leave out")
    raise UsageError(
        f"{artifact.folder} holds this text already ({_named(there)}), with its special tokens read {read}; {option} "
        "--special-tokens, or add the text once more with --again"
    )


def _named(addition: AdditionRecord) -> str:
    return f"sha256 {addition.sha256[:12]}, {addition.tokens:,} tokens"


def _refuse_fixed_methods(artifact: Artifact, online: Collection[str]) -> None:
    fixed = sorted(artifact.manifest.methods.keys() - online)
    if fixed:
        raise UsageError(
            f"{', '.join(fixed)} of {artifact.folder} cannot append tokens; give --rebuild to build such "
            "methods again from all tokens"
        )
