"""`sparsekv inspect`: show what an index contains, and verify its checksums."""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsekv.cli.common.console import note, progress, say
from sparsekv.cli.common.open_artifact import open_artifact
from sparsekv.cli.common.options import (
    IndexOption,
    JsonOption,
    ModelOption,
    QuietOption,
    names_of,
    refuse_unwritable_plot,
)
from sparsekv.cli.common.stats import storage_record
from sparsekv.cli.common.streams import finite_numbers
from sparsekv.cli.configuring.sources import Command, on_command_line
from sparsekv.cli.inspecting.tables import inspection_page, print_inspection, telling_words, words_of
from sparsekv.cli.pages.page import HtmlOption, refuse_unwritable_html, write_html
from sparsekv.formats.device import choose_device
from sparsekv.formats.errors import SparsekvError, UsageError, command
from sparsekv.formats.index.identity import check_tokenizer
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.models.find import named_by_index
from sparsekv.formats.models.load import load_tokenizer, tokenizer_identity
from sparsekv.indexing.indexers.interface import indexers
from sparsekv.runtime.reporting.report import LayerDescription, describe_layers
from sparsekv.runtime.selection.cluster_statistics import Cluster
from sparsekv.runtime.selection.interface import methods
from sparsekv.runtime.selection.registry import methods_of

if TYPE_CHECKING:  # transformers takes seconds to import, and a summary needs no tokenizer
    from transformers import PreTrainedTokenizerBase

app = typer.Typer(rich_markup_mode=None, add_completion=False)
SHOWN = 8
"""Default number of the biggest clusters, and of the most spread clusters, that are shown."""


@app.command(cls=Command)
def inspect(
    ctx: typer.Context,
    index: IndexOption = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="Method to describe, or `all`; repeatable. Default: a summary.",
            autocompletion=names_of(indexers, "all"),
        ),
    ] = None,
    layer: Annotated[int | None, typer.Option(help="Layer whose clusters are shown. Default: the middle one.")] = None,
    clusters: Annotated[
        int | None,
        typer.Option(min=0, help="How many of the biggest and of the most spread clusters to show. Default: 8."),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(metavar="layer", help="Show clusters and posting lists layer by layer, not as a summary."),
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Recompute and check every file's sha256.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.png",
            help="Plot cluster sizes by layer or, for a method with posting lists, how much of the keys' ranking each "
            "subspace decides.",
        ),
    ] = None,
    html: HtmlOption = None,
    as_json: JsonOption = False,
    model: ModelOption = None,
    quiet: QuietOption = False,
) -> None:
    """Show an index's sizes and parameters, and on request what each method has built.

    With --method, --layer, --clusters or --by it shows each method's blocks, clusters and posting lists. --json, --html
    and --plot always have them.

    For clusters it shows the distribution of their sizes, and the words of the biggest clusters and of those with the
    largest key spread. Key spread and value spread are the distance of keys and values from their cluster's centroid,
    relative to their distance from the mean: 0 where a centroid represents its tokens exactly, 1 where it says no more
    than the mean.

    For posting lists (csattention) it shows the share of keys that are in at least one list (keys listed), the share of
    the lists that a key is in (in lists, the median), and how much of the keys' ranking each subspace decides.

    Sizes, spreads and shares are summarised over all layers; --by layer has a row for each layer, as --json always has.
    Blocks and single clusters are those of --layer.

    --plot draws the first of the shown methods that has clusters or posting lists. docs/reference/measures.md explains
    the words.

    \b
    sparsekv inspect --index manual.skv
    sparsekv inspect --index manual.skv --method all
    sparsekv inspect --index manual.skv --by layer
    sparsekv inspect --index manual.skv --verify
    sparsekv inspect --index manual.skv --method csattention --plot shares.png --html shares.html
    sparsekv inspect --index manual.skv --json | python -m json.tool
    """
    if by not in (None, "layer"):
        raise UsageError(f"--by {by}: give layer")
    refuse_unwritable_plot(plot)
    refuse_unwritable_html(html)
    artifact = open_artifact(index, thorough=True)
    shown, names = _shown_layer(artifact, layer), _shown_methods(artifact, method or [])
    if verify:
        with progress(quiet=quiet) as show:
            for done, _ in enumerate(artifact.verify(), 1):
                show("verify", done, len(artifact.manifest.files))
        note(f"verified {len(artifact.manifest.files)} files: every sha256 is right", quiet=quiet)
        if sources := artifact.manifest.prompt.files:
            note(f"the ranges of {len(sources):,} source files are in order, within the prompt", quiet=quiet)
        if pages := len(artifact.manifest.prompt.pages) + sum(len(file.pages) for file in sources or ()):
            note(f"the first tokens of {pages:,} pages are in order, within their text", quiet=quiet)
    more = as_json or any(one is not None for one in (method, layer, clusters, by, html, plot))
    if model is not None and not more and on_command_line(ctx, "model"):
        idle = f"--model {model} has no effect on a summary, which shows no text; --method all shows some"
        note(idle, quiet=quiet)
    described = _describe(artifact, names, SHOWN if clusters is None else clusters, quiet=quiet) if more else {}
    tokenizer, ids = _tokenizer(artifact, model, quiet=quiet) if more else None, artifact.input_ids().tolist()
    words = [] if tokenizer is None else words_of(tokenizer, ids)
    inspection = _inspection(artifact, described or {name: [] for name in names}, shown, words, verified=verify)
    if html is not None:
        texts = [] if tokenizer is None else _token_texts(tokenizer, ids)
        write_html(inspection_page(finite_numbers(inspection), described, shown, texts), html, quiet=quiet)
    if plot is not None:
        _plot(artifact, described, plot)
        note(f"plot: {plot}", quiet=quiet)
    if as_json:
        say(json.dumps(finite_numbers(inspection), indent=1))
    else:
        print_inspection(inspection, by_layer=by is not None)
    if not more:
        say(f"\nBlocks, clusters and lists: {command('inspect', '--index', artifact.folder, '--method', 'all')}")


