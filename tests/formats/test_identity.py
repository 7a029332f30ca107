"""The error for an index and a model that do not belong together: the field, both values, and the remedy."""

from typing import Any

import pytest
from support.artifacts import small_manifest

from sparsekv.formats.checksums import hash_bytes
from sparsekv.formats.errors import IdentityError
from sparsekv.formats.index.identity import check_model, check_tokenizer

MANIFEST = small_manifest()
OTHER = hash_bytes(b"another")
TORCHAO = '{"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}'


def assert_refused(error: IdentityError, field: str, built_with: object, found: object) -> None:
    message = str(error)
    assert (error.field, error.built_with, error.found) == (field, built_with, found)
    for part in (field, f"built with {built_with}", f"this is {found}", "--model some/model", "build the index again"):
        assert part in message
    assert "\n" not in message
    assert error.exit_code == 1


def test_the_same_model_and_tokenizer_pass() -> None:
    check_model(MANIFEST, MANIFEST.model, MANIFEST.dtype)
    check_tokenizer(MANIFEST, MANIFEST.tokenizer)


def test_where_a_model_comes_from_does_not_matter() -> None:
    check_model(MANIFEST, MANIFEST.model.model_copy(update={"id": "/a/folder", "revision": None}), MANIFEST.dtype)


def test_only_across_float16_are_hashes_of_weights_not_compared() -> None:
    other = MANIFEST.model.model_copy(update={"weights_hash": OTHER})
    check_model(MANIFEST, other, "float16")
    check_model(MANIFEST.model_copy(update={"dtype": "float16"}), other, "bfloat16")
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(IdentityError):
            check_model(MANIFEST, other, dtype)


@pytest.mark.parametrize(
    ("change", "field", "built_with", "found"),
    [
        ({"head_dim": 16}, "model config head_dim", 8, 16),
        ({"head_dim": None}, "model config head_dim", 8, None),
        ({"sliding_window": 64}, "model config sliding_window", None, 64),
    ],
    ids=["changed", "gone", "new"],
)
def test_another_config(change: dict[str, Any], field: str, built_with: object, found: object) -> None:
    config = {name: value for name, value in (MANIFEST.model.kv_config | change).items() if value is not None}
    with pytest.raises(IdentityError) as error:
        check_model(MANIFEST, MANIFEST.model.model_copy(update={"kv_config": config}), MANIFEST.dtype)
    assert_refused(error.value, field, built_with, found)


@pytest.mark.parametrize(
    ("name", "value", "field", "built_with", "found"),
    [
        ("quantisation", TORCHAO, "quantisation", "none", f"torchao {hash_bytes(TORCHAO.encode())[:12]}"),
        ("quantisation", "{[", "quantisation", "none", f"unnamed {hash_bytes(b'{[')[:12]}"),
        ("adapter", "lora", "adapter", None, "lora"),
        ("weights_hash", OTHER, "model weights", MANIFEST.model.weights_hash[:12], OTHER[:12]),
    ],
)
def test_another_model(name: str, value: str, field: str, built_with: object, found: object) -> None:
    with pytest.raises(IdentityError) as error:
        check_model(MANIFEST, MANIFEST.model.model_copy(update={name: value}), MANIFEST.dtype)
    assert_refused(error.value, field, built_with, found)


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("tokenizer_hash", OTHER, "tokenizer"),
        ("special_tokens_hash", OTHER, "special tokens"),
        ("chat_template_hash", OTHER, "chat template"),
        ("chat_template_hash", None, "chat template"),
    ],
)
def test_another_tokenizer(name: str, value: str | None, field: str) -> None:
    with pytest.raises(IdentityError) as error:
        check_tokenizer(MANIFEST, MANIFEST.tokenizer.model_copy(update={name: value}))
    found = "none" if value is None else value[:12]
    assert_refused(error.value, field, getattr(MANIFEST.tokenizer, name)[:12], found)
