"""The KV cache of several sequences over one stored context, and the rows of their own tokens."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from sparsekv.kernels.attention.attention import OwnRows
from sparsekv.kernels.common.given_rows import CalledCache
from sparsekv.kernels.common.hook import AttentionCall
from sparsekv.kernels.common.runs import store_in_slots
from sparsekv.runtime.cache.buffers import ReadRows
from sparsekv.runtime.cache.index_cache import BuiltLayers
from sparsekv.runtime.cache.kv_store import Pair
from sparsekv.runtime.cache.stored_layer import StoredLayer

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
        """Rows of their own sequences that tokens see, up to `longest` of them, within a window if there is
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


class PackedLayer(ABC):
    """One layer: what all sequences share lies in `layer`, their own rows in slots."""

    def __init__(self, layer: StoredLayer, slots: int):
        self.own = SlotRows(slots, (layer.keys, layer.values))

    def attend(self, call: AttentionCall, step: PackedStep) -> torch.Tensor:
        """Store the step's rows, then attend with each token; query and output are [Hq, T, D]."""
        self.own.write(call.keys, call.values, step)
        if not step.pieces:
            return self.answer(call, step)
        output = call.query.new_empty(*call.query.shape[:2], call.values.shape[2])
        if len(step.single):
            output[:, step.single] = self.answer(replace(call, query=call.query[:, step.single]), step)
        self.ask_all(call, step, output)
        return output

    def ask_all(self, call: AttentionCall, step: PackedStep, output: torch.Tensor) -> None:
        """Write the attention of all questions' tokens into their places of output [Hq, T, D]."""
        for number, piece in enumerate(step.pieces):
            output[:, piece.where] = self.ask(replace(call, query=call.query[:, piece.where]), piece, number)

    @abstractmethod
    def answer(self, call: AttentionCall, step: PackedStep) -> torch.Tensor:
        """Attention [Hq, B, D] of one token of each sequence that answers."""

    @abstractmethod
    def ask(self, call: AttentionCall, piece: Piece, number: int) -> torch.Tensor:
        """Attention [Hq, Q, D] of a question's tokens; `number` is the question's among those of the step."""


class PackedCache(CalledCache):
    """To transformers a cache; `attend` is the attention function to route the model's calls to.

    Args:
        stored: layers of the stored context, of which it takes the place in the model.
    """

    def __init__(self, stored: list[StoredLayer], packed: list[PackedLayer], built: BuiltLayers | None = None):
        super().__init__(layers=list(stored))
        self.built = built or BuiltLayers()
        self.stored, self.packed = stored, packed
        self.step: PackedStep | None = None

    def begin(self, step: PackedStep) -> None:
        """Say whose tokens the next forward pass has."""
        self.step = step

    def reserve(self, longest: int) -> int:
        """Make room for so many own rows of each sequence; returns the room there is."""
        for layer in self.packed:
            layer.own.reserve(longest)
        return self.packed[0].own.capacity

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Within this context steps count the rows that they read on the device alone. After each replay `advance` adds
        what the host knows."""
        for read in self.reads:
            read.deferred = True
        try:
            yield
        finally:
            for read in self.reads:
                read.deferred = False

    def advance(self) -> None:
        """Count what a replayed step read, as far as the host knows it."""
        for read in self.reads:
            read.advance()

    @property
    def reads(self) -> list[ReadRows]:
        return [layer.read for layer in self.stored if layer.read is not None]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Rows of the context and of one sequence's own tokens, where the pass has the tokens of all; the first is 0.

        A captured step counts its buffers as own rows, which are more than any sequence has.
        """
        assert self.step is not None
        return self.stored[layer_idx].stored + min(self.step.longest, query_length), 0

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Store a layer's new rows and attend to shared and own ones; returns [Hq, T, D].

        Raises:
            IdentityError: the layer attends otherwise than when the index was built.
        """
        self.built.check(call)
        assert self.step is not None
        return self.packed[call.layer].attend(call, self.step)
