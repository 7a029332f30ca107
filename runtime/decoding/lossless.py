"""Lossless decoding: tokens are drafted, and one pass of dense attention verifies several of them.

There are two kinds of drafts. One copies the tokens that followed an earlier occurrence of the newest tokens in answer,
question or document. The other is decoded by the config's method. A pass over T drafted tokens gives dense attention's
logits after each of them. The answer takes the tokens chosen from these logits, up to and including the first that
differs from the draft. So the answer is that of dense attention, greedy or sampled.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from sparsekv.formats.errors import UsageError
from sparsekv.formats.models.rope import rope_depends_on_length
from sparsekv.kernels.common.given_rows import with_cache
from sparsekv.kernels.common.hook import route_attention
from sparsekv.runtime.attention.config import DecodeConfig, Dense
from sparsekv.runtime.attention.sparse_layer import PackedDense, PackedSparse, SparseLayer
from sparsekv.runtime.cache.index_cache import Fed, IndexCache
from sparsekv.runtime.cache.packed_cache import PackedCache, PackedLayer, SlotRows
from sparsekv.runtime.cache.stored_layer import DenseLayer, StoredLayer
from sparsekv.runtime.decoding.answer import Answer
from sparsekv.runtime.decoding.engine import Ended, Engine, NotFiniteError, Sequence
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.step import DecodeStep


def verifies_in_place(cache: IndexCache) -> bool:
    """Whether dense attention can read all rows of a cache in place, on a GPU.

    Then a pass can be captured as a CUDA graph.
    """
    layers = cache.stored_layers
    if not all(layer.keys.is_cuda and layer.keys.shape == layer.values.shape for layer in layers):
        return False
    sparse = (layer for layer in layers if isinstance(layer, SparseLayer))
    return all(layer.plan.middle.in_place() is not None for layer in sparse)


class VerifyingCache(PackedCache):
    """A cache through which one pass of dense attention feeds up to `tokens` tokens of an `IndexCache`'s sequence.

    A pass is a step of a `PackedCache` whose tokens all have the same slot, in neighbouring rows. The slot's rows are
    views of the buffers of the `IndexCache`, so the rows of a pass need no copy. They become rows of the sequence once
    `IndexCache.count_written` counts them.
    """

    def __init__(self, alone: IndexCache, tokens: int):
        super().__init__(alone, [_verifying_layer(layer) for layer in alone.stored_layers], tokens)
        self._bound: list[torch.Tensor] = []
        """For each layer, the buffer of keys that the slot's rows are a view of."""

    def reserve(self, needed: int, most: int, *, capture: bool) -> bool:
        same = bool(self._bound) and needed <= self.packed[0].own.capacity
        if same and all(layer.keys is one for layer, one in zip(self.stored_layers, self._bound, strict=True)):
            return False
        for layer in self.stored_layers:
            layer.make_room(layer.first + max(needed, min(most, needed + self.ROOM)))
        # Layers of one step must have slots of one capacity.
        capacity = min(layer.keys.shape[1] - layer.first for layer in self.stored_layers)
        for layer, packed in zip(self.stored_layers, self.packed, strict=True):
            after = slice(layer.first, layer.first + capacity)
            packed.own = SlotRows(layer.keys[None, :, after], layer.values[None, :, after])
        self._bound = [layer.keys for layer in self.stored_layers]
        return True

    def buffers(self) -> tuple[int, ...]:
        addresses = (one.data_ptr() for layer in self.packed for one in (layer.own.keys, layer.own.values))
        return self.packed[0].own.capacity, *addresses

    def advance(self) -> None:
        """Count no rows as read: `DraftingEngine` gives each answer a KV fraction of 1."""


def _verifying_layer(layer: StoredLayer) -> PackedLayer:
    if isinstance(layer, SparseLayer):
        return PackedSparse(layer, 1, dense_from=1)
    assert isinstance(layer, DenseLayer)
    return PackedDense(layer, 1)


class Verification:
    """Feeds a sequence's tokens in passes of dense attention over an `IndexCache`.

    `verifies_in_place` must be true of the cache.

    Args:
        tokens: maximum number of tokens of a pass.
    """

    def __init__(self, index: OpenIndex, cache: IndexCache, tokens: int):
        self.model, self.cache, self.verifying = index.model, cache, VerifyingCache(cache, tokens)
        self.step = DecodeStep(index.model, self.verifying, index.split.tokens)

    def logits(self, first: int, tokens: Tokens[int], most: int) -> torch.Tensor:
        """Return the logits [T, V] after each of the fed tokens. The next call may overwrite them.

        Args:
            first: row index of the first fed token, counted from the end of the stored context.
            most: maximum number of rows after the stored context, at the end of the answer.
        """
        self.cache.release()
        fed = [Fed(0, first + place, [token], asks=False) for place, token in enumerate(tokens)]
        with route_attention(self.model, self.verifying.attend):
            logits = self.step(fed, torch.tensor(tokens), most)
        self.cache.count_written(len(tokens))
        return logits


