"""Answers questions over an index by transformers' own `generate`, with our cache and attention.

On a GPU the decoding loop replays a step captured as a CUDA graph, where the cache allows it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
    TextStreamer,
)

from sparsekv.formats.border import Border
from sparsekv.formats.documents.continuation import encode_question
from sparsekv.formats.errors import UsageError
from sparsekv.formats.models.rope import positions_after, positions_of, stretchable
from sparsekv.formats.schema import ChatFrame
from sparsekv.kernels.common.cache_argument import cache_argument
from sparsekv.kernels.common.hook import route_attention
from sparsekv.runtime.cache.index_cache import IndexCache, LayerStats
from sparsekv.runtime.decoding.endings import answer_text, ending_tokens, finish_reason, unshown_endings
from sparsekv.runtime.decoding.exclusive import exclusive
from sparsekv.runtime.decoding.few_rows_linear import all_cores
from sparsekv.runtime.decoding.finite_logits import FiniteLogits
from sparsekv.runtime.decoding.free_cores import Following, free_cores
from sparsekv.runtime.decoding.loop import DecodeLoop
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.own_settings import only_special_tokens
from sparsekv.runtime.decoding.sampling import Draw
from sparsekv.runtime.decoding.sampling import Sampling as Sampling
from sparsekv.runtime.decoding.step import captured_step
from sparsekv.runtime.decoding.streaming import Stopping, Streamer


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
        question: [Q] token ids.
        stop: asked after each token; the answer ends with the first for which it is True.

    Raises:
        UsageError: no position of the model is left for an answer.
        NotFiniteError: the model's logits are not finite.
        SparsekvError: the cache has other tokens than `before`.
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
    generated = output[0, prompt.shape[1] :]
    steps, seconds = len(generated) - 1, streamer.last - streamer.first
    ids = generated.tolist()
    ended = finish_reason(ids, ending_tokens(index))
    return Answer(
        text=answer_text(index, ids),
        ids=ids,
        prompt_tokens=prompt.shape[1],
        generated_tokens=len(generated),
        finish_reason="interrupted" if ended == "length" and stop is not None and stop() else ended,
        tokens_per_second=steps / seconds if steps and seconds else 0.0,
        time_to_first_token=streamer.first - start,
        kv_fraction=cache.kv_fraction(),
        layers=cache.stats(),
    )


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
