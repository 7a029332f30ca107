"""A small finished index of random tensors, written by `ArtifactWriter` without a model."""

import uuid
from pathlib import Path

import torch

from sparsekv.formats.checksums import chained_block_hashes, hash_bytes, hash_json, hash_tokens
from sparsekv.formats.index.folder import LOCK, MARKER
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import (
    MANIFEST,
    TOKENS,
    LayerFacts,
    Manifest,
    MethodRecord,
    ModelIdentity,
    PrefillRecord,
    Probe,
    Prompt,
    Split,
    TokenizerIdentity,
    layer_file,
)
from sparsekv.formats.index.writer import ArtifactWriter

KV_HEADS, QUERY_HEADS, HEAD_DIM, CLUSTERS = 2, 4, 8, 5
SPLIT = Split(sinks=4, middle=24, tail=12)
CONTEXT, QUERIES, METHOD = (layer_file(folder, 0) for folder in ("context", "queries", "squeezed"))

Files = dict[str, dict[str, torch.Tensor]]


def small_files(context: int = 0, method: int = 0) -> Files:
    """Return random tensors of every logical file; `context` and `method` are the seeds of the context and of the
    method."""
    generator = torch.Generator().manual_seed(context)
    keys, values = torch.randn(2, KV_HEADS, SPLIT.tokens, HEAD_DIM, generator=generator).unbind()
    tail = torch.randn(QUERY_HEADS, SPLIT.tail, HEAD_DIM, generator=generator)
    input_ids = torch.randint(0, 1000, (SPLIT.tokens,), generator=generator)
    generator.manual_seed(method)
    centroids = torch.randn(KV_HEADS, CLUSTERS, HEAD_DIM, generator=generator)
    counts = torch.randint(1, 9, (KV_HEADS, CLUSTERS), generator=generator, dtype=torch.int32)
    return {
        TOKENS: {"input_ids": input_ids},
        CONTEXT: {"keys": keys, "values": values},
        QUERIES: {"tail": tail},
        METHOD: {"level0.centroids": centroids, "level0.counts": counts},
    }


def small_recipe(name: str, context: int, method: int) -> str:
    """Return the recipe of a logical file: the hash of the file's name and of the seed that determines its tensors."""
    return hash_json([name, method if name == METHOD else context])


def small_manifest(context: int = 0, method: int = 0) -> Manifest:
    """Return a manifest that is valid except that it names no files yet."""
    ids = small_files(context)[TOKENS]["input_ids"].tolist()
    return Manifest(
        writer_version="0.0",
        uuid=str(uuid.uuid5(uuid.NAMESPACE_OID, f"{context} {method}")),
        parent_uuid=None,
        created="2025-01-01T00:00:00+00:00",
        model=ModelIdentity(
            id="some/model",
            revision="main",
            kv_config={"head_dim": HEAD_DIM, "num_key_value_heads": KV_HEADS},
            config_hash=hash_bytes(b"config"),
            weights_hash=hash_bytes(b"weights"),
            adapter=None,
            quantisation=None,
        ),
        tokenizer=TokenizerIdentity(
            tokenizer_hash=hash_bytes(b"tokenizer"),
            chat_template_hash=hash_bytes(b"template"),
            special_tokens_hash=hash_bytes(b"special tokens"),
        ),
        prompt=Prompt(
            text_sha256=hash_bytes(str(context).encode()),
            ids_sha256=hash_tokens(ids),
            block_hashes=chained_block_hashes(ids),
            tokens=len(ids),
            chat=None,
        ),
        split=SPLIT,
        dtype="float32",
        rope={"parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        layers=[LayerFacts(softmax_scale=0.125, softcap=None, sliding_window=None, attention_sinks=False)],
        prefill=PrefillRecord(kind="dense", chunk_size=512),
        versions={"torch": "2.0"},
        methods={
            "squeezed": MethodRecord(
                revision=1, parameters={"levels": [0.2]}, seed=method, calibration={}, built_from={}
            )
        },
        probe=Probe(token_ids=[3, 1], logits=[2.5, -0.125]),
        files={},
    )


def small_artifact(folder: Path, *, context: int = 0, method: int = 0, force: bool = False) -> Manifest:
    """Build, resume or change a small index; returns its sealed manifest."""
    with ArtifactWriter(folder, force=force) as writer:
        for name, tensors in small_files(context, method).items():
            recipe = small_recipe(name, context, method)
            if not writer.reuse(name, recipe):
                writer.write(name, tensors, recipe)
        writer.note(f"facts {context}", context)
        return writer.finish(small_manifest(context, method))


def assert_holds(folder: Path, *, context: int = 0, method: int = 0) -> None:
    """Fail unless the index in a folder is whole and has exactly the tensors of `small_files` for these seeds."""
    artifact, files = Artifact(folder), small_files(context, method)
    assert artifact.manifest.uuid == small_manifest(context, method).uuid
    assert set(artifact.verify()) == artifact.manifest.files.keys() == files.keys()
    for name, tensors in files.items():
        stored = artifact.tensors(name)
        assert stored.keys() == tensors.keys()
        assert all(torch.equal(stored[key], tensor) for key, tensor in tensors.items())


def files_in(folder: Path) -> set[str]:
    """Return the relative paths of all files in an index's folder, except its lock and its marker."""
    own = (LOCK, MARKER)
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name not in own}


def assert_no_strays(folder: Path) -> None:
    """Fail unless the folder has only the manifest and the files that the manifest names."""
    manifest = Artifact(folder).manifest
    assert sorted(files_in(folder)) == sorted({MANIFEST, *(record.path for record in manifest.files.values())})
    assert all(any(path.iterdir()) for path in folder.rglob("*") if path.is_dir())
