"""The ids of a prompt, its questions and its turns are those of the chat template's whole conversation."""

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from support.tokenizers_of_families import KINDS, tokenizer_of

from sparsekv.formats.documents.continuation import border_behind, encode_question
from sparsekv.formats.documents.prompt import departure, encode_prompt
from sparsekv.formats.documents.turns import end_of_turn, next_turn

PIECES = st.sampled_from(
    [
        *"aA1é中🙂.,)(\"'-_\t",
        " ",
        "  ",
        "\n",
        "\n\n",
        "\r\n",
        "the",
        " module",
        "import",
        "e\u0301",
        "ﬁ",
        "\u3000",
        "[INST]",
    ]
)
TEXTS = st.lists(PIECES, min_size=1, max_size=14).map("".join).filter(str.strip)
LONG = "The sys module gives access to some variables. " * 8


def whole(kind: str, *contents: str) -> list[int]:
    """The template's own ids of a conversation."""
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    return list(tokenizer_of(kind).apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


@settings(max_examples=60, deadline=None)
@given(start=TEXTS, end=TEXTS, question=TEXTS)
@example(start="a", end="The end.\n", question="Why?")
@example(start=" \n a", end="The end.\n\n\n", question="\nWhy? \n")
@pytest.mark.parametrize("kind", KINDS)
def test_document_and_question_are_the_templates(kind: str, start: str, end: str, question: str) -> None:
    text = f"{start}{LONG}{end}"
    prompt = encode_prompt(tokenizer_of(kind), text)
    asked = encode_question(tokenizer_of(kind), prompt.border, prompt.chat, question)
    assert prompt.input_ids.tolist() + asked == whole(kind, f"{text}\n\n{question}")
    assert departure(tokenizer_of(kind), prompt, text) == ""


@settings(max_examples=40, deadline=None)
@given(end=TEXTS, question=TEXTS, answers=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=2))
@example(end=".", question="Why?", answers=[("Because.", "And then?"), ("Then.", " \n And?\n")])
@pytest.mark.parametrize("kind", KINDS)
def test_turns_are_the_templates(kind: str, end: str, question: str, answers: list[tuple[str, str]]) -> None:
    """Where an answer has the ids that the template's text gives it, up to the white space before the turn's end."""
    tokenizer, ending = tokenizer_of(kind), tokenizer_of(kind).convert_tokens_to_ids(KINDS[kind][3])
    prompt = encode_prompt(tokenizer, f"{LONG}{end}")
    said, contents = prompt.input_ids.tolist(), [f"{LONG}{end}\n\n{question}"]
    said += encode_question(tokenizer, prompt.border, prompt.chat, question)
    frame = prompt.chat
    for answer, after in answers:
        contents += [f"{answer.strip()}x", after]
        expected = whole(kind, *contents)
        assume(expected[: len(said)] == said)
        rest = expected[len(said) :]
        ids = rest[: rest.index(ending)]
        while not str(tokenizer.decode(ids[-1:])).strip():
            ids.pop()
        assume(str(tokenizer.decode(ids)).strip() == contents[-2])
        assert frame is not None
        assert end_of_turn(tokenizer) == ending
        frame = next_turn(tokenizer, frame)
        said += ids + encode_question(tokenizer, border_behind(tokenizer, ids), frame, after)
        assert said == expected
