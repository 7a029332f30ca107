"""Texts of tokens, the passages that they form, and records of what each answer token attended to."""

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerBase

from sparsekv.runtime.tracing.recorder import (
    MEASURES,
    MOST_CHOSEN,
    MOST_IN_MEAN,
    MOST_IN_RECORD,
    Largest,
    Reduced,
    largest,
    largest_passages,
)

LONGEST = 64  # largest number of tokens of a passage
SENTENCE_END = re.compile(
    r"""[.!?\u2026]+["'\u201d\u2019)\]*_`]*(?=\s)"""  # a full stop before white space: not 3.14
    r"""|[\u3002\uff01\uff1f]+[\u201d\u2019\u300d\u300f\uff09]*"""  # a full stop of languages without spaces
    r"""|\n(?=\s*\n)"""  # an empty line
    r"""|\n(?=[^\S\n]*[^\sa-z])"""  # a line break before anything but a lowercase letter: a heading, a list item, code
)


@dataclass(frozen=True)
class Passages:
    """The sentences of a prompt. `edges` [P + 1] are the positions of their first tokens, and the end of the prompt.

    `texts` are the texts of all tokens.
    """

    texts: Sequence[str]
    edges: Sequence[int]

    def of_tokens(self) -> torch.Tensor:
        """Index of each token's passage, [N] int64."""
        lengths = torch.tensor(self.edges).diff()
        return torch.arange(len(lengths)).repeat_interleave(lengths)

    def __len__(self) -> int:
        return len(self.edges) - 1

    def __iter__(self) -> Iterator[tuple[int, Sequence[str]]]:
        """Yield each passage's first position, and the texts of its tokens."""
        return ((start, self.texts[start:stop]) for start, stop in pairwise(self.edges))


def split_passages(texts: Sequence[str]) -> Passages:
    """Split a prompt into sentences by the texts of its tokens. A sentence longer than `LONGEST` is cut between words.

    A token of white space belongs to the sentence before it.
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
    """Position at which to cut a passage from `start`: the last begin of a word within `LONGEST` tokens.

    If no word begins in the second half of these tokens, as in languages without spaces, return their end.
    """
    end = start + LONGEST
    words = (
        at for at in range(end, start + LONGEST // 2, -1) if texts[at][:1].isspace() or texts[at - 1][-1:].isspace()
    )
    return next(words, end)


UNDECODED = "\ufffd"
LONGEST_CHARACTER = 8
"""Largest number of tokens that make up one character.

A character has at most four bytes. The parts of a composed emoji are separate characters.
"""


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """Decode the text of each token, including special tokens.

    If several tokens make up a character, it is the text of the last of them, and the others' texts are empty. Each
    token is decoded together with the tokens before it, because a tokenizer may drop a space at the begin of a text.
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


@dataclass(frozen=True)
class TokenRecord:
    """Record of one answer token in L layers.

    Attributes:
        totals: [3 or 4, L, Hk], totals of the shares.
        passages, chosen, missed: the largest passages and tokens of each layer and KV head.
        mean: the largest passages [K] of the means over layers and KV heads.
        measures: `MEASURES` [4, L, Hk] float64, NaN where unknown.
    """

    totals: torch.Tensor
    passages: Largest
    chosen: Largest
    missed: Largest | None
    mean: Largest
    measures: torch.Tensor


@dataclass
class TokenRecorder:
    """Records answer tokens one after another from the steps of `layers` layers, which arrive in order of layer.

    All layers of a token are recorded in one batch, because on a CPU the time of a record depends on the number of
    operations.
    """

    layers: int
    middle: int
    tokens: list[TokenRecord] = field(default_factory=list)
    sums: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    """Sums over answer tokens of the shares by passage [2 or 3, L, Hk, P]."""
    _steps: list[Reduced] = field(default_factory=list)

    def add(self, step: Reduced) -> None:
        """Add one layer's step; record the token when the steps of all layers have arrived."""
        self._steps.append(step)
        if len(self._steps) == self.layers:
            steps, self._steps = self._steps, []
            by_passage = torch.stack([one.by_passage for one in steps], 1)
            self.sums = self.sums + by_passage
            self.tokens.append(self._record(steps, by_passage))

    def _record(self, steps: list[Reduced], by_passage: torch.Tensor) -> TokenRecord:
        exact = torch.stack([one.shares.exact for one in steps])
        nowhere = torch.stack([one.shares.nowhere for one in steps])
        chosen, stood_for, *missed = by_passage.sum(-1)
        positions = _alike([one.shares.positions for one in steps], self.middle)
        weights = _alike([one.shares.chosen for one in steps], 0.0)
        return TokenRecord(
            totals=torch.stack([exact, chosen, stood_for + nowhere, *missed]),
            passages=largest_passages(by_passage, MOST_IN_RECORD),
            chosen=largest(weights, MOST_CHOSEN, positions),
            missed=_together([one.missed for one in steps if one.missed is not None]),
            mean=largest_passages(by_passage.mean((1, 2)), MOST_IN_MEAN),
            measures=self._measures(steps),
        )

    def _measures(self, steps: list[Reduced]) -> torch.Tensor:
        known = [one.measures for one in steps if one.measures is not None]
        if known:
            return torch.stack(known, 1)
        exact = steps[0].shares.exact
        read = torch.stack([torch.as_tensor(one.rows_read, device=exact.device).expand_as(exact) for one in steps])
        unknown = torch.full((len(MEASURES) - 1, *read.shape), torch.nan, dtype=torch.float64, device=exact.device)
        return torch.cat([unknown, read.double()[None] / (2 * self.middle)])


def _alike(rows: list[torch.Tensor], filler: float) -> torch.Tensor:
    """Stack the rows [Hk, R] of all layers to [L, Hk, R], padded with `filler` where a layer has fewer columns."""
    most = max(one.shape[1] for one in rows)
    return torch.stack([pad(one, (0, most - one.shape[1]), value=filler) for one in rows])


def _together(layers: list[Largest]) -> Largest | None:
    """Stack the places [Hk, K] of all layers to [L, Hk, K], and the shares likewise; return None for no layers."""
    if not layers:
        return None
    return Largest(torch.stack([one.places for one in layers]), torch.stack([one.shares for one in layers], 1))
