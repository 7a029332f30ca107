"""Decode the text of each token of a prompt, and split the prompt into sentences and parts of long sentences."""

import codecs
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

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
UTF_8 = codecs.getincrementaldecoder("utf-8")


def token_text(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """Decode a single token as it continues a text. A token that is only a part of a character gives U+FFFD."""
    # The token is decoded after itself, because a tokenizer may drop a space at the start of a text.
    once, twice = (str(tokenizer.decode([token] * times, clean_up_tokenization_spaces=False)) for times in (1, 2))
    return twice.removeprefix(once) if twice.startswith(once) else once


class TokenDecoder:
    """Decodes the text of each token of a sequence, some tokens after others.

    If several tokens make up one character, the character is the text of the last token, and the texts of the other
    tokens are empty. Each token is decoded together with earlier tokens, because a tokenizer may drop a space at the
    start of a text. In tokenizers with byte fallback, a run of byte tokens is decoded as a whole, because a single
    invalid byte makes each byte of the run U+FFFD.

    Args:
        skip_special_tokens: special tokens have an empty text.

    Attributes:
        waiting: the last tokens, if tokens that follow may change their texts.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool = False):
        self.tokenizer, self.skip_special_tokens = tokenizer, skip_special_tokens
        self.waiting: list[int] = []
        self._lead: list[int] = []
        """The last tokens before `waiting` that have a text."""
        self._bytes = byte_tokens(tokenizer)
        added = tokenizer.added_tokens_decoder.items() if skip_special_tokens else ()
        self._special = {token for token, one in added if one.special}

    def put(self, tokens: Sequence[int]) -> list[str]:
        """Return the texts of the tokens in `waiting` and of the next tokens, as if no token followed them."""
        ids = [*self.waiting, *tokens]
        places = [place for place, token in enumerate(ids) if not self._is_silent(token)]
        shown, texts, self.waiting = [ids[place] for place in places], [""] * len(ids), []
        start = 0
        while start < len(shown):
            of_bytes = shown[start] in self._bytes
            found = self._byte_run(shown, start) if of_bytes else self._character(shown, start)
            stop = start + len(found)
            for place, text in zip(places[start:stop], found, strict=True):
                texts[place] = text
            incomplete = found[-1].endswith(UNDECODED) and len(found) < LONGEST_CHARACTER
            if stop == len(shown) and (of_bytes or incomplete):
                self.waiting = ids[places[start] :]
            else:
                self._lead = [*([] if found[-1] else self._lead), *shown[start:stop][-LONGEST_CHARACTER:]]
            start = stop
        return texts

    def _byte_run(self, ids: list[int], start: int) -> list[str]:
        """Return the texts of the byte tokens from `start` on."""
        stop = next((place for place in range(start, len(ids)) if ids[place] not in self._bytes), len(ids))
        texts = byte_texts(bytes(self._bytes[token] for token in ids[start:stop]), cut=stop == len(ids))
        if not self._lead and texts[0] == " ":
            texts[0] = self._text(ids[start : start + 1])
        return texts

    def _character(self, ids: list[int], start: int) -> list[str]:
        """Return the texts of the fewest tokens from `start` on that decode to whole characters."""
        before = len(self._text(self._lead))
        for stop in range(start + 1, start + LONGEST_CHARACTER + 1):
            text = self._text([*self._lead, *ids[start:stop]])[before:]
            if not text.endswith(UNDECODED) or stop == len(ids) or ids[stop] in self._bytes:
                break
        return [*[""] * (stop - start - 1), text]

    def _is_silent(self, token: int) -> bool:
        """Whether a token has no text in any sequence. Embeddings beyond the tokenizer's vocabulary have no name."""
        return token in self._special or self.tokenizer.convert_ids_to_tokens(token) is None

    def _text(self, ids: list[int]) -> str:
        return str(
            self.tokenizer.decode(ids, skip_special_tokens=self.skip_special_tokens, clean_up_tokenization_spaces=False)
        )


def byte_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, int]:
    """Return the ids of the tokens for single bytes, such as `<0xE2>`, with their bytes; empty if there are none."""
    names = {f"<0x{byte:02X}>": byte for byte in range(256)}
    ids: Any = tokenizer.convert_tokens_to_ids([*names])
    known = [token for token in ids if token is not None]
    named = zip(known, tokenizer.convert_ids_to_tokens(known), strict=True)
    found = {token: names[name] for token, name in named if name in names}
    letter = next((token for token, byte in found.items() if byte == ord("A")), None)
    # Without byte fallback, decoding returns the names.
    return found if letter is not None and tokenizer.decode([letter]) == "A" else {}


def byte_texts(run: bytes, *, cut: bool) -> list[str]:
    """Return the texts of the byte tokens of a run: a character is the text of its last byte.

    Each byte of a run that is not UTF-8 is U+FFFD. If the sequence ends with the run, only the last character may be
    incomplete.

    Args:
        cut: whether the sequence ends with the run.
    """
    decoder = UTF_8()
    try:
        texts = [decoder.decode(bytes([byte])) for byte in run]
        if not cut:
            decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return [UNDECODED] * len(run)
    return [*texts[:-1], texts[-1] or UNDECODED]


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """Decode the text of each token, as `TokenDecoder` does, including special tokens."""
    return TokenDecoder(tokenizer).put(ids)
