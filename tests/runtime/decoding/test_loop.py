"""The engine's tokens for one question are those of transformers' own loop, however its steps count their rows."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.configs import sparse
from support.engines import count_rows_on_the_device
from support.odd_numbers import logits_full_of
from support.reference import assert_close
from support.small_index import stepped_logits
from transformers import GenerationConfig

from sparsekv.formats.errors import SparsekvError
from sparsekv.kernels.common.hook import route_attention
from sparsekv.runtime.cache import stored_layer
from sparsekv.runtime.cache.index_cache import Fed, IndexCache
from sparsekv.runtime.decoding.answer import Sampling, question_ids
from sparsekv.runtime.decoding.engine import Engine, Request, generate
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.step import DecodeStep
from sparsekv.runtime.methods.quest import Quest
from sparsekv.runtime.methods.snapkv import SnapKV
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.methods.tidaldecode import TidalDecode
from sparsekv.runtime.selection.interface import Budget, Method

QUESTIONS = ("What is an expression?", "And a much longer question: which statement is it that raises an exception?")
METHODS: dict[str, Method] = {
    "squeezed": Squeezed(),
    "quest": Quest(page_size=4),
    "snapkv": SnapKV(window_queries=4),
    "tidaldecode": TidalDecode(),
}
GREEDY = Sampling(max_new_tokens=12)


def _by_transformers(index: OpenIndex, cache: IndexCache, question: torch.Tensor, sampling: Sampling) -> list[int]:
    """The answer of transformers' own loop over the same cache."""
    cache.rewind()
    prompt = torch.cat([index.input_ids, question])[None]
    drawn = {"temperature": sampling.temperature, "top_k": sampling.top_k or 0, "top_p": sampling.top_p or 1.0}
    config = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        pad_token_id=0,
        do_sample=bool(sampling.temperature),
        **(drawn if sampling.temperature else {}),
    )
    torch.manual_seed(sampling.seed)
    with torch.inference_mode(), route_attention(index.model, cache.attend):
        output = index.model.generate(  # type: ignore[operator]
            prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, generation_config=config
        )
    answer: list[int] = output[0, prompt.shape[1] :].tolist()
    return answer


