"""A model whose mask was bent after its index was built is refused by whatever opens the index."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.bent_models import BENDS, bend
from support.configs import sparse
from support.pairs import every_pair
from support.sealing import read_fields, seal
from support.small_index import SmallIndices, random_ids, reopen, small_plan, stepped_logits, without_window

from sparsekv.formats.errors import ArtifactError, IdentityError
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import KVDtype
from sparsekv.formats.models.load import identify
from sparsekv.indexing.convert import convert_index
from sparsekv.runtime.cache.index_cache import BuiltLayers
from sparsekv.runtime.decoding.open import open_index
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.selection.interface import Budget


@every_pair({"hold": [False, True], "kv_dtype": [None, "int8"], "how": BENDS})
def test_a_mask_that_is_bent_later_is_refused(
    small: SmallIndices, tmp_path: Path, how: str, kv_dtype: KVDtype | None, hold: bool
) -> None:
    index = small.copy(tmp_path / "doc.skv", kv_dtype=kv_dtype)
    loaded = replace(index.loaded, model=bend(index.model, how))
    with pytest.raises(IdentityError, match=r"the probe .* or masks other tokens"):
        open_index(index.artifact, loaded.model, loaded.tokenizer, identify(loaded), hold=hold)


def test_int8_is_a_reason_for_other_logits_over_a_converted_index(small: SmallIndices, tmp_path: Path) -> None:
    exact = small.copy(tmp_path / "doc.skv")
    convert_index(exact.artifact, "int8", tmp_path / "int8.skv", torch.device("cpu"), lambda *_: None)
    loaded = replace(exact.loaded, model=bend(exact.model, "window"))
    told = "int8 storage changes this model's logits too much, or .*: use the index that was converted, or the model"
    with pytest.raises(IdentityError, match=told):
        open_index(Artifact(tmp_path / "int8.skv"), loaded.model, loaded.tokenizer, identify(loaded))
    with pytest.raises(IdentityError, match=r"^(?!.*int8)"):
        open_index(exact.artifact, loaded.model, loaded.tokenizer, identify(loaded))


def test_an_index_of_an_earlier_version_is_compared_with_the_models_own_attention(
    small: SmallIndices, tmp_path: Path
) -> None:
    """It has no canary; its probe, of the prefill, says the same where the model attends as the prefill did."""
    small.copy(tmp_path / "doc.skv")
    fields = read_fields(tmp_path / "doc.skv")
    del fields["canary"]
    seal(tmp_path / "doc.skv", fields)
    index = reopen(small_plan(), tmp_path / "doc.skv")
    assert not index.artifact.manifest.canary
    bent = bend(index.model, "window")
    identity = identify(replace(index.loaded, model=bent))
    with pytest.raises(IdentityError):
        open_index(index.artifact, bent, index.tokenizer, identity)


@pytest.mark.parametrize("family", ["gemma2", "gpt-oss"])
def test_a_window_that_a_model_has_lost_is_refused(small: SmallIndices, tmp_path: Path, family: str) -> None:
    index = small.copy(tmp_path / "doc.skv", family)
    model = without_window(family)
    identity = identify(index.loaded)
    model.config.layer_types = ["full_attention"] * len(index.artifact.manifest.layers)
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
        if hasattr(layer, "attention_type"):
            layer.attention_type = "full_attention"
    with pytest.raises(IdentityError):
        open_index(index.artifact, model, index.tokenizer, identity)


@torch.no_grad()
def test_keys_that_other_weights_make_are_refused(small: SmallIndices, tmp_path: Path) -> None:
    """The checked keys are of one token among hundreds. The changed weights hardly change its logits."""
    index = small.copy(tmp_path / "doc.skv")
    identity = identify(index.loaded)
    index.model.model.layers[2].self_attn.k_proj.weight.mul_(1.02)
    with pytest.raises(IdentityError, match="keys and values"):
        open_index(index.artifact, index.model, index.tokenizer, identity)


def _positions(canary: dict) -> None:
    canary["position"] = 10**6


def _lengths(canary: dict) -> None:
    canary["logits"] = canary["logits"][:3]


@pytest.mark.parametrize("change", [_positions, _lengths])
def test_a_canary_that_contradicts_its_index_is_damage(
    small: SmallIndices, tmp_path: Path, change: Callable[[dict], None]
) -> None:
    small.copy(tmp_path / "doc.skv")
    fields = read_fields(tmp_path / "doc.skv")
    change(fields["canary"][0])
    seal(tmp_path / "doc.skv", fields)
    with pytest.raises(ArtifactError, match="canary"):
        Artifact(tmp_path / "doc.skv")


@pytest.mark.parametrize("method", ["dense", "squeezed"])
def test_a_layer_that_our_attention_gets_otherwise_than_at_the_build_is_refused(
    small: SmallIndices, tmp_path: Path, method: str
) -> None:
    """As after an update of transformers that passes a soft cap on under another name."""
    index = small.copy(tmp_path / "doc.skv", "gemma2")
    cache = index.dense_cache() if method == "dense" else index.cache(sparse(method, Squeezed(), Budget(1.0)))
    for change, says in (({"softcap": None}, "soft cap of layer 0"), ({"softmax_scale": 0.5}, "softmax scale")):
        cache.built = BuiltLayers(index.artifact.manifest.layers)
        for _ in range(2):  # the next question is refused, too
            with pytest.raises(IdentityError, match=says):
                stepped_logits(
                    index, cache, random_ids(4), 3, lambda call, change=change: cache.attend(replace(call, **change))
                )
    stepped_logits(index, cache, random_ids(4), 3)
