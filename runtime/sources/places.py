"""Passages of a prompt: its sentences and parts of long sentences, with the file and lines of each.

Attention shares of tokens become shares of passages.
"""

import codecs
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice, pairwise
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from sparsekv.formats.documents.continuation import BETWEEN
from sparsekv.formats.documents.plain_text import Trusted, encode_text
from sparsekv.formats.documents.prompt import next_turn
from sparsekv.formats.index.reader import Artifact

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
    """Return the first token of a token's character: tokens without a text belong to the character that follows."""
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
    """Decodes the text of each token of a sequence, whose tokens may be given in several calls.

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
        """Return the texts of the byte tokens of the run that begins at index `start` of `ids`."""
        stop = next((place for place in range(start, len(ids)) if ids[place] not in self._bytes), len(ids))
        texts = byte_texts(bytes(self._bytes[token] for token in ids[start:stop]), cut=stop == len(ids))
        if not self._lead and texts[0] == " ":
            texts[0] = self._text(ids[start : start + 1])
        return texts

    def _character(self, ids: list[int], start: int) -> list[str]:
        """Return a text for each of the fewest tokens from `start` on that together decode to whole characters.

        A character that the next token does not continue stays U+FFFD, and the next token is not among these tokens.
        """
        before, text = len(self._text(self._lead)), ""
        for stop in range(start + 1, start + LONGEST_CHARACTER + 1):
            earlier, text = text, self._text([*self._lead, *ids[start:stop]])[before:]
            if earlier and text != earlier and text.startswith(earlier):
                return [*[""] * (stop - start - 2), earlier]
            if not text.endswith(UNDECODED) or stop == len(ids) or ids[stop] in self._bytes:
                break
        return [*[""] * (stop - start - 1), text]

    def _is_silent(self, token: int) -> bool:
        """Whether a token has no text in any sequence, such as an id that only the model's embedding has."""
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


BLOCK = 256
"""Least number of tokens of a block. The number of line breaks before each block is computed once and cached."""
BESIDE = 0.1
"""A sentence next to the best sentence joins the source if its attention is at least this share of the best
sentence's attention."""


@dataclass(frozen=True)
class Text:
    """A named text in the stored prompt: a file, the whole document, or text that `append` added.

    Attributes:
        path: the file's path, or the index's name (for added text with a number, such as `manual+1`).
        start, stop: the tokens [start, stop) of the stored prompt that have the text and can be sources.
        begin: the token from which line breaks are counted.
        first_line: the number of the line in which the token `begin` starts.
        pages: the first token of each of the text's pages; empty for a text without pages.
    """

    path: str
    start: int
    stop: int
    begin: int
    first_line: int
    pages: Sequence[int] = ()

    def page(self, token: int) -> int | None:
        """Return the number of a token's page; None for a text without pages."""
        return max(1, bisect_right(self.pages, token)) if self.pages else None


@dataclass(frozen=True)
class Source:
    """A passage of the document that an answer attended to.

    Attributes:
        path: the name of the passage's text; see `Text`.
        lines: the passage's first and last line in this text, counted from 1.
        page: the page of a PDF on which the passage begins; None for a text without pages.
        tokens: the passage's tokens, [start, stop) in the stored prompt.
        text: the passage's text, without white space around it.
        score: the share of the retrieval heads' attention that the passage got, as a mean over the answer's tokens.
    """

    path: str
    lines: tuple[int, int]
    page: int | None
    tokens: tuple[int, int]
    text: str
    score: float

    @property
    def place(self) -> str:
        """The file and the lines, as `path:first-last`, or `path:line` for a single line; in a PDF, as `path p. 3`."""
        first, last = self.lines
        if self.page is not None:
            return f"{self.path} p. {self.page}"
        return f"{self.path}:{first}" if first == last else f"{self.path}:{first}-{last}"


