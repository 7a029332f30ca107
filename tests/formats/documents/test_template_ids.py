"""The ids of a prompt, its questions and its turns are those of the chat template's whole conversation."""

from copy import deepcopy

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from support.short_part import short_part
from support.tokenizers_of_families import CHATML, KINDS, tokenizer_of

from sparsekv.formats.documents.continuation import border_behind, encode_more, encode_question
from sparsekv.formats.documents.prompt import departure, encode_prompt, end_of_turn, next_turn

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


def same(kind: str, ids: list[int], expected: list[int]) -> bool:
    """Whether ids are those expected, but for ties.

    Unigram takes the pieces of the largest sum of scores. Where two orders of the same pieces give the same text, the
    rounding of the sum of all pieces before them decides, so that their order depends on how much text is tokenised.
    """
    tokenizer = tokenizer_of(kind)
    tied = (
        "unigram" in kind
        and str(tokenizer.decode(ids)) == str(tokenizer.decode(expected))
        and sorted(ids) == sorted(expected)
    )
    return ids == expected or tied


@settings(max_examples=20)
@given(start=TEXTS, end=TEXTS, question=TEXTS)
@example(start="a", end="The end.\n", question="Why?")
@example(start=" \n a", end="The end.\n\n\n", question="\nWhy? \n")
@pytest.mark.parametrize("kind", KINDS)
def test_document_and_question_are_the_templates(kind: str, start: str, end: str, question: str) -> None:
    text = f"{start}{LONG}{end}"
    prompt = encode_prompt(tokenizer_of(kind), text)
    asked = encode_question(tokenizer_of(kind), prompt.border, prompt.chat, question)
    assert same(kind, prompt.input_ids.tolist() + asked, whole(kind, f"{text}\n\n{question}"))
    assert departure(tokenizer_of(kind), prompt, text) == ""


@settings(max_examples=20)
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
        assert same(kind, said, expected)


@settings(max_examples=20)
@given(end=TEXTS, more=TEXTS, question=TEXTS)
@example(end="The end.\n", more="\nOne more line.\n", question="Why?")
@pytest.mark.parametrize("kind", KINDS)
def test_appended_text_is_the_templates(kind: str, end: str, more: str, question: str) -> None:
    """As a part of the document, and behind an answer as the beginning of the next message."""
    tokenizer = tokenizer_of(kind)
    prompt = encode_prompt(tokenizer, f"{LONG}{end}")
    encoded, chat, border, _ = encode_more(tokenizer, prompt.border, prompt.chat, more)
    asked = encode_question(tokenizer, border, chat, question)
    expected = whole(kind, f"{LONG}{end}\n\n{more}\n\n{question}")
    assert same(kind, prompt.input_ids.tolist() + encoded.ids + asked, expected)


@settings(max_examples=20)
@given(more=TEXTS, question=TEXTS)
@pytest.mark.parametrize("kind", short_part(KINDS, every=2))
def test_text_appended_to_a_talk_begins_the_next_message(kind: str, more: str, question: str) -> None:
    tokenizer, ending = tokenizer_of(kind), tokenizer_of(kind).convert_tokens_to_ids(KINDS[kind][3])
    prompt = encode_prompt(tokenizer, LONG)
    said = prompt.input_ids.tolist() + encode_question(tokenizer, prompt.border, prompt.chat, "Why?")
    expected = whole(kind, f"{LONG}\n\nWhy?", "the module", f"{more}\n\n{question}")
    answer = expected[len(said) :][: expected[len(said) :].index(ending)]
    while not str(tokenizer.decode(answer[-1:])).strip():
        answer.pop()
    assert prompt.chat is not None
    frame = next_turn(tokenizer, prompt.chat)
    encoded, chat, border, _ = encode_more(tokenizer, border_behind(tokenizer, answer), frame, more)
    asked = encode_question(tokenizer, border, chat, question)
    assert same(kind, said + answer + encoded.ids + asked, expected)


