"""Evaluation of every question over an index built once per document, with each method, budget and prefill."""

import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.metadata import version
from itertools import groupby, product
from pathlib import Path
from typing import Any, Protocol

import torch

from sparsekv.formats.checksums import hash_json, hash_tokens
from sparsekv.formats.documents.continuation import encode_question
from sparsekv.formats.documents.prompt import FixedPrompt, encode_prompt
from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import ModelIdentity, TokenizerIdentity
from sparsekv.formats.models.load import LoadedModel
from sparsekv.formats.models.rope import positions_after, positions_of
from sparsekv.runtime.attention.config import QUESTION_BUDGET, DecodeConfig, Dense, Own, QuestionPrefill
from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.decoding.batch import Batch, why_alone
from sparsekv.runtime.decoding.generate import Sampling, generate
from sparsekv.runtime.decoding.open import OpenIndex, open_index
from sparsekv.runtime.decoding.perplexity import perplexity
from sparsekv.runtime.evaluation.metrics import METRICS
from sparsekv.runtime.evaluation.table import Answers, Result, ScoredAnswer, Variant
from sparsekv.runtime.evaluation.tasks import Context, Question
from sparsekv.runtime.selection.interface import Budget, Method, MethodSpec
from sparsekv.runtime.selection.registry import DENSE

Progress = Callable[[str, int, int], None]
"""Called with a stage, how many of its steps are done, and how many it has."""


class Builder(Protocol):
    """Builds an index of each context; handed in, because answering needs nothing else of building."""

    @property
    def prefills(self) -> Iterable[str]:
        """The ways to prefill, by name."""

    @property
    def parameters(self) -> Mapping[str, dict[str, Any]]:
        """Build parameters of each method that has tensors."""

    @property
    def queries(self) -> int:
        """How many of a document's queries the methods are made of at most."""

    def decides(self, prefill: str) -> dict[str, Any]:
        """Settings that decide an index, beside its prompt and the model."""

    def sample_of(self, name: str) -> dict[str, int]:
        """The number of queries of a method's tensors, where another method wants more."""

    def build(self, prompt: FixedPrompt, prefill: str, folder: Path, progress: Progress) -> None:
        """Build the index of a prompt, or resume it; errors are those of building."""


@dataclass(frozen=True)
class Comparison:
    """The configurations that answer each question: dense attention and methods at budgets, over each prefill.

    The builder has what the methods need, and the prefills; with `residual`, each method is run once more with it;
    `keep` keeps the indices. So many questions of a context are answered `together`.
    """

    loaded: LoadedModel
    identity: tuple[ModelIdentity, TokenizerIdentity]
    methods: dict[str, Method]
    budgets: list[Budget]
    builder: Builder
    question: Dense | Own | QuestionPrefill = field(default_factory=Own)
    residual: bool = False
    raw: bool = False
    keep: bool = False
    max_new_tokens: int | None = None
    together: int = 1

    def count(self, text: str) -> int:
        """Tokens of a document as it is indexed."""
        return len(self.prompt(text, bare=False).input_ids)

    def prompt(self, text: str, *, bare: bool) -> FixedPrompt:
        """A document as it is indexed."""
        return encode_prompt(self.loaded.tokenizer, text, raw=self.raw or bare)

    def question_ids(self, context: Context, question: Question, prompt: FixedPrompt) -> torch.Tensor:
        """Token ids [Q] after the document: the question in the chat template if there is one, and its answer's
        beginning; of a continuation its first tokens."""
        tokenizer, border = self.loaded.tokenizer, prompt.border
        if METRICS[question.metric].continuation:
            return torch.tensor(
                encode_question(tokenizer, border, None, question.answers[0])[: question.max_new_tokens]
            )
        if prompt.chat is not None:
            return torch.tensor(encode_question(tokenizer, border, prompt.chat, question.text, question.prefix))
        text = f"\n{question.text} {question.prefix}".rstrip()
        parts = [question.text, question.prefix] if context.length is None else [text]
        return torch.tensor(encode_question(tokenizer, border, None, *parts))

    def longest(self, question: Question) -> int:
        """Tokens that an answer may have."""
        if METRICS[question.metric].continuation or self.max_new_tokens is None:
            return question.max_new_tokens
        return self.max_new_tokens

    def room(self, context: Context, document: int | None = None) -> int | None:
        """Tokens that a document may have, so that each of its questions and answers fits behind it; None for any.

        Args:
            document: the tokens it has, which decide where some models' positions change; None if they are not known.
        """
        config = self.loaded.model.config
        positions = positions_of(config) if document is None else positions_after(config, document)
        if positions is None:
            return None
        empty = self.prompt("", bare=context.bare)
        asked = (len(self.question_ids(context, one, empty)) + self.longest(one) for one in context.questions)
        return positions - max(asked)

    def ways(self) -> list[Variant]:
        """Every way in which a question is answered, dense attention first."""
        found, variants = [], ["", "residual"] if self.residual else [""]
        for prefill in self.builder.prefills:
            sparse = product(self.methods, variants, self.budgets)
            found += [Variant(prefill, DENSE), *(Variant(prefill, *one) for one in sparse)]
        return found


