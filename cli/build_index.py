"""`sparsekv build-index`: prefill a document once and build sparse-attention indices over its keys and values."""

import os
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsekv.cli.common.console import progress, say
from sparsekv.cli.common.method_options import with_options
from sparsekv.cli.common.options import (
    ENCODING_HELP,
    TAIL_HELP,
    BuildChunkSizeOption,
    BuildKVDtypeOption,
    BuildWeightsOption,
    DeviceOption,
    DtypeOption,
    ModelOption,
    QuietOption,
    RayOption,
    RopeScalingOption,
    SinksOption,
    SpecialTokensOption,
    WorkersOption,
    check_ray,
    names_of,
)
from sparsekv.cli.common.process import refuse_little_room
from sparsekv.cli.configuring.sources import Command, note_idle_encoding, on_command_line
from sparsekv.cli.distributed.launch import join_ranks, refuse_with_ranks
from sparsekv.formats.documents.document import UTF_8, check_encoding
from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.schema import AUTO, FILE_ORDERS, file_order_named, kv_dtype_named, weights_named
from sparsekv.indexing.indexers.interface import choose_indexers, indexers
from sparsekv.indexing.prefill.prefills import choose_prefill, prefills
from sparsekv.runtime.selection.registry import configure, refuse_unused

if TYPE_CHECKING:  # --help does not wait for transformers, which takes as long as all other imports
    from sparsekv.cli.building.recipe import BuildRecipe

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Command-line options of `build-index`."""

    ctx: typer.Context
    documents: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DOC",
            help="Text, PDF, DOCX or HTML files, folders of them, or - for standard input. Or an index, to add methods "
            "to it.",
        ),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Folder of the index, or the folder for the indices of several documents. Default: next to each DOC, "
            "with its name: .skv replaces a file's extension (.txt, .md, ...) and is appended to a folder's name.",
        ),
    ] = None
    from_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help=(
                "Index the documents that this file names, one path per line, without quotes and relative to the "
                "current folder; - for stdin."
            ),
        ),
    ] = None
    as_one: Annotated[
        bool,
        typer.Option(
            "--as-one", help="Join all DOC in one index: files, folders, and patterns in quotes ('docs/**/*.md')."
        ),
    ] = False
    include: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB",
            help=(
                "Of a folder, index only files that match this pattern, written as in .gitignore ('*.py'); repeatable."
            ),
        ),
    ] = None
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB", help="Of a folder, leave out files and folders that match this pattern; repeatable."
        ),
    ] = None
    order: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(FILE_ORDERS),
            help=(
                "Order of the files of a folder or of --as-one. stable: the order that the index has, with new "
                "files at the end. changed-last: changed files go to the end too, so that later changes of them "
                "cost little. Default: the order that the index was built with, or path."
            ),
            autocompletion=names_of(lambda: FILE_ORDERS),
        ),
    ] = None
    model: ModelOption = None
    method: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Method to build an index for, or `all`; repeatable. Default: {', '.join(choose_indexers([]))}.",
            autocompletion=names_of(indexers, "all"),
        ),
    ] = None
    encoding: Annotated[
        str,
        typer.Option(metavar="NAME", help=f"{ENCODING_HELP} In a folder, other encodings are detected by default."),
    ] = UTF_8
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Index only the document's first N tokens.")] = None
    sinks: SinksOption = 10
    tail: Annotated[
        int,
        typer.Option(help=f"{TAIL_HELP} Their queries are held out, to calibrate on and to measure with."),
    ] = 128
    chunk_size: BuildChunkSizeOption = None
    checkpoints: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help=(
                "For a model some of whose layers keep a state instead of attending: also store these states "
                "after every N blocks of 256 tokens. A changed DOC is then prefilled only from the last stored "
                "state before its first change. Default: as in the existing index. If there is no index, none of "
                "these states are stored, and a changed DOC is prefilled as a whole."
            ),
        ),
    ] = None
    prefill: Annotated[
        str,
        typer.Option(
            metavar="|".join(prefills()),
            help=(
                "Tokens that a chunk of the prefill attends to: all earlier tokens (dense), or those that a "
                "method selects."
            ),
        ),
    ] = "dense"
    rope_scaling: RopeScalingOption = None
    raw: Annotated[bool, typer.Option("--raw", help="Put no chat template around document and question.")] = False
    special_tokens: SpecialTokensOption = False
    force: Annotated[
        bool, typer.Option("--force", help="Build from scratch, and replace whatever index is in the folder.")
    ] = False
    watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            help="After the build, wait for changes of the files and build again on each, until Ctrl-C. Needs pip "
            "install 'sparsekv[watch]'.",
        ),
    ] = False
    ray: RayOption = None
    workers: WorkersOption = None
    device: DeviceOption = "auto"
    dtype: DtypeOption = "auto"
    kv_dtype: BuildKVDtypeOption = AUTO
    weights: BuildWeightsOption = AUTO
    quiet: QuietOption = False
    parameters: dict[str, Any]

    def recipe(self) -> "BuildRecipe":
        """Make the recipe by which each document is indexed.

        Raises:
            UsageError: a method, prefill, encoding, file order, dtype or precision of weights does not exist, or a
                parameter is not valid or is read by no chosen method or prefill.
        """
        chosen = {name: indexers()[name] for name in choose_indexers(self.method or [])}
        way = choose_prefill(self.prefill)
        refuse_unused(chosen | {f"the {self.prefill} prefill": way}, self.parameters)
        # Imported here, so that --help does not wait seconds for transformers.
        from sparsekv.cli.building.recipe import BuildRecipe
        from sparsekv.indexing.plan import BuildConfig

        return BuildRecipe(
            config=BuildConfig(
                methods={name: configure(indexer, self.parameters) for name, indexer in chosen.items()},
                prefill=configure(way, self.parameters),
                sinks=self.sinks,
                tail=self.tail,
                chunk_size=self.chunk_size,
                kv_dtype=kv_dtype_named(self.kv_dtype),
                rope_scaling=self.rope_scaling,
                checkpoints=self.checkpoints,
                force=self.force,
            ),
            model=self.model,
            device=self.device,
            dtype=self.dtype,
            weights=weights_named(self.weights),
            max_tokens=self.max_tokens,
            raw=self.raw,
            special_tokens=self.special_tokens,
            quiet=self.quiet,
            encoding=check_encoding(self.encoding),
            include=tuple(self.include or ()),
            exclude=tuple(self.exclude or ()),
            order=file_order_named(self.order),
        )

    def check_files(self, names: Collection[str]) -> None:
        """Raise UsageError for --as-one with --ray, and for a typed --include, --exclude or --order without effect.

        --include and --exclude need a folder or a pattern among the documents. --order needs one too, or --as-one. For
        an --encoding without effect, a note is printed.

        Args:
            names: the files, folders and patterns that the user named.
        """
        from sparsekv.formats.documents.files import is_glob  # completion and --help need no files

        folders = any(os.path.isdir(name) or (self.as_one and is_glob(name)) for name in names)
        for option, given in (("--include", self.include), ("--exclude", self.exclude)):
            if given and not folders and on_command_line(self.ctx, option.removeprefix("--")):
                raise UsageError(
                    f"{option} {given[0]}: this option selects files in a folder, and no folder is given; name a folder"
                )
        if on_command_line(self.ctx, "order") and not (folders or self.as_one):
            raise UsageError(
                f"--order {self.order}: this option orders the files of one index, and each document here is one "
                "file; name a folder, or give --as-one"
            )
        if self.from_file is None:
            note_idle_encoding(self.ctx, self.documents or [], quiet=self.quiet)
        if self.as_one and self.ray is not None:
            raise UsageError("--as-one builds one index, which --ray cannot distribute; leave --ray out")

    def refuse_with_watch(self, index: Path | None, *, ranks: bool) -> None:
        """Raise UsageError for --watch with an index instead of a document, with --ray, or with several ranks.

        Args:
            index: the index that is named instead of a document; None if there is none.
            ranks: whether several ranks run this command.
        """
        if index is not None:
            raise UsageError(f"--watch: {index} is an index, and only texts are watched; name the index's document")
        if self.ray is not None:
            raise UsageError("--watch builds in this process, and --ray in others; leave one of them out")
        if ranks:
            raise UsageError("--watch builds in one process, and --gpus in several; leave one of them out")


@app.command(cls=Command)
@with_options(BuildOptions, indexers() | {f"--prefill {name}": prefill for name, prefill in prefills().items()})
def build_index(options: BuildOptions) -> None:
    """Prefill each DOC once, index it, and print the index's path.

    An interrupted build continues where it stopped when the same command runs again. If the folder holds the index of
    an earlier version of DOC, the unchanged beginning is not prefilled again, and that index's methods are rebuilt
    together with the methods named here. Without --force, the command fails if the folder holds an index for another
    model, of another document, or with appended text that DOC lacks, and if a sparse prefill would replace a dense one.
    An index counts as one of another document if DOC has less than a third of its passages and is not the beginning of
    its text. If DOC is itself an index, methods are added to it from its own tokens, even if its text is gone or text
    was appended.

    A folder is one document: its files, ordered by path (--order), each under a line with its path. Text of PDF, DOCX
    and HTML files is extracted. Hidden files, links, files that a .gitignore names and files without text are left out
    and counted.

    Each of several documents gets an index of its own, and the model is loaded once. A document that cannot be indexed
    is reported at the end, with exit code 1, and the other indices are built all the same. With --as-one, all DOC are
    one document.

    \b
    sparsekv build-index manual.txt
    sparsekv build-index manual.pdf
    sparsekv build-index chapters/*.txt -o indices
    sparsekv build-index project --include '*.py' --include '*.md'
    sparsekv build-index README.md 'docs/**/*.md' --as-one -o docs.skv
    sparsekv build-index project --order changed-last --watch
    sparsekv build-index manual.skv --method multipole
    sparsekv build-index report.txt -o q3.skv --model Qwen/Qwen3-0.6B --max-tokens 32000
    A=$(sparsekv build-index manual.txt) && sparsekv generate --index "$A" "What is this about?"
    """
    recipe, documents = options.recipe(), options.documents or []
    # Imported here, so that --help does not wait seconds for transformers.
    from sparsekv.cli.building.recipe import FIXED, add_methods, choose_targets, index_among, index_by_ranks
    from sparsekv.cli.building.several import (
        build_and_watch,
        index_by_ray,
        index_here,
        index_several,
        refuse_unwatchable,
    )

    refuse_little_room()
    check_ray(options.ray, options.workers)
    ranks = join_ranks(options.device)
    index = index_among(documents, ranks=ranks is not None)
    targets = choose_targets(documents, options.from_file, options.output, as_one=options.as_one)
    options.check_files([name for target in targets for name in target.joined or (target.document,)])
    several = len(targets) > 1 or (options.from_file is not None and not options.as_one)
    if options.watch:
        options.refuse_with_watch(index, ranks=ranks is not None)
        refuse_unwatchable(targets)
        return build_and_watch(recipe, targets)
    if index is not None:
        fixed = [name for name in FIXED if on_command_line(options.ctx, name)]
        with progress(quiet=options.quiet) as show:
            add_methods(index, recipe, fixed, show)
        return say(str(index))
    if ranks is not None:
        if several:
            raise UsageError("with --gpus, one document is indexed at a time; name one document, or leave --gpus out")
        refuse_with_ranks({"--ray": options.ray, "--prefill": not recipe.config.prefill.exact})
    elif options.ray is not None:
        return index_several(targets, partial(index_by_ray, recipe, options.ray, options.workers), quiet=options.quiet)
    elif several:
        return index_several(targets, partial(index_here, recipe), quiet=options.quiet)
    with progress(quiet=options.quiet) as show:
        if ranks is None:
            recipe.index(targets[0], recipe.load, show)
        else:
            index_by_ranks(ranks, recipe, targets[0], show)
    say(str(targets[0].folder))
