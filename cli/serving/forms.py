"""Response formats of the two completion endpoints, as a whole body or as events of a stream."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from statistics import fmean
from typing import Protocol
from uuid import uuid4

from transformers import PreTrainedTokenizerBase

from sparsekv.cli.serving.responses import (
    Alternative,
    AnswerMessage,
    CachedTokens,
    ChatChoice,
    ChatChoiceDelta,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    Completion,
    Delta,
    Details,
    Finish,
    Gauge,
    LayerGauge,
    Sent,
    SourceSent,
    TextChoice,
    TextLogprobs,
    TokenChoice,
    UsageSent,
)
from sparsekv.runtime.attention.config import DecodeConfig
from sparsekv.runtime.decoding.engine import TokenLogprobs
from sparsekv.runtime.serving.stream import Piece, Usage
from sparsekv.runtime.sources.places import TokenDecoder, token_text


@dataclass(frozen=True)
class About:
    """Facts that all parts of a response share.

    Attributes:
        model: the model name as the client wrote it.
        choices: number of answers to each prompt.
        with_usage: whether a stream ends with the numbers of tokens and the details of attention.
        with_logprobs: whether the response has log-probabilities.
        with_sources: whether the response has sources.
        created: Unix time in seconds.
    """

    model: str
    config: DecodeConfig
    tokenizer: PreTrainedTokenizerBase
    choices: int
    with_usage: bool
    with_logprobs: bool
    with_sources: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def usage(self, each: Sequence[Usage]) -> UsageSent:
        """Return the numbers of tokens of all answers. A prompt with several answers counts once."""
        first = each[:: self.choices]
        prompt, answered = sum(one.prompt_tokens for one in first), sum(one.answer_tokens for one in each)
        cached = CachedTokens(cached_tokens=sum(one.cached_tokens for one in first))
        total = prompt + answered
        return UsageSent(
            prompt_tokens=prompt, completion_tokens=answered, total_tokens=total, prompt_tokens_details=cached
        )

    def details(self, each: Sequence[Usage]) -> Details:
        """Return the method, the budget, the KV fraction of the answers' mean step, and their mean missed mass.

        If the request asks for sources, also return the answers' sources.
        """
        stepped = [(one.kv_fraction, one.steps) for one in each if one.steps and one.kv_fraction is not None]
        read = fmean(*zip(*stepped, strict=True)) if stepped else None
        config, sources = self.config, sources_of(each) if self.with_sources else None
        return Details(
            method=config.attention.name,
            budget=config.budget.value,
            kv_fraction=read,
            dense_from=config.dense_from,
            gauge=gauge_of(each),
            sources=sources,
        )

    def likeliest(self, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Return log-probabilities by the tokens' texts, the likeliest first.

        If several tokens have the same text, such as U+FFFD, all but the likeliest are named as in the vocabulary.
        """
        found: dict[str, float] = {}
        for token, logprob in top:
            text = token_text(self.tokenizer, token)
            # The model may have more tokens than the tokenizer's vocabulary.
            other = str(self.tokenizer.convert_ids_to_tokens(token) or token)
            found[other if text in found else text] = logprob
        return found

    def alternative(self, token: int, logprob: float) -> Alternative:
        """Return a token with its log-probability, in the format of a chat completion."""
        text = token_text(self.tokenizer, token)
        whole = None if "\ufffd" in text else list(text.encode())
        return Alternative(token=text, bytes=whole, logprob=logprob)


def sources_of(each: Sequence[Usage]) -> list[SourceSent]:
    """Return the sources of some answers, each with its answer's index."""
    return [SourceSent(index=index, **asdict(one)) for index, usage in enumerate(each) for one in usage.sources]


def gauge_of(each: Sequence[Usage]) -> Gauge | None:
    """Return the mean missed mass of answers; None if no answer has measured it."""
    measured = [one.layers for one in each if one.layers]
    if not measured:
        return None
    layers = [
        LayerGauge(layer=same[0].layer, missed=fmean(one.missed for one in same))
        for same in zip(*measured, strict=True)
    ]
    return Gauge(missed=fmean(one.missed for one in layers), layers=layers)


@dataclass
class Whole:
    """A whole answer, made from its pieces: text, log-probabilities of the tokens, finish and cost."""

    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish = "stop"
    usage: Usage | None = None

    def add(self, piece: Piece) -> None:
        """Add the next piece."""
        self.text += piece.text
        self.logprobs += piece.logprobs
        if piece.finish is not None:
            self.finish, self.usage = finish_of(piece), piece.usage


def finish_of(piece: Piece) -> Finish:
    """Return the finish reason of an answer that ended with `stop` or `length`."""
    return "length" if piece.finish == "length" else "stop"


class Form(Protocol):
    """Response format of an endpoint. A choice is one of the answers to one of the prompts."""

    def opening(self, choice: int) -> Iterator[Sent]:
        """Yield the events of a stream with which a choice (one of the answers) begins."""

    def event(self, choice: int, piece: Piece) -> Iterator[Sent]:
        """Yield the events that send the next piece of a choice."""

    def closing(self, each: Sequence[Usage]) -> Iterator[Sent]:
        """Yield the last events of a stream."""

    def whole(self, answers: Sequence[Whole], each: Sequence[Usage]) -> Sent:
        """Return the body of an answer that is not streamed."""