def check_room(comparison: Comparison, contexts: list[Context]) -> None:
    """Raise UsageError where a document, its question and the answer are more than the model has positions."""
    for context in contexts:
        tokens = len(comparison.prompt(context.text, bare=context.bare).input_ids)
        room = comparison.room(context, tokens)
        if room is not None and tokens > room:
            raise UsageError(
                f"a document of {context.task} has {tokens} tokens, where {comparison.loaded.name} has room for {room} "
                "beside the question and the answer; give a smaller --length"
            )


INDICES = "indices"
DENSELY = {"name": DENSE, "method": None, "budget": asdict(Budget.parse(QUESTION_BUDGET)), "chunk_size": 128}


def evaluate(comparison: Comparison, contexts: list[Context], work: Path, show: Progress) -> Iterator[Result]:
    """Answer every question in every way, taking over answers that are in `work` already.

    Raises:
        UsageError: a document does not fit the model.
        SparsekvError: `work` cannot be written, or another process writes there.
    """
    ways, done = comparison.ways(), 0
    total = len(ways) * sum(len(context.questions) for context in contexts)
    with Answers(work) as answers:
        for context in contexts:
            prompt = comparison.prompt(context.text, bare=context.bare)
            for prefill in comparison.builder.prefills:
                here = [way for way in ways if way.prefill == prefill]
                asking = _Asking(comparison, context, prompt, prefill, answers, work)
                for result in asking.results(here, show):
                    done += 1
                    show("answers", done, total)
                    yield result


def unanswered(comparison: Comparison, contexts: list[Context], answers: Answers, work: Path) -> list[Context]:
    """The contexts that have a question which some way has not answered yet."""
    ways = comparison.ways()

    def is_missing(context: Context) -> bool:
        prompt = comparison.prompt(context.text, bare=context.bare)
        asking = {
            prefill: _Asking(comparison, context, prompt, prefill, answers, work)
            for prefill in comparison.builder.prefills
        }
        keys = (asking[way.prefill].key(way, one) for way in ways for one in context.questions)
        return not all(key in answers.known for key in keys)

    return [context for context in contexts if is_missing(context)]


