"""The text of each token, so that the texts joined are the text of all."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

UNDECODED = "\ufffd"
LONGEST_CHARACTER = 8
"""Tokens that wait for each other at most: a character has four bytes, an emoji's parts are characters of their own."""


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """The text of each token, special ones' too.

    A character that several tokens make up is the text of the last of them, and that of the others is empty. Tokens are
    decoded behind the ones before them, because a tokenizer may drop a space where a text begins.
    """

    def text(start: int, stop: int) -> str:
        some = list(ids[start:stop])
        return str(tokenizer.decode(some, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    texts, before, start, shown = [], "", 0, 0
    for stop in range(1, len(ids) + 1):
        now = text(start, stop)
        if now.endswith(UNDECODED) and stop < len(ids) and stop - shown < LONGEST_CHARACTER:
            texts.append("")
            continue
        texts.append(now[len(before) :])
        start, shown = shown, stop
        before = text(start, stop)
    return texts
