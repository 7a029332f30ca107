"""A conversation that goes on reads as the chat template itself would write all of it."""

import pytest
from support.tiny_models import CHAT_TEMPLATE, END, VOCABULARY, tiny_tokenizer

from sparsekv.formats.documents.prompt import chat_frame, end_of_turn, lost_of_answer, may_reason, next_turn
from sparsekv.formats.index.schema import ChatFrame

DOCUMENT, QUESTION, ANSWER, NEXT = "The document.", "Why?", "Because.", "And then?"
UNUSED = VOCABULARY - 1


def test_document_answer_and_next_question_are_one_chat() -> None:
    tokenizer = tiny_tokenizer()
    first = chat_frame(tokenizer)
    assert first is not None
    second = next_turn(tokenizer, first)
    assert second is not None
    asked = f"{first.before}{DOCUMENT}{first.between}{QUESTION}{first.after}"
    messages = [
        {"role": "user", "content": f"{DOCUMENT}{first.between}{QUESTION}"},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": NEXT},
    ]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert f"{asked}{ANSWER}{second.between}{NEXT}{second.after}" == whole


def test_a_template_that_hides_earlier_answers_has_no_next_turn() -> None:
    shown = "message['role'] == 'user'"
    tokenizer = tiny_tokenizer(CHAT_TEMPLATE.replace("for message in messages", f"for message in messages if {shown}"))
    assert next_turn(tokenizer, ChatFrame(before="<", between="\n\n", after=">")) is None
    assert end_of_turn(tokenizer) is None


def test_a_template_that_allows_one_turn_alone_has_no_next_one() -> None:
    tokenizer = tiny_tokenizer("{% if messages|length > 1 %}{{ raise_exception('one') }}{% endif %}" + CHAT_TEMPLATE)
    frame = chat_frame(tokenizer)
    assert frame is not None
    assert next_turn(tokenizer, frame) is None


@pytest.mark.parametrize(
    ("behind", "end"),
    [("<|end|>", END), ("\n<|end|>", END), ("<|unused|><|end|>", UNUSED), ("END<|end|>", None), ("\n", None)],
)
def test_the_end_of_a_turn_is_the_token_behind_an_answer(behind: str, end: int | None) -> None:
    template = "{% for message in messages %}<|start|>{{ message['content'] }}" + behind + "{% endfor %}"
    assert end_of_turn(tiny_tokenizer(template)) == end


def test_without_a_template_no_turn_ends() -> None:
    assert end_of_turn(tiny_tokenizer(None)) is None


THINKING = CHAT_TEMPLATE.replace("message['content'] }}<", "message['content'].split('</think>')[-1] }}<")


@pytest.mark.parametrize(
    ("template", "answer", "told"),
    [
        (CHAT_TEMPLATE, "<think>\nHm.\n</think>\n\nBecause. \n", ""),
        (THINKING, "Because.", ""),
        (THINKING, "<think>\nHm.\n</think>\n\nBecause.", "such as reasoning; here they stay whole"),
        ("{% if messages[1:] %}{{ raise_exception('') }}{% endif %}" + CHAT_TEMPLATE, "a", "allows one question"),
        ("{{ messages[0]['content'] }}", "Because.", "allows one question"),
    ],
)
def test_a_template_that_shows_earlier_answers_otherwise_is_told(template: str, answer: str, told: str) -> None:
    found = lost_of_answer(tiny_tokenizer(template), answer)
    assert told in found
    assert bool(told) == bool(found)


def test_a_template_that_may_leave_reasoning_out_lets_the_model_reason() -> None:
    without = "{% if not (enable_thinking | default(true)) %}<think>\n\n</think>{% endif %}"
    assert may_reason(tiny_tokenizer(CHAT_TEMPLATE + without))
    assert not may_reason(tiny_tokenizer())
    assert not may_reason(tiny_tokenizer("{{ raise_exception('none') }}"))