@dataclass
class _Asking:
    """One context with one prefill. Its index is built when the first answer that is not cached needs it."""

    comparison: Comparison
    context: Context
    prompt: FixedPrompt
    prefill: str
    answers: Answers
    work: Path
    opened: OpenIndex | None = None

    def results(self, ways: list[Variant], show: Progress) -> Iterator[Result]:
        for way in ways:
            keys = [self.key(way, question) for question in self.context.questions]
            asked = list(zip(self.context.questions, keys, strict=True))
            answered = self._answered(way, asked, show)
            for question, key in asked:
                while key not in self.answers.known:
                    self._keep(*next(answered), way)
                yield Result(self.context, question, way, self.answers.known[key], len(self.prompt.input_ids))
        if self.opened is not None:
            self.opened, kept = None, self._folder().with_suffix(".kept")
            # What one run was told to keep, no other removes.
            if self.comparison.keep:
                kept.touch()
            elif not kept.exists():
                shutil.rmtree(self._folder())

    def key(self, way: Variant, question: Question) -> str:
        """Under which an answer is known: a hash of everything that determines it."""
        return hash_json(self._decides(way, question))

    def _answered(
        self, way: Variant, asked: list[tuple[Question, str]], show: Progress
    ) -> Iterator[tuple[Question, str, ScoredAnswer]]:
        """Answers that are not known, as they come, one for questions that are the same; several questions at once
        where the comparison and the method allow it. Those that share what steps select are then all asked again: an
        answer depends on those beside it."""
        asked = list({one[1]: one for one in asked}.values())
        self.opened = self.opened or self._open(show)
        config = self._config(way)
        cache = self.opened.cache(config)
        one_by_one = self.comparison.together == 1 or why_alone(self.opened, config.attention, cache)
        missing = [one for one in asked if one[1] not in self.answers.known]
        alone = [one for one in missing if one_by_one or METRICS[one[0].metric].continuation]
        for question, key in alone:
            yield question, key, self._answer(self.opened, cache, question)
        rest = [one for one in missing if one not in alone]
        beside = rest if isinstance(config.attention, Dense) else asked
        for longest, wanted in groupby(sorted(rest, key=self._longest), self._longest):
            keys = {key for _, key in wanted}
            some = [one for one in beside if self._longest(one) == longest and not METRICS[one[0].metric].continuation]
            for one, given in self._together(self.opened, cache, longest, some):
                if one[1] in keys:
                    yield *one, given

    def _together(
        self, index: OpenIndex, cache: IndexCache, longest: int, asked: list[tuple[Question, str]]
    ) -> Iterator[tuple[tuple[Question, str], ScoredAnswer]]:
        ids = [self.comparison.question_ids(self.context, question, self.prompt) for question, _ in asked]
        for number, answer in Batch(index, cache, Sampling(longest), self.comparison.together).answers(ids):
            seconds = answer.time_to_first_token
            if answer.tokens_per_second:
                seconds += (answer.generated_tokens - 1) / answer.tokens_per_second
            read = answer.kv_fraction if _takes_steps(cache, answer.generated_tokens) else None
            yield asked[number], ScoredAnswer(answer.text, None, read, seconds)

    def _longest(self, asked: tuple[Question, str]) -> int:
        return self.comparison.longest(asked[0])

    def _keep(self, question: Question, key: str, given: ScoredAnswer, way: Variant) -> None:
        told = {"task": self.context.task, "context": self.context.name, "question": question.text}
        self.answers.add(key, given, {**told, "expected": question.answers, **way.record()})

    def _decides(self, way: Variant, question: Question) -> dict[str, Any]:
        comparison, (model, tokenizer) = self.comparison, self.comparison.identity
        method = comparison.methods.get(way.method)
        parameters = comparison.builder.parameters
        return {
            "version": version("sparsekv"),
            "model": [model.config_hash, model.weights_hash, model.adapter, model.quantisation],
            "tokenizer": tokenizer.tokenizer_hash,
            "loaded": [str(comparison.loaded.model.dtype), comparison.loaded.model.device.type],
            "prompt": hash_tokens(self.prompt.input_ids.tolist()),
            **comparison.builder.decides(self.prefill),
            "question_prefill": self._question_prefill(method is not None),
            "question": hash_tokens(comparison.question_ids(self.context, question, self.prompt).tolist()),
            "kind": [METRICS[question.metric].continuation, comparison.longest(question)],
            "way": way.record(),
            "share": way.budget is not None and way.budget.is_share,
            "method": None if method is None else asdict(method),
            "indexers": parameters if way.variant else {way.method: parameters.get(way.method)},
            **comparison.builder.sample_of(way.method),
        } | ({"together": [comparison.together, self._beside]} if self._shares(question, method) else {})

    @cached_property
    def _beside(self) -> str:
        """The context's questions that are answered several at once."""
        some = [one for one in self.context.questions if not METRICS[one.metric].continuation]
        ids = [self.comparison.question_ids(self.context, one, self.prompt).tolist() for one in some]
        return hash_json([ids, [self.comparison.longest(one) for one in some]])

    def _shares(self, question: Question, method: Method | None) -> bool:
        """Whether the answer depends on the questions beside it: not dense attention's, nor a continuation."""
        return method is not None and self.comparison.together > 1 and not METRICS[question.metric].continuation

    def _question_prefill(self, sparse: bool) -> dict[str, Any] | None:
        """Of a method's questions; dense attention's are prefilled densely."""
        question, builder = self.comparison.question, self.comparison.builder
        if isinstance(question, Own) or not sparse:
            return None
        # Keys of stored answers have a budget for dense attention, too.
        asked = asdict(question) if isinstance(question, QuestionPrefill) else DENSELY
        return asked | {"indexer": builder.parameters.get(question.name)} | builder.sample_of(question.name)

    def _folder(self) -> Path:
        model = self.comparison.identity[0]
        # What is in the folder stays as it is: methods of an earlier call may be made of another sample of queries.
        sample = [self.prefill, self.comparison.builder.queries]
        built = [hash_tokens(self.prompt.input_ids.tolist()), *sample, model.config_hash, model.weights_hash]
        return self.work / INDICES / f"{hash_json(built)[:16]}.skv"

    def _open(self, show: Progress) -> OpenIndex:
        comparison = self.comparison
        comparison.builder.build(self.prompt, self.prefill, self._folder(), show)
        artifact = Artifact(self._folder())
        return open_index(artifact, comparison.loaded.model, comparison.loaded.tokenizer, comparison.identity)

    def _config(self, way: Variant) -> DecodeConfig:
        if way.budget is None:
            return DecodeConfig(Dense())
        form = MethodSpec(way.method, way.variant, self.comparison.methods[way.method], residual=bool(way.variant))
        return DecodeConfig(form, way.budget, question=self.comparison.question)

    def _answer(self, index: OpenIndex, cache: IndexCache, question: Question) -> ScoredAnswer:
        comparison, started = self.comparison, time.perf_counter()
        ids = comparison.question_ids(self.context, question, self.prompt)
        if METRICS[question.metric].continuation:
            text, loss, tokens = "", math.log(perplexity(index, cache, ids)), len(ids)
        else:
            answer = generate(index, cache, ids, Sampling(comparison.longest(question)))
            text, loss, tokens = answer.text, None, answer.generated_tokens
        read = cache.kv_fraction() if _takes_steps(cache, tokens) else None
        return ScoredAnswer(text, loss, read, time.perf_counter() - started)


