"""Decoding over an index: with everything attended it is the plain model's, to the last logit and letter."""

from dataclasses import dataclass

import pytest
import torch
from support.configs import sparse
from support.reference import assert_close, relative_error
from support.short_part import short_part
from support.small_index import build_small, plain_logits_after, random_ids, stepped_logits
from support.tiny_models import WINDOW

from sparsekv.indexing.methods.csattention import CSAttentionIndexer
from sparsekv.indexing.methods.multipole import MultipoleIndexer
from sparsekv.runtime.attention.sparse_layer import SparseLayer
from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.cache.stored_layer import FIRST_NEW_ROWS, DenseLayer
from sparsekv.runtime.decoding.answer import Sampling, question_ids
from sparsekv.runtime.decoding.engine import generate
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.methods.csattention import CSAttention
from sparsekv.runtime.methods.keydiff import KeyDiff
from sparsekv.runtime.methods.lessismore import LessIsMore
from sparsekv.runtime.methods.loki import Loki
from sparsekv.runtime.methods.magicpig import MagicPIG
from sparsekv.runtime.methods.oracle import Oracle
from sparsekv.runtime.methods.quest import Quest
from sparsekv.runtime.methods.snapkv import SnapKV
from sparsekv.runtime.methods.sparq import SparQ
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.methods.tidaldecode import TidalDecode
from sparsekv.runtime.methods.window import Window
from sparsekv.runtime.selection.interface import Budget, Method

TABLES = CSAttentionIndexer(subspace_size=8, centroids=4, iterations=2, query_sample=100)


@pytest.fixture(scope="module")
def tabled(tmp_path_factory: pytest.TempPathFactory) -> OpenIndex:
    """With clusters too, whose centroids can stand for the rest."""
    both = {"csattention": TABLES, "multipole": MultipoleIndexer()}
    return build_small(tmp_path_factory.mktemp("tabled") / "small.skv", methods=both)


METHODS: dict[str, Method] = {
    "squeezed": Squeezed(),
    "quest": Quest(),
    "oracle": Oracle(),
    "snapkv": SnapKV(),
    "keydiff": KeyDiff(),
    "tidaldecode": TidalDecode(),
    "lessismore": LessIsMore(),
    "sparq": SparQ(channels=5, mean_value=True),
    "loki": Loki(dims=5),
    "magicpig": MagicPIG(hash_bits=4, hash_tables=10),
}


@dataclass(frozen=True)
class Plain:
    """Tokens [T] after a prompt, the plain model's logits [T, V], a question's token ids, and those of its answer."""

    tokens: torch.Tensor
    logits: torch.Tensor
    question: torch.Tensor
    answer: torch.Tensor


every_method = pytest.mark.parametrize("name", METHODS)
every_second_method = pytest.mark.parametrize("name", short_part(METHODS, every=2))
EVERYTHING = Budget(1.0)


def _cache(index: OpenIndex, name: str, budget: Budget = EVERYTHING) -> IndexCache:
    return index.cache(sparse(name, METHODS[name], budget))


@pytest.fixture(scope="session")
def plain(family_index: OpenIndex) -> Plain:
    """The plain model's logits and answer, for all methods of a family. Tokens outlast the window of its sliding
    layers."""
    tokens, question = random_ids(WINDOW + 20), question_ids(family_index, "What comes next?")
    prompt = torch.cat([family_index.input_ids, question])[None]
    logits = plain_logits_after(family_index, tokens)
    answer = family_index.model.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :]
    return Plain(tokens, logits, question, answer)


@pytest.mark.thinned
@every_method
def test_a_budget_of_everything_gives_the_plain_models_logits(family_index: OpenIndex, plain: Plain, name: str) -> None:
    """The stored context leaves a sliding layer's window on the way."""
    logits = stepped_logits(family_index, _cache(family_index, name), plain.tokens, question=WINDOW - 2)
    assert_close(logits, plain.logits, 1e-4)


def test_a_dense_cache_gives_the_plain_models_logits(family_index: OpenIndex) -> None:
    tokens = random_ids(WINDOW + 20, seed=1)
    logits = stepped_logits(family_index, family_index.dense_cache(), tokens, question=WINDOW - 2)
    assert_close(logits, plain_logits_after(family_index, tokens), 1e-4)