REPEATED = (3, 2)
"""Numbers of newest tokens whose earlier occurrence is searched for, in this order."""
FROM_TEXT = "text"
"""Source of a draft that is copied from earlier text.

Any other source is the number of tokens that the method decodes for the draft; 0: there is no draft.
"""
BY_METHOD = (2, 4, 8)
LONGEST, SHORTEST = 15, 2
"""Maximum and minimum length of a draft that is copied from earlier text.

With the newest token, the longest draft fills a pass of 16 tokens, the largest that is captured on a GPU.
"""
KEPT = 0.8
"""Decay: factor of a draft source's summed seconds and tokens when another step of this source is added."""
AGAIN = 64
"""A draft source that was unused for this number of steps, times the number of sources, is tried again."""
WORTH_IT = 0.85
"""Largest ratio of the method's seconds per token to dense attention's at which the method decodes drafts.

If dense attention accepts nine of ten tokens, drafts of two tokens save no time at this ratio, and longer drafts lose
time.
"""
HOPELESS = 1000
"""Number of steps for which the method decodes no drafts, after its ratio exceeded `WORTH_IT`."""


@dataclass
class Pace:
    """Seconds and answer tokens of the steps with one source of drafts, as sums that decay by `KEPT` at each step.

    `last` is the number of the step in which the source was last used; 0: never.
    """

    seconds: float = 0.0
    tokens: float = 0.0
    last: int = 0

    def add(self, seconds: float | None, tokens: int, step: int) -> None:
        """Add a step's seconds and tokens to the sums, and record the step's number as `last`.

        The source's first step, which may compile code, and a step with `seconds` None are not added to the sums.
        """
        if self.last and seconds is not None:
            self.seconds, self.tokens = KEPT * self.seconds + seconds, KEPT * self.tokens + tokens
        self.last = step

    @property
    def per_token(self) -> float:
        """Seconds per token of the answer; 0 without a measurement, so that the source is tried."""
        return self.seconds / self.tokens if self.tokens else 0.0


