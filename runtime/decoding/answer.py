"""Answers: token ids of a question, sampling of tokens, EOS tokens, streamed text, and the cost of an answer."""

import codecs
import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sparsekv.formats.documents.continuation import encode_question
from sparsekv.formats.documents.prompt import end_of_turn
from sparsekv.formats.errors import UsageError, check_type
from sparsekv.formats.index.schema import Border, ChatFrame
from sparsekv.formats.models.rope import positions_after, positions_of, stretchable
from sparsekv.kernels.common.hook import calling_back
from sparsekv.runtime.cache.index_cache import LayerStats
from sparsekv.runtime.decoding.open import OpenIndex, embeddings_of
from sparsekv.runtime.sources.places import Source

LEAST_TEMPERATURE = 1e-5
"""The smallest allowed temperature above 0. Float32 logits divided by a far smaller one would overflow."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of an answer; temperature 0 is greedy decoding. Raises the errors of `check_sampling`."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_sampling(self)


def check_sampling(values: Any, named: Callable[[str], str] = str) -> None:
    """Raise UsageError for an invalid value, and for `top_p` or `top_k` at temperature 0, where they have no effect.

    Args:
        values: an object with the fields of `Sampling`.
        named: returns, for a field's name, the name that error messages use, such as `--top-p`.
    """
    for one in fields(Sampling):
        check_type(named(one.name), getattr(values, one.name), one.type)
    wrong = {
        "max_new_tokens": (values.max_new_tokens < 1, "at least 1"),
        "temperature": (
            not (values.temperature == 0 or LEAST_TEMPERATURE <= values.temperature < math.inf),
            f"0 (greedy), or at least {LEAST_TEMPERATURE:g}",
        ),
        "top_p": (values.top_p is not None and not 0 < values.top_p <= 1, "a share above 0 and at most 1"),
        "top_k": (values.top_k is not None and values.top_k < 1, "at least 1"),
        "seed": (not -(2**63) <= values.seed < 2**63, "a whole number from -2**63 to 2**63 - 1"),
    }
    for name, (is_wrong, remedy) in wrong.items():
        if is_wrong:
            raise UsageError(f"{named(name)} {getattr(values, name)}: give {remedy}")
    for name in ("top_p", "top_k"):
        if (value := getattr(values, name)) is not None and not values.temperature:
            raise UsageError(
                f"{named(name)} {value} has no effect at {named('temperature')} 0, which always takes the most likely "
                f"token; give a temperature above 0, or leave {named(name)} out"
            )


def warpers(sampling: Sampling) -> LogitsProcessorList:
    """Return the logits processors that transformers would use for a temperature above 0, top-k and top-p.

    Values are converted, because the processors accept only Python's float and int, and a `Sampling` may have others.
    """
    found = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature))])
    if sampling.top_k:
        found.append(TopKLogitsWarper(int(sampling.top_k)))
    if sampling.top_p is not None and sampling.top_p < 1:
        found.append(TopPLogitsWarper(float(sampling.top_p)))
    return found


def draw(scores: torch.Tensor, sampling: Sampling, randoms: Sequence[torch.Generator]) -> list[int]:
    """Draw a token for each row of scores [B, V].

    Each answer has its own generator, because all threads of the process share torch's global generator. A generator's
    random numbers equal those of the global generator after `torch.manual_seed(seed)`.
    """
    nothing = torch.empty(len(scores), 0, dtype=torch.int64, device=scores.device)
    probability = warpers(sampling)(nothing, scores).softmax(-1)  # type: ignore[arg-type]  # any tensors will do
    each = [torch.multinomial(one, 1, generator=random) for one, random in zip(probability, randoms, strict=True)]
    return torch.cat(each).tolist()


LONGEST = 32
"""Number of tokens at which a `Streamer` drops tokens that it no longer needs, unless a character is incomplete."""
INCOMPLETE = "\ufffd"
"""Text to which an incomplete character is decoded, until later tokens add its other bytes."""
LONGEST_CHARACTER = 4
"""Largest number of bytes of a character."""
BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
"""Name of a token for one byte in tokenizers with byte fallback."""
UTF_8 = codecs.getincrementaldecoder("utf-8")


class Streamer:
    """Decodes an answer token by token, and passes the text to a callback piece by piece.

    A new token is decoded together with the last tokens only, so the time per token does not grow with the answer's
    length. Text is passed on at once, except an incomplete character and a run of byte tokens. A run's text is passed
    on when the run ends, because a single invalid byte makes each byte of the run U+FFFD.

    Args:
        on_text: the callback.
        ends: ids of EOS tokens, which are left out of the text.

    Attributes:
        tokens: the last tokens, which are decoded together.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], None], ends: Collection[int] = ()):
        self.tokenizer, self.on_text, self.ends = tokenizer, on_text, ends
        self.tokens = list[int]()
        self._passed = 0  # characters of the text of `tokens`

    def put(self, token: int) -> None:
        """Add the next token of the answer. EOS tokens, special tokens and ids without a token are ignored."""
        name = self.tokenizer.convert_ids_to_tokens(token)
        # A model may have more embeddings than its tokenizer has tokens. The ids of the others have no name.
        if token in self.ends or name is None or self._is_special(token):
            return
        self.tokens.append(token)
        if BYTE.fullmatch(str(name)):
            return
        text = self._decoded(0)
        self._pass_on(text, len(text.rstrip(INCOMPLETE)))
        if text.endswith("\n") or (len(self.tokens) >= LONGEST and not text.endswith(INCOMPLETE)):
            self._shorten(text)

    def waiting(self) -> str:
        """Return the text that has not been passed to the callback yet, without an incomplete last character."""
        return self._decoded(0).rstrip(INCOMPLETE)[self._passed :]

    def end(self) -> None:
        """Pass the rest of the text to the callback."""
        text = decoded(self.tokenizer, self.tokens)
        self._pass_on(text, len(text))

    def _pass_on(self, text: str, end: int) -> None:
        if piece := text[self._passed : end]:
            self._passed = end
            with calling_back():
                self.on_text(piece)

    def _is_special(self, token: int) -> bool:
        """Whether decoding with `skip_special_tokens` leaves a token out of the text."""
        shown = self.tokenizer.decode([token], skip_special_tokens=True)
        return not shown and bool(self.tokenizer.decode([token], skip_special_tokens=False))

    def _decoded(self, start: int) -> str:
        return _text(self.tokenizer, self.tokens[start:])

    def _shorten(self, text: str) -> None:
        """Drop tokens, except the fewest last tokens that still decode to the end of `text`. The callback has `text`.

        Some decoders strip the leading space of the first token. Without a token before a new line, such a decoder
        would strip a space that belongs to the line.
        """
        for start in range(len(self.tokens) - 1, 0, -1):
            if (end := self._decoded(start)) and text.endswith(end):
                self.tokens, self._passed = self.tokens[start:], len(end)
                return


