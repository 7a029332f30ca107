"""A manifest reads back from disk as it was written, whatever it contains."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from support.artifacts import small_manifest

from sparsekv.formats.index.manifest import manifest_bytes, read_manifest
from sparsekv.formats.index.schema import (
    FILE_NAME,
    MANIFEST,
    METHOD_NAME,
    AdditionRecord,
    CanaryToken,
    ChatFrame,
    FileRecord,
    LayerFacts,
    Manifest,
    MethodRecord,
    Probe,
    RopeRecord,
    Split,
    TensorRecord,
    layer_file,
)

finite = st.floats(allow_nan=False, allow_infinity=False)
text = st.text(max_size=20)
sizes = st.integers(1, 2**31 - 1)
tails = st.integers(2, 2**31 - 1)
positive = st.floats(0, 1e300, exclude_min=True)
names = st.from_regex(FILE_NAME, fullmatch=True)
hashes = st.from_regex(r"[0-9a-f]{64}", fullmatch=True)
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | finite | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
json_objects = st.dictionaries(text, json_values, max_size=3)
splits = st.builds(Split, sinks=sizes, middle=sizes, tail=tails)
layers = st.builds(
    LayerFacts,
    softmax_scale=positive,
    softcap=st.none() | positive,
    sliding_window=st.none() | sizes,
    attention_sinks=st.booleans(),
)
methods = st.builds(
    MethodRecord,
    revision=sizes,
    parameters=json_objects,
    seed=sizes,
    calibration=json_objects,
    built_from=st.dictionaries(names, text, max_size=2),
)
files = st.builds(
    FileRecord,
    path=names,
    bytes=sizes,
    sha256=hashes,
    recipe=text,
    tensors=st.dictionaries(text, st.builds(TensorRecord, shape=st.lists(sizes, max_size=4), dtype=text), max_size=2),
)
probes = st.lists(st.tuples(sizes, finite), min_size=1, max_size=4).map(
    lambda pairs: Probe(token_ids=[token for token, _ in pairs], logits=[logit for _, logit in pairs])
)
canaries = st.builds(
    lambda position, probe: CanaryToken(position=position, **probe.model_dump()), st.integers(0, 2**31 - 1), probes
)
changes = st.fixed_dictionaries(
    {
        "created": text,
        "parent_uuid": st.none() | text,
        "split": splits,
        "rope": st.builds(RopeRecord, scaling=st.none() | text, parameters=st.none() | json_objects),
        "layers": st.lists(layers, min_size=1, max_size=3),
        "methods": st.dictionaries(st.from_regex(METHOD_NAME, fullmatch=True), methods, max_size=2),
        "probe": probes,
        "canary": st.lists(canaries, max_size=3),
        "files": st.dictionaries(names, files, max_size=2),
        "additions": st.lists(st.builds(AdditionRecord, sha256=hashes, tokens=sizes), max_size=2),
    }
)


@given(changes, st.none() | st.builds(ChatFrame, before=text, between=text, after=text))
@settings(max_examples=25)
def test_a_manifest_round_trips(changed: dict[str, Any], chat: ChatFrame | None) -> None:
    manifest = small_manifest()
    prompt = manifest.prompt.model_copy(update={"chat": chat})
    data, sealed = manifest_bytes(manifest.model_copy(update=changed | {"prompt": prompt}))
    with TemporaryDirectory() as folder:
        (Path(folder) / MANIFEST).write_bytes(data)
        assert read_manifest(Path(folder)) == sealed


def test_sealing_twice_changes_nothing() -> None:
    data, sealed = manifest_bytes(small_manifest())
    assert manifest_bytes(sealed) == (data, sealed)


@pytest.mark.parametrize("field", [name for name, field in Manifest.model_fields.items() if field.is_required()])
def test_no_field_of_identity_is_optional(field: str) -> None:
    fields = small_manifest().model_dump()
    del fields[field]
    with pytest.raises(ValidationError, match=field):
        Manifest.model_validate(fields)


def test_layers_without_a_window_are_the_indexed_ones() -> None:
    full = small_manifest().layers[0]
    sliding = full.model_copy(update={"sliding_window": 32})
    manifest = small_manifest().model_copy(update={"layers": [sliding, full, sliding, full]})
    assert manifest.indexed_layers == [1, 3]


def test_layer_files_sort_by_layer() -> None:
    names = [layer_file("context", layer) for layer in range(120)]
    assert names == sorted(names)
    assert names[7] == "context/layer_007.safetensors"
