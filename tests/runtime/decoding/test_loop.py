"""A step whose lengths lie on the device, in a decoding loop of ours, says what transformers' own loop says."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support.configs import sparse
from support.odd_numbers import logits_full_of
from support.reference import assert_close
from support.small_index import stepped_logits
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from sparsekv.formats.errors import SparsekvError
from sparsekv.kernels.common.hook import route_attention
from sparsekv.runtime.cache import stored_layer
from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.decoding import step as decode_step
from sparsekv.runtime.decoding.generate import DecodeLoop, question_ids
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


@dataclass
class Told(BaseStreamer):
    """What a streamer is told, the prompt first."""

    tokens: list[int] = field(default_factory=list)
    ended: int = 0

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended += 1


def _continued(
    index: OpenIndex, cache: IndexCache, question: str, *, own_loop: bool, **config: Any
) -> tuple[list[int], Told]:
    """Token ids of prompt and answer, and what was streamed."""
    cache.rewind()
    prompt = torch.cat([index.input_ids, question_ids(index, question)])[None]
    told = Told()
    loop = {"custom_generate": DecodeLoop(DecodeStep(index.model, cache, capture=False), told)} if own_loop else {}
    torch.manual_seed(7)
    with torch.inference_mode(), route_attention(index.model, cache.attend):
        output = index.model.generate(  # type: ignore[operator]
            prompt,
            attention_mask=torch.ones_like(prompt),
            past_key_values=cache,
            generation_config=GenerationConfig(**({"max_new_tokens": 24, "pad_token_id": 0} | config)),
            streamer=told,
            **loop,
        )
    return output[0].tolist(), told


@pytest.mark.parametrize(
    ("name", "config"),
    [
        *((name, {"do_sample": False}) for name in METHODS),
        ("squeezed", {"do_sample": True, "temperature": 1.5}),
        ("squeezed", {"do_sample": True, "temperature": 1.0, "top_k": 9, "top_p": 0.9}),
        ("squeezed", {"do_sample": False, "repetition_penalty": 1.7}),
    ],
    ids=[*METHODS, "sampled", "cut", "penalised"],
)
def test_tokens_are_those_of_transformers_own_loop(index: OpenIndex, name: str, config: dict[str, Any]) -> None:
    """Over several questions to one cache, the second of which is longer."""
    ours, theirs = (index.cache(sparse(name, METHODS[name], Budget(0.2))) for _ in range(2))
    for question in QUESTIONS:
        expected, expected_told = _continued(index, theirs, question, own_loop=False, **config)
        found, told = _continued(index, ours, question, own_loop=True, **config)
        assert found == expected == told.tokens
        assert told.tokens == expected_told.tokens
        assert told.ended == 1
        assert ours.kv_fraction() == pytest.approx(theirs.kv_fraction())
        assert ours.get_seq_length() == theirs.get_seq_length()


@pytest.mark.parametrize("sampled", [False, True], ids=["best", "drawn"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_are_told(index: OpenIndex, number: float, sampled: bool) -> None:
    """Before a draw from them, which on a GPU no later call would survive."""
    cache = index.cache(sparse("squeezed", Squeezed(), Budget(0.2)))
    with logits_full_of(index.model, number), pytest.raises(SparsekvError, match="logits are not finite"):
        _continued(index, cache, QUESTIONS[0], own_loop=True, do_sample=sampled)


def test_an_answer_stops_at_an_end_token_and_is_told_it(index: OpenIndex) -> None:
    cache = index.cache(sparse("squeezed", Squeezed(), Budget(0.2)))
    whole, _ = _continued(index, cache, QUESTIONS[0], own_loop=True)
    prompt = len(index.input_ids) + len(question_ids(index, QUESTIONS[0]))
    answer = whole[prompt:]
    end = answer[5]
    ended, told = _continued(index, cache, QUESTIONS[0], own_loop=True, eos_token_id=[end])
    assert ended[prompt:] == answer[: answer.index(end) + 1]
    assert told.tokens == ended


def test_a_step_begins_before_its_tokens_text_is_shown(index: OpenIndex) -> None:
    """A GPU would wait for the text. Only the first token is shown at once: its step is captured, which takes long."""
    cache, done = index.cache(sparse("squeezed", Squeezed(), Budget(0.2))), list[str]()

    class Shown(Told):
        def put(self, value: torch.Tensor) -> None:
            done.append("text")

    class Noted(DecodeStep):
        def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
            done.append("step")
            return super().__call__(tokens)

    prompt = torch.cat([index.input_ids, question_ids(index, QUESTIONS[0])])[None]
    with torch.inference_mode(), route_attention(index.model, cache.attend):
        index.model.generate(  # type: ignore[operator]
            prompt,
            attention_mask=torch.ones_like(prompt),
            past_key_values=cache,
            generation_config=GenerationConfig(max_new_tokens=4, pad_token_id=0),
            custom_generate=DecodeLoop(Noted(index.model, cache, capture=False), Shown()),
        )
    assert done == ["text", "step", "step", "text", "step", "text", "text"]


def test_a_buffer_that_is_full_grows_within_an_answer(index: OpenIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_step, "ROOM", 1)
    monkeypatch.setattr(stored_layer, "FIRST_NEW_ROWS", 50)
    expected, _ = _continued(index, index.dense_cache(), QUESTIONS[0], own_loop=False, max_new_tokens=60)
    cache = index.dense_cache()
    before = cache.buffers()
    assert _continued(index, cache, QUESTIONS[0], own_loop=True, max_new_tokens=60)[0] == expected
    assert cache.buffers() != before


def test_every_family_decodes_at_a_place_on_the_device(family_index: OpenIndex) -> None:
    """Layers that slide too, far past their window; in logits, for these models' best tokens may be close."""
    tokens = torch.arange(60) % 200
    for cache in (family_index.cache(sparse("squeezed", Squeezed(), Budget(0.2))), family_index.dense_cache()):
        expected = stepped_logits(family_index, cache, tokens, question=25)
        cache.rewind()
        step = DecodeStep(family_index.model, cache, capture=False)
        with torch.inference_mode(), route_attention(family_index.model, cache.attend):
            first = family_index.model(input_ids=tokens[None, :25], past_key_values=cache, use_cache=True).logits[0]
            step.begin(len(tokens) - 25)
            found = [step(token.view(1, 1)).clone() for token in tokens[25:]]
            cache.release()
        assert_close(torch.cat([first, *found]), expected, 1e-4)


@pytest.mark.parametrize(
    "changes",
    [{"placement": "disk"}, {"gauge": True}, {"ahead": True}],
    ids=["elsewhere", "measured", "prefetch"],
)
def test_what_cannot_be_captured_says_so(index: OpenIndex, changes: dict[str, Any]) -> None:
    assert index.cache(sparse("squeezed", Squeezed(), Budget(0.2))).capturable
    assert not index.cache(sparse("squeezed", Squeezed(), Budget(0.2), **changes)).capturable