def decoded(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """Decode the tokens of an answer to text, without special tokens and without transformers' clean-up of spaces.

    Tokens such as `<0xE2>` are single bytes. If a run of byte tokens ends within a character, tokenizers decode none of
    the run's bytes. This function decodes them, and only the incomplete character becomes U+FFFD.
    """
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    # A run of byte tokens continues over special tokens, and over ids without a token in the tokenizer.
    shown = [one for one in tokens if one not in special and tokenizer.convert_ids_to_tokens(one) is not None]
    names = [str(tokenizer.convert_ids_to_tokens(token)) for token in shown[-LONGEST_CHARACTER:]]
    for count in range(1, min(len(shown), LONGEST_CHARACTER - 1) + 1):
        if _begins_character(names[-count:]):
            return f"{_text(tokenizer, shown[:-count])}{INCOMPLETE}"
    return _text(tokenizer, shown)


def _text(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """Decode tokens without special tokens, and with all spaces.

    The clean-up of some tokenizers removes a space before a full stop, and the space may have been streamed already.
    """
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _begins_character(names: Sequence[str]) -> bool:
    """Whether all tokens are byte tokens, and together the first but not all bytes of one UTF-8 character."""
    found = [int(one[1], 16) for name in names if (one := BYTE.fullmatch(name))]
    try:
        return len(found) == len(names) and not UTF_8().decode(bytes(found))
    except UnicodeDecodeError:
        return False


def own_endings(model: PreTrainedModel) -> set[int]:
    """Return the ids of the EOS tokens of a model's `generation_config`."""
    ends = model.generation_config.eos_token_id
    return {ends} if isinstance(ends, int) else set(ends or ())


OF_GREEDY_ANSWERS: dict[str, Any] = {
    "repetition_penalty": 1,
    "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "sequence_bias": None,
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "min_new_tokens": 0,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "stop_strings": [],
    "guidance_scale": 1,
    "num_beams": 1,
    "watermarking_config": None,
    "max_time": None,
}
"""Settings of a `generation_config` that change or end greedy answers of transformers' `generate`.

Answers over an index ignore these settings. Each has its value without effect; None has no effect for any of them."""


def unused_settings(model: PreTrainedModel) -> str:
    """Return a line that names the settings of `OF_GREEDY_ANSWERS` in a model's `generation_config`; empty for none."""
    values = {name: getattr(model.generation_config, name, None) for name in OF_GREEDY_ANSWERS}
    changing = {name: one for name, one in values.items() if one not in (None, OF_GREEDY_ANSWERS[name])}
    named = [f"{name} {value}" if isinstance(value, int | float) else name for name, value in changing.items()]
    if not named:
        return ""
    return f"the model's generation_config.json sets {', '.join(named)}, which answers over an index do not use"


def ending_tokens(index: OpenIndex) -> set[int]:
    """Return the ids of the EOS tokens, which end an answer over an index."""
    return eos_tokens(index.model, index.tokenizer, chat=index.artifact.manifest.prompt.chat is not None)


def eos_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, chat: bool) -> set[int]:
    """Return the ids of the EOS tokens of the model's `generation_config`, and in a chat the end-of-turn token.

    Without the chat template's end-of-turn token the model would continue with invented turns.
    """
    found = own_endings(model)
    if not chat or (end := end_of_turn(tokenizer)) is None:
        return found
    return found | {end}


def finish_reason(answer: Sequence[int], ends: set[int]) -> str:
    """Return why an answer ended: `stop` if its last token is one of the EOS tokens `ends`, otherwise `length`."""
    return "stop" if answer and answer[-1] in ends else "length"


def unshown_endings(index: OpenIndex) -> set[int]:
    """Return the EOS tokens that are not shown as text: all that are added tokens of the tokenizer, special or not."""
    return ending_tokens(index) & index.tokenizer.added_tokens_decoder.keys()


def answer_text(index: OpenIndex, answer: Sequence[int]) -> str:
    """Decode an answer's tokens to text, without special tokens and without a last EOS token (`unshown_endings`)."""
    shown = answer[:-1] if answer and answer[-1] in unshown_endings(index) else answer
    return decoded(index.tokenizer, shown)


@dataclass(frozen=True)
class Answer:
    """A generated text, its tokens and its cost.

    `prompt_tokens` counts the document, earlier turns and the question. `tokens_per_second` is the speed of the decode
    steps, which give all tokens but the first. `time_to_first_token` is in wall-clock seconds since the engine began
    the question. `kv_fraction` is the number of key, value and index rows that the decode steps read, divided by the
    number that dense attention would read. It is None for an answer of one token, which takes no decode step, unless
    all layers are dense.

    `finish_reason` is `stop` if the model ended the answer, and `length` if the token limit or the model's last
    position was reached. It is `interrupted` if the caller stopped the answer, and empty if the question was an empty
    line. `layers` has the missed mass of each layer if the cache measures the missed mass. `sources` are the passages
    that the answer attended to most, if the request asks for sources.
    """

    text: str
    ids: list[int] = field(repr=False)
    prompt_tokens: int
    generated_tokens: int
    finish_reason: str
    tokens_per_second: float
    time_to_first_token: float
    kv_fraction: float | None
    layers: list[LayerStats] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)


