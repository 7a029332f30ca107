"""Answer many questions over one open index with continuous batching: each finished answer frees its slot.

The tokens of all sequences in a step go through the model as one row. They are one token of each sequence that is
answering, and all tokens of the questions that begin. So nothing is padded, and the model's weights and the document's
rows are read once for all sequences.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.formats.models.rope import rope_depends_on_length
from sparsekv.kernels.common.given_rows import with_cache
from sparsekv.kernels.common.hook import route_attention
from sparsekv.runtime.attention.config import Dense
from sparsekv.runtime.attention.sparse_layer import SparseLayer, packed_layer
from sparsekv.runtime.cache.buffers import read_share, total_read
from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.cache.packed_cache import PackedCache, PackedStep, Piece
from sparsekv.runtime.decoding.generate import (
    Answer,
    NotFiniteError,
    Sampling,
    answer_of,
    answer_room,
    ending_tokens,
)
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.sampling import warpers
from sparsekv.runtime.decoding.step import SharedStep
from sparsekv.runtime.decoding.threads import all_cores, exclusive, free_cores
from sparsekv.runtime.selection.interface import MethodSpec

QUESTION_TOKENS = 2048
"""Maximum number of tokens of the questions that begin in one step; a longer question is the only one to begin.

With a maximum of 512 a GPU would wait for the host, which launches the same number of operations for fewer tokens.
"""


def why_alone(index: OpenIndex, attention: MethodSpec | Dense, cache: IndexCache) -> str:
    """Return the reason why several questions cannot share a step; empty if they can."""
    if rope_depends_on_length(index.artifact.manifest.rope.parameters):
        return "this model turns keys by the length of a sequence, and sequences in a step have several lengths"
    plans = [layer.plan for layer in cache.stored_layers if isinstance(layer, SparseLayer)]
    if isinstance(attention, MethodSpec) and not attention.method.can_unite():
        return "what stands for the tokens that this method leaves differs from question to question"
    if not all(plan.shareable for plan in plans):
        return (
            "--gauge, --guard, --ahead, --stream and --step keep something of one question, which others cannot share"
        )
    return ""


def pack(cache: IndexCache, slots: int) -> PackedCache:
    """Make a cache for `slots` sequences that shares the stored context of `cache`."""
    return PackedCache(cache.stored_layers, [packed_layer(layer, slots) for layer in cache.stored_layers], cache.built)


@dataclass
class _Sequence:
    """One question and its answer so far; `used` is the number of its tokens in the cache.

    `number` is the question's index, and `longest` the maximum number of answer tokens. `started`, `first` and `last`
    are clock readings in seconds. `read_before` are the counts of rows read when the question began.
    """

    number: int
    question: torch.Tensor
    longest: int
    random: torch.Generator
    started: float
    answer: list[int] = field(default_factory=list)
    used: int = 0
    first: float = 0.0
    last: float = 0.0
    read_before: tuple[float, int] = (0.0, 0)

    def next_tokens(self) -> list[int]:
        """Return the tokens to feed in the next step: first the whole question, later the newest answer token."""
        return self.answer[-1:] if self.answer else self.question.tolist()

    def take(self, token: int) -> None:
        """Record the next token of the answer."""
        self.used += len(self.next_tokens())
        self.answer.append(token)
        self.last = time.perf_counter()
        self.first = self.first or self.last


class Batch:
    """Decodes questions over one index together, up to `slots` at a time.

    Allocates rows for the own tokens of `slots` sequences, and in each step the logits of all sequences.

    Args:
        cache: a cache for which `why_alone` returns no reason. Its rows are shared, so no other code may use it
            meanwhile.
    """

    def __init__(self, index: OpenIndex, cache: IndexCache, sampling: Sampling, slots: int):
        self.index, self.cache, self.sampling, self.slots = index, cache, sampling, slots
        self.packed = pack(cache, slots)
        on_gpu = index.model.device.type == "cuda"
        self.shared = SharedStep(index.model, self.packed, index.split.tokens, slots, capture=on_gpu)
        self.active: dict[int, _Sequence] = {}
        self.read: tuple[float, int] | None = None
        self.ends = ending_tokens(index)

    @torch.inference_mode()
    def one_step(self) -> None:
        """Run one warm-up step with `slots` sequences and no questions; compiled kernels and captured graphs stay."""
        last, model = int(self.index.input_ids[-1]), self.index.model
        with exclusive(model), route_attention(model, self.packed.attend), free_cores(model), all_cores(model):
            self.shared([last] * self.slots, list(range(self.slots)), [0] * self.slots)

    def answers(self, questions: Sequence[torch.Tensor]) -> Iterator[tuple[int, Answer]]:
        """Answer questions, each of token ids [Q]; yield each answer with its question's index once it is complete.

        While this generator waits for its caller, other threads may use the model. If one of them rewinds the cache,
        this generator raises.

        Raises:
            UsageError: no position of the model is left for an answer, another question was asked over the same cache
                between two answers, or this was called from an answer's callback.
            NotFiniteError: the model's logits are not finite.
        """
        waiting = [(number, question, self._longest(question)) for number, question in enumerate(questions)][::-1]
        with exclusive(self.index.model):
            self.cache.rewind()
            self.active, self.read, mine = {}, None, self.cache.rewinds
        while waiting or self.active:
            with exclusive(self.index.model):
                if self.cache.rewinds != mine:
                    raise UsageError("another question was asked over the cache of a batch; ask again, or ask_all")
                done = self._until_answered(waiting)
            yield from done

    @torch.inference_mode()
    def _until_answered(self, waiting: list[tuple[int, torch.Tensor, int]]) -> list[tuple[int, Answer]]:
        """Run steps until one completes answers; return the completed questions' indices and answers."""
        model, done = self.index.model, list[tuple[int, Answer]]()
        with route_attention(model, self.packed.attend), free_cores(model) as cores, all_cores(model):
            while not done:
                cores.follow()
                self._admit(waiting)
                for slot, token in self._step():
                    sequence = self.active[slot]
                    sequence.take(token)
                    if token in self.ends or len(sequence.answer) == sequence.longest:
                        done.append((sequence.number, self._answer(self.active.pop(slot))))
        return done

    def _longest(self, question: torch.Tensor) -> int:
        room = answer_room(self.index, len(self.index.input_ids) + len(question))
        return self.sampling.max_new_tokens if room is None else min(room, self.sampling.max_new_tokens)

    def _admit(self, waiting: list[tuple[int, torch.Tensor, int]]) -> None:
        """Assign free slots to the next questions, up to QUESTION_TOKENS tokens together."""
        tokens = 0
        for slot in range(self.slots):
            if not waiting or (tokens and tokens + len(waiting[-1][1]) > QUESTION_TOKENS):
                return
            if slot not in self.active:
                number, question, longest = waiting.pop()
                random = torch.Generator(self.index.model.device).manual_seed(self.sampling.seed)
                sequence = _Sequence(number, question, longest, random, time.perf_counter())
                sequence.read_before = self._read()
                self.active[slot] = sequence
                tokens += len(question)

    def _step(self) -> list[tuple[int, int]]:
        """Run one step; return a pair of slot and next token for each sequence."""
        self.read = None
        slots = sorted(self.active)
        fed = [self.active[slot].next_tokens() for slot in slots]
        if all(self.active[slot].answer for slot in slots):
            used = [self.active[slot].used for slot in slots]
            logits = self.shared([tokens[0] for tokens in fed], slots, used)
        else:
            logits = self._begin(slots, fed)
        return list(zip(slots, self._choose(logits, slots), strict=True))

    def _begin(self, slots: list[int], fed: list[list[int]]) -> torch.Tensor:
        """Run a step in which some questions begin; return the logits [B, V]."""
        device, lengths = self.index.model.device, [len(tokens) for tokens in fed]
        asks = [not self.active[slot].answer for slot in slots]
        ends = torch.tensor(lengths).cumsum(0)
        firsts = (ends - torch.tensor(lengths)).tolist()
        used = [self.active[slot].used for slot in slots]
        rows = torch.cat([torch.arange(start, start + length) for start, length in zip(used, lengths, strict=True)])
        step = PackedStep(
            slots=torch.tensor(slots).repeat_interleave(torch.tensor(lengths)).to(device),
            rows=rows.to(device),
            ends=ends.int().to(device),
            single=torch.tensor([first for first, one in zip(firsts, asks, strict=True) if not one]).to(device),
            pieces=tuple(Piece(*one) for one in compress(zip(slots, firsts, lengths, strict=True), asks)),
            longest=max(start + length for start, length in zip(used, lengths, strict=True)),
        )
        self.packed.begin(step)
        logits: torch.Tensor = self.index.model(
            input_ids=torch.tensor([list(chain.from_iterable(fed))], device=device),
            position_ids=(self.index.split.tokens + step.rows)[None],
            **with_cache(self.index.model, self.packed),
            logits_to_keep=(ends - 1).to(device),
        ).logits[0]
        return logits

    def _choose(self, logits: torch.Tensor, slots: list[int]) -> list[int]:
        """Choose the next token of each sequence from its logits [B, V], by sampling or as the argmax."""
        highest, best = logits.float().max(-1)
        *tokens, finite = torch.cat([best, highest.isfinite().all()[None]]).tolist()
        if not finite:
            raise NotFiniteError
        if not self.sampling.temperature:
            return tokens
        scores = logits.to(torch.float32, copy=True)
        nothing = torch.empty(len(slots), 0, dtype=torch.int64, device=scores.device)
        probability = warpers(self.sampling)(nothing, scores).softmax(-1)  # type: ignore[arg-type]  # any tensors will do
        drawn = zip(probability, slots, strict=True)
        each = [torch.multinomial(one, 1, generator=self.active[slot].random) for one, slot in drawn]
        return torch.cat(each).tolist()

    def _read(self) -> tuple[float, int]:
        """Return the rows read for all sequences so far, and the rows that dense attention would have read.

        The first call after a step needs one sync.
        """
        if self.read is None:
            counts = self.packed.reads
            self.read = total_read(counts), sum(count.dense for count in counts)
        return self.read

    def _answer(self, done: _Sequence) -> Answer:
        read, dense = (now - before for now, before in zip(self._read(), done.read_before, strict=True))
        fraction = read_share(read, dense, counted=bool(self.packed.reads))
        tokens = self.index.split.tokens + len(done.question)
        return answer_of(self.index, done.answer, tokens, (done.started, done.first, done.last), fraction)
