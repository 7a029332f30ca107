"""Generate answers with transformers' `generate`, our KV cache, our attention and our decoding loop."""

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
    """Within the context, ignore all settings of the model's own `generation_config` except its special tokens.

    A repetition penalty in it would change greedy answers, because it counts all of the document's tokens.
    `use_cache: false` would prefill the document again for each token. `Batch`, which has its own loop, ignores these
    settings, so its answers would differ.
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
    """Raised when a model's logits are not finite, so that no next token can be chosen."""

    def __init__(self) -> None:
        super().__init__(
            "the model's logits are not finite numbers, so there is no answer; check the index with inspect --verify, "
            "and the model in --dtype float32"
        )


class FiniteLogits(LogitsProcessor):
    """Logits processor that checks that logits are finite and returns them unchanged.

    Raises:
        NotFiniteError: the largest logit of a sequence is not finite.
    """

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not bool(scores.amax(-1).isfinite().all()):
            raise NotFiniteError
        return scores


class Streamer(TextStreamer):
    """Passes decoded text to a callback piece by piece, and records the times of the first and the last token.

    Args:
        ends: ids of tokens that end an answer and are not part of its text.
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
        """Keep the last token that decodes to text in the token cache, and mark its text as already printed.

        Some decoders strip the leading space of the first token. Without the kept token they would strip a space that
        belongs to the new line.
        """
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
    """Stopping criterion that ends an answer at the first token after which `stop()` returns True."""

    def __init__(self, stop: Callable[[], bool]):
        self.stop = stop

    def __call__(self, input_ids: torch.Tensor, scores: object, **more: object) -> torch.Tensor:
        with calling_back():
            stopped = bool(self.stop())
        return torch.full((len(input_ids),), stopped, dtype=torch.bool, device=input_ids.device)


def ending_tokens(index: OpenIndex) -> set[int]:
    """Return the ids of the tokens that end an answer: the EOS tokens of the model's `generation_config`.

    If the index has a chat frame, the end-of-turn token of the chat template is added. Without it the model would
    continue with invented turns.
    """
    ends = index.model.generation_config.eos_token_id
    found = {ends} if isinstance(ends, int) else set(ends or ())
    if index.artifact.manifest.prompt.chat is None or (end := end_of_turn(index.tokenizer)) is None:
        return found
    return found | {end}


def finish_reason(answer: Sequence[int], ends: set[int]) -> str:
    """Return why an answer ended: `stop` if its last token is in `ends`, otherwise `length`."""
    return "stop" if answer and answer[-1] in ends else "length"


def unshown_endings(index: OpenIndex) -> set[int]:
    """Return the ending tokens that are not shown as text.

    These are the tokenizer's added tokens, including added tokens that it does not mark as special.
    """
    return ending_tokens(index) & index.tokenizer.added_tokens_decoder.keys()


def answer_text(index: OpenIndex, answer: Sequence[int]) -> str:
    """Decode an answer's tokens to text, without special tokens and without an added token that ends the answer."""
    shown = answer[:-1] if answer and answer[-1] in unshown_endings(index) else answer
    return str(index.tokenizer.decode(list(shown), skip_special_tokens=True))


NO_TOKEN = -1


