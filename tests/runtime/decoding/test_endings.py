"""An answer ends where the chat template ends a turn, as well as at the model's own end tokens."""

from pathlib import Path

import pytest
import torch
from support.small_index import TEXT, build_small
from support.tiny_models import CHAT_TEMPLATE, END
from tokenizers import AddedToken

from sparsekv.formats.documents.prompt import encode_prompt
from sparsekv.runtime.attention.config import DecodeConfig
from sparsekv.runtime.decoding.answer import Answer, Sampling, ending_tokens, question_ids
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.session import Conversation, Session
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.selection.interface import Budget, MethodSpec
from sparsekv.runtime.tracing.trace import TracedIndex

SETTING = DecodeConfig(MethodSpec("squeezed", "", Squeezed(), False), Budget(1.0))
SAMPLING = Sampling(max_new_tokens=24)
QUESTION = "What is an expression?"


@pytest.fixture
def index(tmp_path: Path) -> OpenIndex:
    return build_small(tmp_path / "small.skv")


def end_turns_with(index: OpenIndex, answer: Answer) -> int:
    """Have the chat template end a turn with the first letter of an answer that is not its first token; returns it."""
    texts = [str(index.tokenizer.decode([token])) for token in answer.ids]
    place = next(place for place, text in enumerate(texts) if place and text.isalpha() and text not in texts[:place])
    index.tokenizer.add_tokens([AddedToken(texts[place], special=False)])
    index.tokenizer.chat_template = CHAT_TEMPLATE.replace("<|end|>", texts[place])
    return place


def test_an_answer_ends_with_the_templates_turn(index: OpenIndex) -> None:
    """One alone, one of several together and a traced one; the token is not part of the text, marked special or not."""
    asker, question = Session.open(index, SETTING), question_ids(index, QUESTION)
    long = asker.ask(question, SAMPLING)
    place = end_turns_with(index, long)
    assert ending_tokens(index) == {END, long.ids[place]}
    streamed: list[str] = []
    answers = [asker.ask(question, SAMPLING, streamed.append), *asker.ask_all([question, question], SAMPLING)]
    answers.append(TracedIndex(index, SETTING).trace(question, SAMPLING.max_new_tokens)[0])
    assert [answer.ids for answer in answers] == [long.ids[: place + 1]] * 4
    assert {answer.finish_reason for answer in answers} == {"stop"}
    assert {answer.text for answer in answers} == {"".join(streamed)} == {index.tokenizer.decode(long.ids[:place])}


def test_the_turn_is_ended_once_for_the_next_question(index: OpenIndex) -> None:
    place = end_turns_with(index, Conversation(index, SETTING).ask(QUESTION, SAMPLING))
    talk = Conversation(index, SETTING)
    answer = talk.ask(QUESTION, SAMPLING)
    assert answer.finish_reason == "stop"
    assert talk.turns[0].said.tolist() == answer.ids[:-1]
    ended = talk.before(1).tolist()
    talk.ask("And then?", Sampling(max_new_tokens=1))
    following = talk.before(2)[: len(ended) + 1].tolist()
    assert following == [*ended, answer.ids[-1]]
    assert place == len(answer.ids) - 1


def test_without_a_chat_frame_only_the_models_tokens_end_an_answer(tmp_path: Path, index: OpenIndex) -> None:

    raw = build_small(tmp_path / "raw.skv", prompt=encode_prompt(index.tokenizer, TEXT, raw=True, max_tokens=300))
    asker = Session.open(raw, SETTING)
    long = asker.ask(torch.tensor([65, 66]), SAMPLING)
    end_turns_with(raw, long)
    assert ending_tokens(raw) == {END}
    assert asker.ask(torch.tensor([65, 66]), SAMPLING).ids == long.ids
