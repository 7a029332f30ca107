"""Answer each question with dense attention and with each combination of method, residual and budget.

This is repeated for each prefill. A document has one index per prefill.
"""

import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.metadata import version
from itertools import accumulate, groupby, pairwise, product
from pathlib import Path
from typing import Any, Protocol

import torch

from sparsekv.formats.checksums import hash_json, hash_tokens
from sparsekv.formats.documents.continuation import BETWEEN, encode_question
from sparsekv.formats.documents.plain_text import Trusted
from sparsekv.formats.documents.prompt import FixedPrompt, before_answer, encode_prompt, next_turn
from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.identity import LOGIT_FIELDS
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import ChatFrame, ModelIdentity, TokenizerIdentity
from sparsekv.formats.models.load import LoadedModel
from sparsekv.formats.models.rope import positions_after, positions_of, stretch_for
from sparsekv.runtime.attention.config import QUESTION_BUDGET, DecodeConfig, Dense, Own, QuestionPrefill
from sparsekv.runtime.attention.sparse_layer import divides_questions
from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.decoding.answer import Sampling, eos_tokens, known_ids
from sparsekv.runtime.decoding.engine import (
    Engine,
    PrefilledQuestion,
    Request,
    generate,
    pack,
    prefill_question,
    why_alone,
)
from sparsekv.runtime.decoding.open import OpenIndex, open_index
from sparsekv.runtime.decoding.perplexity import perplexity
from sparsekv.runtime.evaluation.table import Answers, Result, ScoredAnswer, Variant
from sparsekv.runtime.selection.checked import code_of
from sparsekv.runtime.selection.interface import DENSE, Budget, Method, MethodSpec
from sparsekv.runtime.selection.token_choice import first_dense
from sparsekv.runtime.tasks.interface import Context, Question
from sparsekv.runtime.tasks.metrics import METRICS

Progress = Callable[[str, int, int], None]
"""Called with a stage's name, the number of its steps done, and their total."""


class Builder(Protocol):
    """Builds the indices of contexts. Callers pass an implementation: this package must not import `indexing`."""

    @property
    def prefills(self) -> Iterable[str]:
        """Names of the prefills. Each document has an index for each of these prefills."""

    @property
    def parameters(self) -> Mapping[str, dict[str, Any]]:
        """Build parameters by method name, of the methods that store tensors in the index."""

    @property
    def queries(self) -> int:
        """Size of the query sample, in queries per KV head, from which the methods' tensors are built."""

    def decides(self, prefill: str) -> dict[str, Any]:
        """Return the settings that determine an index, besides its prompt, model and methods."""

    def sample_of(self, name: str) -> dict[str, int]:
        """Return the size n of the query sample as `{"queries": n}`, if method `name` needs fewer queries than n.

        All methods share one sample. The dict is empty if the method needs the whole sample, or no queries.
        """

    def check(self, prompt: FixedPrompt) -> None:
        """Raise UsageError if the prompt is too short or too long for an index."""

    def build(self, prompt: FixedPrompt, prefill: str, folder: Path, progress: Progress) -> None:
        """Build the index of a prompt, reusing files of an earlier build. Raises the errors of `build_index`."""