class DecodeLoop:
    """Decoding loop for `model.generate(custom_generate=...)`, for one sequence.

    It prefills with the model and then decodes with a `DecodeStep`. Logits processing, sampling and stopping are as in
    transformers' own loop, with the same random numbers. Each token after the first is streamed once the next step has
    been launched. `streamer` is an argument here because transformers passes no streamer to a custom loop.
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
        """Generate; return the token ids [1, T] of the prompt and its continuation.

        Raises:
            NotFiniteError: the model's logits are not finite.
        """
        logits = self._prefill(model, input_ids, model_kwargs)
        before, longest = input_ids.shape[1], int(stopping_criteria.max_length or 0)
        # Stopping criteria get a copy of the ids on the host: reading ids on a GPU would force a sync.
        ids, on_host = (_with_room(input_ids, longest, device) for device in (input_ids.device, "cpu"))
        try:
            self.step.begin(longest - before)
            with _experts_as_for_decoding(model):
                for count in range(before, longest):
                    token = _next(logits_processor, ids[:, :count], logits, sample=bool(generation_config.do_sample))
                    told = _on_host(token)
                    ids[:, count], on_host[:, count] = token[:, 0], told
                    if count == before:
                        self.streamer.put(told)  # before the first step, because capturing that step may take long
                    ended = bool(stopping_criteria(on_host[:, : count + 1], None).all())
                    if not ended:
                        logits = self.step(token)
                    if count > before:
                        self.streamer.put(told)  # while the device computes the next step
                    if ended:
                        break
        finally:
            self.step.cache.release()
        self.streamer.end()
        return ids[:, : count + 1]

    def _prefill(self, model: PreTrainedModel, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> torch.Tensor:
        """Prefill the tokens that are not in the cache; return the logits [1, V] of the last token."""
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
    """Return a tensor of token ids [1, length] on `device` that begins with `ids` [1, N] and continues with zeros."""
    longer = torch.zeros(1, length, dtype=ids.dtype, device=device)
    longer[:, : ids.shape[1]] = ids
    return longer


def _on_host(token: torch.Tensor) -> torch.Tensor:
    """Copy a token id [1, 1] to the host, as [1]; raise NotFiniteError if it is `NO_TOKEN`."""
    told = token[:, 0].cpu()
    if int(told) == NO_TOKEN:
        raise NotFiniteError
    return told


def _next(processors: LogitsProcessorList, ids: torch.Tensor, logits: torch.Tensor, *, sample: bool) -> torch.Tensor:
    """Choose the next token [1, 1] after ids [1, N] from logits [1, V], by sampling or as the argmax.

    Returns `NO_TOKEN` if the chosen token's score is not finite. The check thus needs no extra sync.
    """
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
    """Within the context, a model on a GPU computes its mixtures of experts with batched_mm instead of grouped_mm.

    transformers does the same when it decodes few tokens.
    """
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
    """A generated text, its tokens and its cost.

    Times are wall-clock seconds. `kv_fraction` covers all decode steps.
    `finish_reason` is `stop` if the model ended the answer, `length` if the token limit was reached, `interrupted` if
    the caller stopped it, and empty for an empty line.
    `layers` has the missed-mass figures of each layer, if the cache measures them.
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
    """Make an `Answer` from its token ids and measurements.

    Args:
        times: three clock readings in seconds: when the question was asked, and when the first and the last token of
            the answer were generated.
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
    """Encode a question as the token ids [Q] that follow the stored prompt.

    If the index has a chat frame, they include the rest of the chat template around the question.

    Args:
        raw: encode the question alone, without the chat template.
        special_tokens: special tokens in the question keep their meaning; otherwise they are encoded as plain text.

    Raises:
        UsageError: the question is empty.
        SparsekvError: the question's special tokens cannot be encoded as plain text.
    """
    prompt = index.artifact.manifest.prompt
    return framed_ids(index, question, None if raw else prompt.chat, prompt.border, special_tokens=special_tokens)


def framed_ids(
    index: OpenIndex, question: str, chat: ChatFrame | None, border: Border | None, *, special_tokens: bool = False
) -> torch.Tensor:
    """Encode a question as token ids [Q], with the text that a chat frame puts around it.

    Raises what `question_ids` raises.

    Args:
        chat: the chat frame; None: encode the question alone.
        border: the end of the text that the question follows; None: unknown.
    """
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

    Other threads that use the model wait until the answer is complete. A failed question does not affect the answer to
    the next question.

    Args:
        question: [Q] token ids after the stored prompt; only these are prefilled.
        on_text: called with each piece of text as it is decoded.
        stop: called after each token, in the thread that generates; the answer ends when it returns True.

    Raises:
        UsageError: no position of the model is left for an answer, or this was called from a callback of an answer.
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
    """Answer a question that follows the tokens `before`. Call it within `exclusive`.

    All tokens except the last one of the answer stay in the cache.

    Args:
        before: [N] token ids of the stored prompt and of everything after it. If the cache lacks the last of them, it
            is prefilled with the question.

    Raises:
        SparsekvError: the number of tokens in the cache does not match `before`.
        UsageError, NotFiniteError: as `generate`.
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
    """Return the arguments of `generate` that select the decoding loop.

    The loop is `DecodeLoop` on a GPU, if steps can be replayed as CUDA graphs; otherwise it is transformers' own loop.
    Both take the argmax of the logits. For sampling, `Draw` sets the logits of all tokens but the sampled one to -inf.
    """
    step = captured_step(index.model, cache)
    drawn = [Draw(sampling, index.model.device)] if sampling.temperature else []
    if step is None:
        return {"logits_processor": LogitsProcessorList([*index.agreed(), FiniteLogits(), *drawn])}
    processors = LogitsProcessorList([*index.agreed(), *drawn])
    return {"custom_generate": DecodeLoop(step, streamer), "logits_processor": processors}


def answer_room(index: OpenIndex, prompt_tokens: int) -> int | None:
    """Return the maximum number of answer tokens after a prompt of `prompt_tokens` tokens; None for no limit.

    `prompt_tokens` includes the tokens of the stored prompt.

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