@pytest.mark.parametrize("one", ["One", "\uac00\ub098\ub2e4\ub77c"])
@pytest.mark.parametrize("blank", ["", "\n\n\n"])
@pytest.mark.parametrize("kind", KINDS)
def test_lines_are_those_of_the_texts(kind: str, blank: str, one: str) -> None:
    """The first line is right for a document, for text appended to it, whose tokens begin with the document's end, and
    for text after an answer. Some tokenizers decode a line break together with the bytes of the characters after it."""
    tokenizer, text = tokenizer_of(kind), f"{blank}{one}.\nimport two.\nThree."
    prompt = encode_prompt(tokenizer, text)
    assert prompt.chat is not None
    more, _, _, after = encode_more(tokenizer, prompt.border, prompt.chat, text)
    answer = tokenizer("the module", add_special_tokens=False).input_ids
    frame = next_turn(tokenizer, prompt.chat)
    turn, _, _, behind = encode_more(tokenizer, border_behind(tokenizer, answer), frame, text)
    for first, ids in ((prompt.first_line, prompt.input_ids.tolist()), (after, more.ids), (behind, turn.ids)):
        assert first is not None
        decoded = str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        assert first + decoded[: decoded.index("two")].count("\n") == 2 + len(blank)


@settings(max_examples=20)
@given(start=TEXTS, question=TEXTS, tokens=st.integers(5, 60))
@example(start="a", question="\na", tokens=5)
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_is_cut_has_the_templates_first_tokens(kind: str, start: str, question: str, tokens: int) -> None:
    """A question behind it has the tokens that it has behind any word: none spans the cut."""
    tokenizer, text = tokenizer_of(kind), f"{start.strip()}{LONG}"
    prompt = encode_prompt(tokenizer, text, max_tokens=tokens)
    ids = prompt.input_ids.tolist()
    assert same(kind, ids, whole(kind, text)[: len(ids)])
    asked = encode_question(tokenizer, prompt.border, prompt.chat, question)
    assert same(kind, asked, whole(kind, f"{LONG}x\n\n{question}")[-len(asked) :])


@settings(max_examples=20)
@given(data=st.data(), question=TEXTS)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_the_template_in_a_text_are_text(kind: str, data: st.DataObject, question: str) -> None:
    """The text around a template's token has the same ids as around other text of such letters."""
    tokenizer = tokenizer_of(kind)
    special = data.draw(st.sampled_from(sorted(map(str, tokenizer.added_tokens_decoder.values()))))
    prompt = encode_prompt(tokenizer, f"{LONG}{special}{LONG}")
    asked = encode_question(tokenizer, prompt.border, prompt.chat, f"{question}{special}")
    expected = whole(kind, f"{LONG}\n\n{question}")
    control = set(tokenizer.added_tokens_decoder) - {tokenizer.unk_token_id}
    ids = prompt.input_ids.tolist() + asked
    assert [one for one in ids if one in control] == [one for one in expected if one in control]
    assert prompt.plain == {special: 1}
    head = len(encode_prompt(tokenizer, LONG).input_ids) - 1
    assert ids[:head] == expected[:head]


@pytest.mark.parametrize("kind", KINDS)
def test_an_index_of_an_earlier_version_is_answered_as_before(kind: str) -> None:
    tokenizer, chat = tokenizer_of(kind), encode_prompt(tokenizer_of(kind), LONG).chat
    assert chat is not None
    asked = encode_question(tokenizer, None, chat.model_copy(update={"trimmed": False}), " Why? ")
    assert asked == tokenizer(f"\n\n Why? {chat.after}", add_special_tokens=False).input_ids
    encoded, after, border, _ = encode_more(tokenizer, None, chat, "More.")
    assert encoded.ids == tokenizer("\n\nMore.", add_special_tokens=False).input_ids
    assert (after, border) == (chat, None)


@pytest.mark.parametrize("kind", ["llama-2", "llama-2 first", "mistral", "unigram chatml"])
def test_a_text_without_a_template_goes_on_without_the_prefix_of_a_text(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    prompt = encode_prompt(tokenizer, LONG.strip(), raw=True)
    asked = encode_question(tokenizer, prompt.border, None, "And (the) module")
    assert prompt.input_ids.tolist() + asked == tokenizer(f"{LONG.strip()}And (the) module").input_ids


@pytest.mark.parametrize(
    ("template", "text", "says"),
    [
        (CHATML.replace("message['content']", "message['content'] | replace('\\t', ' ')"), "a\tb", "change the text"),
        (CHATML.replace("message['content']", "message['content'].lstrip()"), " a b", "change the text"),
        (CHATML.replace("message['content']", "message['content'] | replace('\\t', ' ')"), "a b", ""),
    ],
)
def test_a_template_that_changes_more_than_the_ends_of_a_text_is_told(template: str, text: str, says: str) -> None:
    tokenizer = deepcopy(tokenizer_of("gpt-2 chatml"))
    tokenizer.chat_template = template
    told = departure(tokenizer, encode_prompt(tokenizer, text), text)
    assert says in told
    assert bool(told) == bool(says)
