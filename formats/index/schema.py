"""Schemas 1 and 2 of an index: the fields of `manifest.json` and the names of the index's files."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal, Self, TypeAlias, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator

from sparsekv.formats.errors import check_at_least_one, check_choice

_PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}"

METHOD_NAME = rf"^{_PART}$"
FILE_NAME = rf"^({_PART}/)?{_PART}\.safetensors$"
"""Pattern of a logical file's name, and of the path below the index's folder where it is stored."""


def stored_parameters(method: Any) -> dict[str, Any]:
    """Convert a dataclass's fields to the values that JSON would give back, to compare them with a manifest's."""
    stored: dict[str, Any] = json.loads(json.dumps(asdict(method)))
    return stored


def given_parameters(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Convert stored parameters back to the arguments of their dataclass: JSON's lists become tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()}


CHOICES = {
    "quoka_subset": ("far", "random", "all"),
    "quoka_similarity": ("cosine", "dot"),
    "quoka_across": ("max", "mean"),
}
"""Values of QuoKA's options: first the value in the paper's method, then the values of the paper's ablations."""


@dataclass(frozen=True)
class QuokaOptions:
    """Options of QuoKA, a prefill in which some of a chunk's queries rank the keys that the chunk attends to."""

    prefill_queries: int = field(
        default=16,
        metadata={
            "joint": True,
            "needs": {"quoka_subset": ("far", "random")},
            "help": "How many of a chunk's queries rank the tokens that the whole chunk attends to.",
        },
    )
    quoka_subset: str = field(
        default="far",
        metadata={
            "joint": True,
            "help": f"Which of a chunk's queries rank the tokens: {', '.join(CHOICES['quoka_subset'])} (far: those of "
            "lowest cosine to the chunk's mean query).",
        },
    )
    quoka_similarity: str = field(
        default="cosine", metadata={"help": f"Score of a key for a query: {', '.join(CHOICES['quoka_similarity'])}."}
    )
    quoka_across: str = field(
        default="max",
        metadata={
            "joint": True,
            "help": f"How a key's scores for several queries are combined: {', '.join(CHOICES['quoka_across'])}.",
        },
    )

    def __post_init__(self) -> None:
        check_at_least_one(self, "prefill_queries")
        for name, known in CHOICES.items():
            check_choice(f"--{name.replace('_', '-')}", getattr(self, name), known)


MOST_TOKENS = 2**31 - 1  # positions are int32

