"""Convert attention shares of tokens to passages of the document, with the file and lines of each passage."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from transformers import PreTrainedTokenizerBase

from sparsekv.formats.documents.continuation import BETWEEN
from sparsekv.formats.documents.plain_text import Trusted, encode_text
from sparsekv.formats.index.reader import Artifact
from sparsekv.runtime.sources.passages import LONGEST, UNDECODED, split_passages, token_texts

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
    include the chat template's text before the document. Nor do they include the prompt's first token, because every
    answer attends to it.
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
        later = [
            self._addition(f"{name}+{number}", *edge, one.first_line) for number, (edge, one) in enumerate(records, 1)
        ]
        self.texts = [*(files or [whole]), *later]

    def _addition(self, path: str, start: int, stop: int, line: int | None) -> Text:
        if line is None:  # a conversation, or text that an earlier version added
            line = 1 - BETWEEN.count("\n") if self._text(start, stop).startswith(BETWEEN) else 1
        return Text(path, start, stop, start, line)

    def sources(self, shares: torch.Tensor, most: int) -> list[Source]:
        """Return up to `most` sources by descending score: the sum of the attention shares [N] of a source's tokens."""
        left = torch.zeros(len(shares), dtype=torch.float64)
        for one in self.texts:
            left[one.start : one.stop] = shares[one.start : one.stop]
        found = [self._source(*passage) for passage in self._passages(left, most)]
        return sorted(found, key=lambda one: -one.score)

    def _passages(self, left: torch.Tensor, most: int) -> Iterator[tuple[Text, int, int, float]]:
        """Yield up to `most` passages that share no tokens, as (text, start, stop, score).

        Overwrites the shares `left` [N], which must be zero outside the texts.
        """
        sums, taken = _sums(left), list[tuple[int, int]]()
        for _ in range(most):
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
        """The first token of each block, and the number of line breaks before it.

        A block begins where a text's lines are counted from. The text before may be cut within a character, whose bytes
        would be decoded together with the text's first line breaks.
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