NO_ANSWER = Answer("", [], 0, 0, "", 0.0, 0.0, None)
"""The answer to a blank line of a file of questions."""


def answer_of(
    index: OpenIndex,
    ids: list[int],
    prompt_tokens: int,
    times: tuple[float, float, float],
    kv_fraction: float | None,
    layers: Sequence[LayerStats] = (),
) -> Answer:
    """Make an `Answer` from its token ids, its times and its cost.

    Args:
        prompt_tokens, kv_fraction, layers: as in `Answer`.
        times: three clock readings in seconds: when the engine began the question, and when the first and the last
            token of the answer were generated.
    """
    (started, first, last), steps = times, len(ids) - 1
    return Answer(
        text=answer_text(index, ids),
        ids=ids,
        prompt_tokens=prompt_tokens,
        generated_tokens=len(ids),
        finish_reason=finish_reason(ids, ending_tokens(index)),
        tokens_per_second=steps / (last - first) if steps and last > first else 0.0,
        time_to_first_token=first - started,
        kv_fraction=kv_fraction,
        layers=list(layers),
    )


def question_ids(index: OpenIndex, question: str, *, raw: bool = False, special_tokens: bool = False) -> torch.Tensor:
    """Encode a question as the token ids [Q] that follow the stored prompt.

    If the index has a chat frame, the ids include the rest of the chat template around the question.

    Args:
        raw: encode the question alone, without the chat template.
        special_tokens: special tokens in the question keep their meaning; otherwise they are encoded as plain text.

    Raises:
        UsageError: the question is empty or has a lone surrogate, or the model has no embedding for one of its tokens.
        SparsekvError: the question's special tokens cannot be encoded as plain text.
    """
    prompt = index.artifact.manifest.prompt
    return framed_ids(index, question, None if raw else prompt.chat, prompt.border, special_tokens=special_tokens)


