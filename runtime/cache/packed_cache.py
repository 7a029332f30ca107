"""KV cache of several sequences that share one stored context, with separate rows for each sequence's new tokens."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Self

import torch

from sparsekv.kernels.attention.attention import OwnRows
from sparsekv.kernels.common.hook import AttentionCall
from sparsekv.kernels.common.row_operations import store_in_slots
from sparsekv.runtime.cache.index_cache import Fed, IndexCache, ModelInput, SequenceCache
from sparsekv.runtime.cache.kept_turns import KeptRows
from sparsekv.runtime.cache.kv_store import Pair
from sparsekv.runtime.cache.stored_layer import SlotStates, StoredLayer

FIRST_ROWS = 64


@dataclass(frozen=True)
class Piece:
    """The tokens of one question in a step: `tokens` tokens, from token `first` of the step on.

    The tokens belong to the sequence in `slot`. Their rows follow the `before` rows that the sequence already has after
    the stored context.
    """

    slot: int
    first: int
    tokens: int
    before: int = 0

    @property
    def where(self) -> slice:
        return slice(self.first, self.first + self.tokens)


@dataclass(frozen=True)
class StepTokens:
    """A subset of T' tokens of a step.

    `slots` and `rows` [T'] int64: as in `PackedStep`. Each token attends to its sequence's rows after the stored
    context, from row `first` [T'], which is 0, to row `used` [T'] - 1. `ends` [B] int32 is the index, within the
    subset, after the last token of each of B sequences. `asks` [B] bool is True if the sequence's tokens belong to a
    question. Otherwise the sequence has one token, of an answer.
    """

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
    """The T tokens of one forward pass, one sequence after another.

    `slots` and `rows` [T] int64: the slot of each token's sequence, and the token's index among the sequence's rows
    after the stored context. `ends` [B] int32 is the index after the last token of each of B sequences. `single` int64:
    the indices of the tokens that continue an answer, one per answering sequence. `pieces`: the questions, or parts of
    questions, each of one or more tokens. `longest`: an upper bound of the number of rows of a sequence after the
    stored context, including the rows of this step.
    """

    slots: torch.Tensor
    rows: torch.Tensor
    ends: torch.Tensor
    single: torch.Tensor
    pieces: tuple[Piece, ...]
    longest: int

    @cached_property
    def everyone(self) -> StepTokens:
        """All tokens of the step, computed once for all layers."""
        asks = torch.zeros_like(self.ends, dtype=torch.bool)
        if self.pieces:  # a step without questions may be captured as a CUDA graph, which must not copy from the host
            ends = torch.tensor([piece.where.stop for piece in self.pieces], dtype=self.ends.dtype)
            asks = (self.ends[:, None] == sent(ends, self.ends.device)).any(1)
        return _tokens(self.slots, self.rows, self.ends, asks)

    @cached_property
    def answering(self) -> StepTokens:
        """The tokens of `single`, which continue answers."""
        if not self.pieces:
            return self.everyone
        ends = torch.arange(1, len(self.single) + 1, dtype=torch.int32, device=self.rows.device)
        return _tokens(self.slots[self.single], self.rows[self.single], ends, torch.zeros_like(ends, dtype=torch.bool))

    @cached_property
    def places(self) -> torch.Tensor:
        """The indices [T'] int64 of the tokens of `pieces`."""
        of_each = [torch.arange(piece.first, piece.first + piece.tokens) for piece in self.pieces]
        return sent(torch.cat(of_each), self.rows.device)

    @cached_property
    def asking(self) -> StepTokens:
        """The tokens of `pieces`, which belong to questions."""
        ends = torch.tensor([piece.tokens for piece in self.pieces], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        ends = sent(ends, self.rows.device)
        return _tokens(self.slots[self.places], self.rows[self.places], ends, torch.ones_like(ends, dtype=torch.bool))


def sent(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy numbers of the host to a device. The host does not wait until a GPU has finished its pending work."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers


class SlotRows:
    """One layer's keys and values [S, Hk, capacity, D] of S sequences, for their tokens after the stored context.

    The capacity at least doubles when it grows.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor):
        self.keys, self.values = keys, values

    @classmethod
    def empty(cls, slots: int, like: Pair) -> Self:
        """Return `slots` empty slots, with the heads, channels, dtype and device of keys and values [Hk, any, D]."""
        # Initialised with zeros, because rows that are masked out must still be finite.
        return cls(*(rows.new_zeros(slots, rows.shape[0], FIRST_ROWS, rows.shape[2]) for rows in like))

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    def reserve(self, longest: int) -> None:
        """Grow the buffers to at least `longest` rows per sequence."""
        if longest > self.capacity:
            self.keys, self.values = (_grown(rows, longest) for rows in (self.keys, self.values))

    def write(self, keys: torch.Tensor, values: torch.Tensor, step: PackedStep) -> None:
        """Store the step's rows [Hk, T, D]."""
        self.reserve(step.longest)
        store_in_slots((self.keys, self.values), (keys, values), step.slots, step.rows)

    def seen_by(self, tokens: StepTokens, longest: int, window: int | None = None) -> OwnRows:
        """Return, for each token, its sequence's rows up to its own row; with a window, only the last `window` rows.

        `longest` is an upper bound of the number of rows of a sequence.
        """
        keys, values = (rows[:, :, :longest] for rows in (self.keys, self.values))
        first = tokens.first if window is None else (tokens.used - window).clamp(min=0)
        return OwnRows(keys, values, tokens.slots, first, tokens.used)

    def of_piece(self, piece: Piece) -> Pair:
        """Return views of a question's keys and values [Hk, before + tokens, D], up to the end of the piece."""
        return self.first_of(piece.slot, piece.before + piece.tokens)

    def of_only(self, step: PackedStep) -> Pair:
        """Return the keys and values [Hk, used, D] of the only sequence that answers in a step.

        On a GPU, this call synchronises.
        """
        tokens = step.answering
        return self.first_of(int(tokens.slots[0]), int(tokens.used[0]))

    def first_of(self, slot: int, tokens: int) -> Pair:
        """Return views [Hk, tokens, D] of the first keys and values of the sequence in a slot."""
        return self.keys[slot, :, :tokens], self.values[slot, :, :tokens]


def _grown(rows: torch.Tensor, needed: int) -> torch.Tensor:
    grown = rows.new_zeros(*rows.shape[:2], max(needed, 2 * rows.shape[2]), rows.shape[3])
    grown[:, :, : rows.shape[2]] = rows
    return grown


class PackedLayer(ABC):
    """One layer for several sequences, which share a stored layer's rows and have their new tokens' rows in slots."""

    def __init__(self, layer: StoredLayer, slots: int):
        self.own = SlotRows.empty(slots, (layer.keys, layer.values))

    def attend(self, call: AttentionCall, step: PackedStep) -> torch.Tensor:
        """Store the step's rows, then attend for each token; query and output are [Hq, T, D]."""
        self.own.write(call.keys, call.values, step)
        if not step.pieces:
            return self.answer(call, step)
        output = call.query.new_empty(*call.query.shape[:2], call.values.shape[2])
        if len(step.single):
            output[:, step.single] = self.answer(replace(call, query=call.query[:, step.single]), step)
        self.ask_all(call, step, output)
        return output

    def ask_all(self, call: AttentionCall, step: PackedStep, output: torch.Tensor) -> None:
        """Attend for the tokens of all questions, and write the results at the tokens' indices to output [Hq, T, D]."""
        for number, piece in enumerate(step.pieces):
            output[:, piece.where] = self.ask(replace(call, query=call.query[:, piece.where]), piece, number)

    @abstractmethod
    def answer(self, call: AttentionCall, step: PackedStep) -> torch.Tensor:
        """Attend for one token of each sequence that continues an answer; return [Hq, B, D]."""

    @abstractmethod
    def ask(self, call: AttentionCall, piece: Piece, number: int) -> torch.Tensor:
        """Attend for a question's tokens; return [Hq, Q, D]. `number` is the question's index in the step."""


class PackedCache(SequenceCache):
    """The cache of several sequences, which share the stored context of a single sequence's cache.

    Args:
        alone: the cache of the single sequence.
        packed: for each layer of `alone`, the layer that attends for several sequences.
    """

    ROOM = 256

    def __init__(self, alone: IndexCache, packed: list[PackedLayer], slots: int):
        super().__init__(alone.stored_layers, alone.built, slots, alone.states)
        self.alone, self.packed = alone, packed
        self.packed_by_number = dict(zip(self.by_number, packed, strict=True))
        self.step: PackedStep | None = None
        self.places = torch.zeros(2, slots, dtype=torch.int64, device=self.tokens.device)
        """For each token of a decode step, the slot of its sequence, and the index of its row in the slot."""

    @property
    def step_shape(self) -> tuple[int, int]:
        return 1, self.slots

    @property
    def rewinds(self) -> int:
        return self.alone.rewinds

    def rewind(self) -> None:
        self.alone.rewind()

    def expect_prompt(self, tokens: int) -> None:
        """Do nothing, because each step marks its questions' tokens itself."""

    def passes(self, fed: Sequence[Fed]) -> list[list[Fed]]:
        """If steps are captured, divide a step into a pass of the answers and a pass of the questions.

        A CUDA graph replays the pass of the answers. The host launches the second pass while the GPU computes the first
        one. Both passes read the model's weights. Reading them twice takes less time than launching a pass with all
        tokens.
        """
        parts = [one for one in fed if not one.asks], [one for one in fed if one.asks]
        return [part for part in parts if part] if self.capturable else [list(fed)]

    def questions_input(self, fed: Sequence[Fed], tokens: int) -> ModelInput:
        device, lengths = self.tokens.device, torch.tensor([len(one.tokens) for one in fed])
        ends = lengths.cumsum(0)
        firsts = (ends - lengths).tolist()
        asking = ((one, first) for one, first in zip(fed, firsts, strict=True) if one.asks)
        pieces = (Piece(one.slot, first, len(one.tokens), one.first) for one, first in asking)
        single = [first for one, first in zip(fed, firsts, strict=True) if not one.asks]
        rows = torch.cat([torch.arange(one.first, one.first + len(one.tokens)) for one in fed])
        self.step = PackedStep(
            slots=sent(torch.tensor([one.slot for one in fed]).repeat_interleave(lengths), device),
            rows=sent(rows, device),
            ends=sent(ends.int(), device),
            single=sent(torch.tensor(single, dtype=torch.int64), device),
            pieces=tuple(pieces),
            longest=int(rows.max()) + 1,
        )
        ids = sent(torch.tensor([list(chain.from_iterable(one.tokens for one in fed))]), device)
        return ids, (tokens + self.step.rows)[None]

    def own_keys(self, layer: int, slot: int, tokens: int) -> torch.Tensor:
        return self.packed_by_number[layer].own.first_of(slot, tokens)[0]

    def kept(self, slot: int, tokens: int) -> KeptRows:
        rows = [layer.own.first_of(slot, tokens) for layer in self.packed]
        return KeptRows(tokens, tuple((keys.clone(), values.clone()) for keys, values in rows))

    def restore(self, slot: int, kept: KeptRows) -> None:
        for layer, rows in zip(self.packed, kept.rows, strict=True):
            layer.own.reserve(kept.tokens)
            for into, of_layer in zip(layer.own.first_of(slot, kept.tokens), rows, strict=True):
                into.copy_(of_layer)

    def clear(self, slot: int) -> None:
        for layer in self.packed:
            for rows in (layer.own.keys, layer.own.values):
                rows[slot].zero_()

    def reserve(self, needed: int, most: int, *, capture: bool) -> bool:
        before = self.buffers()
        for layer in self.packed:
            layer.own.reserve(max(needed, self.ROOM) if capture else needed)
        return self.buffers() != before

    def place(self, fed: Sequence[Fed], size: int) -> None:
        places = torch.tensor([[one.slot for one in fed], [one.first for one in fed]])
        self.places[:, :size] = torch.cat([places, places[:, -1:].expand(2, size - len(fed))], 1)
        for read in self.reads:
            read.deferred = True

    def step_input(self, size: int, tokens: int) -> ModelInput:
        slots, rows = self.places[:, :size]
        everyone = torch.arange(size, device=slots.device)
        self.step = PackedStep(slots, rows, (everyone + 1).int(), everyone, (), self.packed[0].own.capacity)
        return self.tokens[None, :size], (tokens + rows)[None]

    def advance(self) -> None:
        for read in self.reads:
            read.advance()
        self.release()

    def release(self) -> None:
        for read in self.reads:
            read.deferred = False

    def buffers(self) -> tuple[int, ...]:
        return (self.packed[0].own.capacity,)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of keys for which transformers makes a mask, and the index of the first of them, 0.

        The number may be smaller than the number of keys of a sequence, because only the sliding window is read from
        the mask. A window of at least the model's original positions counts as no window, which is correct here,
        because no sequence is longer than such a window (`positions_of`).
        """
        assert self.step is not None
        layer = self.by_number.get(layer_idx, self.stored_layers[0])  # transformers may pass a layer without rows
        return layer.stored + min(self.step.longest, query_length), 0

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.built.check(call)
        assert self.step is not None
        if self.watched is not None:
            self.watched.write(call, self.step.ends.long() - 1)
        return self.packed_by_number[call.layer].attend(call, self.step)


class BatchedCache(PackedCache):
    """The cache of several sequences of a model with layers that have a recurrent or convolution state.

    Such a layer treats all tokens of a batch row as one sequence. Therefore each question is fed in a separate pass,
    and in a decode step each sequence is a row of the model's batch.
    """

    def __init__(self, alone: IndexCache, packed: list[PackedLayer], slots: int):
        super().__init__(alone, packed, slots)
        self.of_slots = SlotStates(self.states, slots)

    @property
    def step_shape(self) -> tuple[int, int]:
        return self.slots, 1

    def live_states(self) -> Mapping[str, torch.Tensor]:
        return self.of_slots.slots

    def passes(self, fed: Sequence[Fed]) -> list[list[Fed]]:
        answering = [one for one in fed if not one.asks]
        return [*([one] for one in fed if one.asks), *([answering] if answering else [])]

    def questions_input(self, fed: Sequence[Fed], tokens: int) -> ModelInput:
        self.of_slots.begin_question(self.layers, fed[0].slot, continued=fed[0].first > 0)
        return super().questions_input(fed, tokens)

    def kept(self, slot: int, tokens: int) -> KeptRows:
        return replace(super().kept(slot, tokens), state=self.of_slots.copied(slot))

    def restore(self, slot: int, kept: KeptRows) -> None:
        super().restore(slot, kept)
        self.of_slots.put(slot, kept.state)

    def step_input(self, size: int, tokens: int) -> ModelInput:
        ids, positions = super().step_input(size, tokens)
        self.of_slots.begin_step(self.layers, self.places[0, :size])
        return ids.T, positions.T

    def end_step(self) -> None:
        self.of_slots.end_step()

    def attend(self, call: AttentionCall) -> torch.Tensor:
        assert self.step is not None
        if self.step.pieces:
            return super().attend(call)
        batch, sinks = len(self.step.slots), call.sink_logits
        query, keys, values = (rows.unflatten(0, (batch, -1))[:, :, 0].transpose(0, 1) for rows in _rows(call))
        sinks = None if sinks is None else sinks[: len(query)]
        output = super().attend(replace(call, query=query, keys=keys, values=values, sink_logits=sinks))
        return output.transpose(0, 1).flatten(0, 1)[:, None]


def _rows(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return call.query, call.keys, call.values
