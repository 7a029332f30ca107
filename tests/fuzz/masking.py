"""The deed that masks: logits of sparse answers are those of plain transformers that see what each layer chose.

Transformers attends with a mask to the chosen tokens alone. Centroids are further keys and values, whose log-counts
are in the mask. So not the choice is checked, but all that is done with it, by one question and by several together.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from sparsekv.kernels.common.hook import AttentionCall
from sparsekv.runtime.attention.executors import Fetched, GatherExecutor, GatherMaker, LayerOutput, Step
from sparsekv.runtime.cache.packed_cache import PackedCache
from sparsekv.runtime.decoding.answer import Sampling, question_ids
from sparsekv.runtime.decoding.engine import Engine, Request, TokenLogprobs, pack, why_alone
from sparsekv.runtime.decoding.engine import Sequence as Answering
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.session import Session
from sparsekv.runtime.reporting.recall import chosen_positions
from sparsekv.runtime.selection.interface import CentroidSegment, Selection, Selector

from .deeds import deed
from .oracles import ROUNDING, Seen, expect, plain_over
from .questions import expect_same_steps, fed_with, stepped
from .rounding import Rounding, expect_logits
from .world import World, stored_rows


@dataclass(frozen=True)
class Chosen:
    """A layer's choice for the queries of `queries` tokens, of which the first is row `first` after the stored context.

    Attributes:
        middle: the number M of tokens between sinks and tail, to which `--stream` adds tokens.
        positions: [Hk, Q or 1, R], positions of the chosen tokens; M stands for no token. None: all tokens.
        log_weights: [Hk, G, Q or 1, R], the log-weights of these tokens.
        rest: the centroids that were attended to.
    """

    first: int
    queries: int
    middle: int
    positions: torch.Tensor | None
    log_weights: torch.Tensor | None = None
    rest: tuple[CentroidSegment, ...] = ()


Keep = Callable[[Chosen], None]


class Recorder(GatherExecutor):
    """Gathers as always, and keeps what was chosen. The steps of several answers only fetch."""

    def __init__(self, *layer: Any, keep: Keep, stored: int, **options: Any):
        super().__init__(*layer, **options)
        self.keep, self.stored, self.tokens = keep, stored, (0, 1)

    def attend_to_everything(self, step: Step) -> torch.Tensor:
        self.keep(Chosen(step.first - self.stored, step.query.shape[2], self.middle.used, None))
        return super().attend_to_everything(step)

    def attend_to(self, step: Step, selection: Selection, selector: Selector) -> LayerOutput:
        self.tokens = step.first - self.stored, step.query.shape[2]
        try:
            return super().attend_to(step, selection, selector)
        finally:
            self.tokens = 0, 1

    def fetch(self, selection: Selection, device: torch.device) -> Fetched:
        middle = self.middle.used
        positions = chosen_positions(selection.rows, self.selector.layout, middle)
        rest = tuple(  # copies, because an append of tokens changes centroids in place
            CentroidSegment(part.keys.clone(), part.log_counts.clone(), part.values.clone())
            for part in selection.attended_segments()
        )
        self.keep(Chosen(*self.tokens, middle, positions, selection.rows.log_weights, rest))
        return super().fetch(selection, device)


@dataclass
class Recording:
    """An asker whose layers keep what they chose, by layer, since `found` was cleared."""

    index: OpenIndex
    asker: Session
    found: dict[int, list[Chosen]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        def maker(layer: int) -> GatherMaker:
            return partial(Recorder, keep=self.found.setdefault(layer, []).append, stored=self.index.split.tokens)

        self.asker = Session.open(self.index, self.asker.config, gather_makers=maker)


def seen(index: OpenIndex, chosen: Sequence[Chosen], fed: int, heads: tuple[int, int]) -> Seen:
    """A layer's mask [Hq, T, N + T + C] of T tokens after N stored ones, and C further keys and values [Hk, C, D]."""
    split, (Hk, G) = index.split, heads
    causal = torch.cat([torch.zeros(fed, split.tokens), torch.full((fed, fed), -math.inf).triu(1)], 1)
    masks, further = [causal.repeat(Hk, G, 1, 1)], [part for one in chosen for part in one.rest]
    for one in chosen:
        rows = slice(one.first, one.first + one.queries)
        if one.positions is not None:
            places = one.positions.cpu()[:, None].expand(Hk, G, one.queries, -1)
            weights = torch.zeros(1) if one.log_weights is None else one.log_weights.cpu()
            of_middle = torch.full((Hk, G, one.queries, one.middle + 1), -math.inf)
            of_middle = of_middle.scatter_(-1, places, weights.expand(places.shape))[..., :-1]
            masks[0][:, :, rows, split.sinks : split.sinks + one.middle] = of_middle
        for part in one.rest:
            column = torch.full((Hk, G, fed, part.keys.shape[1]), -math.inf)
            column[:, :, rows] = part.log_counts.cpu()[:, None].expand(Hk, G, one.queries, -1)
            masks.append(column)
    rest = tuple(torch.cat([getattr(part, name) for part in further], 1) for name in ("keys", "values") if further)
    return Seen(torch.cat(masks, -1).flatten(0, 1), rest)


