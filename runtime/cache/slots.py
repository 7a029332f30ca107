"""Rows of several sequences' own tokens, beside a document that they share."""

from dataclasses import dataclass
from functools import cached_property

import torch

from sparsekv.kernels.attention.shared_attention import OwnRows
from sparsekv.kernels.common.slot_rows import store_in_slots
from sparsekv.runtime.cache.kv_store import Pair

FIRST_ROWS = 64


@dataclass(frozen=True)
class Piece:
    """A question's tokens among those of a step: `tokens` from `first` on belong to `slot`, as its first rows."""

    slot: int
    first: int
    tokens: int

    @property
    def where(self) -> slice:
        return slice(self.first, self.first + self.tokens)


@dataclass(frozen=True)
class StepTokens:
    """Some of a step's tokens, slots and rows [T'] int64 as the step has them; each sees its sequence's first rows, up
    to `used` [T'], from `first` [T'] on, which is zero. ends [B] int32: after which of them each sequence's end.
    asks [B] bool: whether they are a question's tokens, or else one of an answer."""

    slots: torch.Tensor
    rows: torch.Tensor
    ends: torch.Tensor
    asks: torch.Tensor
    first: torch.Tensor
    used: torch.Tensor


def _tokens(slots: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor, asks: torch.Tensor) -> StepTokens:
    return StepTokens(slots, rows, ends, asks, torch.zeros_like(rows), rows + 1)


@dataclass(frozen=True)
class PackedStep:
    """The tokens of one forward pass, of all sequences one after another.

    slots, rows [T] int64: the sequence of each token, and its place among the sequence's own rows. ends [B] int32:
    after which token each sequence's end. `single` int64: the tokens that answer, one a sequence. `pieces`: questions,
    of one token or more. `longest`: the most own rows of any sequence with this step's.
    """

    slots: torch.Tensor
    rows: torch.Tensor
    ends: torch.Tensor
    single: torch.Tensor
    pieces: tuple[Piece, ...]
    longest: int

    @cached_property
    def everyone(self) -> StepTokens:
        """All tokens: what all layers need of them, computed once."""
        asks = torch.zeros_like(self.ends, dtype=torch.bool)
        if self.pieces:  # without any nothing is copied to a GPU, which a captured step must not do
            ends = torch.tensor([piece.where.stop for piece in self.pieces], dtype=self.ends.dtype)
            asks = (self.ends[:, None] == ends.to(self.ends.device)).any(1)
        return _tokens(self.slots, self.rows, self.ends, asks)

    @cached_property
    def answering(self) -> StepTokens:
        """Those of `single`."""
        if not self.pieces:
            return self.everyone
        ends = torch.arange(1, len(self.single) + 1, dtype=torch.int32, device=self.rows.device)
        return _tokens(self.slots[self.single], self.rows[self.single], ends, torch.zeros_like(ends, dtype=torch.bool))

    @cached_property
    def places(self) -> torch.Tensor:
        """[T'] int64: which tokens are those of `pieces`."""
        of_each = [torch.arange(piece.first, piece.first + piece.tokens) for piece in self.pieces]
        return torch.cat(of_each).to(self.rows.device)

    @cached_property
    def asking(self) -> StepTokens:
        """Those of `pieces`."""
        ends = torch.tensor([piece.tokens for piece in self.pieces], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        ends = ends.to(self.rows.device)
        return _tokens(self.slots[self.places], self.rows[self.places], ends, torch.ones_like(ends, dtype=torch.bool))


class SlotRows:
    """One layer's keys and values [S, Hk, capacity, D] of S sequences; the capacity doubles when it is used up.

    Args:
        like: keys and values [Hk, any, D], for sizes, dtype and device.
    """

    def __init__(self, slots: int, like: Pair):
        # Zeros, because masked rows must still be finite numbers.
        self.keys, self.values = (rows.new_zeros(slots, rows.shape[0], FIRST_ROWS, rows.shape[2]) for rows in like)

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    def reserve(self, longest: int) -> None:
        """Make room for so many rows of each sequence."""
        if longest > self.capacity:
            self.keys, self.values = (_grown(rows, longest) for rows in (self.keys, self.values))

    def write(self, keys: torch.Tensor, values: torch.Tensor, step: PackedStep) -> None:
        """Store the step's rows [Hk, T, D]."""
        self.reserve(step.longest)
        store_in_slots((self.keys, self.values), (keys, values), step.slots, step.rows)

    def seen_by(self, tokens: StepTokens, longest: int, window: int | None = None) -> OwnRows:
        """What tokens see of their sequences' rows, of which there are up to `longest`, within a window if there is
        one."""
        keys, values = (rows[:, :, :longest] for rows in (self.keys, self.values))
        first = tokens.first if window is None else (tokens.used - window).clamp(min=0)
        return OwnRows(keys, values, tokens.slots, first, tokens.used)

    def of_piece(self, piece: Piece) -> Pair:
        """Keys and values [Hk, tokens, D] of a question."""
        return self.keys[piece.slot, :, : piece.tokens], self.values[piece.slot, :, : piece.tokens]


def _grown(rows: torch.Tensor, needed: int) -> torch.Tensor:
    grown = rows.new_zeros(*rows.shape[:2], max(needed, 2 * rows.shape[2]), rows.shape[3])
    grown[:, :, : rows.shape[2]] = rows
    return grown
