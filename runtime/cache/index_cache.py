"""Base class of the caches that an engine decodes over, and the cache of a single sequence."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from sparsekv.formats.errors import IdentityError, SparsekvError, UsageError
from sparsekv.formats.index.context_rows import Pair
from sparsekv.formats.index.schema import LayerFacts
from sparsekv.kernels.common.given_rows import CalledCache
from sparsekv.kernels.common.hook import AttentionCall, is_routed
from sparsekv.kernels.common.states import LayerKinds, copied_state, state_tensors
from sparsekv.runtime.cache.buffers import ModelGraph, ReadRows, read_share, total_read
from sparsekv.runtime.cache.kept_turns import KeptRows
from sparsekv.runtime.cache.stored_layer import DocumentState, DynamicSlot, StoredLayer
from sparsekv.runtime.cache.watched import WatchedQueries


class BuiltLayers:
    """Comparison of each layer's first attention call with the layer's attention settings in the index's manifest.

    transformers passes a layer's scale, soft cap, window and sinks to the attention function. Another version of
    transformers may pass other values than the version with which the index was built. The probe (a short forward pass
    when an index is opened) cannot notice this, because it runs the model's own attention.

    Args:
        layers: each layer's settings; None for a layer without attention.
    """

    def __init__(self, layers: Sequence[LayerFacts | None] = ()):
        self._left = {layer: facts for layer, facts in enumerate(layers) if facts is not None}

    def check(self, call: AttentionCall) -> None:
        """Raise IdentityError if a layer's first call differs from the settings.

        Once a layer's first call has matched, each later call of the layer costs one look-up in a dict.
        """
        if (facts := self._left.get(call.layer)) is None:
            return
        same_scale = math.isclose(facts.softmax_scale, call.softmax_scale, rel_tol=1e-6)
        compared: tuple[tuple[str, object, object], ...] = (
            ("softmax scale", facts.softmax_scale, facts.softmax_scale if same_scale else call.softmax_scale),
            ("soft cap", facts.softcap, call.softcap),
            ("sliding window", facts.sliding_window, call.window),
            ("attention sinks", facts.attention_sinks, call.sink_logits is not None),
        )
        for what, built, found in compared:
            if built != found:
                raise IdentityError(
                    f"{what} of layer {call.layer}",
                    built,
                    found,
                    (
                        "use the versions of transformers and sparsekv that built the index, or build the index again "
                        "with `sparsekv build-index --force`"
                    ),
                )
        del self._left[call.layer]


@dataclass(frozen=True)
class LayerStats:
    """One layer's missed-mass statistics since counting began.

    `missed` is the estimated missed mass, a mean over heads and queries. `raised` is the share of heads and queries
    over the guard's limit at the first budget. `dense` is the share that fell back to dense attention.
    """

    layer: int
    missed: float
    raised: float
    dense: float


@dataclass(frozen=True)
class Fed:
    """Tokens that a forward pass feeds for the sequence in `slot`.

    The tokens' keys and values become the slot's rows after the stored context, from row `first` on. With `asks`, the
    tokens belong to a question. Otherwise there is the newest token of an answer, followed by a draft's tokens if dense
    attention verifies a draft.
    """

    slot: int
    first: int
    tokens: list[int]
    asks: bool


ModelInput = tuple[torch.Tensor, torch.Tensor]
"""Token ids and position ids, as a model takes them."""


class SequenceCache(CalledCache, ABC):
    """A transformers cache of the sequences that an engine decodes, in one slot each, over one stored context.

    Attributes:
        stored_layers: the layers that attend.
        by_number: the same layers, by their index in the model.
        states: the states of the layers that have a recurrent or convolution state.
        watched: records the queries of the retrieval heads in each pass; None: no queries are recorded. Set by `watch`.
        tokens: [slots] int64 on the device, the inputs of a decode step.
        graphs: the CUDA graphs of decode steps, by their number of tokens. A graph is valid as long as `buffers()` does
            not change.
        capturing: whether to capture decode steps; False on a CPU, and after a failed capture.
    """

    ROOM: int
    """Number of rows to reserve for steps that a CUDA graph replays.

    An `IndexCache` reserves at most this many at a time. A `PackedCache` reserves at least this many for each sequence.
    """

    def __init__(
        self, layers: Sequence[StoredLayer], built: BuiltLayers | None, slots: int, states: DocumentState | None = None
    ):
        self.states = states or DocumentState(LayerKinds(len(layers), tuple(range(len(layers)))))
        super().__init__(layers=self.states.cache_layers(layers))
        self.stored_layers, self.built, self.slots = list(layers), built or BuiltLayers(), slots
        self.by_number = dict(zip(self.states.kinds.attending, layers, strict=True))
        device = layers[0].keys.device
        self.tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        self.graphs: dict[int, ModelGraph] = {}
        self.capturing = device.type == "cuda"
        self.watched: WatchedQueries | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> Pair:
        """Return the rows unchanged; `attend` stores them.

        Raises:
            UsageError: the model runs its own attention, which would ignore the stored context.
        """
        if not (torch.compiler.is_compiling() or is_routed()):
            raise UsageError(
                "the cache of an index answers through sparsekv alone: ask with `asker.ask` or `asker.stream`, not "
                "with the model's own `generate`"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @property
    @abstractmethod
    def rewinds(self) -> int:
        """Number of calls of `rewind` so far, on this cache and on all caches that share its stored context.

        A change shows that another question has used the stored context.
        """

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph of one decode step can be replayed for all later steps."""
        return self.capturing

    @property
    def step_shape(self) -> tuple[int, int]:
        """Shape of the model's `input_ids` in a decode step with a sequence in every slot: rows, and tokens per row."""
        return self.slots, 1

    @abstractmethod
    def rewind(self) -> None:
        """Restore the stored context, also after a failed question."""

    @abstractmethod
    def expect_prompt(self, tokens: int) -> None:
        """Prepare for an answer after a prompt of `tokens` tokens, including the tokens of the stored context."""

    @abstractmethod
    def questions_input(self, fed: Sequence[Fed], tokens: int) -> ModelInput:
        """Begin a forward pass with tokens of questions; `tokens` is the number of tokens of the stored context."""

    def kept(self, slot: int, tokens: int) -> KeptRows:
        """Return copies of the state of the sequence in `slot` and of its first `tokens` rows after the stored context.

        The state is always the state after all rows of the sequence. Therefore it belongs to the copied rows only if
        all rows are copied.
        """
        raise NotImplementedError

    def restore(self, slot: int, kept: KeptRows) -> None:
        """Overwrite the first rows and the state of the sequence in `slot` with copies that `kept` returned."""
        raise NotImplementedError

    def clear(self, slot: int) -> None:
        """Set the slot's rows after the stored context to zero, in a cache of several sequences.

        The rows may be NaN or infinite. Even a masked row must be finite, because its values are multiplied by a weight
        of 0. The base class does nothing.
        """

    @abstractmethod
    def reserve(self, needed: int, most: int, *, capture: bool) -> bool:
        """Reserve rows for a decode step; return whether buffers may have changed.

        Args:
            needed: number of rows that each sequence needs after the stored context.
            most: maximum number of such rows that a sequence can get.
            capture: also reserve rows for later steps (`ROOM`), so that CUDA graphs of steps stay valid.
        """

    @abstractmethod
    def place(self, fed: Sequence[Fed], size: int) -> None:
        """Write each token's slot and row index in the next decode step to the device.

        Args:
            fed: the tokens that the step feeds, one for each sequence.
            size: number of tokens of the step. If it is larger than `len(fed)`, the last token is repeated as padding.
        """

    @abstractmethod
    def step_input(self, size: int, tokens: int) -> ModelInput:
        """Begin a decode step of `size` tokens, which may be captured; `tokens`: as in `questions_input`."""

    def passes(self, fed: Sequence[Fed]) -> list[list[Fed]]:
        """Divide the tokens that a step feeds into forward passes."""
        return [list(fed)]

    def end_step(self) -> None:
        """End a decode step on the device. This may be part of the step's CUDA graph."""

    @abstractmethod
    def advance(self) -> None:
        """Count a launched or replayed decode step on the host."""

    def release(self) -> None:
        """End the decode steps of an answer; the base class does nothing."""

    @abstractmethod
    def buffers(self) -> tuple[int, ...]:
        """Return the addresses and sizes of buffers; if they are unchanged, CUDA graphs of steps are still valid."""

    def watch(self, watched: WatchedQueries) -> None:
        """Record the retrieval heads' queries in each pass from now on. Drops the CUDA graphs of earlier steps."""
        self.watched = watched
        self.graphs.clear()

    @abstractmethod
    def own_keys(self, layer: int, slot: int, tokens: int) -> torch.Tensor:
        """Return the keys [Hk, tokens, D] of the first tokens that a sequence has after the stored context."""

    @property
    def reads(self) -> list[ReadRows]:
        return [layer.read for layer in self.stored_layers if layer.read is not None]

    def counters(self) -> list[torch.Tensor]:
        """Return the device tensors that a step changes, except the buffers of rows."""
        return [one for read in self.reads for one in read.counters()] + list(self.live_states().values())

    def live_states(self) -> Mapping[str, torch.Tensor]:
        """Return the states that steps overwrite, without copies."""
        return state_tensors(self.layers)

    def stats(self) -> list[LayerStats]:
        """Return the statistics of each layer that measures missed mass; none if sequences share steps."""
        return []

    @abstractmethod
    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Store a layer's new rows and attend to stored and new rows; return [Hq, Q, D].

        Raises:
            IdentityError: the layer attends differently than when the index was built.
        """


class IndexCache(SequenceCache):
    """The cache of a single sequence, or of `batch` sequences that decode in lockstep.

    Between `reserve` and `release`, each layer appends one row per step, at an index that a `DynamicSlot` has on the
    device. Therefore the step can be captured as a CUDA graph.

    Args:
        layers: the layers that attend.
        built: compares each layer's first call with the index's manifest; None: no comparison.
        batch: number of sequences, concatenated along the heads, each with its own context.
        states: the states after the stored context; None if no layer has a state.
    """

    ROOM = 1024

    def __init__(
        self,
        layers: list[StoredLayer],
        built: BuiltLayers | None = None,
        batch: int = 1,
        states: DocumentState | None = None,
    ):
        super().__init__(layers, built, batch, states)
        self._rewinds, self._reserved, self._room = 0, False, 0
        self.position = torch.zeros(1, 1, dtype=torch.int64, device=self.tokens.device)
        self.rows = torch.zeros(len(layers), dtype=torch.int64, device=self.tokens.device)
        self.counts = torch.zeros_like(self.rows, dtype=torch.int32)

    @property
    def rewinds(self) -> int:
        return self._rewinds

    @property
    def capturable(self) -> bool:
        return self.capturing and all(layer.capturable for layer in self.stored_layers)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.built.check(call)
        if self.watched is not None:
            self.watched.write(call, slice(-1, None))
        layer = self.by_number[call.layer]
        layer.append(call.keys, call.values)
        return layer.attend(call)

    def own_keys(self, layer: int, slot: int, tokens: int) -> torch.Tensor:
        of_layer = self.by_number[layer]
        return of_layer.keys[:, of_layer.first : of_layer.first + tokens]

    def kept(self, slot: int, tokens: int) -> KeptRows:
        own = ((layer, slice(layer.first, layer.first + tokens)) for layer in self.stored_layers)
        rows = tuple((layer.keys[:, some].clone(), layer.values[:, some].clone()) for layer, some in own)
        return KeptRows(tokens, rows, copied_state(self.layers))

    def restore(self, slot: int, kept: KeptRows) -> None:
        for layer, (keys, values) in zip(self.stored_layers, kept.to(self.tokens.device).rows, strict=True):
            layer.used = layer.first
            layer.append(keys, values)
        for name, tensor in self.live_states().items():
            tensor.copy_(kept.state[name])

    def questions_input(self, fed: Sequence[Fed], tokens: int) -> ModelInput:
        return self._at_the_end(torch.tensor([list(chain.from_iterable(one.tokens for one in fed))]))

    def _at_the_end(self, ids: torch.Tensor) -> ModelInput:
        """Return ids [batch, T] on the device, and positions [1, T] after all tokens so far."""
        used, device = self.get_seq_length(), self.tokens.device
        return ids.to(device), torch.arange(used, used + ids.shape[1], device=device)[None]

    def reserve(self, needed: int, most: int, *, capture: bool) -> bool:
        if self._room if self._reserved else not capture:
            return False
        tokens = max(1, min(most - needed + 1, self.ROOM))
        for number, layer in enumerate(self.stored_layers):
            one = slice(number, number + 1)
            layer.reserve(DynamicSlot(self.rows[one], self.counts[one]), tokens)
        used = torch.tensor([layer.used for layer in self.stored_layers])
        self.rows.copy_(used)
        self.counts.copy_(used + 1)
        self.position.fill_(self.get_seq_length())
        self._reserved, self._room = True, self.room_left()
        return True

    def place(self, fed: Sequence[Fed], size: int) -> None:
        """Do nothing, because each row follows the previous row, and the device counts the rows."""

    def step_input(self, size: int, tokens: int) -> ModelInput:
        ids = self.tokens[:, None]
        return (ids, self.position) if self._reserved else self._at_the_end(ids)

    def end_step(self) -> None:
        if self._reserved:
            self.position += 1
            self.rows += 1
            self.counts += 1

    def room_left(self) -> int:
        """Return the number of rows that still fit into the buffers of every layer."""
        return min(layer.room_left() for layer in self.stored_layers)

    def advance(self) -> None:
        if self._reserved:
            self._room -= 1
            for layer in self.stored_layers:
                layer.advance()

    def release(self) -> None:
        """End the mode of one row per step (`reserve`): steps may append any number of rows again."""
        self._reserved = False
        for layer in self.stored_layers:
            layer.release()

    def counters(self) -> list[torch.Tensor]:
        return [self.position, self.rows, self.counts, *super().counters()]

    def buffers(self) -> tuple[int, ...]:
        rows = tuple(number for layer in self.stored_layers for number in layer.buffers())
        return rows + tuple(tensor.data_ptr() for tensor in self.live_states().values())

    @torch.inference_mode()
    def rewind(self) -> None:
        self._rewinds += 1
        self.release()
        for layer in self.stored_layers:
            layer.rewind()
        self.states.copy_to(self.live_states())

    def count_written(self, tokens: int) -> None:
        """Count the rows of `tokens` tokens that other code has written to the layers' buffers."""
        for layer in self.stored_layers:
            layer.count_written(tokens)

    def drop(self, tokens: int) -> None:
        """Drop the rows of the last `tokens` tokens. The next tokens are decode steps, if fed one by one.

        The cache must have no states, because a state cannot be taken back.
        """
        self.release()
        for layer in self.stored_layers:
            layer.drop(tokens)
            layer.expect_prompt(layer.get_seq_length())

    def prefill_next(self, tokens: int) -> None:
        """Let the next `tokens` tokens attend like a question's tokens; they are fed in one pass."""
        self.release()
        for layer in self.stored_layers:
            layer.expect_prompt(layer.get_seq_length() + tokens)

    def check_length(self, tokens: int) -> None:
        """Raise SparsekvError unless every layer has `tokens` tokens, or every layer has one token less.

        `tokens` is the number of tokens before a question. Without this check, the question could follow rows that the
        caller does not know, or `answer_after` would prefill every token that the cache lacks.
        """
        lengths = {layer.get_seq_length() for layer in self.stored_layers}
        if len(lengths) > 1 or not lengths <= {tokens, tokens - 1}:
            found = " and ".join(f"{length:,}" for length in sorted(lengths))
            raise SparsekvError(
                f"the cache has {found} tokens, and the question begins after {tokens:,}: something else has "
                "written to the cache; open a new session with `index.asker()`"
            )

    def expect_prompt(self, tokens: int) -> None:
        """Prepare for an answer after a prompt of `tokens` tokens, stored tokens included.

        The prompt tokens that the cache lacks are prefilled, in calls of any length. Each later token that is fed alone
        is a decode step.
        The counts of rows read and of missed mass are reset. After `rewind` no prompt is expected.
        """
        for layer in self.stored_layers:
            layer.expect_prompt(tokens)
            layer.start_counting()

    def kv_fraction(self) -> float:
        """Return the rows read of the middle and of the index, divided by the middle's rows that dense attention reads.

        The middle are the tokens between sinks and tail.
        Only sparse layers count rows, in all decode steps since `expect_prompt`. Returns 0 before the first decode
        step, and 1 if all layers are dense. Needs one sync per device.
        """
        return read_share(total_read(self.reads), sum(read.dense for read in self.reads), counted=bool(self.reads))

    def stats(self) -> list[LayerStats]:
        """Return the statistics of each layer that has measured missed mass; one sync per layer."""
        measured = ((number, layer.missed()) for number, layer in self.by_number.items())
        return [LayerStats(number, *shares) for number, shares in measured if shares is not None]
