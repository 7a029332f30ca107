"""Base class of the caches that an engine decodes over, and the cache of a single sequence."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from sparsekv.formats.errors import IdentityError, SparsekvError
from sparsekv.formats.index.schema import LayerFacts
from sparsekv.kernels.common.given_rows import CalledCache
from sparsekv.kernels.common.hook import AttentionCall
from sparsekv.kernels.common.states import LayerKinds, state_tensors
from sparsekv.runtime.cache.buffers import ModelGraph, ReadRows, read_share, total_read
from sparsekv.runtime.cache.document_state import DocumentState
from sparsekv.runtime.cache.kept_turns import KeptRows
from sparsekv.runtime.cache.stored_layer import DynamicSlot, StoredLayer
from sparsekv.runtime.cache.watched import WatchedQueries


class BuiltLayers:
    """Comparison of each layer's first attention call with the layer's facts in the manifest.

    The probe cannot make this comparison, because it runs the model's own attention. Our attention gets a layer's
    scale, soft cap, window and sinks from transformers. Another version of transformers may pass these values
    differently than the version with which the index was built.
    """

    def __init__(self, layers: Sequence[LayerFacts | None] = ()):
        self._left = {layer: facts for layer, facts in enumerate(layers) if facts is not None}

    def check(self, call: AttentionCall) -> None:
        """Raise IdentityError if the layer's first call differs from its facts. Later calls cost one dict look-up."""
        if (facts := self._left.pop(call.layer, None)) is None:
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
                        "use the versions of transformers and sparsekv that built the index, or build the index again, "
                        "with --force"
                    ),
                )


@dataclass(frozen=True)
class LayerStats:
    """One layer's missed-mass statistics since counting began.

    `missed` is the estimated missed mass, a mean over heads and queries. `raised` and `dense` are the shares of heads
    for which a guard raised the budget or fell back to dense attention.
    """

    layer: int
    missed: float
    raised: float
    dense: float


@dataclass(frozen=True)
class Fed:
    """Tokens that a forward pass feeds for the sequence in `slot`.

    Their keys and values become the slot's own rows from index `first` on. With `asks`, the tokens belong to a
    question. Otherwise there is a single token, the newest of an answer.
    """

    slot: int
    first: int
    tokens: list[int]
    asks: bool


ModelInput = tuple[torch.Tensor, torch.Tensor]
"""Token ids and position ids, as a model takes them."""


class SequenceCache(CalledCache, ABC):
    """A transformers cache of the sequences that an engine decodes, in one slot each, over one stored context.

    `stored_layers` are the layers that attend, and `by_number` maps their indices in the model to them. `states` are
    the states of the layers that keep a state.

    `watched` records the queries of the watched heads in each pass; None: no queries are recorded. Set by `watch`.

    `attend` is the attention function to route the model's calls to. `tokens` [slots] int64 on the device are the
    inputs of a decode step. `graphs` are the captured decode steps, by their number of tokens. A captured step is valid
    as long as `buffers()` does not change. `capturing` is False on a CPU, and after a failed capture.
    """

    ROOM: int
    """Maximum number of rows that are reserved in advance for captured steps."""

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

    @property
    @abstractmethod
    def rewinds(self) -> int:
        """Number of calls of `rewind`, each of which drops the own rows of all sequences."""

    @property
    def capturable(self) -> bool:
        """Whether a captured decode step can be replayed for all later steps."""
        return self.capturing

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
        """Return copies of the first `tokens` own rows of a slot, and of the slot's state.

        The state is that after all rows of the slot, so it belongs to the copied rows only if these are all rows.
        """
        raise NotImplementedError

    def restore(self, slot: int, kept: KeptRows) -> None:
        """Overwrite the first own rows of a slot, and the slot's state, with kept rows."""
        raise NotImplementedError

    def clear(self, slot: int) -> None:
        """Set the own rows of a slot to zero. They may have NaN or infinity, which even a masked row must not have."""

    @abstractmethod
    def reserve(self, needed: int, most: int, *, capture: bool) -> bool:
        """Reserve `needed` own rows per sequence for a decode step; return whether buffers may have changed.

        If steps are captured, up to ROOM rows are reserved in advance. `most` is the maximum number of own rows that a
        sequence can get.
        """

    @abstractmethod
    def place(self, fed: Sequence[Fed], size: int) -> None:
        """Write the row indices of the next decode step's tokens to the device; the step feeds `size` tokens."""

    @abstractmethod
    def step_input(self, size: int, tokens: int) -> ModelInput:
        """Begin a decode step of `size` tokens, which may be captured; `tokens`: as in `questions_input`."""

    def passes(self, fed: Sequence[Fed]) -> list[list[Fed]]:
        """Divide the tokens that a step feeds into forward passes."""
        return [list(fed)]

    def end_step(self) -> None:
        """End a decode step on the device; may be captured."""

    @abstractmethod
    def advance(self) -> None:
        """Count a launched or replayed decode step on the host."""

    def release(self) -> None:
        """End the decode steps of an answer."""

    @abstractmethod
    def buffers(self) -> tuple[int, ...]:
        """Return a fingerprint of all buffers that a captured step refers to."""

    def watch(self, watched: WatchedQueries) -> None:
        """Record the queries of the heads in `watched` in each pass from now on. Decode steps are captured again."""
        self.watched = watched
        self.graphs.clear()

    @abstractmethod
    def own_keys(self, layer: int, slot: int, tokens: int) -> torch.Tensor:
        """Return the keys [Hk, tokens, D] of the first own tokens of a sequence, those after the stored context."""

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
    """The cache of a single sequence.

    Between `reserve` and `release`, each layer appends one row per step, so that the step can be captured as a CUDA
    graph. A `DynamicSlot` on the device has the index of this row.

    Args:
        batch: number of sequences that decode in lockstep, concatenated along the heads, each with its own context.
        states: the states after the stored context; None if no layer keeps a state.
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
        layer.update(call.keys[None], call.values[None])
        return layer.attend(call)

    def own_keys(self, layer: int, slot: int, tokens: int) -> torch.Tensor:
        of_layer = self.by_number[layer]
        return of_layer.keys[:, of_layer.first : of_layer.first + tokens]

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
        """Switch back to appending any number of rows per step."""
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

    def check_length(self, tokens: int) -> None:
        """Raise SparsekvError unless every layer has `tokens` tokens, or every layer has one token less.

        Without this check, transformers would prefill the tokens that it considers missing, possibly the whole
        document, and append rows that the cache already has.
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

        The prompt tokens that the cache lacks are prefilled, in calls of any length. Each later token is a decode step.
        The counts of rows read and of missed mass are reset. After `rewind` no prompt is expected.
        """
        for layer in self.stored_layers:
            layer.expect_prompt(tokens)
            layer.start_counting()

    def kv_fraction(self) -> float:
        """Return the middle and index rows that were read, as a share of the middle rows that dense attention reads.

        The rows of all decode steps are counted. Returns 1 if all layers are dense, because dense layers count nothing.
        Needs one sync per device.
        """
        return read_share(total_read(self.reads), sum(read.dense for read in self.reads), counted=bool(self.reads))

    def stats(self) -> list[LayerStats]:
        """Return the statistics of each layer that has measured missed mass; one sync per layer."""
        measured = ((number, layer.missed()) for number, layer in self.by_number.items())
        return [LayerStats(number, *shares) for number, shares in measured if shares is not None]
