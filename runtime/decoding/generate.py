"""Answers by transformers' `generate` with our cache, attention and decoding loop."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer

from sparsekv.formats.documents.continuation import encode_question
from sparsekv.formats.documents.prompt import end_of_turn
from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.formats.index.schema import Border, ChatFrame
from sparsekv.formats.models.rope import positions_after, positions_of, stretchable
from sparsekv.kernels.common.given_rows import cache_argument, with_cache
from sparsekv.kernels.common.hook import calling_back, route_attention
from sparsekv.runtime.cache.index_cache import IndexCache, LayerStats
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.sampling import Draw
from sparsekv.runtime.decoding.sampling import Sampling as Sampling
from sparsekv.runtime.decoding.step import DecodeStep, captured_step
from sparsekv.runtime.decoding.threads import Following, all_cores, exclusive, free_cores


@contextmanager
def only_special_tokens(model: PreTrainedModel) -> Iterator[None]:
    """Within the context, nothing of the model's own `generation_config` counts but its special tokens.

    A repetition penalty there would act on greedy answers, by all of the document's tokens, and `use_cache: false`
    would run the document again for each token; a batch, whose loop is ours, would answer otherwise.
    """
    own = model.generation_config
    model.generation_config = GenerationConfig(
        bos_token_id=own.bos_token_id, eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id
    )
    try:
        yield
    finally:
        model.generation_config = own


class NotFiniteError(SparsekvError):
    """A model's logits are not finite, so that no token can be chosen."""

    def __init__(self) -> None:
        super().__init__(
            "the model's logits are not finite numbers, so there is no answer; check the index with inspect --verify, "
            "and the model in --dtype float32"
        )


class FiniteLogits(LogitsProcessor):
    """Returns logits unchanged.

    Raises:
        NotFiniteError: the largest logit of a sequence is not finite.
    """

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not bool(scores.amax(-1).isfinite().all()):
            raise NotFiniteError
        return scores


class Streamer(TextStreamer):
    """Passes text on as it is decoded, and records the times of the first and the last token.

    Args:
        ends: tokens that end an answer and are no part of its text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], None], ends: Collection[int] = ()):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text, self.ends = on_text, ends
        self.first = self.last = 0.0

    def put(self, value: torch.Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.last = time.perf_counter()
            self.first = self.first or self.last
            if self.ends and int(value) in self.ends:
                return
        before = self.token_cache
        super().put(value)  # type: ignore[no-untyped-call]
        if not self.token_cache and not self.next_tokens_are_prompt:
            self._begin_line(before)

    def _begin_line(self, tokens: list[int]) -> None:
        """Keep the last token that is text before the next ones, and as printed: a decoder that takes the space from
        the first token would take one of the line's own."""
        for start in range(len(tokens) - 1, -1, -1):
            text = self.tokenizer.decode(tokens[start:], **self.decode_kwargs)
            if text:
                self.token_cache, self.print_len = tokens[start:], len(text)
                return

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            with calling_back():
                self.on_text(text)


class Stopping(StoppingCriteria):
    """Ends an answer with the first token after which `stop` says so."""

    def __init__(self, stop: Callable[[], bool]):
        self.stop = stop

    def __call__(self, input_ids: torch.Tensor, scores: object, **more: object) -> torch.Tensor:
        with calling_back():
            stopped = bool(self.stop())
        return torch.full((len(input_ids),), stopped, dtype=torch.bool, device=input_ids.device)


def ending_tokens(index: OpenIndex) -> set[int]:
    """The tokens with which an answer ends: those of the model's `generation_config`, and where the index has a chat
    frame the one that the chat template puts behind an answer, without which the model goes on with invented turns."""
    ends = index.model.generation_config.eos_token_id
    found = {ends} if isinstance(ends, int) else set(ends or ())
    if index.artifact.manifest.prompt.chat is None or (end := end_of_turn(index.tokenizer)) is None:
        return found
    return found | {end}


def finish_reason(answer: Sequence[int], ends: set[int]) -> str:
    """Why an answer has no more tokens."""
    return "stop" if answer and answer[-1] in ends else "length"