def framed_ids(
    index: OpenIndex, question: str, chat: ChatFrame | None, border: Border | None, *, special_tokens: bool = False
) -> torch.Tensor:
    """Encode a question as token ids [Q], with the text that a chat frame puts around the question.

    Raises the errors of `question_ids`.

    Args:
        chat: the chat frame; None: encode the question alone.
        border: the end of the text that the question follows; None: unknown.
    """
    if not question.strip():
        raise UsageError("the question is empty; ask one")
    try:
        question.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the question has {question[error.start]!r}, half of a UTF-16 surrogate pair; write the whole character, "
            "or leave it out"
        ) from None
    ids = encode_question(index.tokenizer, border, chat, question, special_tokens=special_tokens)
    return known_ids(index.model, ids)


def known_ids(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """Return a question's token ids as a tensor [Q].

    Raises:
        UsageError: the model has no embedding for a token, because the tokenizer has more tokens than the model.
    """
    known, highest = embeddings_of(model), max(ids, default=0)
    if highest >= known:
        raise UsageError(
            f"the question has token id {highest}, and the model has {known} embeddings; leave this token out of the "
            "question, or put the model's own tokenizer into its folder"
        )
    return torch.tensor(ids)


def answer_room(index: OpenIndex, prompt_tokens: int) -> int | None:
    """Return the maximum number of answer tokens after a prompt of `prompt_tokens` tokens; None for no limit.

    `prompt_tokens` includes the tokens of the stored prompt.

    Raises:
        UsageError: no position of the model is left for an answer, or the model's RoPE changes at this length.
    """
    config = index.model.config
    positions, held = positions_after(config, index.split.tokens), positions_of(config)
    if positions is not None and positions != held and prompt_tokens >= positions:
        raise UsageError(
            f"document and question have {prompt_tokens} tokens, and this model's RoPE changes beyond {positions}, "
            "so that the index's keys are wrong there; ask a shorter question, or index a document of more than "
            f"{positions} tokens"
        )
    if positions is None:
        return None
    if prompt_tokens >= positions:
        stretch = ", or build the index with `sparsekv build-index --rope-scaling`" if stretchable(config) else ""
        raise UsageError(
            f"document and question have {prompt_tokens} tokens, and the model has {positions} positions; ask "
            f"a shorter question{stretch}"
        )
    return positions - prompt_tokens
