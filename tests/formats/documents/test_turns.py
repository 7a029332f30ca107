"""A conversation that goes on reads as the chat template itself would write all of it."""

import pytest
from support.tiny_models import CHAT_TEMPLATE, tiny_tokenizer

from sparsekv.formats.documents.prompt import chat_frame
from sparsekv.formats.documents.turns import next_turn
from sparsekv.formats.schema import ChatFrame

DOCUMENT, QUESTION, ANSWER, NEXT = "The document.", "Why?", "Because.", "And then?"


@pytest.mark.parametrize("ending", ["<|end|>", ""], ids=["ended by its token", "cut short"])
def test_document_answer_and_next_question_are_one_chat(ending: str) -> None:
    tokenizer = tiny_tokenizer()
    first = chat_frame(tokenizer)
    assert first is not None
    second = next_turn(tokenizer, first, ending or ANSWER[-1])
    asked = f"{first.before}{DOCUMENT}{first.between}{QUESTION}{first.after}"
    messages = [
        {"role": "user", "content": f"{DOCUMENT}{first.between}{QUESTION}"},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": NEXT},
    ]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert f"{asked}{ANSWER}{ending}{second.between}{NEXT}{second.after}" == whole


def test_a_template_that_hides_earlier_answers_keeps_its_frame() -> None:
    shown = "message['role'] == 'user'"
    tokenizer = tiny_tokenizer(CHAT_TEMPLATE.replace("for message in messages", f"for message in messages if {shown}"))
    frame = ChatFrame(before="<", between="\n\n", after=">")
    assert next_turn(tokenizer, frame, "") == frame


def test_a_template_that_allows_one_turn_alone_leaves_the_frame() -> None:
    tokenizer = tiny_tokenizer("{% if messages|length > 1 %}{{ raise_exception('one') }}{% endif %}" + CHAT_TEMPLATE)
    frame = chat_frame(tokenizer)
    assert frame is not None
    assert next_turn(tokenizer, frame, "<|end|>") == frame