@pytest.mark.thinned
@pytest.mark.parametrize("on_device", [False, True], ids=["", "rows counted on the device"])
@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        *((name, GREEDY) for name in METHODS),
        ("squeezed", replace(GREEDY, temperature=1.5, seed=7)),
        ("squeezed", replace(GREEDY, temperature=1.0, top_k=9, top_p=0.9, seed=7)),
    ],
    ids=[*METHODS, "sampled", "cut"],
)
def test_tokens_are_those_of_transformers_own_loop(
    index: OpenIndex, name: str, sampling: Sampling, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over several questions to one cache, the second of which is longer."""
    ours, theirs = (index.cache(sparse(name, METHODS[name], Budget(0.2))) for _ in range(2))
    if on_device:
        count_rows_on_the_device(monkeypatch)
    for question in QUESTIONS:
        asked, pieces = question_ids(index, question), list[str]()
        expected = _by_transformers(index, theirs, asked, sampling)
        found = generate(index, ours, asked, sampling, pieces.append)
        assert found.ids == expected
        assert "".join(pieces) == found.text
        assert found.kv_fraction == ours.kv_fraction() == pytest.approx(theirs.kv_fraction())
        assert ours.get_seq_length() == theirs.get_seq_length()


@pytest.mark.parametrize("sampled", [False, True], ids=["best", "drawn"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_are_told(index: OpenIndex, number: float, sampled: bool) -> None:
    """Before a draw from them, which on a GPU no later call would survive."""
    cache = index.cache(sparse("squeezed", Squeezed(), Budget(0.2)))
    with logits_full_of(index.model, number), pytest.raises(SparsekvError, match="logits are not finite"):
        generate(index, cache, question_ids(index, QUESTIONS[0]), replace(GREEDY, temperature=float(sampled)))


def test_a_step_begins_before_its_tokens_text_is_shown(index: OpenIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU would wait for the text. Only the first token is shown at once: its step is captured, which takes long."""
    done, plain = list[str](), DecodeStep.__call__

    def noted(step: DecodeStep, *given: Any) -> torch.Tensor:
        done.append("step")
        return plain(step, *given)

    monkeypatch.setattr(DecodeStep, "__call__", noted)
    monkeypatch.setattr("sparsekv.runtime.decoding.answer.Streamer.put", lambda self, value: done.append("text"))
    cache = index.cache(sparse("squeezed", Squeezed(), Budget(0.2)))
    generate(index, cache, question_ids(index, QUESTIONS[0]), Sampling(max_new_tokens=4), lambda text: None)
    assert done == ["text", "step", "step", "text", "step", "text", "text"]


def test_whoever_may_stop_an_answer_has_seen_all_of_its_text(index: OpenIndex) -> None:
    cache, pieces, seen = index.dense_cache(), list[str](), list[int]()

    def stop() -> bool:
        seen.append(len("".join(pieces)))
        return len(seen) == 5

    answer = generate(index, cache, question_ids(index, QUESTIONS[0]), GREEDY, pieces.append, stop)
    assert answer.finish_reason == "interrupted"
    assert answer.generated_tokens == 5
    assert seen == sorted(seen)
    assert seen[-1] > 0


def test_questions_one_after_another_are_those_of_fresh_caches(index: OpenIndex) -> None:
    """Also where what reads their answers asks something else in between."""
    config = sparse("squeezed", Squeezed(), Budget(0.2))
    cache, asked = index.cache(config), [question_ids(index, question) for question in QUESTIONS]
    expected = [generate(index, index.cache(config), one, GREEDY) for one in asked]
    for number, answer in Engine(index, cache).answers([Request(one, GREEDY) for one in asked]):
        assert answer.ids == expected[number].ids
        assert answer.kv_fraction == expected[number].kv_fraction
        generate(index, cache, asked[0], Sampling(max_new_tokens=3))


def test_a_buffer_that_is_full_grows_within_an_answer(index: OpenIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    long = replace(GREEDY, max_new_tokens=60)
    expected = generate(index, index.dense_cache(), question_ids(index, QUESTIONS[0]), long)
    monkeypatch.setattr(IndexCache, "ROOM", 1)
    monkeypatch.setattr(stored_layer, "FIRST_NEW_ROWS", 50)
    count_rows_on_the_device(monkeypatch)
    cache = index.dense_cache()
    before = cache.buffers()
    assert generate(index, cache, question_ids(index, QUESTIONS[0]), long).ids == expected.ids
    assert cache.buffers() != before


def test_every_family_decodes_at_a_place_on_the_device(
    family_index: OpenIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that slide too, far past their window; in logits, for these models' best tokens may be close."""
    count_rows_on_the_device(monkeypatch)
    tokens, context = torch.arange(44), family_index.split.tokens
    for cache in (family_index.cache(sparse("squeezed", Squeezed(), Budget(0.2))), family_index.dense_cache()):
        expected = stepped_logits(family_index, cache, tokens, question=25)
        cache.rewind()
        step = DecodeStep(family_index.model, cache, context)
        with torch.inference_mode(), route_attention(family_index.model, cache.attend):
            first = family_index.model(input_ids=tokens[None, :25], past_key_values=cache, use_cache=True).logits[0]
            found = [
                step([Fed(0, row, [], asks=False)], tokens[row : row + 1], len(tokens)).clone()
                for row in range(25, len(tokens))
            ]
            cache.release()
        assert_close(torch.cat([first, *found]), expected, 1e-4)


@pytest.mark.parametrize(
    "changes",
    [{"placement": "disk"}, {"gauge": True}, {"ahead": True}],
    ids=["elsewhere", "measured", "prefetch"],
)
def test_what_cannot_be_captured_says_so(index: OpenIndex, changes: dict[str, Any]) -> None:
    caches = [index.cache(sparse("squeezed", Squeezed(), Budget(0.2), **some)) for some in ({}, changes)]
    for cache in caches:
        cache.capturing = True  # as on a GPU
    assert [cache.capturable for cache in caches] == [True, False]
