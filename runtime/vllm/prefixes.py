"""Find the index whose prompt a request begins with, and decide which of its tokens are loaded and which are compared.

An index is *on trial* while the first request loads its rows: the model computes the RUN tokens after the loaded ones
itself, and the worker compares their keys and values with the index's. If they are alike, the index is trusted.
Otherwise it is refused. One trial runs at a time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

RUN = 8
"""Number of tokens whose computed keys and values are compared with the index's."""


@dataclass(frozen=True)
class Prefix:
    """The first tokens that a request shares with an index's prompt: those to load, and those to compare.

    Attributes:
        index: the index's name.
        loaded: number of tokens that are loaded, in whole blocks.
        compared: positions of the tokens that are computed and compared; empty for a trusted index.
    """

    index: str
    loaded: int
    compared: range


@dataclass(frozen=True)
class Trial:
    """A request that loads an index which is not trusted yet."""

    request: str
    prefix: Prefix


class PrefixTable:
    """The prompts of all indices, and which of them vLLM may load.

    An index is trusted after its first load, the trial, has shown no error. One trial runs at a time.

    Args:
        prompts: token ids of each index's prompt, by the index's name.
        block: number of tokens in a block of vLLM's cache.
    """

    def __init__(self, prompts: Mapping[str, Sequence[int]], block: int):
        self._prompts = {name: np.asarray(ids, dtype=np.int64) for name, ids in prompts.items()}
        self._block = block
        self._trusted = set[str]()
        self.trial: Trial | None = None

    def longest(self, ids: Sequence[int]) -> Prefix | None:
        """Return the prefix of the index with the most tokens to load for a prompt; None if no block can be loaded.

        At least one token of the prompt is never loaded, because its logits are needed.
        """
        found = [self._prefix(name, shared, len(ids)) for name, shared in self._shared(ids).items()]
        return max((prefix for prefix in found if prefix.loaded > 0), key=lambda prefix: prefix.loaded, default=None)

    def whole(self, ids: Sequence[int]) -> str | None:
        """Return the index whose whole prompt `ids` begin with, the longest one of several; None if there is none."""
        whole = {name: shared for name, shared in self._shared(ids).items() if shared == len(self._prompts[name])}
        return max(whole, key=lambda name: whole[name], default=None)

    def waits(self, ids: Sequence[int]) -> bool:
        """Whether a prompt must wait until the running trial ends.

        It must if its first block is that of the index on trial, or if it would begin another trial.
        """
        if self.trial is None:
            return False
        prefix = self.longest(ids)
        untrusted = prefix is not None and len(prefix.compared) > 0
        return untrusted or self._shared(ids).get(self.trial.prefix.index, 0) >= self._block

    def begin(self, request: str, prefix: Prefix) -> None:
        """Begin the trial of an index that is not trusted."""
        self.trial = Trial(request, prefix)

    def trust(self, index: str) -> None:
        """Load an index without comparison from now on, and end its trial."""
        self._trusted.add(index)
        self.end_trial(index)

    def distrust(self) -> None:
        """End the running trial, and load every index again with a comparison."""
        self.trial = None
        self._trusted.clear()

    def trusts(self, index: str) -> bool:
        """Whether an index is loaded without comparison."""
        return index in self._trusted and index in self._prompts

    def tokens(self, index: str) -> int:
        """Return the number of tokens of an index's prompt."""
        return len(self._prompts[index])

    def refuse(self, index: str) -> bool:
        """Exclude an index from later loads, and end its trial, if any. Returns False if it was excluded before."""
        self.end_trial(index)
        return self._prompts.pop(index, None) is not None

    def end_trial(self, index: str) -> None:
        """End the trial of an index, if it is running. Its next load begins another trial, unless it is trusted."""
        if self.on_trial(index):
            self.trial = None

    def on_trial(self, index: str) -> bool:
        """Whether the trial of an index is running."""
        return self.trial is not None and self.trial.prefix.index == index

    def _prefix(self, name: str, shared: int, tokens: int) -> Prefix:
        if name in self._trusted:
            return Prefix(name, min(shared, tokens - 1) // self._block * self._block, range(0))
        loaded = max(0, shared - RUN) // self._block * self._block
        return Prefix(name, loaded, range(loaded, loaded + RUN))

    def _shared(self, ids: Sequence[int]) -> dict[str, int]:
        """Return the number of leading tokens that a prompt shares with the prompt of each index.

        Only indices whose first block the prompt begins with are included.
        """
        head = np.asarray(ids[: self._block], dtype=np.int64)
        alike = [name for name, prompt in self._prompts.items() if np.array_equal(prompt[: self._block], head)]
        given = np.asarray(ids, dtype=np.int64) if alike else head
        return {name: _shared_tokens(given, self._prompts[name]) for name in alike}


def _shared_tokens(first: np.ndarray, second: np.ndarray) -> int:
    tokens = min(len(first), len(second))
    differs = first[:tokens] != second[:tokens]
    return int(differs.argmax()) if differs.any() else tokens