@dataclass(frozen=True)
class Comparison:
    """The configurations that answer each question: dense attention and the methods at each budget, for each prefill.

    Attributes:
        builder: builds the indices with the tensors of the methods, for each of the builder's prefills.
        question: attention of a question's tokens.
        residual: if a method drops unselected tokens, run it a second time with a residual.
        dense_layers: number of the model's first layers in which methods attend to all tokens. Methods that have dense
            layers of their own keep those.
        raw: use no chat template.
        keep: do not remove the indices after the evaluation.
        max_new_tokens: largest number of tokens of a generated answer; None: the question's own `max_new_tokens`.
        together: maximum number of questions of a context that decode at the same time.
        rope_scaling: the RoPE scaling with which the model was loaded.
    """

    loaded: LoadedModel
    identity: tuple[ModelIdentity, TokenizerIdentity]
    methods: dict[str, Method]
    budgets: list[Budget]
    builder: Builder
    question: Dense | Own | QuestionPrefill = field(default_factory=Own)
    residual: bool = False
    dense_layers: int = 0
    raw: bool = False
    keep: bool = False
    max_new_tokens: int | None = None
    together: int = 1
    rope_scaling: str | None = None

    def count(self, text: str) -> int:
        """Return the number of tokens of a document's prompt: a chat template's text, if any, and the document."""
        return len(self.prompt(text, bare=False).input_ids)

    def prompt(self, text: str, *, bare: bool) -> FixedPrompt:
        """Encode the prompt of a document for its index. With `bare`, as with `raw`, there is no chat template."""
        return encode_prompt(self.loaded.tokenizer, text, raw=self.raw or bare)

    def question_ids(self, context: Context, question: Question, prompt: FixedPrompt) -> torch.Tensor:
        """Return the token ids [Q] that are fed after the document.

        The ids are those of the question, in the chat template if there is one, and of the question's `prefix`. In a
        conversation the earlier questions come first, each with its expected answer. For a `continuation` metric, the
        ids are the first `max_new_tokens` tokens of the text that follows the document.

        Raises:
            UsageError: the question is a later turn, and the model's chat template has only one turn; or the model has
                no embedding for a token.
        """
        chat = prompt.chat
        most: int | None = None
        if METRICS[question.metric].continuation:
            chat, parts, most = None, [question.answers[0]], question.max_new_tokens
        elif chat is not None:
            chat, parts = self._turns_in_chat(question, chat)
        else:
            parts = [_turns_in_text(question, generated=context.length is not None)]
        return known_ids(self.loaded.model, encode_question(self.loaded.tokenizer, prompt.border, chat, *parts)[:most])

    def _turns_in_chat(self, question: Question, chat: ChatFrame) -> tuple[ChatFrame, list[str]]:
        """Return the first question's chat frame, and the parts that `encode_question` takes, from that question on.

        Raises UsageError for a later turn, if the model's chat template has only one turn.
        """
        if not question.earlier:
            return chat, [question.text, question.prefix]
        tokenizer, turns = self.loaded.tokenizer, [*question.earlier, question]
        later = next_turn(tokenizer, chat)
        if later is None:
            raise UsageError("the model's chat template has no second turn; leave --turns out, or give --raw")
        begins = [before_answer(tokenizer)] * len(question.earlier) + [chat.after]
        parts = [turns[0].text, turns[0].prefix]
        for (before, one), begin in zip(pairwise(turns), begins[1:], strict=True):
            text = one.text.strip() if chat.trimmed else one.text.lstrip("\n")
            said = f"{before.prefix}{_said(before)}"
            parts[-1] = said.strip() if chat.trimmed else said
            parts += [Trusted(later.between), text, Trusted(begin), one.prefix]
        return chat.model_copy(update={"after": begins[0]}), parts

    def longest(self, question: Question) -> int:
        """Return the largest number of tokens of the answer to a question, or of the scored continuation."""
        if METRICS[question.metric].continuation or self.max_new_tokens is None:
            return question.max_new_tokens
        return self.max_new_tokens

    def room(self, context: Context, document: int | None = None) -> int | None:
        """Return the maximum number of prompt tokens that leaves positions for each question with its answer.

        The result is below 1 if no prompt fits, and None if the model has no limit.

        Args:
            document: number of tokens of the prompt; None: unknown. With a short prompt, some models have fewer
                positions.
        """
        config = self.loaded.model.config
        positions = positions_of(config) if document is None else positions_after(config, document)
        if positions is None:
            return None
        empty = self.prompt("", bare=context.bare)
        asked = (len(self.question_ids(context, one, empty)) + self.longest(one) for one in context.questions)
        return positions - max(asked)

    def ways(self) -> list[Variant]:
        """Return all variants that answer a question. Dense attention is the first variant of each prefill."""
        found, variants = [], ["", "residual"] if self.residual else [""]
        for prefill in self.builder.prefills:
            sparse = product(self.methods, variants, self.budgets)
            # A residual changes nothing if the method represents unselected tokens itself.
            different = (one for one in sparse if not (one[1] and self.methods[one[0]].replaces()))
            found += [Variant(prefill, DENSE), *(Variant(prefill, *one) for one in different)]
        return found