def _token_texts(tokenizer: "PreTrainedTokenizerBase", ids: list[int]) -> list[str]:
    from sparsekv.runtime.sources.places import token_texts  # imports transformers, which takes seconds

    return token_texts(tokenizer, ids)


Described = list[LayerDescription]


def _shown_layer(artifact: Artifact, layer: int | None) -> int:
    indexed = artifact.manifest.indexed_layers
    if layer is None:
        return indexed[len(indexed) // 2]
    if layer not in indexed:
        raise UsageError(f"--layer {layer}: the indexed layers are {', '.join(map(str, indexed))}")
    return layer


def _shown_methods(artifact: Artifact, names: list[str]) -> list[str]:
    """Return the names of the methods to show, in the index's order. Raises UsageError for a method that the index
    does not contain."""
    held = list(artifact.manifest.methods)
    chosen = methods_of(artifact, names)
    for name in names:
        if name not in held and name != "all":
            raise UsageError(f"--method {name}: the index has no tensors of this method; it has: {', '.join(held)}")
    return [name for name in held if name in chosen]


def _describe(artifact: Artifact, names: list[str], biggest: int, *, quiet: bool) -> dict[str, Described]:
    described: dict[str, Described] = {}
    with progress(quiet=quiet) as show:
        for name in names:
            described[name] = []
            for done, found in enumerate(describe_layers(artifact, name, biggest, choose_device("auto")), 1):
                described[name].append(found)
                show(name, done, len(artifact.manifest.indexed_layers))
    return described


def _tokenizer(artifact: Artifact, model: str | None, *, quiet: bool) -> "PreTrainedTokenizerBase | None":
    """Return the tokenizer of `model`, or of the index's model if `model` is None.

    Returns None and prints a note if the tokenizer is not on this machine or does not fit the index, or if the user has
    never named the index's model.
    """
    try:
        name = named_by_index(artifact.manifest.model.id, partial(note, quiet=quiet)) if model is None else model
        tokenizer = load_tokenizer(name)
        check_tokenizer(artifact.manifest, tokenizer_identity(tokenizer))
        ids = artifact.input_ids()
        if ids.amin() < 0 or ids.amax() > max(tokenizer.get_vocab().values()):
            raise SparsekvError(
                f"{artifact.folder} has token ids that the tokenizer of {name} does not have; name the index's "
                "model with --model"
            )
        return tokenizer
    except SparsekvError as error:
        note(f"no words, only counts: {error}", quiet=quiet)
        return None


def _inspection(
    artifact: Artifact, described: dict[str, Described], layer: int, words: list[str], *, verified: bool
) -> dict[str, Any]:
    manifest = artifact.manifest
    sizes: dict[str, int] = {}
    for name, record in manifest.files.items():
        sizes[name.split("/")[0]] = sizes.get(name.split("/")[0], 0) + record.bytes
    return {
        "index": str(artifact.folder),
        "created": manifest.created,
        "schema_version": manifest.schema_version,
        "uuid": manifest.uuid,
        "parent_uuid": manifest.parent_uuid,
        "verified": verified,
        "model": manifest.model.model_dump(),
        "dtype": manifest.dtype,
        "kv_storage": storage_record(manifest.kv_storage),
        "rope": manifest.rope.model_dump(),
        "prefill": manifest.prefill.model_dump(),
        "versions": manifest.versions,
        "split": {**manifest.split.model_dump(), "tokens": manifest.split.tokens},
        "chat_template": manifest.prompt.chat is not None,
        "layers": {
            "all": len(manifest.layers),
            "indexed": len(manifest.indexed_layers),
            "attending": list(manifest.attending),
        },
        "states": manifest.states,
        "files": None if manifest.prompt.files is None else [file.model_dump() for file in manifest.prompt.files],
        "files_behind": list(manifest.prompt.files_behind),
        "pages": list(manifest.prompt.pages),
        "file_history": None if manifest.file_history is None else manifest.file_history.model_dump(),
        "cut_after": manifest.prompt.max_tokens,
        "bytes": sizes,
        "defaults": None if manifest.defaults is None else manifest.defaults.model_dump(),
        "methods": {
            name: {
                **manifest.methods[name].model_dump(include={"revision", "seed", "parameters", "calibration"}),
                "default_budget": methods()[name].default_budget(manifest.split.middle).value,
                **_clusters(found, layer, words),
                "lists": [{"layer": one.layer, **asdict(one.lists)} for one in found if one.lists is not None],
            }
            for name, found in described.items()
        },
    }


def _clusters(found: Described, layer: int, words: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the cluster levels of all layers, and the blocks and some clusters of one layer. All lists are empty
    for a method without clusters."""
    clusterings = {one.layer: one.clusters for one in found if one.clusters is not None}
    levels = [{"layer": number, **asdict(level)} for number, one in clusterings.items() for level in one.levels]
    shown = clusterings.get(layer)
    return {
        "layers": levels,
        "blocks": [] if shown is None else [asdict(block) for block in shown.blocks],
        "biggest": [] if shown is None else [_cluster(cluster, layer, words) for cluster in shown.biggest],
        "most_spread": [] if shown is None else [_cluster(cluster, layer, words) for cluster in shown.most_spread],
    }


def _cluster(cluster: Cluster, layer: int, words: list[str]) -> dict[str, Any]:
    return {
        "layer": layer,
        "kv_head": cluster.kv_head,
        "cluster": cluster.cluster,
        "tokens": len(cluster.positions),
        "key_spread": cluster.key_spread,
        "words": telling_words(words, cluster.positions) if words else {},
    }


def _plot(artifact: Artifact, described: dict[str, Described], path: Path) -> None:
    """Plot the first method that has clusters or posting lists.

    Raises:
        UsageError: no method has clusters or posting lists.
        SparsekvError: the picture cannot be written.
    """
    from sparsekv.cli.common.plots import plot_clusters, plot_lists  # the module imports matplotlib

    for name, found in described.items():
        title = f"{name}: {artifact.folder.name}"
        if counts := {one.layer: one.clusters.counts.flatten().numpy() for one in found if one.clusters is not None}:
            plot_clusters(list(counts), list(counts.values()), title, path)
            return
        if lists := {one.layer: one.lists for one in found if one.lists is not None}:
            plot_lists(lists, title, path)
            return
    raise UsageError(
        f"{artifact.folder} has no method with clusters or posting lists to plot; add one, such as "
        "multipole, with build-index"
    )