def unshown_endings(index: OpenIndex) -> set[int]:
    """The ending tokens that are no text: added tokens, whether the tokenizer marks them as special or not."""
    return ending_tokens(index) & index.tokenizer.added_tokens_decoder.keys()


def answer_text(index: OpenIndex, answer: Sequence[int]) -> str:
    """An answer's text, without special tokens and the token that ends it."""
    shown = answer[:-1] if answer and answer[-1] in unshown_endings(index) else answer
    return str(index.tokenizer.decode(list(shown), skip_special_tokens=True))


NO_TOKEN = -1


class DecodeLoop:
    """For `model.generate(custom_generate=...)`: prefills by the model, then decodes by a `DecodeStep`.

    Logits processing, sampling and stopping are as in transformers' own loop, with the same random numbers. A token is
    streamed when the next step has begun.
    One sequence only. `streamer` is passed here because transformers passes none to a custom loop.
    """

    def __init__(self, step: DecodeStep, streamer: BaseStreamer):
        self.step, self.streamer = step, streamer

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        """Token ids [1, T] of the prompt and its continuation.

        Raises:
            NotFiniteError: the model's logits are not finite.
        """
        logits = self._prefill(model, input_ids, model_kwargs)
        before, longest = input_ids.shape[1], int(stopping_criteria.max_length or 0)
        # Criteria look at the host's ids: they would wait for a device.
        ids, on_host = (_with_room(input_ids, longest, device) for device in (input_ids.device, "cpu"))
        try:
            self.step.begin(longest - before)
            with _experts_as_for_decoding(model):
                for count in range(before, longest):
                    token = _next(logits_processor, ids[:, :count], logits, sample=bool(generation_config.do_sample))
                    told = _on_host(token)
                    ids[:, count], on_host[:, count] = token[:, 0], told
                    if count == before:
                        self.streamer.put(told)  # before its step, which may have to be captured
                    ended = bool(stopping_criteria(on_host[:, : count + 1], None).all())
                    if not ended:
                        logits = self.step(token)
                    if count > before:
                        self.streamer.put(told)  # while the device computes
                    if ended:
                        break
        finally:
            self.step.cache.release()
        self.streamer.end()
        return ids[:, : count + 1]

    def _prefill(self, model: PreTrainedModel, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> torch.Tensor:
        """Prefill the tokens that are not in the cache; returns the logits [1, V] of the last one."""
        known, tokens = self.step.cache.get_seq_length(), input_ids.shape[1]
        only_last = {name: value for name, value in model_kwargs.items() if name == "logits_to_keep"}
        logits: torch.Tensor = model(
            input_ids=input_ids[:, known:],
            position_ids=torch.arange(known, tokens, device=input_ids.device)[None],
            **with_cache(model, self.step.cache),
            **only_last,
        ).logits[:, -1]
        return logits


def _with_room(ids: torch.Tensor, length: int, device: torch.device | str) -> torch.Tensor:
    """[1, length] token ids that begin with `ids` [1, N]."""
    longer = torch.zeros(1, length, dtype=ids.dtype, device=device)
    longer[:, : ids.shape[1]] = ids
    return longer


def _on_host(token: torch.Tensor) -> torch.Tensor:
    """A token [1, 1] as [1] on the host; raises NotFiniteError for `NO_TOKEN`."""
    told = token[:, 0].cpu()
    if int(told) == NO_TOKEN:
        raise NotFiniteError
    return told


def _next(processors: LogitsProcessorList, ids: torch.Tensor, logits: torch.Tensor, *, sample: bool) -> torch.Tensor:
    """The next token [1, 1] after ids [1, N], by logits [1, V]; `NO_TOKEN` if the scores are not finite, so that this
    needs no extra sync."""
    scores = processors(ids, logits.to(torch.float32, copy=True))  # type: ignore[arg-type]  # any tensors will do
    if sample:
        probability = scores.softmax(-1)
        token = torch.multinomial(probability.nan_to_num(1.0), 1)
        found = probability.gather(-1, token)
    else:
        token = scores.argmax(-1, keepdim=True)
        found = scores.gather(-1, token)
    return torch.where(found.isfinite(), token, NO_TOKEN)


@contextmanager
def _experts_as_for_decoding(model: PreTrainedModel) -> Iterator[None]:
    """On a GPU, compute mixtures of experts as transformers does for few tokens: by batched_mm, not grouped_mm."""
    before = model.get_experts_implementation()
    if model.device.type == "cpu" or "grouped_mm" not in before.values():
        yield
        return
    model.set_experts_implementation(
        {name: "batched_mm" if one == "grouped_mm" else one for name, one in before.items()}
    )
    try:
        yield
    finally:
        model.set_experts_implementation(before)


@dataclass(frozen=True)
class Answer:
    """A generated text, its tokens and its cost; seconds are wall time, `kv_fraction` is over all decode steps.

    finish_reason: `stop` where the model ended it, `length` where no more tokens were allowed, `interrupted` where the
    caller stopped it, empty for an empty line.
    `layers` are the missed-mass figures of each layer, if the cache was opened to measure them.
    """

    text: str
    ids: list[int] = field(repr=False)
    prompt_tokens: int
    generated_tokens: int
    finish_reason: str
    tokens_per_second: float
    time_to_first_token: float
    kv_fraction: float
    layers: list[LayerStats] = field(default_factory=list)


NO_ANSWER = Answer("", [], 0, 0, "", 0.0, 0.0, 0.0)
"""The answer to an empty line."""


def answer_of(
    index: OpenIndex,
    ids: list[int],
    prompt_tokens: int,
    times: tuple[float, float, float],
    kv_fraction: float,
    layers: Sequence[LayerStats] = (),
) -> Answer:
    """An answer by its tokens.

    Args:
        times: seconds at which it was asked for, and at which its first and its last token came.
    """
    (asked, first, last), steps = times, len(ids) - 1
    return Answer(
        text=answer_text(index, ids),
        ids=ids,
        prompt_tokens=prompt_tokens,
        generated_tokens=len(ids),
        finish_reason=finish_reason(ids, ending_tokens(index)),
        tokens_per_second=steps / (last - first) if steps and last > first else 0.0,
        time_to_first_token=first - asked,
        kv_fraction=kv_fraction,
        layers=list(layers),
    )


def question_ids(index: OpenIndex, question: str, *, raw: bool = False, special_tokens: bool = False) -> torch.Tensor:
    """Token ids [Q] that follow the stored prompt: the question within the rest of the chat template, or alone.

    Args:
        raw: the question alone, without the chat template.
        special_tokens: special tokens in the question keep their meaning; otherwise they are plain text.

    Raises:
        UsageError: the question is empty.
        SparsekvError: its special tokens cannot be read as plain text.
    """
    prompt = index.artifact.manifest.prompt
    return framed_ids(index, question, None if raw else prompt.chat, prompt.border, special_tokens=special_tokens)


def framed_ids(
    index: OpenIndex, question: str, chat: ChatFrame | None, border: Border | None, *, special_tokens: bool = False
) -> torch.Tensor:
    """Token ids [Q] of a question with what a chat frame puts around it, behind a border; raises what `question_ids`
    raises."""
    if not question.strip():
        raise UsageError("the question is empty; give it as an argument, with --prompt-file or on standard input")
    return torch.tensor(encode_question(index.tokenizer, border, chat, question, special_tokens=special_tokens))


def generate(
    index: OpenIndex,
    cache: IndexCache,
    question: torch.Tensor,
    sampling: Sampling,
    on_text: Callable[[str], None] = lambda text: None,
    stop: Callable[[], bool] | None = None,
) -> Answer:
    """Answer one question; the cache is rewound first, so one cache serves many questions.

    Other threads that ask the model wait until the answer is whole. After any failure the next question is answered as
    if the failed one had not been asked.

    Args:
        question: [Q] token ids after the stored prompt; only these are prefilled.
        on_text: called with each piece of text as it is decoded.
        stop: asked after each token, by the thread that answers; the answer ends with the first for which it is True.

    Raises:
        UsageError: no position of the model is left for an answer, or the model is answering already, in this thread.
        NotFiniteError: the model's logits are not finite.
    """
    with exclusive(index.model):
        cache.rewind()
        return answer_after(index, cache, index.input_ids, question, sampling, on_text, stop)


@torch.inference_mode()
def answer_after(
    index: OpenIndex,
    cache: IndexCache,
    before: torch.Tensor,
    question: torch.Tensor,
    sampling: Sampling,
    on_text: Callable[[str], None] = lambda text: None,
    stop: Callable[[], bool] | None = None,
) -> Answer:
    """Answer a question after other tokens; all but the answer's last stay in the cache. Call it within `exclusive`.

    Args:
        before: [N] token ids, of the stored prompt and of all that followed; the cache may lack the last one, which is
            then prefilled too.

    Raises:
        SparsekvError: the cache has other tokens than `before`; and what `generate` raises.
    """
    cache.check_length(len(before))
    prompt = torch.cat([before, question])[None].to(index.model.device)
    config = _generation_config(index, sampling.max_new_tokens, answer_room(index, prompt.shape[1]))
    streamer = Streamer(index.tokenizer, on_text, unshown_endings(index))
    model = index.model
    with (
        route_attention(model, cache.attend),
        only_special_tokens(model),
        free_cores(model) as cores,
        all_cores(model),
    ):
        cache.expect_prompt(prompt.shape[1])
        start = time.perf_counter()
        output = model.generate(  # type: ignore[operator]  # torch types attributes of a module as tensors
            prompt,
            attention_mask=torch.ones_like(prompt),
            **cache_argument(model, cache),
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([Following(cores), *([] if stop is None else [Stopping(stop)])]),
            streamer=streamer,
            **_decoding(index, cache, sampling, streamer),
        )
    ids, times = output[0, prompt.shape[1] :].tolist(), (start, streamer.first, streamer.last)
    answer = answer_of(index, ids, prompt.shape[1], times, cache.kv_fraction(), cache.stats())
    interrupted = answer.finish_reason == "length" and stop is not None and stop()
    return replace(answer, finish_reason="interrupted") if interrupted else answer


def _decoding(index: OpenIndex, cache: IndexCache, sampling: Sampling, streamer: TextStreamer) -> dict[str, Any]:
    """Arguments of `generate` that choose the decoding loop: transformers' own on a CPU or if steps cannot be replayed,
    else `DecodeLoop`. Either takes the likeliest token of what `Draw` leaves it."""
    step = captured_step(index.model, cache)
    drawn = [Draw(sampling, index.model.device)] if sampling.temperature else []
    if step is None:
        return {"logits_processor": LogitsProcessorList([*index.agreed(), FiniteLogits(), *drawn])}
    processors = LogitsProcessorList([*index.agreed(), *drawn])
    return {"custom_generate": DecodeLoop(step, streamer), "logits_processor": processors}


def answer_room(index: OpenIndex, prompt_tokens: int) -> int | None:
    """The maximum number of answer tokens after `prompt_tokens`, stored ones included; None for no limit.

    Raises:
        UsageError: no position of the model is left for an answer.
    """
    config = index.model.config
    positions, held = positions_after(config, index.split.tokens), positions_of(config)
    if positions is not None and positions != held and prompt_tokens >= positions:
        raise UsageError(
            f"document and question have {prompt_tokens} tokens and positions of this model change at {positions}, "
            f"where no index can follow; ask less, or index a document of more than {positions} tokens"
        )
    if positions is None:
        return None
    if prompt_tokens >= positions:
        stretch = ", or build the index with --rope-scaling" if stretchable(config) else ""
        raise UsageError(
            f"document and question have {prompt_tokens} tokens and the model has {positions} positions; ask a shorter "
            f"question{stretch}"
        )
    return positions - prompt_tokens


def _generation_config(index: OpenIndex, tokens: int, room: int | None) -> GenerationConfig:
    own = index.model.generation_config
    return GenerationConfig(
        max_new_tokens=tokens if room is None else min(room, tokens),
        do_sample=False,
        num_beams=1,
        bos_token_id=own.bos_token_id,
        eos_token_id=sorted(ending_tokens(index)) or None,
        pad_token_id=own.pad_token_id if own.pad_token_id is not None else index.tokenizer.pad_token_id,
    )
