"""`sparsekv inspect`: what is in an index, and whether it is still what was written."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from sparsekv.cli.console import note, progress
from sparsekv.cli.index_option import open_artifact
from sparsekv.cli.inspect_tables import print_inspection
from sparsekv.cli.options import IndexOption, JsonOption, ModelOption, QuietOption
from sparsekv.cli.plots import plot_clusters
from sparsekv.cli.words import telling_words, words_of
from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.formats.reader import Artifact
from sparsekv.indexing.models import load_tokenizer
from sparsekv.runtime.clusters import Cluster, Clustering
from sparsekv.runtime.describe import describe_layers

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def inspect(
    index: IndexOption = None,
    layer: Annotated[
        int | None, typer.Option(help="Show this layer's biggest clusters. Default: the middle one.")
    ] = None,
    clusters: Annotated[int, typer.Option(min=0, help="How many of the biggest clusters to show.")] = 8,
    verify: Annotated[bool, typer.Option("--verify", help="Recheck every file's sha256.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Cluster sizes by layer.")] = None,
    as_json: JsonOption = False,
    model: ModelOption = None,
    quiet: QuietOption = False,
) -> None:
    """Show sizes, parameters, blocks, the distribution of cluster sizes, and the biggest clusters with their words.

    Key and value spread say how far keys and values lie from their clusters' centroids, relative to their distance from
    the mean: 0 when a centroid stands for its tokens exactly, 1 when it tells nothing of them.

    \b
    sparsekv inspect --index manual.skv
    sparsekv inspect --index manual.skv --verify
    sparsekv inspect --index manual.skv --json | python -m json.tool
    """
    artifact = open_artifact(index)
    shown = _shown_layer(artifact, layer)
    if verify:
        with progress(quiet=quiet) as show:
            for done, _ in enumerate(artifact.verify(), 1):
                show("verify", done, len(artifact.manifest.files))
        note(f"verified {len(artifact.manifest.files)} files: every sha256 is right", quiet=quiet)
    described = _describe(artifact, clusters, quiet=quiet)
    words = _words(artifact, model, quiet=quiet)
    inspection = _inspection(artifact, described, shown, words, verified=verify)
    if plot is not None:
        _plot(artifact, described, plot)
        note(f"plot: {plot}", quiet=quiet)
    if as_json:
        typer.echo(json.dumps(inspection, indent=1))
    else:
        print_inspection(inspection)


Described = dict[int, Clustering]


def _shown_layer(artifact: Artifact, layer: int | None) -> int:
    indexed = artifact.manifest.indexed_layers
    if layer is None:
        return indexed[len(indexed) // 2]
    if layer not in indexed:
        raise UsageError(f"--layer {layer}: the indexed layers are {', '.join(map(str, indexed))}")
    return layer


def _describe(artifact: Artifact, biggest: int, *, quiet: bool) -> dict[str, Described]:
    described: dict[str, Described] = {}
    with progress(quiet=quiet) as show:
        for name in artifact.manifest.methods:
            described[name] = {}
            for done, (layer, found) in enumerate(describe_layers(artifact, name, biggest), 1):
                if found is not None:
                    described[name][layer] = found
                show(name, done, len(artifact.manifest.indexed_layers))
    return described


def _words(artifact: Artifact, model: str | None, *, quiet: bool) -> list[str]:
    """The word of each token of the prompt; none where the model's tokenizer is not to be had."""
    try:
        tokenizer = load_tokenizer(model or artifact.manifest.model.id)
    except SparsekvError as error:
        note(f"no words, only counts: {error}", quiet=quiet)
        return []
    return words_of(tokenizer, artifact.input_ids().tolist())


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
        "rope": manifest.rope,
        "prefill": manifest.prefill.model_dump(),
        "versions": manifest.versions,
        "split": {**manifest.split.model_dump(), "tokens": manifest.split.tokens},
        "chat_template": manifest.prompt.chat is not None,
        "layers": {"all": len(manifest.layers), "indexed": len(manifest.indexed_layers)},
        "bytes": sizes,
        "methods": {
            name: {
                **manifest.methods[name].model_dump(include={"revision", "seed", "parameters", "calibration"}),
                "layers": [{"layer": number, **asdict(level)} for number, one in found.items() for level in one.levels],
                "blocks": [asdict(block) for block in found[layer].blocks] if found else [],
                "biggest": [_cluster(cluster, layer, words) for cluster in found[layer].biggest] if found else [],
            }
            for name, found in described.items()
        },
    }


def _cluster(cluster: Cluster, layer: int, words: list[str]) -> dict[str, Any]:
    return {
        "layer": layer,
        "kv_head": cluster.kv_head,
        "cluster": cluster.cluster,
        "tokens": len(cluster.positions),
        "words": telling_words(words, cluster.positions) if words else {},
    }


def _plot(artifact: Artifact, described: dict[str, Described], path: Path) -> None:
    name = next((name for name, found in described.items() if found), None)
    if name is None:
        raise UsageError(f"{artifact.folder} holds no method with clusters: there is nothing to plot")
    counts = [one.counts.flatten().numpy() for one in described[name].values()]
    plot_clusters(list(described[name]), counts, f"{name}: {artifact.folder.name}", path)
