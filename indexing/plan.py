"""The inputs of one build (`BuildPlan`), and the state that its stages share while it runs (`BuildJob`)."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from sparsekv.formats.documents.prompt import FixedPrompt
from sparsekv.formats.errors import UsageError
from sparsekv.formats.kv_storage import KVDtype
from sparsekv.formats.models.load import LoadedModel
from sparsekv.formats.models.rope import positions_of, rope_depends_on_length, stretchable
from sparsekv.formats.parameters import stored_parameters
from sparsekv.formats.schema import AdditionRecord, ModelIdentity, PrefillRecord, Split, TokenizerIdentity
from sparsekv.formats.writer import ArtifactWriter
from sparsekv.indexing.capture.team import Team
from sparsekv.indexing.indexers.interface import Indexer
from sparsekv.indexing.indexers.layer_maker import LayerMaker, make_layers
from sparsekv.indexing.prefill.interface import DensePrefill, Prefill, prefill_name

Progress = Callable[[str, int, int], None]

CHUNK, CHUNK_ON_A_CPU, CHUNK_ON_A_GPU = 512, 2048, 8192
LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})
"""Kinds of layers, as transformers names them, that attend to all tokens or to the last ones."""
MOST_CHUNKS = 2  # more GPUs have not been measured, and each has the hidden states of all tokens


def most_tokens(positions: int) -> int:
    """A round number of a document's tokens that leaves some positions to a template, questions and answers."""
    most = positions * 15 // 16
    return most // 100 * 100 or most


def choose_chunk_size(asked: int | None, device: torch.device, prefill: Prefill, ranks: int = 1) -> int:
    """Tokens per forward pass of a prefill: as asked, else as many as the device needs to be busy.

    The result of a sparse prefill depends on them, so there they are the same for all devices.

    Args:
        ranks: how many devices share the model: of each token each one computes a share.
    """
    if asked is not None:
        return asked
    if not prefill.exact:
        return CHUNK
    return CHUNK_ON_A_GPU * min(ranks, MOST_CHUNKS) if device.type == "cuda" else CHUNK_ON_A_CPU


@dataclass(frozen=True)
class Growth:
    """Says that a build appends tokens to the index with the uuid `base`: methods in `online` append them, the others
    are rebuilt. `addition` is the manifest's record of the tokens."""

    base: str
    online: frozenset[str]
    addition: AdditionRecord