def _turns_in_text(question: Question, *, generated: bool) -> str:
    """Return the text after the document up to a question, without a chat template. A blank line separates turns.

    Args:
        generated: the question is of a generated task, and is put on a new line. A question of published data begins
            with a separator of its own.
    """

    def asked(one: Question) -> str:
        return f"\n{one.text} {one.prefix}".rstrip() if generated else one.text + one.prefix

    turns = [*question.earlier, question]
    text = asked(turns[0])
    for before, one in pairwise(turns):
        text += _said(before) + BETWEEN + asked(one).lstrip("\n")
    return text


def _said(question: Question) -> str:
    """Return the answer that later turns show: all expected strings if the metric requires each, or else the first."""
    answers = question.answers if METRICS[question.metric].every else question.answers[:1]
    return f"{' ' if question.prefix else ''}{', '.join(answers)}"


def check_room(comparison: Comparison, contexts: list[Context]) -> None:
    """Raise UsageError if a context's document, a question and its answer need more positions than the model has.

    Also raises the errors of `question_ids`.
    """
    for context in contexts:
        tokens = len(comparison.prompt(context.text, bare=context.bare).input_ids)
        room = comparison.room(context, tokens)
        if room is not None and room < 1:
            raise UsageError(
                f"the question and the answer of {context.task} take all positions of {comparison.loaded.name}, "
                "so no document fits; give a smaller --max-new-tokens, or a model with more positions"
            )
        if room is not None and tokens > room:
            config = comparison.loaded.model.config
            needed = tokens + (positions_of(config) or room) - room
            option = stretch_for(config, needed, comparison.rope_scaling)
            stretch = option and f", or stretch the model with {option}"
            raise UsageError(
                f"a document of {context.task} has {tokens} tokens, and {comparison.loaded.name} has positions "
                f"for {room} besides the question and the answer; give a smaller --length{stretch}"
            )


def indexable(comparison: Comparison, contexts: list[Context]) -> tuple[list[Context], list[str]]:
    """Return the contexts that can be indexed, and a line for each other context with the reason.

    Raises:
        UsageError: no context can be indexed.
    """
    kept, left_out = list[Context](), list[tuple[str, UsageError]]()
    for context in contexts:
        try:
            comparison.builder.check(comparison.prompt(context.text, bare=context.bare))
        except UsageError as error:
            left_out.append((f"{context.task}, {context.name}", error))
        else:
            kept.append(context)
    if not kept:
        (first, why), others = left_out[0], f" (and {len(left_out) - 1} more)" if len(left_out) > 1 else ""
        raise UsageError(f"{first}{others}: {why}")
    return kept, [f"{name}: {error}" for name, error in left_out]


INDICES = "indices"
DENSELY = {"name": DENSE, "method": None, "budget": asdict(Budget.parse(QUESTION_BUDGET)), "chunk_size": 128}


def evaluate(comparison: Comparison, contexts: list[Context], work: Path, show: Progress) -> Iterator[Result]:
    """Answer every question with every variant. Answers that are stored in the folder `work` are reused.

    Raises:
        SparsekvError: `work` cannot be written, another process writes there, or the stored answers are damaged. Also
            raises the errors of `question_ids`, `Builder.build`, `OpenIndex.cache` and `generate`.
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
    """Return the contexts with a question that at least one variant has not answered yet."""
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


def without_index(comparison: Comparison, contexts: list[Context], work: Path) -> int:
    """Return the number of contexts of which the folder `work` lacks an index, for at least one of the prefills."""

    def lacks(context: Context) -> bool:
        prompt = comparison.prompt(context.text, bare=context.bare)
        each = (
            _Asking(comparison, context, prompt, prefill, Answers(work), work)
            for prefill in comparison.builder.prefills
        )
        return not all(one.folder().exists() for one in each)

    return sum(map(lacks, contexts))


MOST_PREFILLED = 8192
"""Maximum number of question tokens of a context whose prefill is kept in host memory.