def masked_logits(world: World, index: OpenIndex, found: dict[int, list[Chosen]], fed: torch.Tensor) -> torch.Tensor:
    """Plain transformers' logits [T, vocabulary] of tokens [T] after the stored prompt, of which layers see what was
    found."""
    rows = stored_rows(world.folder / "index.skv", world.case.layers)
    layers = {}
    for layer, chosen in found.items():
        heads, queries = len(rows[layer][0]), index.artifact.queries(layer)["tail"].shape[0]
        layers[layer] = seen(index, chosen, len(fed), (heads, queries // heads))
    return plain_over(world, rows, index.input_ids, fed, seen=layers)


@deed("masked", 6)
def masked(world: World, index: OpenIndex) -> None:
    """Logits of sparse answers are those of plain transformers with a mask of what each layer chose."""
    asked = question_ids(index, world.question(0), raw=world.case.raw)
    asker = world.asker(index, guard=None, ahead=False)
    recording = Recording(index, asker)
    answer = asker.ask(asked, Sampling(world.case.answer))
    fed, copied = fed_with(asked, answer.ids), recording.asker.ask(asked, Sampling(world.case.answer))
    if copied.ids == answer.ids and copied.kv_fraction is not None and answer.kv_fraction is not None:
        apart = abs(copied.kv_fraction - answer.kv_fraction)
        expect(apart <= 1e-3 * (1 + copied.kv_fraction), "fused kv fraction", f"{answer}, and {copied}")
    for chosen in recording.found.values():
        chosen.clear()
    logits = stepped(index, recording.asker, fed, len(asked))
    oracle, told = partial(masked_logits, world, index, recording.found, fed), "plain ones with a mask of the choice"
    expect_logits(logits, oracle, world, "masked logits", told)
    told = "those of the fused step, with rows that are copied"
    expect_same_steps(logits, world, index, asker, fed, len(asked), "fused logits", told)
    if world.device == "cpu" and not why_alone(index, asker.config.attention, asker.cache):
        _batch(world, index, recording)


class Packed:
    """An engine of `slots` answers over a recording's cache, and what each answer's tokens chose, by layer."""

    def __init__(self, recording: Recording, slots: int):
        self.recording, self.cache = recording, pack(recording.asker.cache, slots)
        self.engine, self._attend = Engine(recording.index, self.cache), self.cache.attend
        self.found: dict[Answering, dict[int, list[Chosen]]] = {}
        self.cache.attend = self.attend  # type: ignore[method-assign]

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Attend as the cache does, and share out what was chosen: first by the answers, then by each question."""
        chosen = self.recording.found.get(call.layer, [])
        chosen.clear()
        output, step = self._attend(call), self.cache.step
        assert isinstance(self.cache, PackedCache)
        assert step is not None
        if not chosen:  # a layer with a window
            return output
        left, single = [*chosen], step.single.tolist()
        of_answers = left.pop(0) if single else None
        for token in single:
            assert of_answers is not None
            own = replace(of_answers, first=int(step.rows[token]), queries=1)
            self._of(int(step.slots[token]), call.layer).append(own)
        for piece in step.pieces:
            end = piece.before + piece.tokens
            while left and left[0].first + left[0].queries <= end:
                one = left.pop(0)
                self._of(piece.slot, call.layer).append(one)
                if one.first + one.queries == end:
                    break
        assert not left
        return output

    def _of(self, slot: int, layer: int) -> list[Chosen]:
        return self.found.setdefault(self.engine.active[slot], {}).setdefault(layer, [])


def _batch(world: World, index: OpenIndex, recording: Recording) -> None:
    """Log-probabilities of answers that share steps are plain transformers' own, with the choice of each answer."""
    case, told = world.case, dict[int, list[TokenLogprobs]]()
    asked = [question_ids(index, world.question(place), raw=case.raw) for place in range(3)]
    packed = Packed(recording, 2 + case.more % 2)

    def note(place: int, token: int, logprobs: TokenLogprobs | None) -> None:
        assert logprobs is not None
        told.setdefault(place, []).append(logprobs)

    requests = [
        Request(ids, Sampling(case.answer + place), on_token=partial(note, place), logprobs=3)
        for place, ids in enumerate(asked)
    ]
    answers = dict(packed.engine.answers(requests))
    for sequence, found in packed.found.items():
        place = next(place for place, one in enumerate(requests) if one is sequence.request)
        fed = fed_with(asked[place], answers[place].ids)
        logits = masked_logits(world, index, found, fed)[len(asked[place]) - 1 :]
        plainly, size = logits.double().log_softmax(-1), float(logits.abs().max())
        apart = max(
            abs(value - float(plainly[step, token]))
            for step, one in enumerate(told[place])
            for token, value in ((one.token, one.logprob), *one.top)
        )
        near = 20 * ROUNDING * size
        if apart > near:
            near = 20 * size * Rounding(world, torch.cat([index.input_ids, fed])).logits(len(logits))
        expect(apart <= near, "masked batch", f"log-probabilities of question {place} are {apart:.2e} from plain ones")