def test_layers_with_a_window_stay_dense_and_hold_what_is_in_sight(family_index: OpenIndex) -> None:
    cache = _cache(family_index, "squeezed", Budget(0.05))
    for facts, layer in zip(family_index.artifact.manifest.layers, cache.stored_layers, strict=True):
        assert isinstance(layer, SparseLayer if facts.sliding_window is None else DenseLayer)
        if isinstance(layer, DenseLayer):
            assert layer.stored_keys.shape[1] == WINDOW - 1


@pytest.mark.thinned
@every_method
def test_a_greedy_answer_is_the_one_transformers_gives(family_index: OpenIndex, plain: Plain, name: str) -> None:
    answer = generate(family_index, _cache(family_index, name), plain.question, Sampling(max_new_tokens=12))
    assert answer.generated_tokens == len(plain.answer)
    assert answer.text == family_index.tokenizer.decode(plain.answer, skip_special_tokens=True)
    assert answer.prompt_tokens == len(family_index.input_ids) + len(plain.question)


@pytest.mark.parametrize("question", [FIRST_NEW_ROWS - 20, FIRST_NEW_ROWS + 30])
def test_an_answer_outgrows_the_buffer_it_began_in(index: OpenIndex, question: int) -> None:
    tokens = random_ids(FIRST_NEW_ROWS + 45)
    logits = stepped_logits(index, _cache(index, "squeezed"), tokens, question)
    assert_close(logits, plain_logits_after(index, tokens), 1e-4)


@every_second_method
def test_a_second_question_is_answered_as_by_a_fresh_cache(index: OpenIndex, name: str) -> None:
    first, second = (question_ids(index, text) for text in ("Tell me of assertions.", "And of atoms?"))
    used, fresh = (_cache(index, name, Budget(0.1)) for _ in range(2))
    generate(index, used, first, Sampling(max_new_tokens=8))
    answers = [generate(index, cache, second, Sampling(max_new_tokens=6)) for cache in (used, fresh)]
    assert answers[0].text == answers[1].text
    assert answers[0].kv_fraction == pytest.approx(answers[1].kv_fraction)
    tokens = random_ids(12)
    again, anew = (
        stepped_logits(index, cache, tokens, question=7) for cache in (used, _cache(index, name, Budget(0.1)))
    )
    assert torch.equal(again, anew)


@pytest.mark.parametrize("residual", [False, True])
def test_a_schedule_begins_anew_with_each_question(tabled: OpenIndex, residual: bool) -> None:
    """No selection of the question before is used."""
    first, second = (question_ids(tabled, text) for text in ("Tell me of assertions.", "And of atoms?"))
    used, fresh = (
        tabled.cache(sparse("csattention", CSAttention(step=8), Budget(0.1), residual=residual)) for _ in range(2)
    )
    generate(tabled, used, first, Sampling(max_new_tokens=6))
    answers = [generate(tabled, cache, second, Sampling(max_new_tokens=6)) for cache in (used, fresh)]
    assert answers[0].ids == answers[1].ids
    assert answers[0].kv_fraction == answers[1].kv_fraction
    tokens = random_ids(20)
    logits = [stepped_logits(tabled, cache, tokens, question=7) for cache in (used, fresh)]
    assert torch.equal(*logits)


@pytest.mark.parametrize("name", ["squeezed", "quest", "oracle", "keydiff"])
def test_a_larger_budget_comes_nearer_to_the_plain_model(index: OpenIndex, name: str) -> None:
    tokens = random_ids(20)
    plain = plain_logits_after(index, tokens)
    errors = [
        relative_error(stepped_logits(index, _cache(index, name, Budget(share)), tokens, question=5), plain)
        for share in (0.02, 0.5, 1.0)
    ]
    assert errors[0] > errors[1] > errors[2]
    window = stepped_logits(index, index.cache(sparse("window", Window(), EVERYTHING)), tokens, question=5)
    assert relative_error(window, plain) > errors[0]


@pytest.mark.thinned
@every_second_method
def test_half_precision_is_as_near_to_full_as_the_plain_models_is(
    half_index: OpenIndex, index: OpenIndex, name: str
) -> None:
    tokens = random_ids(12)
    exact = plain_logits_after(index, tokens)
    logits = stepped_logits(half_index, _cache(half_index, name), tokens, question=5)
    assert relative_error(logits, exact) < 1.5 * relative_error(plain_logits_after(half_index, tokens), exact)