class SortedRuns:
    """All runs of `number` tokens of a text, sorted, so that each step finds a run without reading the text.

    Allocates 12 bytes for each token of the text.
    """

    def __init__(self, text: NDArray[np.int64], number: int):
        self.number, self.base = number, int(text.max(initial=0)) + 1
        # A run at the text's end is left out, because no token follows it.
        runs = self._keys(sliding_window_view(text, number)[:-1] if len(text) > number else text[:0, None])
        order = runs.argsort(kind="stable")
        self.sorted, self.order = runs[order], order.astype(np.int32)

    def after(self, run: NDArray[np.int64]) -> int | None:
        """Return the index after the last occurrence of a run of tokens in the text; None if there is none."""
        if run.max() >= self.base:
            return None
        key = self._keys(run[None])[0]
        place = int(self.sorted.searchsorted(key, side="right")) - 1
        return int(self.order[place]) + self.number if place >= 0 and self.sorted[place] == key else None

    def _keys(self, runs: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return a number for each run [N, number]; runs of tokens below `base` have the same number if they are equal.

        Three tokens of a vocabulary of up to two million fit into 63 bits.
        """
        keys: NDArray[np.int64] = (runs * self.base ** np.arange(runs.shape[1])).sum(1)
        return keys


def _after_last(text: NDArray[np.int64], run: NDArray[np.int64]) -> int | None:
    """Return the same as `SortedRuns.after`, for a text that changes in each step."""
    last = len(text) - len(run)
    same = np.ones(max(0, last), dtype=bool)
    for offset, token in enumerate(run):
        same &= text[offset : offset + last] == token
    found = np.flatnonzero(same)
    return int(found[-1]) + len(run) if len(found) else None


@dataclass
class Drafter:
    """Chooses the source of each draft by the measured seconds per token, and counts drafted and accepted tokens.

    Args:
        document: token ids of the stored prompt, from which drafts may be copied.
        by_method: whether the config's method decodes drafts; False for dense attention.
        length: maximum length of the next draft that is copied from earlier text.

    Attributes:
        steps: number of steps so far.
        drafted, accepted: numbers of drafted tokens and of accepted tokens so far.
        paces: speed of each source; the keys are the values that `source` returns.
        decoding: speed of the method alone, for the tokens of its drafts.
    """

    document: NDArray[np.int64]
    by_method: bool
    length: int = 4
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    paces: dict[str | int, Pace] = field(default_factory=dict)
    decoding: Pace = field(default_factory=Pace)

    def from_text(self, tokens: list[int]) -> list[int]:
        """Return up to `length` tokens that followed the last earlier occurrence of the newest tokens.

        The newest three tokens are searched for, then the newest two (`REPEATED`), first in `tokens` and then in the
        document. Returns an empty list if neither occurs.

        Args:
            tokens: the tokens of question and answer.
        """
        near = np.asarray(tokens, dtype=np.int64)
        for number in REPEATED:
            if len(near) < number:
                continue
            newest = near[-number:]
            for text, place in ((near, _after_last(near, newest)), (self.document, self._runs[number].after(newest))):
                if place is not None:
                    return [int(token) for token in text[place : place + self.length]]
        return []

    @cached_property
    def _runs(self) -> dict[int, SortedRuns]:
        return {number: SortedRuns(self.document, number) for number in REPEATED}

    def source(self, found: Tokens[int]) -> str | int:
        """Return the source of the next draft: the one with the fewest seconds per token, or one to retry (`AGAIN`).

        Args:
            found: the draft from earlier text. If it is empty, earlier text is no source.
        """
        sources: list[str | int] = [*([FROM_TEXT] if found else []), 0, *self._by_method()]
        paces = {one: self.paces.setdefault(one, Pace()) for one in sources}
        forgotten = min(sources, key=lambda one: paces[one].last)
        if self.steps - paces[forgotten].last >= AGAIN * len(sources):
            return forgotten
        return min(sources, key=lambda one: paces[one].per_token)

    def _by_method(self) -> tuple[int, ...]:
        """Return the lengths of drafts that the method may decode.

        A draft saves time only if the method takes less time for a token than dense attention (`WORTH_IT`). Until this
        is known, the method decodes only short drafts.
        """
        if not self.by_method:
            return ()
        by_method, dense = self.decoding.per_token, self.paces.get(0, Pace()).per_token
        if not by_method:
            return BY_METHOD[:1]
        slow = bool(dense) and by_method > WORTH_IT * dense
        hopeless = slow and self.steps - self.decoding.last < HOPELESS
        return () if hopeless else BY_METHOD

    def count(self, source: str | int, drafted: int, accepted: int, seconds: float | None) -> None:
        """Count a step's drafted and accepted tokens, and its seconds.

        After a draft from earlier text, also adapt `length`, the maximum length of the next such draft.

        Besides the accepted tokens, the step adds one token to the answer. `seconds` is None for a step whose time is
        no measure of later steps.
        """
        self.steps += 1
        self.drafted, self.accepted = self.drafted + drafted, self.accepted + accepted
        self.paces.setdefault(source, Pace()).add(seconds, accepted + 1, self.steps)
        if source == FROM_TEXT:
            grown = self.length + 2 if accepted == drafted else accepted + 1
            self.length = min(LONGEST, max(SHORTEST, grown))


class DraftingEngine(Engine):
    """An engine of one sequence, whose steps verify drafts by dense attention.

    A pass over T tokens allocates their logits, and on a CPU also each layer's attention logits of T queries on all
    tokens. On a GPU a pass is captured as a CUDA graph, if dense attention can read all rows in place.

    Args:
        cache: a cache of one sequence for `config`.
        config: a config with `lossless`.

    Raises:
        UsageError: the method or a layer of the model keeps a state that a rejected token changes, or the model's RoPE
            depends on a sequence's length.
    """

    def __init__(self, index: OpenIndex, cache: IndexCache, config: DecodeConfig):
        super().__init__(index, cache)
        if cache.live_states():
            raise UsageError(
                "--lossless: the model has layers with a state, from which a rejected token cannot be removed; leave "
                "the option out"
            )
        if rope_depends_on_length(index.artifact.manifest.rope.parameters):
            raise UsageError(
                "--lossless: this model's RoPE depends on a sequence's length, which a rejected token changes; leave "
                "the option out"
            )
        if not all(layer.plan.shareable for layer in cache.stored_layers if isinstance(layer, SparseLayer)):
            raise UsageError(
                f"--lossless: {config.attention.name} keeps state of steps that dense attention may reject; leave the "
                "option out, or give another --method"
            )
        self.sequence_cache = cache
        self.drafter = Drafter(index.input_ids.numpy(), by_method=not isinstance(config.attention, Dense))
        self.verification = Verification(index, cache, LONGEST + 1) if verifies_in_place(cache) else None

    def run_step(self) -> list[Ended]:
        sequence = self.active.get(0)
        if sequence is None or not sequence.answer:
            return super().run_step()
        spent, room = self._stopwatch(), sequence.longest - len(sequence.answer) - 1
        found = self.drafter.from_text([*sequence.question, *sequence.answer])[: max(0, room)]
        source = self.drafter.source(found)
        if not self.drafter.by_method and source == 0:
            before = len(sequence.answer)
            ended = super().run_step()
            self.drafter.count(0, 0, len(sequence.answer) - before - 1, spent())
            return ended
        draft = found if source == FROM_TEXT else self._decoded(sequence, min(int(source), max(0, room)))
        if source != FROM_TEXT and draft:
            self.drafter.decoding.add(spent(), len(draft), self.drafter.steps + 1)
        before = len(sequence.answer)
        ended = self._verify(sequence, draft)
        taken = len(sequence.answer) - before
        self.drafter.count(source, len(draft), max(0, taken - 1), spent())
        return ended

    def _stopwatch(self) -> Callable[[], float | None]:
        """Return a function that returns the seconds since this call; None if a CUDA graph was captured since then."""
        steps = [self.step, *([self.verification.step] if self.verification else [])]
        began, captures = time.perf_counter(), [step.captures for step in steps]

        def spent() -> float | None:
            return time.perf_counter() - began if [step.captures for step in steps] == captures else None

        return spent

    @torch.inference_mode()
    def _decoded(self, sequence: Sequence, tokens: int) -> list[int]:
        """Decode a draft of `tokens` tokens greedily by the config's method; drop the draft's rows from the cache."""
        draft = list[int]()
        while len(draft) < tokens:
            newest = [*sequence.answer[-1:], *draft][-1]
            fed = Fed(0, sequence.used + len(draft), [newest], asks=False)
            logits = self.step([fed], torch.tensor([newest]), sequence.most)
            draft.append(int(self.index.agreed(logits).argmax()))
        self.sequence_cache.drop(len(draft))
        return draft

    @torch.inference_mode()
    def _verify(self, sequence: Sequence, draft: list[int]) -> list[Ended]:
        """Feed the newest token and a draft. Add tokens to the answer, up to the first that differs from the draft.

        The token that differs is added too. Returns the sequence with its answer, or with an error, if the sequence
        ends; otherwise an empty list.
        """
        logits = self._dense_logits(sequence, [sequence.answer[-1], *draft])
        self.read = None
        taken, ended = 0, False
        greedy = not sequence.request.sampling.temperature
        chosen = self._choose(logits, [0] * len(logits)) if greedy else None
        for place in range(len(logits)):
            (token, *_), (logprobs, *_) = (
                (chosen[0][place:], chosen[1][place:]) if chosen else self._choose(logits[place : place + 1], [0])
            )
            sequence.used, taken = sequence.used + 1, taken + 1
            if token is None:
                ended = True
                break
            ended = sequence.take(token, logprobs, self.ends)
            if ended or place == len(draft) or token != draft[place]:
                break
        self.sequence_cache.drop(len(logits) - taken)
        if not ended:
            sequence.stream()
            return []
        if token is None:
            self.sequence_cache.clear(0)
            return [(self.active.pop(0), NotFiniteError())]
        return [self._end(0)]

    def _answer(self, done: Sequence) -> Answer:
        return replace(super()._answer(done), kv_fraction=1.0)

    @property
    def told(self) -> str:
        """A line for the user with the numbers of drafted and accepted tokens so far."""
        drafter = self.drafter
        if not drafter.drafted:
            return "no token was drafted"
        tokens = (drafter.steps + drafter.accepted) / drafter.steps
        return (
            f"{drafter.accepted:,} of {drafter.drafted:,} drafted tokens accepted, {tokens:.2f} tokens per pass of "
            "dense attention"
        )

    def _dense_logits(self, sequence: Sequence, tokens: list[int]) -> torch.Tensor:
        """Return the logits [T, V] after each of the sequence's next tokens, by dense attention."""
        if self.verification is not None:
            return self.verification.logits(sequence.used, tokens, sequence.most)
        cache = self.sequence_cache
        cache.release()
        cache.prefill_next(len(tokens))
        ids, positions = cache.questions_input([Fed(0, sequence.used, tokens, asks=False)], self.index.split.tokens)
        logits: torch.Tensor = self.index.model(
            input_ids=ids, position_ids=positions, **with_cache(self.index.model, cache)
        ).logits[0]
        return logits
