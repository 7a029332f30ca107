"""Decoding over an index in 8 bits: everywhere the rows are what the stored bytes mean, and answers are those over
them."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.configs import sparse
from support.reference import assert_close
from support.sealing import change_tensors
from support.small_index import (
    INDEXERS,
    build_small,
    plain_logits_after,
    random_ids,
    reopen,
    small_plan,
    stepped_logits,
)
from support.tiny_models import FAMILIES_OF_STEPS, WINDOW
from transformers import DynamicCache

from sparsekv.formats.errors import ArtifactError, IdentityError
from sparsekv.formats.index.context_rows import ContextRows, context_rows
from sparsekv.formats.index.reader import CPU, Artifact
from sparsekv.formats.index.schema import layer_file
from sparsekv.indexing.build import build_index
from sparsekv.runtime.cache.kv_store import PLACEMENTS, LayerRows
from sparsekv.runtime.decoding.answer import Sampling, question_ids
from sparsekv.runtime.decoding.engine import generate
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.prepare import prepare_layer, stored_context
from sparsekv.runtime.methods.codes import Codes
from sparsekv.runtime.methods.csattention import CSAttention
from sparsekv.runtime.methods.h2o import H2O
from sparsekv.runtime.methods.multipole import Multipole
from sparsekv.runtime.methods.pqcache import PQCache
from sparsekv.runtime.methods.quest import Quest
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.selection.interface import Budget, Method, MethodSpec

METHODS: dict[str, Method] = {
    "squeezed": Squeezed(),
    "multipole": Multipole(),
    "csattention": CSAttention(),
    "h2o": H2O(),
    "pqcache": PQCache(),
    "codes": Codes(),
    "quest": Quest(),
}
BUILT = {name: INDEXERS[name] for name in METHODS if name in INDEXERS}
EVERYTHING = Budget(1.0)


@pytest.fixture(scope="session", params=FAMILIES_OF_STEPS)
def int8_index(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OpenIndex:
    """An index in 8 bits of each family in turn, with every method."""
    folder = tmp_path_factory.mktemp(request.param) / "int8.skv"
    return build_small(folder, request.param, methods=BUILT, kv_dtype="int8")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> OpenIndex:
    return build_small(tmp_path_factory.mktemp("llama") / "int8.skv", methods=BUILT, kv_dtype="int8")


def _restored_cache(index: OpenIndex) -> DynamicCache:
    """transformers' own cache, with what the stored bytes mean."""
    cache = DynamicCache()
    for layer in range(len(index.artifact.manifest.layers)):
        keys, values = index.artifact.context(layer)
        cache.update(keys[None].clone(), values[None].clone(), layer)
    return cache


@torch.inference_mode()
def _plain_logits(index: OpenIndex, tokens: torch.Tensor) -> torch.Tensor:
    """[T, V]: transformers' own logits of tokens [T] over the restored rows."""
    index.model.set_attn_implementation("eager")
    logits: torch.Tensor = index.model(input_ids=tokens[None], past_key_values=_restored_cache(index)).logits[0]
    return logits


@torch.inference_mode()
def _plain_answer(index: OpenIndex, question: torch.Tensor, tokens: int) -> list[int]:
    """transformers' own greedy answer over the restored rows."""
    index.model.set_attn_implementation("eager")
    cache, answer, fed = _restored_cache(index), list[int](), question
    ends = index.model.generation_config.eos_token_id
    while len(answer) < tokens and (not answer or answer[-1] != ends):
        logits = index.model(input_ids=fed[None], past_key_values=cache).logits[0, -1]
        answer.append(int(logits.argmax()))
        fed = torch.tensor(answer[-1:])
    return answer


@pytest.mark.thinned
@pytest.mark.parametrize("name", METHODS)
def test_a_greedy_answer_is_the_one_transformers_gives_over_restored_rows(int8_index: OpenIndex, name: str) -> None:
    question = question_ids(int8_index, "What comes next?")
    cache = int8_index.cache(sparse(name, METHODS[name], EVERYTHING))
    answer = generate(int8_index, cache, question, Sampling(max_new_tokens=8))
    assert answer.ids == _plain_answer(int8_index, question, 8)


@pytest.mark.thinned
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_logits_are_those_over_restored_rows_wherever_rows_lie(int8_index: OpenIndex, placement: str) -> None:
    tokens = random_ids(WINDOW + 20)
    cache = int8_index.cache(sparse("squeezed", METHODS["squeezed"], EVERYTHING, placement=placement))
    expected = _plain_logits(int8_index, tokens)
    assert_close(stepped_logits(int8_index, cache, tokens, question=WINDOW - 2), expected, 1e-4)


