"""The identity of a loaded model: the same for the same model, another one for anything that changes K and V."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from support.artifacts import small_manifest
from support.tiny_models import FAMILIES, tiny_tokenizer

from sparsekv.formats.models.load import LoadedModel, identify


def _loaded(family: str = "llama", template: str | None = None) -> LoadedModel:
    return LoadedModel(FAMILIES[family](), tiny_tokenizer(template), "tiny", None)


def _other_rope(loaded: LoadedModel) -> None:
    loaded.model.config.rope_parameters["rope_theta"] = 77.0


def _other_weights(loaded: LoadedModel) -> None:
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight.mul_(2)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_loaded_again_or_in_another_precision_is_the_same(family: str) -> None:
    first, again = identify(_loaded(family)), identify(_loaded(family))
    assert first == again
    halved = _loaded(family)
    halved.model.to(torch.bfloat16)
    assert identify(halved)[0].weights_hash == first[0].weights_hash


def test_every_family_is_another_model() -> None:
    identities = [identify(_loaded(family))[0] for family in FAMILIES]
    assert len({identity.config_hash for identity in identities}) == len(FAMILIES)


@pytest.mark.parametrize(
    ("change", "field"), [(_other_rope, "config_hash"), (_other_weights, "weights_hash")], ids=["rope", "weights"]
)
def test_a_change_of_config_or_weights_changes_its_own_hash_alone(
    change: Callable[[LoadedModel], None], field: str
) -> None:
    loaded = _loaded()
    before, _ = identify(loaded)
    change(loaded)
    after, _ = identify(loaded)
    changed = {name for name in ("config_hash", "weights_hash") if getattr(before, name) != getattr(after, name)}
    assert changed == {field}


def test_tokenizer_special_tokens_and_template_have_hashes_of_their_own() -> None:
    loaded = _loaded()
    _, plain = identify(loaded)
    _, with_template = identify(replace(loaded, tokenizer=tiny_tokenizer("{{ messages }}")))
    assert plain.chat_template_hash is None
    assert with_template.chat_template_hash is not None
    assert with_template.tokenizer_hash == plain.tokenizer_hash
    other_end = tiny_tokenizer(None)
    other_end.eos_token = "<|unused|>"
    assert identify(replace(loaded, tokenizer=other_end))[1].special_tokens_hash != plain.special_tokens_hash
    splitting = tiny_tokenizer(None)
    splitting.split_special_tokens = True
    assert identify(replace(loaded, tokenizer=splitting))[1].special_tokens_hash != plain.special_tokens_hash
    more_tokens = tiny_tokenizer(None)
    more_tokens.add_tokens(["sparse"])
    assert identify(replace(loaded, tokenizer=more_tokens))[1].tokenizer_hash != plain.tokenizer_hash


def test_a_tokenizer_is_the_same_before_and_after_its_first_text() -> None:
    """Files of many fine-tuned models set truncation and padding, which the first text turns off."""
    tokenizer, plain = tiny_tokenizer(None), identify(_loaded())[1]
    tokenizer.backend_tokenizer.enable_truncation(100)
    tokenizer.backend_tokenizer.enable_padding(length=128)
    before = identify(replace(_loaded(), tokenizer=tokenizer))[1]
    assert len(tokenizer("text " * 100)["input_ids"]) == 500
    assert before == identify(replace(_loaded(), tokenizer=tokenizer))[1] == plain


@dataclass
class Adapter:
    """An adapter's settings, as peft has them."""

    lora_alpha: int = 8
    target_modules: set[str] = field(default_factory=set)
    base_model_name_or_path: str | None = None


def _adapter(**adapters: Adapter) -> str | None:
    loaded = _loaded()
    loaded.model.peft_config = adapters
    return identify(loaded)[0].adapter


def test_adapters_are_known_by_their_names_and_settings() -> None:
    """The alpha of LoRA changes keys, and is no weight."""
    assert identify(_loaded())[0].adapter is None
    plain, named = _adapter(facts=Adapter()), _adapter(style=Adapter(), facts=Adapter(lora_alpha=9))
    assert plain is not None
    assert re.fullmatch("facts [0-9a-f]{12}", plain)
    assert named is not None
    assert re.fullmatch("facts [0-9a-f]{12},style [0-9a-f]{12}", named)
    assert _adapter(facts=Adapter(base_model_name_or_path="elsewhere")) == plain
    others = {_adapter(facts=Adapter(lora_alpha=9)), _adapter(facts=Adapter(target_modules={"q", "k"})), plain}
    assert len(others) == 3


def test_a_tokenizer_of_the_files_that_an_index_names_is_its_own_and_others_are_compared() -> None:
    index = small_manifest().model_copy(update={"tokenizer_files": "1" * 64})
    loaded = _loaded()
    assert identify(replace(loaded, tokenizer_files="1" * 64), index)[1] is index.tokenizer
    for files, named in (("2" * 64, index), (None, index), (None, index.model_copy(update={"tokenizer_files": None}))):
        assert identify(replace(loaded, tokenizer_files=files), named)[1] == identify(loaded)[1]