def _takes_steps(cache: IndexCache, tokens: int) -> bool:
    """Whether a method's steps are counted for so many tokens; dense attention reads all without a count."""
    return tokens > 1 or all(layer.read is None for layer in cache.stored_layers)


FOLDER = "parts"


@dataclass(frozen=True)
class Parts:
    """The parts in a work folder: one a context."""

    work: Path

    def of(self, context: Context) -> Path:
        """Where the answers to a context's questions go; whoever resumes them finds them there."""
        return self.work / FOLDER / hash_json([context.name, context.task, context.length, context.text])[:16]

    def take(self, context: Context, answers: Answers) -> None:
        """Take over what a context's part has, if it has any.

        Raises:
            SparsekvError: its answers are damaged, in use by another process, or cannot be written.
        """
        if (part := self.of(context)).is_dir():
            with Answers(part) as theirs:
                answers.take_over(theirs)

    def finish(self, context: Context) -> None:
        """Remove a context's part, of which all answers have been taken over; indices that were kept are kept."""
        part = self.of(context)
        for index in part.glob(f"{INDICES}/*"):
            kept = self.work / INDICES / index.name
            kept.parent.mkdir(exist_ok=True)
            if not kept.exists():
                index.rename(kept)
        shutil.rmtree(part, ignore_errors=True)