class Places:
    """The texts of an index's document, in which sources are searched.

    These are the document's files, or else the whole document, followed by the texts that `append` added. They do not
    include the chat template's text before the document, or between an answer and the text that was added after it. Nor
    do they include the prompt's first token, because every answer attends to it.
    """

    def __init__(self, artifact: Artifact, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer, self.ids = tokenizer, artifact.input_ids().tolist()
        self._characters: dict[int, bool] = {}
        prompt, name = artifact.manifest.prompt, artifact.folder.stem
        added = [one.tokens for one in artifact.manifest.additions]
        edges = [*accumulate(added, initial=len(self.ids) - sum(added))]
        before = "" if prompt.chat is None else prompt.chat.before
        head = len(encode_text(tokenizer, Trusted(before)).ids) if before else 0
        # Line breaks are counted from the prompt's beginning, because a token may have some of the template and some of
        # the document.
        line = 1 - before.count("\n") if prompt.first_line is None else prompt.first_line
        whole = Text(name, max(1, head), edges[0], 0, line, prompt.pages)
        files = [
            Text(one.path, max(1, one.start), one.stop, one.start, one.first_line, one.pages)
            for one in prompt.files or ()
        ]
        records = zip(pairwise(edges), artifact.manifest.additions, strict=True)
        turn = None if prompt.chat is None or not added else next_turn(tokenizer, prompt.chat)
        self._between = "" if turn is None else turn.between
        self._frame = encode_text(tokenizer, Trusted(self._between)).ids
        later = [
            self._addition(f"{name}+{number}", *edge, one.first_line) for number, (edge, one) in enumerate(records, 1)
        ]
        self.texts = [*(files or [whole]), *later]

    def _addition(self, path: str, start: int, stop: int, line: int | None) -> Text:
        ids = self.ids[start:stop]
        # The frame's last token may be joined with the text's first characters.
        frame = self._frame if ids[: len(self._frame)] == self._frame else self._frame[:-1]
        framed = bool(frame) and ids[: len(frame)] == frame
        if line is None:  # a conversation, or text that an earlier version added
            before = self._between if framed else BETWEEN if self._text(start, stop).startswith(BETWEEN) else ""
            line = 1 - before.count("\n")
        return Text(path, start + len(frame) if framed else start, stop, start, line)

    def sources(self, shares: torch.Tensor, most: int) -> list[Source]:
        """Return up to `most` sources by descending score: the sum of the attention shares [N] of a source's tokens.

        Passages of white space alone, such as blank lines at a text's beginning, are left out.
        """
        left = torch.zeros(len(shares), dtype=torch.float64)
        for one in self.texts:
            left[one.start : one.stop] = shares[one.start : one.stop]
        found = (self._source(*passage) for passage in self._passages(left))
        return sorted(islice((one for one in found if one.text), most), key=lambda one: -one.score)

    def _passages(self, left: torch.Tensor) -> Iterator[tuple[Text, int, int, float]]:
        """Yield passages that share no tokens, as (text, start, stop, score), until no token has a share.

        Overwrites the shares `left` [N], which must be zero outside the texts.
        """
        sums, taken = _sums(left), list[tuple[int, int]]()
        while True:
            best = int(sums.argmax())
            centre = best + int(left[best : best + LONGEST].argmax())
            if not left[centre] > 0:
                return
            text = next(one for one in self.texts if one.start <= centre < one.stop)
            lowest = max([text.start, *(stop for _, stop in taken if stop <= centre)])
            highest = min([text.stop, *(start for start, _ in taken if start > centre)])
            start, stop = self._around(left, (lowest, highest), best, centre)
            yield text, start, stop, float(left[start:stop].sum())
            left[start:stop] = 0
            taken.append((start, stop))
            first = max(0, start - LONGEST)
            sums[first:stop] = _sums(left[first : stop + LONGEST])[: stop - first]

    def _around(self, left: torch.Tensor, within: tuple[int, int], best: int, centre: int) -> tuple[int, int]:
        """Return [start, stop) of the sentences of highest share near the token `centre`, at most `LONGEST` tokens.

        Args:
            left: [N], shares of the tokens.
            within: [start, stop) of the tokens around `centre` that are of its text and of no earlier passage.
            best: the first of the `LONGEST` consecutive tokens with the largest sum of shares.
            centre: the one of these tokens with the largest share.
        """
        first = self._last_whole(within[0], max(within[0], min(best, centre) - LONGEST))
        last = min(within[1], centre + 2 * LONGEST)
        while last < within[1] and not self._is_whole(last):
            last += 1
        edges = [first + edge for edge in split_passages(token_texts(self.tokenizer, self.ids[first:last])).edges]
        sums = [float(left[start:stop].sum()) for start, stop in pairwise(edges)]
        low = high = max(range(len(sums)), key=sums.__getitem__)
        least = BESIDE * sums[low]

        def grows(to: int) -> bool:
            inside = 0 <= to < len(sums) and sums[to] >= least > 0
            return inside and edges[max(to, high) + 1] - edges[min(to, low)] <= LONGEST

        while grows(low - 1) or grows(high + 1):
            low, high = (low - 1, high) if grows(low - 1) else (low, high + 1)
        return edges[low], edges[high + 1]

    def _source(self, whole: Text, start: int, stop: int, score: float) -> Source:
        text = "".join(token_texts(self.tokenizer, self.ids[start:stop]))  # a cut document may end within a character
        begin = len(text) - len(text.lstrip())
        before = self._line_breaks(start) - self._line_breaks(whole.begin)
        first = whole.first_line + before + text[:begin].count("\n")
        last = first + text.strip().count("\n")
        return Source(whole.path, (first, last), whole.page(start), (start, stop), text.strip(), score)

    def _line_breaks(self, stop: int) -> int:
        """Return the number of line breaks in the prompt's first `stop` tokens."""
        edges, before = self._blocks
        block = bisect_right(edges, stop) - 1
        return before[block] + self._text(edges[block], stop).count("\n")

    @cached_property
    def _blocks(self) -> tuple[list[int], list[int]]:
        """The first token of each block of tokens, and the number of line breaks before each block.

        A block also begins at each token from which a text's lines are counted. The text before this token may be cut
        within a character. In one block, the character's bytes would be decoded together with the next text's first
        line breaks.
        """
        edges = [0]
        for token in range(BLOCK, len(self.ids), BLOCK):
            if (edge := self._last_whole(edges[-1], token)) > edges[-1]:
                edges.append(edge)
        edges = sorted({*edges, *(one.begin for one in self.texts)})
        return edges, [*accumulate((self._text(*block).count("\n") for block in pairwise(edges)), initial=0)]

    def _last_whole(self, least: int, token: int) -> int:
        """Return the last token in [least, token] that `_is_whole`; `least` if there is none."""
        return next((one for one in range(token, least, -1) if self._is_whole(one)), least)

    def _is_whole(self, token: int) -> bool:
        """Whether a token is text by itself, so that it begins with a character's first byte.

        A text that is cut within a character may lose line breaks beside the cut: bytes that are tokens of their own
        are decoded together, and none of them is decoded unless all of them are text.
        """
        number = self.ids[token]
        if number not in self._characters:
            self._characters[number] = UNDECODED not in self._text(token, token + 1)
        return self._characters[number]

    def _text(self, start: int, stop: int) -> str:
        ids = self.ids[start:stop]
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _sums(shares: torch.Tensor) -> torch.Tensor:
    """Return [N]: for each token, the sum of the shares of the `LONGEST` tokens that begin with this token."""
    total = torch.nn.functional.pad(shares.cumsum(0), (1, 0))
    stops = (torch.arange(len(shares)) + LONGEST).clamp(max=len(shares))
    return total[stops] - total[:-1]
