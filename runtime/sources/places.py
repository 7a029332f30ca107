"""Passages of a document by their tokens, and the files and lines where they stand."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from transformers import PreTrainedTokenizerBase

from sparsekv.formats.documents.plain_text import Trusted, encode_text
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import SourceFile
from sparsekv.runtime.sources.passages import LONGEST, split_passages, token_texts

MOST_SOURCES = 64
"""Maximum number of sources of an answer."""
BESIDE = 0.1
"""A sentence beside the best one belongs to the source if it has at least this share of the best one's attention."""


@dataclass(frozen=True)
class Source:
    """A passage of the document that an answer attended to.

    Attributes:
        path: the file of the passage, or the document's name.
        lines: its first and last line in the file, counted from 1.
        tokens: its tokens [start, stop) in the stored prompt.
        score: share of the retrieval heads' attention that it got, a mean over the answer's steps.
    """

    path: str
    lines: tuple[int, int]
    tokens: tuple[int, int]
    score: float

    @property
    def place(self) -> str:
        """The file and the lines, as `path:first-last`, or `path:line` for a single line."""
        first, last = self.lines
        return f"{self.path}:{first}" if first == last else f"{self.path}:{first}-{last}"


class Places:
    """The files of an index's document, and the passages in them.

    A document of one text is a file with the name of the index. The chat template's text before it belongs to no file.
    """

    def __init__(self, artifact: Artifact, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer, self.ids = tokenizer, artifact.input_ids().tolist()
        prompt = artifact.manifest.prompt
        head = 0 if prompt.chat is None else len(encode_text(tokenizer, Trusted(prompt.chat.before)).ids)
        whole = SourceFile.model_construct(path=artifact.folder.stem, sha256="", start=head, stop=len(self.ids))
        self.files = (whole,) if prompt.files is None else prompt.files

    def sources(self, shares: torch.Tensor, most: int) -> list[Source]:
        """Return up to `most` passages with the largest sums of the tokens' shares [N], the largest first."""
        left = torch.zeros(len(shares), dtype=torch.float64)
        for file in self.files:
            left[file.start : file.stop] = shares[file.start : file.stop]
        found = [self._source(*passage) for passage in self._passages(left, most)]
        return sorted(found, key=lambda one: -one.score)

    def _passages(self, left: torch.Tensor, most: int) -> Iterator[tuple[SourceFile, int, int, float]]:
        """Yield passages without common tokens; overwrites the shares `left` [N], which are zero outside of files."""
        for _ in range(most):
            best = int(_sums(left).argmax())
            centre = best + int(left[best : best + LONGEST].argmax())
            file = next((one for one in self.files if one.start <= centre < one.stop), None)
            if file is None or not left[centre] > 0:
                return
            start, stop = self._around(left, file, best, centre)
            yield file, start, stop, float(left[start:stop].sum())
            left[start:stop] = 0

    def _around(self, left: torch.Tensor, file: SourceFile, best: int, centre: int) -> tuple[int, int]:
        """Return the sentences of highest share around a token, together at most `LONGEST` tokens."""
        first = max(file.start, min(best, centre) - LONGEST)
        last = min(file.stop, centre + 2 * LONGEST)
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

    def _source(self, file: SourceFile, start: int, stop: int, score: float) -> Source:
        before, text = self._text(file.start, start), self._text(start, stop)
        begin = len(text) - len(text.lstrip())
        first = file.first_line + before.count("\n") + text[:begin].count("\n")
        last = first + text.strip().count("\n")
        return Source(file.path, (first, last), (start, stop), score)

    def _text(self, start: int, stop: int) -> str:
        ids = self.ids[start:stop]
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _sums(shares: torch.Tensor) -> torch.Tensor:
    """Sum the `LONGEST` shares from each token on: [N]."""
    total = torch.nn.functional.pad(shares.cumsum(0), (1, 0))
    stops = (torch.arange(len(shares)) + LONGEST).clamp(max=len(shares))
    return total[stops] - total[:-1]
