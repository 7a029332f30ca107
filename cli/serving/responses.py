"""Bodies of answers, as OpenAI's clients read them."""

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer

Finish = Literal["stop", "length"]


class Sent(BaseModel):
    """The OpenAPI description of these models lists every field that is sent.

    OMITTED: fields that are left out where they are None. Other fields are sent as null.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    OMITTED: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _sent(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        return {name: one for name, one in fields.items() if one is not None or name not in self.OMITTED}


class CachedTokens(Sent):
    """Of a prompt's tokens, those that were not prefilled for this answer: the document's, and kept turns'."""

    cached_tokens: int


class UsageSent(Sent):
    """Numbers of tokens. The prompt includes the document."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class LayerGauge(Sent):
    """The estimated share of a layer's attention that the steps left to centroids or dropped."""

    layer: int
    missed: float


class Gauge(Sent):
    """The estimated share of the attention that the answers' steps left to centroids or dropped: the mean of all
    layers, and each layer's."""

    missed: float
    layers: list[LayerGauge]


class SourceSent(Sent):
    """A passage of the document that an answer attended to: the answer's `index` among the choices, file, first and
    last line, tokens [start, stop) of the stored prompt, and its share of this attention."""

    index: int
    path: str
    lines: tuple[int, int]
    tokens: tuple[int, int]
    score: float


class Details(Sent):
    """How the answers attended to the document. kv_fraction is the mean share of its keys and values that was read."""

    OMITTED = ("gauge", "sources")

    method: str
    budget: float | int
    kv_fraction: float
    gauge: Gauge | None = None
    sources: list[SourceSent] | None = None


class Alternative(Sent):
    """A token, its text's UTF-8 bytes (null if the token is only a part of a character), and its log-probability."""

    token: str
    bytes: list[int] | None
    logprob: float


class TokenChoice(Alternative):
    """A token of an answer with the likeliest tokens at its place."""

    top_logprobs: list[Alternative]


class ChatLogprobs(Sent):
    """Log-probabilities of a chat completion's tokens."""

    content: list[TokenChoice]
    refusal: None = None


class AnswerMessage(Sent):
    """The message of a chat completion."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(Sent):
    """One of the answers to a conversation."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish


class ChatCompletion(Sent):
    """The answer of `/v1/chat/completions` without `stream`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageSent
    sparsekv: Details


class Delta(Sent):
    """The part of a message that an event adds."""

    OMITTED = ("role", "content")

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChoiceDelta(Sent):
    """The part of one of the answers that an event adds."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None


class ChatCompletionChunk(Sent):
    """An event of `/v1/chat/completions` with `stream`."""

    OMITTED = ("usage", "sparsekv")

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChoiceDelta]
    usage: UsageSent | None = None
    sparsekv: Details | None = None


class TextLogprobs(Sent):
    """Log-probabilities of a completion's tokens. `text_offset` are places in the answer, in characters."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(Sent):
    """One of the continuations, or what an event adds to it. `finish_reason` is null until its last event."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: Finish | None = None


class Completion(Sent):
    """The answer of `/v1/completions`, or with `stream` an event of it."""

    OMITTED = ("usage", "sparsekv")

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageSent | None = None
    sparsekv: Details | None = None


class ModelDetails(Sent):
    """An index: the model that answers, the number of its document's tokens, the methods that can answer, and the
    method and budget of a request that names none."""

    model: str
    tokens: int
    methods: list[str]
    method: str
    budget: float | int


class ModelSent(Sent):
    """A model of `/v1/models`: an index. One that no request has opened yet has no details, and 0 as its time."""

    OMITTED = ("sparsekv",)

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["sparsekv"] = "sparsekv"
    sparsekv: ModelDetails | None = None


class ModelList(Sent):
    """The answer of `/v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelSent]


class IndexClosed(Sent):
    """The answer of `DELETE /v1/indices/{name}`, in the form of a model that is deleted. Its files are untouched."""

    id: str
    object: Literal["model"] = "model"
    deleted: Literal[True] = True


class Health(Sent):
    """The answer of `/health`."""

    status: Literal["ok", "draining"]