class ChatForm:
    """The response format of `/v1/chat/completions`."""

    def __init__(self, about: About):
        self.about, self.id = about, f"chatcmpl-{uuid4().hex}"

    def opening(self, choice: int) -> Iterator[Sent]:
        yield self._chunk(ChatChoiceDelta(index=choice, delta=Delta(role="assistant", content="")))

    def event(self, choice: int, piece: Piece) -> Iterator[Sent]:
        logprobs = self._logprobs(piece.logprobs) if piece.logprobs else None
        if piece.text or logprobs is not None:
            yield self._chunk(ChatChoiceDelta(index=choice, delta=Delta(content=piece.text), logprobs=logprobs))
        if piece.finish is not None:
            yield self._chunk(ChatChoiceDelta(index=choice, delta=Delta(), finish_reason=finish_of(piece)))

    def closing(self, each: Sequence[Usage]) -> Iterator[Sent]:
        if self.about.with_usage:
            yield self._chunk(usage=self.about.usage(each), details=self.about.details(each))

    def whole(self, answers: Sequence[Whole], each: Sequence[Usage]) -> Sent:
        choices = [
            ChatChoice(
                index=number,
                message=AnswerMessage(content=one.text),
                logprobs=self._logprobs(one.logprobs) if self.about.with_logprobs else None,
                finish_reason=one.finish,
            )
            for number, one in enumerate(answers)
        ]
        about, usage, details = self.about, self.about.usage(each), self.about.details(each)
        return ChatCompletion(
            id=self.id, created=about.created, model=about.model, choices=choices, usage=usage, sparsekv=details
        )

    def _chunk(
        self, *choices: ChatChoiceDelta, usage: UsageSent | None = None, details: Details | None = None
    ) -> ChatCompletionChunk:
        about = self.about
        return ChatCompletionChunk(
            id=self.id, created=about.created, model=about.model, choices=list(choices), usage=usage, sparsekv=details
        )

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> ChatLogprobs:
        return ChatLogprobs(content=[self._token(one) for one in tokens])

    def _token(self, one: TokenLogprobs) -> TokenChoice:
        top = [self.about.alternative(*pair) for pair in one.top]
        return TokenChoice(**dict(self.about.alternative(one.token, one.logprob)), top_logprobs=top)


class TokenOffsets:
    """Positions of the tokens of an answer in its text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._decoder = TokenDecoder(tokenizer, skip_special_tokens=True)
        self._characters = 0
        """Number of characters before the tokens that wait in the decoder."""

    def put(self, tokens: Sequence[int]) -> list[int]:
        """Return the position in the text, in characters, of each of the next tokens.

        A token that continues a character has the position of that character.
        """
        waiting = len(self._decoder.waiting)
        texts = self._decoder.put(tokens)
        starts = list(accumulate(map(len, texts), initial=self._characters))
        self._characters = starts[len(texts) - len(self._decoder.waiting)]
        return starts[waiting:-1]


class TextForm:
    """The response format of `/v1/completions`."""

    def __init__(self, about: About):
        self.about, self.id = about, f"cmpl-{uuid4().hex}"
        self._answers: dict[int, TokenOffsets] = {}

    def opening(self, choice: int) -> Iterator[Sent]:
        yield from ()

    def event(self, choice: int, piece: Piece) -> Iterator[Sent]:
        if piece.text or piece.logprobs or piece.finish is not None:
            finish = None if piece.finish is None else finish_of(piece)
            yield self._body([self._choice(choice, piece.text, piece.logprobs, finish)])

    def closing(self, each: Sequence[Usage]) -> Iterator[Sent]:
        if self.about.with_usage:
            yield self._body([], each)

    def whole(self, answers: Sequence[Whole], each: Sequence[Usage]) -> Sent:
        choices = [self._choice(number, one.text, one.logprobs, one.finish) for number, one in enumerate(answers)]
        return self._body(choices, each)

    def _choice(self, choice: int, text: str, tokens: Sequence[TokenLogprobs], finish: Finish | None) -> TextChoice:
        logprobs = self._logprobs(choice, tokens) if self.about.with_logprobs else None
        return TextChoice(index=choice, text=text, logprobs=logprobs, finish_reason=finish)

    def _body(self, choices: list[TextChoice], each: Sequence[Usage] = ()) -> Completion:
        about = self.about
        usage, details = (about.usage(each), about.details(each)) if each else (None, None)
        return Completion(
            id=self.id, created=about.created, model=about.model, choices=choices, usage=usage, sparsekv=details
        )

    def _logprobs(self, choice: int, tokens: Sequence[TokenLogprobs]) -> TextLogprobs:
        answer = self._answers.setdefault(choice, TokenOffsets(self.about.tokenizer))
        return TextLogprobs(
            tokens=[token_text(self.about.tokenizer, one.token) for one in tokens],
            token_logprobs=[one.logprob for one in tokens],
            top_logprobs=[self.about.likeliest(one.top) for one in tokens],
            text_offset=answer.put([one.token for one in tokens]),
        )