def test_a_dense_cache_gives_the_logits_over_restored_rows(int8_index: OpenIndex) -> None:
    tokens = random_ids(WINDOW + 20, seed=1)
    logits = stepped_logits(int8_index, int8_index.dense_cache(), tokens, question=WINDOW - 2)
    assert_close(logits, _plain_logits(int8_index, tokens), 1e-4)


def test_restored_rows_cost_less_than_the_probe_allows_for(int8_index: OpenIndex) -> None:
    """And are not the exact ones: else this file would show nothing."""
    tokens = random_ids(20)
    difference = _plain_logits(int8_index, tokens) - plain_logits_after(int8_index, tokens)
    assert 0 < difference.abs().max() < 0.2 * plain_logits_after(int8_index, tokens).abs().max()


@pytest.mark.thinned
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("placement", ["device", "disk"])
def test_a_small_budget_chooses_as_over_an_exact_index_of_the_restored_rows(
    llama: OpenIndex, name: str, placement: str
) -> None:
    """Only chosen rows are restored, from where they are mapped: the same as restoring all of them first."""
    tokens, method = random_ids(16), METHODS[name]
    restored = llama.cache(sparse(name, method, Budget(0.2), placement=placement))
    found = stepped_logits(llama, restored, tokens, question=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Artifact, "context_rows", _restored_at_once)
        again = stepped_logits(llama, llama.cache(sparse(name, method, Budget(0.2))), tokens, question=8)
    assert_close(found, again, 1e-4)


_context_rows = Artifact.context_rows


def _restored_at_once(artifact: Artifact, layer: int, device: torch.device = CPU) -> ContextRows:
    stored = _context_rows(artifact, layer, device)
    keys, values = stored.part(slice(None))
    return context_rows({"keys": keys, "values": values}, stored.dtype)


def test_streamed_tokens_join_the_clusters(llama: OpenIndex) -> None:
    tokens, method = random_ids(40), Multipole(stream=True, buffer=8)
    logits = [
        stepped_logits(llama, llama.cache(sparse("multipole", method, EVERYTHING, placement=placement)), tokens, 10)
        for placement in PLACEMENTS
    ]
    plain = _plain_logits(llama, tokens)
    for some in logits:
        assert_close(some, plain, 1e-4)


def test_what_a_disk_search_keeps_mapped_are_the_bytes_of_the_file(llama: OpenIndex) -> None:
    """Their pages are released after each search: restored rows would lose their content."""
    rows = LayerRows(llama.artifact, 1)
    stored = llama.artifact.tensors(layer_file("context", 1))
    mapped = stored_context(rows, "quest").mapped
    assert {tensor.dtype for tensor in mapped} <= {tensor.dtype for tensor in stored.values()}
    prepared = prepare_layer(rows, MethodSpec("quest", "", METHODS["quest"]))
    assert all(prepared.context.keys.data_ptr() != tensor.data_ptr() for tensor in prepared.mapped)


@torch.no_grad()
def test_the_probe_still_catches_other_weights(llama: OpenIndex) -> None:
    other = replace(llama, rows={})
    kept = {name: parameter.clone() for name, parameter in other.model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    try:
        for parameter in other.model.parameters():
            parameter.add_(0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator))
        with pytest.raises(IdentityError, match="probe"):
            other.check_probe()
    finally:
        for name, parameter in other.model.named_parameters():
            parameter.copy_(kept[name])


def test_an_index_in_half_precision_opens_and_answers(tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        plan, folder = small_plan(kv_dtype="int8"), tmp_path / f"{dtype}.skv"
        plan.loaded.model.to(dtype)
        build_index(plan, folder)
        index = reopen(plan, folder)
        assert index.artifact.context(0)[0].dtype == dtype
        cache = index.cache(sparse("squeezed", METHODS["squeezed"], EVERYTHING))
        generate(index, cache, question_ids(index, "What?"), Sampling(max_new_tokens=2))


def test_scales_that_are_not_finite_are_refused(llama: OpenIndex, tmp_path: Path) -> None:
    context = layer_file("context", 1)
    for name in ("key_scales", "value_scales", "channel_scales", "channel_offsets"):
        # The last is finite; what it gives is not, and kernels take it as it is.
        for wrong in (torch.nan, torch.inf, *([] if name == "channel_offsets" else [1e38])):
            folder = tmp_path / f"{name}{wrong}.skv"
            shutil.copytree(llama.artifact.folder, folder)

            def spoil(tensors: dict[str, torch.Tensor], at: str = name, bad: float = wrong) -> dict[str, torch.Tensor]:
                return tensors | {at: torch.full_like(tensors[at], bad)}

            change_tensors(folder, context, spoil)
            with pytest.raises(ArtifactError, match=rf"{name} in context/layer_001.* not finite"):
                Artifact(folder).context(1)
