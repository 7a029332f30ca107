"""Copies of the keys and values of ended sequences, for later questions that begin with the same tokens."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from sparsekv.formats.documents.continuation import common_prefix
from sparsekv.formats.index.context_rows import Pair
from sparsekv.kernels.common.states import State

BLOCK = 8
"""Tokens per hashed block; sequences of fewer tokens are not looked up."""


@dataclass(frozen=True)
class KeptRows:
    """Copies of the rows of the first `tokens` tokens that a sequence has after the stored context.

    `rows` are the keys and values [Hk, tokens, D] of each layer that attends. `state` is the state, after these tokens,
    of the layers that have a recurrent or convolution state.
    """

    tokens: int
    rows: tuple[Pair, ...]
    state: State = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for pair in self.rows for one in pair) + sum(one.nbytes for one in self.state.values())

    def to(self, device: torch.device) -> "KeptRows":
        """Return the rows and the state on a device; tensors that are already there are not copied."""
        rows = tuple((keys.to(device), values.to(device)) for keys, values in self.rows)
        return replace(self, rows=rows, state={name: one.to(device) for name, one in self.state.items()})

    def first(self, tokens: int) -> "KeptRows":
        """Return the first `tokens` rows, as views. The state is still the state after all rows."""
        if tokens == self.tokens:
            return self
        return replace(
            self, tokens=tokens, rows=tuple((keys[:, :tokens], values[:, :tokens]) for keys, values in self.rows)
        )


@dataclass(frozen=True, eq=False)
class _Entry:
    """An ended sequence: its tokens, copies of their rows, the hashes of its blocks, and the `owner` that added it."""

    owner: object
    tokens: list[int]
    rows: KeptRows
    hashes: list[int]


class TurnStore:
    """Stores copies of ended sequences' rows for several caches.

    Above `most_bytes`, the copies of the least recently used sequences are dropped.
    """

    def __init__(self, most_bytes: int):
        self.most_bytes, self.nbytes = most_bytes, 0
        self._entries: OrderedDict[_Entry, None] = OrderedDict()
        self._by_hash: dict[int, list[_Entry]] = {}

    def add(self, entry: _Entry) -> None:
        self._entries[entry] = None
        self.nbytes += entry.rows.nbytes
        for one in entry.hashes:
            self._by_hash.setdefault(one, []).append(entry)
        while self.nbytes > self.most_bytes:
            self.remove(next(iter(self._entries)))

    def remove(self, entry: _Entry) -> None:
        del self._entries[entry]
        self.nbytes -= entry.rows.nbytes
        for one in entry.hashes:
            self._by_hash[one].remove(entry)
            if not self._by_hash[one]:
                del self._by_hash[one]

    def use(self, entry: _Entry) -> None:
        self._entries.move_to_end(entry)

    def with_hash(self, number: int) -> Sequence[_Entry]:
        return self._by_hash.get(number, ())

    def forget(self, owner: object = None) -> None:
        """Remove the rows that `owner` has added; None: all rows."""
        for entry in [one for one in self._entries if owner is None or one.owner is owner]:
            self.remove(entry)


class KeptTurns:
    """Copies of the rows of one cache's ended sequences.

    Args:
        store: stores the copies of this cache and of other caches.
        divided: whether a question may continue after any token of an ended sequence. This needs layers without a
            state, and rows that do not depend on the steps in which tokens were fed. Otherwise a question must continue
            after all tokens of a sequence, as in a chat.
    """

    def __init__(self, store: TurnStore, *, divided: bool):
        self.store, self.divided = store, divided

    def find(self, tokens: list[int]) -> KeptRows | None:
        """Return the stored rows of the longest prefix of `tokens` that a stored sequence shares; None if none does.

        The prefix has at least BLOCK tokens and, without `divided`, all tokens of the stored sequence. It never
        includes the last token of `tokens`, because the model must compute that token's logits.
        """
        hashes, best, length = list(self._hashes(tokens[:-1])), None, 0
        for one in reversed(hashes):
            for entry in self.store.with_hash(one):
                same = common_prefix(entry.tokens, tokens[:-1]) if entry.owner is self else 0
                if same > length and (self.divided or same == len(entry.tokens)):
                    best, length = entry, same
            if best is not None:
                self.store.use(best)
                return best.rows.first(length)
        return None

    def keep(self, tokens: list[int], rows: Callable[[], KeptRows]) -> None:
        """Store the rows of an ended sequence.

        Stored sequences of this cache that the new one replaces are removed: with `divided` all its prefixes, otherwise
        only an equal sequence. Nothing changes if the sequence has fewer than BLOCK tokens, or if its rows alone are
        larger than the store. If memory for the copies runs out, all stored rows are removed.

        Args:
            rows: copies the rows of `tokens`.
        """
        hashes = list(self._hashes(tokens))
        if not hashes:
            return
        try:
            kept = rows()
        except torch.OutOfMemoryError:
            self.store.forget()
            return
        if kept.nbytes > self.store.most_bytes:
            return
        for entry in list(self.store.with_hash(hashes[0])):
            same = common_prefix(entry.tokens, tokens) if entry.owner is self else 0
            if same == len(entry.tokens) and (self.divided or same == len(tokens)):
                self.store.remove(entry)
        self.store.add(_Entry(self, tokens, kept, hashes))

    def forget(self) -> None:
        self.store.forget(self)

    def _hashes(self, tokens: list[int]) -> Iterator[int]:
        """Yield, for each whole block of BLOCK tokens, a hash of all tokens up to the end of the block."""
        last = id(self)
        for first in range(0, len(tokens) - BLOCK + 1, BLOCK):
            last = hash((last, *tokens[first : first + BLOCK]))
            yield last
