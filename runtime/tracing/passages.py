"""Passages: sentences of a prompt, as runs of its tokens."""

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

LONGEST = 64  # tokens of a passage
SENTENCE_END = re.compile(
    r"""[.!?\u2026]+["'\u201d\u2019)\]*_`]*(?=\s)"""  # a full stop before white space: not 3.14
    r"""|[\u3002\uff01\uff1f]+[\u201d\u2019\u300d\u300f\uff09]*"""  # a full stop of languages without spaces
    r"""|\n(?=\s*\n)"""  # an empty line
    r"""|\n(?=[^\S\n]*[^\sa-z])"""  # a line that does not go on with a small letter: a heading, an item, code
)


@dataclass(frozen=True)
class Passages:
    """Sentences, as positions of their first tokens and of the end: `edges` [P + 1]; the texts of all tokens."""

    texts: Sequence[str]
    edges: Sequence[int]

    def of_tokens(self) -> torch.Tensor:
        """[N] int64: the passage of each token."""
        lengths = torch.tensor(self.edges).diff()
        return torch.arange(len(lengths)).repeat_interleave(lengths)

    def __len__(self) -> int:
        return len(self.edges) - 1

    def __iter__(self) -> Iterator[tuple[int, Sequence[str]]]:
        """Each passage's first position, and the texts of its tokens."""
        return ((start, self.texts[start:stop]) for start, stop in pairwise(self.edges))


def split_passages(texts: Sequence[str]) -> Passages:
    """The sentences of a prompt from the texts of its tokens; those longer than `LONGEST` are cut between words.

    White space belongs to the sentence before it, where it is a token of its own.
    """
    starts = [0, *accumulate(map(len, texts))]
    edges = [0]
    for found in SENTENCE_END.finditer("".join(texts)):
        edge = bisect_left(starts, found.end(), 0, len(texts))
        while edge < len(texts) and not texts[edge].strip():
            edge += 1
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
    """Where the last word begins that the longest passage from `start` cannot hold as a whole; its end where none does
    in its second half, as in languages without spaces."""
    end = start + LONGEST
    words = (at for at in range(end, start + LONGEST // 2, -1) if _begins_word(texts, at))
    return next(words, end)


def _begins_word(texts: Sequence[str], at: int) -> bool:
    return texts[at][:1].isspace() or texts[at - 1][-1:].isspace()