@dataclass(frozen=True)
class BuildPlan:
    """Everything that decides the content of an index. `kv_dtype`: what keys and values are stored in; None: the
    model's dtype."""

    loaded: LoadedModel
    prompt: FixedPrompt
    methods: dict[str, Indexer]
    sinks: int = 10
    tail: int = 128
    chunk_size: int = CHUNK
    prefill: Prefill = field(default_factory=DensePrefill)
    rope_scaling: str | None = None
    force: bool = False
    growth: Growth | None = None
    kv_dtype: KVDtype | None = None

    def __post_init__(self) -> None:
        if self.sinks < 1 or self.tail < 2:
            raise UsageError(f"--sinks {self.sinks} --tail {self.tail}: give at least 1 sink and 2 tail tokens")
        if self.chunk_size < 1:
            raise UsageError(f"--chunk-size {self.chunk_size}: give at least 1")
        self._check_heads()
        for indexer in self.methods.values():
            indexer.check_channels(self.head_dim)
        config = self.loaded.model.config.get_text_config()
        if others := sorted(set(getattr(config, "layer_types", None) or ()) - LAYERS):
            told = f"{self.loaded.name} has layers of {', '.join(others)}"
            raise UsageError(f"{told}; an index is of full attention, and of a sliding window's: choose another model")
        parameters = getattr(config, "rope_parameters", None)
        if not self.prefill.exact and rope_depends_on_length(parameters):
            raise UsageError(
                f"--prefill {prefill_name(self.prefill)}: {self.loaded.name} turns keys by the prompt's length, so "
                "that it has to be run at once; leave the option out"
            )

    def _check_heads(self) -> None:
        """Raise UsageError for a model whose config has no one number and size of heads for all layers."""
        config = self.loaded.model.config.get_text_config()
        told = f"{self.loaded.name} ({config.model_type})"
        try:
            heads, _, _ = getattr(config, "num_key_value_heads", None), config.num_attention_heads, self.head_dim
        except RuntimeError:  # as transformers raises for a field that differs between layers
            raise UsageError(f"{told} has layers with heads of different sizes: choose another model") from None
        except AttributeError:
            heads = None
        if heads is None:
            raise UsageError(f"{told} has no KV heads in its config: choose another model")

    @property
    def prefill_record(self) -> PrefillRecord:
        """The manifest's record of the prefill."""
        return PrefillRecord(
            kind=prefill_name(self.prefill),
            chunk_size=self.chunk_size,
            parameters=stored_parameters(self.prefill),
            exact=self.prefill.exact,
            revision=self.prefill.revision,
        )

    @property
    def dtype(self) -> str:
        """The model's dtype as the manifest names it, such as `bfloat16`."""
        return str(self.loaded.model.dtype).removeprefix("torch.")

    @property
    def num_hidden_layers(self) -> int:
        return int(self.loaded.model.config.get_text_config().num_hidden_layers)

    @property
    def head_dim(self) -> int:
        """Channels of a head, by the model's config."""
        config = self.loaded.model.config.get_text_config()
        return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)

    def split(self) -> Split:
        """Sinks, middle and tail of the prompt.

        Raises:
            UsageError: the document is no longer than sinks and tail, or has more tokens than the model has positions.
        """
        tokens = len(self.prompt.input_ids)
        positions = positions_of(self.loaded.model.config)
        if tokens <= self.sinks + self.tail:
            more = "raise --max-tokens, or lower" if self.prompt.cut else "give a longer one or lower"
            raise UsageError(
                f"the document is too short to index: {tokens} tokens with the chat template, where sinks and tail "
                f"alone take {self.sinks + self.tail}; {more} --sinks and --tail"
            )
        if positions is not None and tokens > positions:
            stretch = f"--rope-scaling yarn:{-(-tokens // positions)}" if stretchable(self.loaded.model.config) else ""
            if self.growth is not None:
                again = f", or build the index again with {stretch}" if stretch else ""
                raise UsageError(
                    f"the document and what is added have {tokens:,} tokens and {self.loaded.name} has {positions:,} "
                    f"positions; add less{again}"
                )
            longer = f", or stretch the model with {stretch}" if stretch else ""
            raise UsageError(
                f"the document has {tokens:,} tokens and {self.loaded.name} has {positions:,} positions; shorten it "
                f"with --max-tokens {most_tokens(positions)}, which leaves room for questions{longer}"
            )
        return Split(sinks=self.sinks, middle=tokens - self.sinks - self.tail, tail=self.tail)


@dataclass(frozen=True)
class MethodJob:
    """What the methods of an index are built with, once the context's files are written or reused: no model.

    Args:
        make_layers: makes the tensors of layers, in this process or in several.
    """

    methods: dict[str, Indexer]
    split: Split
    dtype: str
    device: torch.device
    writer: ArtifactWriter
    progress: Progress
    force: bool = False
    growth: Growth | None = None
    make_layers: LayerMaker = make_layers

    def read(self, name: str) -> dict[str, torch.Tensor]:
        """Tensors of a file of this build, on the device."""
        return self.writer.read(name, self.device)

    def read_base(self, name: str) -> dict[str, torch.Tensor]:
        """Tensors of a file of the finished index in the folder, on the device."""
        return self.writer.read_base(name, self.device)


@dataclass(frozen=True)
class BuildJob:
    """A running build: its plan and split, the model's identity, the writer that holds the folder's lock, the processes
    that run the model, and what is called with a line for the user."""

    plan: BuildPlan
    split: Split
    model: ModelIdentity
    tokenizer: TokenizerIdentity
    writer: ArtifactWriter
    progress: Progress
    team: Team
    tell: Callable[[str], None]

    @property
    def method_job(self) -> MethodJob:
        """The part of the build that needs no model."""
        plan, device = self.plan, self.plan.loaded.model.device
        return MethodJob(
            plan.methods,
            self.split,
            plan.dtype,
            device,
            self.writer,
            self.progress,
            plan.force,
            plan.growth,
            self.team.make_layers,
        )

    def read_base(self, name: str) -> dict[str, torch.Tensor]:
        """Tensors of a file of the finished index in the folder, on the model's device."""
        return self.writer.read_base(name, self.plan.loaded.model.device)
