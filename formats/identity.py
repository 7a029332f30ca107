"""Checks that an index belongs to a model and a tokenizer; an error names the field, both values and the remedy."""

from typing import Any

from sparsekv.formats.errors import IdentityError
from sparsekv.formats.schema import Manifest, ModelIdentity, TokenizerIdentity


def check_model(manifest: Manifest, model: ModelIdentity, dtype: str) -> None:
    """Raise IdentityError at the first field in which the index's model and this one, loaded as `dtype`, differ.

    One checkpoint has the same weight hash in float32 and bfloat16. float16 rounds differently, so hashes are not
    compared between float16 and the others: there only the probe can find a difference.
    """
    stored, remedy = manifest.model, _model_remedy(manifest)
    for field in sorted(stored.kv_config.keys() | model.kv_config.keys()):
        _compare(f"model config {field}", stored.kv_config.get(field), model.kv_config.get(field), remedy)
    _compare("quantisation", stored.quantisation, model.quantisation, remedy)
    _compare("adapter", stored.adapter, model.adapter, remedy)
    if (dtype == "float16") == (manifest.dtype == "float16"):
        _compare("model weights", stored.weights_hash[:12], model.weights_hash[:12], remedy)


def check_tokenizer(manifest: Manifest, tokenizer: TokenizerIdentity) -> None:
    """Raise IdentityError when the tokenizer, its special tokens or its chat template differs."""
    stored, remedy = manifest.tokenizer, _model_remedy(manifest)
    _compare("tokenizer", stored.tokenizer_hash[:12], tokenizer.tokenizer_hash[:12], remedy)
    _compare("special tokens", stored.special_tokens_hash[:12], tokenizer.special_tokens_hash[:12], remedy)
    _compare("chat template", _short(stored.chat_template_hash), _short(tokenizer.chat_template_hash), remedy)


def _short(digest: str | None) -> str:
    return "none" if digest is None else digest[:12]


def _model_remedy(manifest: Manifest) -> str:
    return f"use the model it was built with (--model {manifest.model.id}) or build the index again for this one"


def _compare(field: str, built_with: Any, found: Any, remedy: str) -> None:
    if built_with != found:
        raise IdentityError(field, built_with, found, remedy)
