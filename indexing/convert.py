"""Convert a finished index to an index that stores keys and values in int8, without running a model."""

from pathlib import Path

import torch

from sparsekv.formats.errors import WaysOut
from sparsekv.formats.index.context_rows import row_bytes
from sparsekv.formats.index.folder import Folder, mark
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import TOKENS, KVDtype, KVStorage, Manifest, MethodRecord, layer_file, state_file
from sparsekv.formats.index.writer import ArtifactWriter
from sparsekv.indexing.append import cannot_write, partial_folder, stored_indexers
from sparsekv.indexing.build import MethodStage
from sparsekv.indexing.context_files import ContextFacts, ContextFiles, context_recipe, state_recipe
from sparsekv.indexing.plan import Progress, birth
from sparsekv.indexing.reuse import sample_recipe, write_sample


def convert_index(
    artifact: Artifact, kv_dtype: KVDtype, folder: Path, device: torch.device, progress: Progress
) -> Manifest:
    """Write an index of the same prompt, with int8 keys and values, to a new folder; return its manifest.

    The prompt, the queries and the states are copied from the old index. The logits of probe and canary are copied,
    too, although they were computed from unquantised rows. Methods are built again from the int8 rows, so that all
    files equal those of `build_index` with the same `kv_dtype`. The folder appears only when all files are written.
    Allocates one layer, the memory of `make_layers_from` for the methods, and the files that wait to be written.

    Args:
        artifact: an index with unquantised rows. It was opened with all checksums verified, because damaged rows would
            otherwise be written with a valid checksum.
        device: device on which rows are converted and methods are built.

    Raises:
        ArtifactError: a file is damaged, this version cannot build one of the methods, the disk lacks space, or the
            folder exists or cannot be written.
    """
    indexers = stored_indexers(artifact.manifest)
    try:
        with partial_folder(folder) as unfinished:
            mark(Folder(unfinished))
            with ArtifactWriter(unfinished, ways_out=WaysOut(less="")) as writer:
                writer.need_space(_bytes(artifact.manifest))
                storage = _write_context(artifact, kv_dtype, writer, device, progress)
                facts = ContextFacts(artifact.manifest.attending, artifact.manifest.probe, storage)
                stage = MethodStage(artifact.manifest.split, artifact.manifest.dtype, device, writer, facts, progress)
                methods = {name: stage.build(name, indexer) for name, indexer in indexers.items()}
                return writer.finish(_manifest(artifact.manifest, storage, methods))
    except OSError as error:
        raise cannot_write(folder, error) from None


def _write_context(
    artifact: Artifact, kv_dtype: KVDtype, writer: ArtifactWriter, device: torch.device, progress: Progress
) -> KVStorage:
    manifest = artifact.manifest
    ids_sha256 = manifest.prompt.ids_sha256
    recipe = context_recipe(manifest.model, ids_sha256, manifest.split, manifest.dtype, manifest.prefill, kv_dtype)
    writer.write(TOKENS, artifact.tensors(TOKENS), recipe)
    names = {layer_file(part, layer) for part in ("context", "queries") for layer in manifest.attending}
    files = ContextFiles(writer, recipe, names, kv_dtype, copies=True)
    ids, about = artifact.input_ids().tolist(), (manifest.split, manifest.dtype, manifest.prefill, kv_dtype)
    for tokens in manifest.states:
        made = state_recipe(manifest.model, ids[:tokens], *about)
        writer.write(state_file(tokens), artifact.state(tokens), made, wait=False)
    for done, (layer, facts) in enumerate(manifest.attending.items(), 1):
        files.write(layer, artifact.context(layer, device), artifact.queries(layer, device), facts)
        if (name := layer_file("samples", layer)) in manifest.files:
            sample = artifact.tensors(name)
            positions = sample["positions"].long()
            write_sample(writer, layer, sample["queries"], positions, sample_recipe(recipe, positions))
        progress("write context", done, len(manifest.attending))
    storage = files.storage(ids_sha256, manifest.split.tokens, exact_probe=True)
    assert storage is not None
    return storage


def _manifest(old: Manifest, storage: KVStorage, methods: dict[str, MethodRecord]) -> Manifest:
    return old.model_copy(
        update={**birth(), "parent_uuid": old.uuid, "kv_storage": storage, "methods": methods, "defaults": None}
    )


def _bytes(manifest: Manifest) -> int:
    """Estimate the new index's size on disk. Files other than keys and values are at most as large as before."""
    context = [manifest.files[layer_file("context", layer)] for layer in manifest.attending]
    shapes = [record.tensors["keys"].shape for record in context]
    stored = sum(2 * row_bytes(channels) * heads * tokens for heads, tokens, channels in shapes)
    others = sum(record.bytes for record in manifest.files.values()) - sum(record.bytes for record in context)
    return int(stored + others)
