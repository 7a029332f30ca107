"""Decode the text of each token of a prompt, and split the prompt into sentences and parts of long sentences."""

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from transformers import PreTrainedTokenizerBase

LONGEST = 64  # largest number of tokens of a passage
SENTENCE_END = re.compile(
    r"""(?:[!?\u2026]|(?<=[^\s.])\.)[.!?\u2026]*["'\u201d\u2019)\]*_`]*(?=\s)"""  # not 3.14, `.. note::`, `. import`
    r"""|[\u3002\uff01\uff1f]+[\u201d\u2019\u300d\u300f\uff09]*"""  # a full stop of languages without spaces
    r"""|\n(?=\s*\n)"""  # an empty line
    r"""|\n(?=[^\S\n]*[^\sa-z])"""  # a line break before anything but a lowercase letter: a heading, a list item, code
)


@dataclass(frozen=True)
class Passages:
    """Passages of a prompt: sentences, or parts of long sentences.

    Attributes:
        texts: the text of each of the prompt's tokens.
        edges: [P + 1], the position of each passage's first token, followed by the number of tokens.
    """

    texts: Sequence[str]
    edges: Sequence[int]

    def of_tokens(self) -> torch.Tensor:
        """Return the index of each token's passage, [N] int64."""
        lengths = torch.tensor(self.edges).diff()
        return torch.arange(len(lengths)).repeat_interleave(lengths)

    def __len__(self) -> int:
        return len(self.edges) - 1

    def __iter__(self) -> Iterator[tuple[int, Sequence[str]]]:
        """Yield (position of the first token, texts of the tokens) of each passage."""
        return ((start, self.texts[start:stop]) for start, stop in pairwise(self.edges))


def split_passages(texts: Sequence[str]) -> Passages:
    """Split a prompt, given as the texts of its tokens, into sentences.

    A sentence of more than `LONGEST` tokens is cut between words. A token of white space belongs to the sentence that
    precedes it. The tokens of a character stay together.
    """
    starts = [0, *accumulate(map(len, texts))]
    edges = [0]
    for found in SENTENCE_END.finditer("".join(texts)):
        edge = bisect_left(starts, found.end(), 0, len(texts))
        while edge < len(texts) and not texts[edge].strip():
            edge += 1
        edge = _first_of_character(texts, edge)
        if edge > edges[-1]:
            edges.append(edge)
    if edges[-1] < len(texts):
        edges.append(len(texts))
    return Passages(texts, [*_cut(texts, edges), edges[-1]])


def _cut(texts: Sequence[str], edges: Sequence[int]) -> Iterator[int]:
    for start, stop in pairwise(edges):
        while stop - start > LONGEST:
            yield start
            start = _last_word(texts, start)
        yield start


def _last_word(texts: Sequence[str], start: int) -> int:
    """Return the token at which to cut a long sentence: the last that begins a word, at most `LONGEST` after `start`.

    If no word begins in the second half of these `LONGEST` tokens, as in languages without spaces, it is the last token
    that begins a character.
    """
    end = start + LONGEST
    words = (
        at for at in range(end, start + LONGEST // 2, -1) if texts[at][:1].isspace() or texts[at - 1][-1:].isspace()
    )
    return _first_of_character(texts, next(words, end))


def _first_of_character(texts: Sequence[str], token: int) -> int:
    """Return the first of the tokens that make up the character of a token: those before it that have no text."""
    while 0 < token < len(texts) and not texts[token - 1]:
        token -= 1
    return token


UNDECODED = "\ufffd"
LONGEST_CHARACTER = 8
"""Number of tokens after which a text that does not decode is not the beginning of a character.

A character has at most four bytes, and a token at least one. The parts of a composed emoji are separate characters.
"""


def token_text(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """Decode a single token as it continues a text. A token that is only a part of a character gives U+FFFD."""
    # The token is decoded after itself, because a tokenizer may drop a space at the start of a text.
    once, twice = (str(tokenizer.decode([token] * times)) for times in (1, 2))
    return twice.removeprefix(once) if twice.startswith(once) else once


class TokenDecoder:
    """Decodes the text of each token of a sequence, one token after another.

    If several tokens make up one character, the character is the text of the last token, and the texts of the other
    tokens are empty. Each token is decoded together with earlier tokens, because a tokenizer may drop a space at the
    start of a text.

    Args:
        skip_special_tokens: special tokens have an empty text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool = False):
        self.tokenizer, self.skip_special_tokens = tokenizer, skip_special_tokens
        self.lead: list[int] = []
        """The last tokens that have a text."""
        self.waiting: list[int] = []
        """Tokens since then. Their text does not decode yet, because it may be the beginning of a character."""

    def put(self, token: int, *, last: bool = False) -> str:
        """Return the text of the next token. The `last` token of a sequence waits for no other tokens."""
        self.waiting.append(token)
        now = self._text([*self.lead, *self.waiting])
        if now.endswith(UNDECODED) and not last and len(self.waiting) < LONGEST_CHARACTER:
            return ""
        text = now[len(self._text(self.lead)) :]
        self.lead, self.waiting = self.waiting if text else [*self.lead, *self.waiting], []
        return text

    def _text(self, ids: list[int]) -> str:
        return str(
            self.tokenizer.decode(ids, skip_special_tokens=self.skip_special_tokens, clean_up_tokenization_spaces=False)
        )


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """Decode the text of each token, as `TokenDecoder` does, including special tokens."""
    decoder = TokenDecoder(tokenizer)
    return [decoder.put(token, last=number == len(ids)) for number, token in enumerate(ids, 1)]