FileName = Annotated[str, StringConstraints(pattern=FILE_NAME)]
MethodName = Annotated[str, StringConstraints(pattern=METHOD_NAME)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
MOST_AXES = 8
"""Largest number of axes of a stored tensor."""
Share = Annotated[float, Field(gt=0, le=1)]
Size = Annotated[int, Field(ge=1, le=MOST_TOKENS)]


class Record(BaseModel):
    """Base class of the manifest and of its records. They are immutable.

    Unknown fields are ignored, because a newer schema that this version can read may add fields.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=(), allow_inf_nan=False)


KVDtype: TypeAlias = Literal["int8"]
"""Dtypes other than the model's in which keys and values can be stored."""
AUTO = "auto"
KV_DTYPES: tuple[str, ...] = (AUTO, *get_args(KVDtype))
"""Values of `--kv-dtype`; `auto` is the model's dtype."""


def kv_dtype_named(name: str) -> KVDtype | None:
    """Return the storage dtype of a `--kv-dtype` value; None for the model's dtype.

    Raises:
        UsageError: the value is unknown.
    """
    check_choice("--kv-dtype", name, KV_DTYPES)
    return next((known for known in get_args(KVDtype) if known == name), None)


Weights: TypeAlias = Literal["int8", "int4"]
"""Precisions to which weights of a model's linear layers can be rounded when it is loaded."""
WEIGHTS: tuple[str, ...] = (AUTO, *get_args(Weights))
"""Values of `--weights`. `auto`: weights as in the checkpoint, or as the index was built."""


def weights_named(name: str) -> Weights | None:
    """Return the precision of a `--weights` value; None for `auto`.

    Raises:
        UsageError: the value is unknown.
    """
    check_choice("--weights", name, WEIGHTS)
    return next((known for known in get_args(Weights) if known == name), None)


class KVStorage(Record):
    """The int8 storage of an index's keys and values, and the error that it causes in dense attention.

    Attributes:
        errors: for each layer that attends, the error of dense attention over the stored rows relative to dense
            attention over the exact rows: the mean over heads and the tail's queries.
        measured_ids: hash of the token ids of the prompt on which the errors were measured. It is an earlier prompt if
            the index reuses that prompt's rows.
        measured_tokens: number of tokens of that prompt.
        exact_probe: the stored logits (of the last prompt token and a few others) were computed over exact keys and
            values. `convert` to int8 leaves such logits, because it runs no model.
    """

    dtype: KVDtype
    errors: list[Annotated[float, Field(ge=0)]] = Field(min_length=1)
    measured_ids: Sha256
    measured_tokens: Size
    exact_probe: bool = True

    @property
    def error(self) -> float:
        """Mean of the errors over layers."""
        return sum(self.errors) / len(self.errors)

    @property
    def worst(self) -> int:
        """Index of the largest error in `errors`."""
        return max(range(len(self.errors)), key=self.errors.__getitem__)


class Border(Record):
    """The last characters of the prompt's text. The first tokens of the text that follows depend on them."""

    lead: str = Field(
        description="the last characters whose tokens are stored; a question is tokenised together with them"
    )
    held: str = Field(
        default="",
        description="characters after `lead` whose tokens depend on the question; each question is tokenised with them",
    )


FIRST_SCHEMA, SCHEMA_VERSION = 1, 2
"""Version of the schema of an index whose layers all attend, and the newest version. Only the newest can have layers
that do not attend, and files of recurrent and convolution states."""
MANIFEST = "manifest.json"
TOKENS = "tokens.safetensors"


def layer_file(folder: str, layer: int) -> str:
    """Return the logical name of a layer's file in one of the index's folders."""
    return f"{folder}/layer_{layer:03d}.safetensors"


STATES = "states"
"""The index's subfolder of recurrent and convolution states, which some layers of some models have."""


def state_file(tokens: int) -> str:
    """Return the logical name of the file of all layers' states after the prompt's first `tokens` tokens."""
    return f"{STATES}/token_{tokens:010d}.safetensors"


def state_tokens(name: str) -> int | None:
    """Return the number of tokens of a state's file by its logical name; None for any other file."""
    digits = name.removeprefix(f"{STATES}/token_").removesuffix(".safetensors")
    return int(digits) if digits.isdecimal() and state_file(int(digits)) == name else None


class ModelIdentity(Record):
    """Identity of the model that computed the keys and values.

    Attributes:
        id: the model's name.
        revision: commit of a hub model; None for any other model.
        config_hash: hash of `kv_config`.
        weights_hash: hash of a sample of the checkpoint's weights, before weights were rounded to `weights`.
        adapter: the names of the model's adapters, each with a hash of its settings, joined by commas; None without
            adapters.
        quantisation: the quantisation of the checkpoint's config, as JSON; None if the checkpoint is not quantised.
    """

    id: str
    revision: str | None
    kv_config: dict[str, Any] = Field(description="heads, sizes, rope, windows, soft cap: all that shapes K and V")
    config_hash: str
    weights_hash: str
    adapter: str | None
    quantisation: str | None
    weights: Weights | None = Field(default=None, description="null: linear layers have the checkpoint's weights")


class TokenizerIdentity(Record):
    """Hashes of the tokenizer, its chat template and its special tokens."""

    tokenizer_hash: str
    chat_template_hash: str | None
    special_tokens_hash: str


class ChatFrame(Record):
    """The texts around the parts of a prompt that a chat template frames.

    `before` is the template's text before the document. `between` precedes a question. After a document it is a blank
    line. After an answer it is the template's text from the end of the answer to the next question. `after` is the
    template's text from the end of the question to the beginning of the answer.
    """

    before: str
    between: str
    after: str
    trimmed: bool = Field(default=False, description="the template takes white space from both ends of a message")


_UNSAFE = r"\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069"
SOURCE_PATH = re.compile(rf"(?!\.{{1,2}}/)[^/{_UNSAFE}]+(/(?!\.{{1,2}}(/|$))[^/{_UNSAFE}]+)*")
"""Pattern of a source file's path: relative, without parts `.` and `..`, without characters that steer a terminal. It
also matches the whole paths `.` and `..`, which `is_source_path` refuses."""


def is_source_path(path: str) -> bool:
    """Whether a path is allowed in a table of files: it matches `SOURCE_PATH`, is not `.` or `..`, and is UTF-8."""
    return SOURCE_PATH.fullmatch(path) is not None and path not in (".", "..") and _is_utf_8(path)


def _is_utf_8(text: str) -> bool:
    try:
        return bool(text.encode())
    except UnicodeEncodeError:
        return False


def _checked_path(path: str) -> str:
    if not is_source_path(path):
        raise ValueError("a path within the folder")
    return path


SourcePath = Annotated[str, AfterValidator(_checked_path)]
"""Path of a source file, relative to the document's folder, with / between its parts."""


Pages: TypeAlias = tuple[Count, ...]
"""Position in the prompt of the first token of each page, ascending from page 1; empty for a text without pages."""


def _check_pages(pages: Pages, start: int, stop: int) -> None:
    if list(pages) != sorted(pages) or (pages and not start <= pages[0] <= pages[-1] < stop):
        raise ValueError("pages one after another within their text")


class SourceFile(Record):
    """A file of a document that was joined from several files: its name, the hash of its bytes, and its tokens."""

    path: SourcePath = Field(description="relative to the document's folder, with / between its parts")
    sha256: Sha256
    start: Count = Field(description="the file's text, without its header, is tokens [start, stop) of the whole prompt")
    stop: Count
    first_line: Count = Field(default=1, description="line of the file at which its text begins")
    cut: bool = Field(default=False, description="the file's text goes on after the last token of the prompt")
    pages: Pages = Field(default=(), description="if it is a PDF: the first token of each page in the whole prompt")

    @model_validator(mode="after")
    def _pages_within(self) -> Self:
        _check_pages(self.pages, self.start, self.stop)
        return self


class Prompt(Record):
    """The fixed prompt: its hashes, its chat frame, and the files and pages that its tokens come from.

    Attributes:
        text_sha256: hash of the document's text. After text was added, it is the hash of the earlier hash, in hex,
            followed by the added text.
        ids_sha256: hash of the token ids.
        block_hashes: chained hashes of the token ids. Entry i covers the first 256 (i + 1) tokens.
        tokens: number of tokens.
        chat: the chat template's texts; None: the index was built without a chat template.
    """

    text_sha256: str
    ids_sha256: Sha256
    block_hashes: list[str]
    tokens: Size
    chat: ChatFrame | None
    special_tokens: bool = Field(
        default=False, description="special tokens in the text or in an addition keep their meaning"
    )
    max_tokens: Size | None = Field(
        default=None, description="tokens of the document if it was cut after them; null if all of it is in the prompt"
    )
    border: Border | None = Field(default=None, description="null: the following text is tokenised separately")
    files: tuple[SourceFile, ...] | None = Field(
        default=None, description="the document's files, in the order of their tokens; null for a document of one text"
    )
    files_behind: tuple[SourcePath, ...] = Field(
        default=(), description="files whose text begins after the last token of the prompt"
    )
    pages: Pages = Field(default=(), description="if the document is one PDF: the first token of each page")
    first_line: int | None = Field(
        default=None,
        description="for a document of one text: the line at which the prompt's first token begins. Line breaks that "
        "the chat template puts before the text count back from line 1, to 0 or less. Null if unknown",
    )

    @model_validator(mode="after")
    def _files_in_order(self) -> Self:
        edges = [edge for file in self.files or () for edge in (file.start, file.stop)]
        if edges != sorted(edges) or max(edges, default=0) > self.tokens:
            raise ValueError("files one after another within the prompt")
        _check_pages(self.pages, 0, self.tokens)
        return self


FileOrder: TypeAlias = Literal["path", "stable", "changed-last"]
FILE_ORDERS: tuple[FileOrder, ...] = get_args(FileOrder)
"""Values of `build-index --order`."""
BY_PATH, CHANGED_LAST = FILE_ORDERS[0], FILE_ORDERS[2]


def file_order_named(name: str | None) -> FileOrder | None:
    """Return the file order of an `--order` value; None for None. Raises UsageError for an unknown value."""
    if name is not None:
        check_choice("--order", name, FILE_ORDERS)
    return next((order for order in FILE_ORDERS if order == name), None)


class FileHistory(Record):
    """Order of the files of a document of several files, and how often each has changed from build to build."""

    order: FileOrder = Field(default="path", description="see `build-index --order`")
    changes: dict[SourcePath, Count] = Field(
        default={}, description="for each file of the table, the number of builds in which it had changed; absent for 0"
    )


class Split(Record):
    """Split of a prompt's N tokens, in this order, into sinks, middle and tail.

    Every query attends to the sinks (the first tokens) and to the tail (the last tokens). The index covers the middle:
    the tokens between sinks and tail.
    """

    sinks: Size
    middle: Size
    tail: Annotated[int, Field(ge=2, le=MOST_TOKENS)]

    @property
    def tokens(self) -> int:
        return self.sinks + self.middle + self.tail


class RopeFacts(Record):
    """Rotary embedding of a layer's queries and keys: radians per position for each pair of channels.

    Without frequencies nothing is rotated. With P frequencies, pairs are channels i and i + P, or 2 i and 2 i + 1 if
    interleaved; channels from 2 P on are not rotated.
    """

    frequencies: list[float]
    interleaved: bool


class LayerFacts(Record):
    """Attention settings of one layer. A layer with a sliding window keeps dense attention and is not indexed.

    Logits are multiplied by `softmax_scale`. `softcap` bounds the logits; None: they are not bounded. `sliding_window`
    is the largest number of tokens that a query attends to; None: a query attends to all earlier tokens.
    """

    softmax_scale: Annotated[float, Field(gt=0)]
    softcap: Annotated[float, Field(gt=0)] | None
    sliding_window: Size | None
    attention_sinks: bool = Field(description="the layer has a learned logit per head in its softmax")
    rope: RopeFacts | None = Field(default=None, description="null where it is not known")

    @property
    def scaling(self) -> tuple[float, float | None]:
        """Softmax scale and soft cap of logits."""
        return self.softmax_scale, self.softcap


class PrefillRecord(Record):
    """How the context was computed: `dense`, or an approximation with its parameters."""

    kind: str
    chunk_size: Size
    parameters: dict[str, Any] = Field(default={})
    exact: bool = Field(default=True, description="dense attention, which does not depend on the chunk size")
    revision: int = Field(
        default=1, description="version of the prefill's code; another one computes other rows by the same options"
    )

    def __str__(self) -> str:
        """The prefill as reports print it: its kind, with chunk size and parameters if the prefill is sparse."""
        told = ", ".join(f"{name} {value}" for name, value in self.parameters.items())
        return self.kind if self.exact else f"{self.kind} (chunks of {self.chunk_size}, {told})"


class MethodRecord(Record):
    """One method's build: revision, parameters, seed and calibration, and the sha256 of each file it was built from."""

    revision: int
    parameters: dict[str, Any]
    seed: int
    calibration: dict[str, Any]
    built_from: dict[FileName, str]


class Probe(Record):
    """Highest logits of the last prompt token, which are recomputed to check that a model is the same.

    A build computes these logits by the model's own attention over the stored context. An index of an earlier version,
    whose manifest has an empty `canary`, has the logits of its prefill instead.
    """

    token_ids: list[Count] = Field(min_length=1)
    logits: list[float] = Field(min_length=1)

    @model_validator(mode="after")
    def _one_logit_a_token(self) -> Self:
        if len(self.token_ids) != len(self.logits):
            raise ValueError("as many logits as tokens")
        return self


class CanaryToken(Probe):
    """Highest logits of the prompt token at `position`, where a build compared our attention with the model's own."""

    position: Count


class TensorRecord(Record):
    """Shape and dtype of one tensor in a file."""

    shape: list[Count] = Field(max_length=MOST_AXES)
    dtype: str


class FileRecord(Record):
    """Path, size, checksum and tensors of a file of an index, which the manifest lists under its logical name.

    `recipe` is the hash of all inputs and settings that determine the file's content.
    """

    path: FileName
    bytes: Annotated[int, Field(ge=0)]
    sha256: Sha256
    recipe: str
    tensors: dict[str, TensorRecord]


class TuneTarget(Record):
    """Goal of a tuned setting: a bound `value` on `measure`.

    Recall must be at least `value`, and the output error at most `value`, as means over layers, heads and queries.
    Perplexity must be at most `value` times the perplexity of dense attention.

    Recall is the share of the oracle's tokens that the setting attends to. The oracle's tokens are those of highest
    attention weight; `of` is their number, or their share of the middle. `methods` are the methods that the search
    compared; empty: all methods.
    """

    measure: str
    value: float
    of: float | int | None = None
    methods: list[MethodName] = Field(default_factory=list)


class Defaults(Record):
    """The cheapest measured setting that reaches a target; used when no setting is requested.

    Attributes:
        variant: name of the method's variant that has these parameters; empty for the default variant.
        budget: the budget of every layer, as a share of the middle; with `layer_budgets` the mean of these.
        layer_budgets: a share of the middle for each layer; None: `budget` for all layers.
        residual: whether centroids represent the tokens that are not selected.
        calibration: the target's measure on the queries or tokens on which the setting was chosen.
        held_out: the same measure on other queries or tokens.
        kv_fraction: share of the keys and values that the setting reads, measured on the same queries or tokens as
            `held_out`.
    """

    method: str
    variant: str
    parameters: dict[str, Any]
    budget: Share
    layer_budgets: dict[int, Share] | None
    residual: bool
    target: TuneTarget
    calibration: float
    held_out: float
    kv_fraction: float


class AdditionRecord(Record):
    """Text that `append` added: its sha256 and its number of tokens."""

    sha256: Sha256
    tokens: Size
    first_line: int | None = Field(
        default=None,
        description="line of the text at which its first token begins. Line breaks that the program puts before the "
        "text count back from line 1, to 0 or less. Null if unknown",
    )
    special_tokens: bool | None = Field(
        default=None,
        description="whether the text's special tokens kept their meaning; null if it has none, or if unknown",
    )


class RopeRecord(Record):
    """The RoPE scaling requested when the index was built, and the RoPE settings of the model's config."""

    scaling: str | None = None
    parameters: dict[str, Any] | None = None
    max_position_embeddings: Any = None


class Manifest(Record):
    """Record of an index: its inputs, settings and files, with checksums. `manifest_sha256` covers all other fields.

    A version of sparsekv can read the index if its newest schema is at least `least_reader_version`. `writer_version`
    is the version of sparsekv that wrote the index, and `versions` has the versions of Python, torch and transformers.
    `parent_uuid` is the uuid of the index that this one was built upon; None: there was none.
    """

    schema_version: int = FIRST_SCHEMA
    least_reader_version: int = FIRST_SCHEMA
    writer_version: str
    uuid: str
    parent_uuid: str | None
    created: str
    model: ModelIdentity
    tokenizer: TokenizerIdentity
    tokenizer_files: Sha256 | None = Field(
        default=None,
        description="hash of the files that the tokenizer was loaded from; equal files give equal tokenizers",
    )
    prompt: Prompt
    file_history: FileHistory | None = Field(
        default=None, description="null: a document of one text, or an index of an earlier version"
    )
    split: Split
    dtype: Annotated[str, StringConstraints(pattern="^(float32|float16|bfloat16)$")]
    kv_storage: KVStorage | None = Field(default=None, description="null: keys and values are stored in `dtype`")
    rope: RopeRecord
    layers: list[LayerFacts | None] = Field(min_length=1, description="null for a layer that does not attend")
    prefill: PrefillRecord
    versions: dict[str, str]
    methods: dict[MethodName, MethodRecord]
    probe: Probe
    canary: list[CanaryToken] = Field(default=[], max_length=64, description="none in an index of an earlier version")
    files: dict[FileName, FileRecord]
    checkpoints: Size | None = Field(
        default=None,
        description="states are also stored after each this many blocks of 256 tokens; null: only the states that "
        "every index needs, or an index of an earlier version",
    )
    additions: list[AdditionRecord] = Field(
        default=[], description="texts appended since the index was built, in order"
    )
    defaults: Defaults | None = Field(default=None, description="null where no setting was measured")
    manifest_sha256: str = ""

    @property
    def attending(self) -> dict[int, LayerFacts]:
        """Facts of the layers that attend, by layer index. Only these layers have stored keys and values."""
        return {layer: facts for layer, facts in enumerate(self.layers) if facts is not None}

    @property
    def indexed_layers(self) -> list[int]:
        """Indices of the layers that attend without a sliding window. Methods build tensors for these layers only."""
        return [layer for layer, facts in self.attending.items() if facts.sliding_window is None]

    @property
    def keeping(self) -> tuple[int, ...]:
        """Indices, ascending, of the layers whose recurrent or convolution states are stored."""
        names = self.files[state_file(self.states[0])].tensors if self.states else {}
        return tuple(sorted({int(name.removeprefix("layer_").partition(".")[0]) for name in names}))

    @property
    def states(self) -> list[int]:
        """Numbers of prompt tokens, ascending, after which the layers' recurrent and convolution states are stored."""
        return sorted(tokens for name in self.files if (tokens := state_tokens(name)) is not None)