If the context itself has more tokens, the maximum is the number of the context's tokens. A kept token takes as many
bytes as a token of the context in the model's dtype.
"""


@dataclass
class _Asking:
    """Answers the questions of one context over the index that was built with one prefill.

    The index is built only if an answer is not stored. If questions attend densely, the first questions, up to
    MOST_PREFILLED tokens, are prefilled once. Variants whose selectors observe a question's queries prefill it again.
    """

    comparison: Comparison
    context: Context
    prompt: FixedPrompt
    prefill: str
    answers: Answers
    work: Path
    opened: OpenIndex | None = None
    prefilled: dict[Question, PrefilledQuestion] = field(default_factory=dict)

    def results(self, ways: list[Variant], show: Progress) -> Iterator[Result]:
        for way in ways:
            keys = [self.key(way, question) for question in self.context.questions]
            asked = list(zip(self.context.questions, keys, strict=True))
            answered = self._answered(way, asked, show)
            for question, key in asked:
                while key not in self.answers.known:
                    self._keep(*next(answered), way)
                yield Result(self.context, question, way, self.answers.known[key], len(self.prompt.input_ids))
        self.opened, index = None, self.folder()
        # The file `.kept` marks an index of a run with `keep`, so that later runs without `keep` leave the index.
        kept = index.with_suffix(".kept")
        # An earlier run that was killed after its last answer has left the index, too.
        if index.exists() and self.comparison.keep:
            kept.touch()
        elif index.exists() and not kept.exists():
            shutil.rmtree(index)

    def key(self, variant: Variant, question: Question) -> str:
        """Return the key under which an answer is stored: a hash of all inputs that determine the answer."""
        return hash_json(self._decides(variant, question))

    def _answered(
        self, variant: Variant, asked: list[tuple[Question, str]], show: Progress
    ) -> Iterator[tuple[Question, str, ScoredAnswer]]:
        """Yield the answers that are not stored yet, in order of completion, one for each distinct question.

        Several questions are answered in one batch if the comparison and the method allow batches. A batch has
        questions with the same maximum answer length. With a sparse method, questions of a batch share selections, so
        an answer depends on the other questions. Therefore questions whose answers are stored are asked again, too.
        """
        asked = list({one[1]: one for one in asked}.values())
        self.opened = self.opened or self._open(show)
        config = self._config(variant)
        missing = [one for one in asked if one[1] not in self.answers.known]
        # Before the variant's cache is made, so that there are never two caches in memory.
        self._prefill(self.opened, [one for one, _ in (missing if self.comparison.together == 1 else asked)], show)
        cache = self.opened.cache(config)
        one_by_one = self.comparison.together == 1 or why_alone(self.opened, config.attention, cache)
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
        engine = Engine(index, pack(cache, self.comparison.together))
        before = [self._prefilled_for(cache, question) for question, _ in asked]
        ids = [self._question_ids[question] for question, _ in asked]
        each = zip(ids, before, strict=True)
        requests = [Request(one, Sampling(longest), prefilled=kept) for one, kept in each]
        for number, answer in engine.answers(requests):
            kept = before[number]
            seconds = answer.time_to_first_token + (0.0 if kept is None else kept.seconds)
            if answer.tokens_per_second:
                seconds += (answer.generated_tokens - 1) / answer.tokens_per_second
            yield asked[number], ScoredAnswer(answer.text, None, answer.kv_fraction, seconds)

    @cached_property
    def _question_ids(self) -> dict[Question, torch.Tensor]:
        """The token ids [Q] of each question of the context."""
        return {one: self.comparison.question_ids(self.context, one, self.prompt) for one in self.context.questions}

    @cached_property
    def _prompt_hash(self) -> str:
        return hash_tokens(self.prompt.input_ids.tolist())

    @cached_property
    def _prefilled_once(self) -> set[Question]:
        """The questions whose prefill is kept: the first ones, up to the maximum number of tokens.

        Continuations are left out. The set is empty if questions do not attend densely.
        """
        if not isinstance(self.comparison.question, Dense):
            return set()
        asked = [one for one in self.context.questions if not METRICS[one.metric].continuation]
        tokens = accumulate(len(self._question_ids[one]) for one in asked)
        most = max(MOST_PREFILLED, len(self.prompt.input_ids))
        return {one for one, total in zip(asked, tokens, strict=True) if total <= most}

    def _prefill(self, index: OpenIndex, questions: list[Question], show: Progress) -> None:
        """Prefill the questions that are in `_prefilled_once`, and keep the result for later variants.

        The questions attend densely. A question that has been prefilled before is left out.
        """
        missing = [one for one in questions if one in self._prefilled_once and one not in self.prefilled]
        if not missing:
            return
        cache = index.dense_cache()
        for done, question in enumerate(missing, 1):
            self.prefilled[question] = prefill_question(index, cache, self._question_ids[question])
            show("questions", done, len(missing))

    def _prefilled_for(self, cache: IndexCache, question: Question) -> PrefilledQuestion | None:
        """Return a question's prefill; None if it is not kept, or if answers over this cache cannot begin from it."""
        return self.prefilled.get(question) if divides_questions(cache.stored_layers) else None

    def _longest(self, asked: tuple[Question, str]) -> int:
        return self.comparison.longest(asked[0])

    def _keep(self, question: Question, key: str, given: ScoredAnswer, way: Variant) -> None:
        told = {"task": self.context.task, "context": self.context.name, "question": question.text}
        self.answers.add(key, given, {**told, "expected": question.answers, **way.record()})

    def _decides(self, way: Variant, question: Question) -> dict[str, Any]:
        comparison, (model, tokenizer) = self.comparison, self.comparison.identity
        method = comparison.methods.get(way.method)
        parameters = comparison.builder.parameters
        code = None if method is None else code_of(type(method))
        dense_layers = first_dense(method, comparison.dense_layers)
        return {
            "version": version("sparsekv"),
            "model": [model.config_hash, model.weights_hash, model.adapter, model.quantisation],
            **({} if model.weights is None else {"weights": model.weights}),
            "tokenizer": tokenizer.tokenizer_hash,
            **self._ends_and_logits(question),
            "loaded": [str(comparison.loaded.model.dtype), comparison.loaded.model.device.type],
            "prompt": self._prompt_hash,
            **comparison.builder.decides(self.prefill),
            "question_prefill": self._question_prefill(method is not None),
            "question": hash_tokens(self._question_ids[question].tolist()),
            "kind": [METRICS[question.metric].continuation, comparison.longest(question)],
            "way": way.record(),
            "share": way.budget is not None and way.budget.is_share,
            "method": None if method is None else asdict(method),
            **({"dense_layers": dense_layers} if dense_layers else {}),
            **({} if code is None else {"code": code}),
            "indexers": parameters if way.variant else {way.method: parameters.get(way.method)},
            **comparison.builder.sample_of(way.method),
        } | ({"together": [comparison.together, self._beside]} if self._shares(question, method) else {})

    def _ends_and_logits(self, question: Question) -> dict[str, Any]:
        """Return the model's settings that an index does not depend on, as a part of the answer's key.

        These are the ids of the EOS tokens, for a generated answer, and the fields of LOGIT_FIELDS that the config has.
        """
        config = self.comparison.loaded.model.config.get_text_config()
        logits = {name: value for name in LOGIT_FIELDS if (value := getattr(config, name, None)) is not None}
        ends = {} if METRICS[question.metric].continuation else {"ends": self._ends}
        return ends | ({"logits": logits} if logits else {})

    @cached_property
    def _ends(self) -> list[int]:
        loaded = self.comparison.loaded
        return sorted(eos_tokens(loaded.model, loaded.tokenizer, chat=self.prompt.chat is not None))

    @cached_property
    def _beside(self) -> str:
        """Hash of the context's questions that can be answered in batches, and of their maximum answer lengths."""
        some = [one for one in self.context.questions if not METRICS[one.metric].continuation]
        ids = [self._question_ids[one].tolist() for one in some]
        return hash_json([ids, [self.comparison.longest(one) for one in some]])

    def _shares(self, question: Question, method: Method | None) -> bool:
        """Whether the answer may depend on the other questions of its batch.

        An answer by dense attention and the score of a continuation do not depend on other questions.
        """
        return method is not None and self.comparison.together > 1 and not METRICS[question.metric].continuation

    def _question_prefill(self, sparse: bool) -> dict[str, Any] | None:
        """Return the settings of the question's prefill, as a part of the answer's key.

        The result is None if the question's tokens select by the answer's method, and for answers by dense attention.
        """
        question, builder = self.comparison.question, self.comparison.builder
        if isinstance(question, Own) or not sparse:
            return None
        # A stored answer's key has a budget for the question, even if the question attends densely.
        asked: dict[str, Any] = {**DENSELY}
        if isinstance(question, QuestionPrefill):
            code = code_of(type(question.method))
            asked = asdict(question) | ({} if code is None else {"code": code})
        return asked | {"indexer": builder.parameters.get(question.name)} | builder.sample_of(question.name)

    def folder(self) -> Path:
        """Return the folder of the index."""
        model = self.comparison.identity[0]
        builder = self.comparison.builder
        # A call with other settings, such as sinks or another query sample, must not reuse the index. Neither must a
        # residual, which could take the centroids of a method that an earlier call has added to the index.
        settings = [self.prefill, builder.decides(self.prefill), builder.queries]
        settings += [dict(builder.parameters)] if self.comparison.residual else []
        built = [self._prompt_hash, *settings, model.config_hash, model.weights_hash]
        return self.work / INDICES / f"{hash_json(built)[:16]}.skv"

    def _open(self, show: Progress) -> OpenIndex:
        comparison = self.comparison
        comparison.builder.build(self.prompt, self.prefill, self.folder(), show)
        artifact = Artifact(self.folder())
        return open_index(artifact, comparison.loaded.model, comparison.loaded.tokenizer, comparison.identity)

    def _config(self, way: Variant) -> DecodeConfig:
        if way.budget is None:
            return DecodeConfig(Dense())
        comparison, method = self.comparison, self.comparison.methods[way.method]
        form = MethodSpec(way.method, way.variant, method, residual=bool(way.variant))
        dense_layers = first_dense(method, comparison.dense_layers)
        return DecodeConfig(form, way.budget, question=comparison.question, dense_layers=dense_layers)

    def _answer(self, index: OpenIndex, cache: IndexCache, question: Question) -> ScoredAnswer:
        comparison, started = self.comparison, time.perf_counter()
        ids, kept = self._question_ids[question], self._prefilled_for(cache, question)
        if METRICS[question.metric].continuation:
            text, loss, tokens = "", math.log(perplexity(index, cache, ids)), len(ids)
        else:
            answer = generate(index, cache, ids, Sampling(comparison.longest(question)), prefilled=kept)
            text, loss, tokens = answer.text, None, answer.generated_tokens
        read = cache.kv_fraction() if _takes_steps(cache, tokens) else None
        seconds = time.perf_counter() - started + (0.0 if kept is None else kept.seconds)
        return ScoredAnswer(text, loss, read, seconds)


def _takes_steps(cache: IndexCache, tokens: int) -> bool:
    """Whether the KV fraction of an answer with `tokens` tokens is known.

    A sparse layer counts only decode steps, so the answer needs more than one token. If all layers are dense, the KV
    fraction is known to be 1.
    """
    return tokens > 1 or all(layer.read is None for layer in cache.stored_layers)


FOLDER = "parts"


@dataclass(frozen=True)
class Parts:
    """Parts of an evaluation: one subfolder per context, in which another process can evaluate the context."""

    work: Path

    def of(self, context: Context) -> Path:
        """Return the folder of a context's part. The path is the same in all runs, so a later run can resume."""
        return self.work / FOLDER / hash_json([context.name, context.task, context.length, context.text])[:16]

    def take(self, context: Context, answers: Answers) -> None:
        """Copy the answers of a context's part to `answers`, if the part exists.

        Raises:
            SparsekvError: the part's answers are damaged, in use by another process, or cannot be written.
        """
        if (part := self.of(context)).is_dir():
            with Answers(part) as theirs:
                answers.take_over(theirs)

    def finish(self, context: Context) -> None:
        """Remove a context's part, whose answers `take` must have copied.

        Indices of the part are moved to the evaluation's folder, unless they are there already.
        """
        part = self.of(context)
        for index in part.glob(f"{INDICES}/*"):
            kept = self.work / INDICES / index.name
            kept.parent.mkdir(exist_ok=True)
            if not kept.exists():
                index.rename(kept)
        shutil.rmtree(part, ignore_errors=True)
