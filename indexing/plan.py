"""The inputs of a build, the earlier index that it may reuse, the state that its stages share, and its GPU memory."""

import platform
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import version
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from sparsekv.formats.checksums import BLOCK_TOKENS, hash_tokens
from sparsekv.formats.device import MemoryPlan, device_memory, model_bytes
from sparsekv.formats.documents.prompt import FixedPrompt
from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.context_rows import Pair, context_rows
from sparsekv.formats.index.schema import (
    AdditionRecord,
    FileHistory,
    KVDtype,
    Manifest,
    ModelIdentity,
    PrefillRecord,
    Split,
    TokenizerIdentity,
    layer_file,
    state_file,
    stored_parameters,
)
from sparsekv.formats.index.writer import HELD_BYTES, ArtifactWriter
from sparsekv.formats.models.load import ENCODER_DECODER, LoadedModel, has_encoder
from sparsekv.formats.models.rope import positions_of, rope_depends_on_length, stretch_for
from sparsekv.indexing.capture.team import AHEAD, Team
from sparsekv.indexing.context_files import context_recipe, state_recipe
from sparsekv.indexing.indexers.interface import Indexer
from sparsekv.indexing.prefill.prefills import DensePrefill, Prefill, prefill_name
from sparsekv.kernels.common.states import ATTENDING, BOTH, KEEPING, NEITHER, LayerKinds, layer_kinds


def birth() -> dict[str, Any]:
    """Return the manifest fields of a new index that identify it: uuid, creation time and software versions."""
    return {
        "writer_version": version("sparsekv"),
        "uuid": str(uuid.uuid4()),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


class EarlierIndex:
    """Reads the finished index in a build's folder onto the model's device, while the build has the folder's lock."""

    def __init__(self, writer: ArtifactWriter, model: PreTrainedModel):
        assert writer.base is not None
        self.manifest: Manifest = writer.base
        self._writer, self._device, self._dtype = writer, model.device, model.dtype

    def read(self, name: str) -> dict[str, torch.Tensor]:
        """Read the tensors of a file by its logical name."""
        return self._writer.read_base(name, self._device)

    def are_whole(self, names: Iterable[str]) -> bool:
        """Whether files exist with their recorded checksums.

        Without this check, damaged rows that a build copies would get valid checksums in the new index.
        """
        return all(self._writer.is_whole(self.manifest.files[name]) for name in names)

    def rows(self, layer: int, tokens: int) -> Pair:
        """Read keys and values [Hk, tokens, D] of a layer's first tokens, in the model's dtype."""
        return context_rows(self.read(layer_file("context", layer)), self._dtype).part(slice(tokens))

    def state(self, tokens: int) -> dict[str, torch.Tensor]:
        """Read the states after the first `tokens` tokens."""
        return self.read(state_file(tokens))

    def query_positions(self) -> torch.Tensor:
        """Return the ascending positions [P] of stored queries: the sample's, between sinks and tail, then the tail's.

        Returns no positions if a file of queries is damaged.
        """
        split, layers = self.manifest.split, self.manifest.indexed_layers
        if not self.are_whole(layer_file(folder, layer) for folder in self._query_folders() for layer in layers):
            return torch.zeros(0, dtype=torch.int64)
        tail = torch.arange(split.sinks + split.middle, split.tokens)
        if not self._has_sample():
            return tail
        sampled = self._writer.read_base(layer_file("samples", layers[0]))["positions"]
        return torch.cat([sampled.long(), tail])

    def queries(self, layer: int) -> torch.Tensor:
        """Read the queries [Hq, P, D] of a layer at `query_positions`."""
        names = {"samples": "queries", "queries": "tail"}
        return torch.cat([self.read(layer_file(one, layer))[names[one]] for one in self._query_folders()], 1)

    def sample_size(self) -> int:
        """Return the number of positions between sinks and tail whose queries are stored."""
        stored = self.manifest.files.get(layer_file("samples", self.manifest.indexed_layers[0]))
        return 0 if stored is None else stored.tensors["positions"].shape[0]

    def is_finite(self, tokens: int) -> bool:
        """Whether the keys and values of the first tokens and the sampled queries are finite, in all layers."""
        for layer in self.manifest.attending:
            tensors = list(self.rows(layer, tokens))
            if (name := layer_file("samples", layer)) in self.manifest.files:
                tensors.append(self.read(name)["queries"])
            if not all(bool(rows.isfinite().all()) for rows in tensors):
                return False
        return True

    def _has_sample(self) -> bool:
        return layer_file("samples", self.manifest.indexed_layers[0]) in self.manifest.files

    def _query_folders(self) -> list[str]:
        return ["samples", "queries"] if self._has_sample() else ["queries"]


Progress = Callable[[str, int, int], None]

CHUNK, CHUNK_ON_A_CPU, CHUNK_ON_A_GPU = 512, 2048, 8192
LAYERS = ATTENDING | KEEPING | BOTH | NEITHER
LEAST_SINKS, LEAST_TAIL = 1, 2
# A chunk grows with the number of GPUs, at most by this factor. Larger factors were not measured, and each GPU holds
# the hidden states of all tokens of a chunk.
MOST_CHUNKS = 2


def most_tokens(positions: int) -> int:
    """Return a rounded number of tokens that leaves at least 1/16 of `positions` to template, questions and answers."""
    most = positions * 15 // 16
    return most // 100 * 100 or most


def choose_chunk_size(requested: int | None, device: torch.device, prefill: Prefill, ranks: int = 1) -> int:
    """Return the tokens per forward pass of a prefill: `requested`, or if it is None, as many as keep the device busy.

    The result of a sparse prefill depends on the chunk size, so its default is the same on all devices.

    Args:
        ranks: the number of devices that share the model; each computes a part of the work for every token.
    """
    if requested is not None:
        return requested
    if not prefill.exact:
        return CHUNK
    return CHUNK_ON_A_GPU * min(ranks, MOST_CHUNKS) if device.type == "cuda" else CHUNK_ON_A_CPU


@dataclass(frozen=True)
class BuildConfig:
    """The settings of builds, the same for each document.

    Args:
        methods: indexers with their parameters, by name.
        prefill: the attention of a prefill's chunks.
        sinks, tail: numbers of first and last prompt tokens, which are always attended and never indexed.
        chunk_size: tokens per forward pass; None for the default of `choose_chunk_size`.
        kv_dtype: storage dtype of keys and values; None for the model's dtype.
        rope_scaling: the RoPE scaling of the model, which the manifest records.
        checkpoints: layer states are stored after each `checkpoints` blocks of 256 tokens. None: as often as in the
            index in the folder; without such an index, only the states that every index needs.
        force: replace the index in the folder, and reuse none of its files.

    Raises:
        UsageError: a number is too small.
    """

    methods: dict[str, Indexer]
    prefill: Prefill = field(default_factory=DensePrefill)
    sinks: int = 10
    tail: int = 128
    chunk_size: int | None = None
    kv_dtype: KVDtype | None = None
    rope_scaling: str | None = None
    checkpoints: int | None = None
    force: bool = False

    def __post_init__(self) -> None:
        if self.sinks < LEAST_SINKS or self.tail < LEAST_TAIL:
            least = f"give at least {LEAST_SINKS} sink and {LEAST_TAIL} tail tokens"
            raise UsageError(f"--sinks {self.sinks} --tail {self.tail}: {least}")
        if self.chunk_size is not None and self.chunk_size < 1:
            raise UsageError(f"--chunk-size {self.chunk_size}: give at least 1")
        if self.checkpoints is not None and self.checkpoints < 1:
            raise UsageError(f"--checkpoints {self.checkpoints}: give at least 1")


def config_of(manifest: Manifest, methods: dict[str, Indexer], prefill: Prefill, chunk_size: int | None) -> BuildConfig:
    """Return the settings of a build that continues an index: the index's own, except methods and chunk size."""
    return BuildConfig(
        methods=methods,
        prefill=prefill,
        sinks=manifest.split.sinks,
        tail=manifest.split.tail,
        chunk_size=chunk_size,
        kv_dtype=None if manifest.kv_storage is None else manifest.kv_storage.dtype,
        rope_scaling=manifest.rope.scaling,
    )


def stored_checkpoints(manifest: Manifest) -> int | None:
    """Return the number of blocks between an index's stored states; None if the index has only the needed states.

    An index of an earlier version does not record this number. A needed state of such an index may have been a
    checkpoint, too.
    """
    if manifest.checkpoints is not None:
        return manifest.checkpoints
    needed = needed_states(manifest.split)
    kept = [tokens for tokens in manifest.states if tokens not in needed and not tokens % BLOCK_TOKENS]
    return min(kept) // BLOCK_TOKENS if kept else None


def needed_states(split: Split) -> set[int]:
    """Return the numbers of prompt tokens after which every index stores the layers' states.

    An answer needs the state after all tokens, and the probe the state before the last token. An append needs the state
    before the tail, because it prefills the old tail again for its queries.
    """
    return {split.sinks + split.middle, split.tokens - 1, split.tokens}


@dataclass(frozen=True)
class Growth:
    """Marks a build that appends tokens to an index.

    Args:
        online: names of the methods that append the tokens; the others are built again.
        addition: the manifest's record of the tokens.
    """

    online: frozenset[str]
    addition: AdditionRecord


PREFILL = "prefill"
"""Name of the stage in which the model runs over the prompt, whose steps are tokens."""


def check_positions(
    prompt: FixedPrompt, config: PreTrainedConfig, name: str, *, scaling: str | None = None, grows: bool = False
) -> None:
    """Raise UsageError if a prompt has more tokens than a model has positions.

    Args:
        scaling: the RoPE scaling with which the config was stretched.
        grows: the prompt's last tokens are appended to an index.
    """
    tokens, positions = len(prompt.input_ids), positions_of(config)
    if positions is None or tokens <= positions:
        return
    stretch = stretch_for(config, tokens, scaling)
    if grows:
        again = f", or build the index again with {stretch}" if stretch else ""
        raise UsageError(
            f"the document and the appended text have {tokens:,} tokens together, and {name} has "
            f"{positions:,} positions; append less{again}"
        )
    longer = f", or stretch the model with {stretch}" if stretch else ""
    raise UsageError(
        f"the document has {tokens:,} tokens, and {name} has {positions:,} positions; "
        f"{_less(prompt)}shorten it with --max-tokens {most_tokens(positions)}, which leaves room for "
        f"questions{longer}"
    )


def _less(prompt: FixedPrompt) -> str:
    """Return a hint that names the largest files of a document of several files; empty for a document of one text."""
    if not prompt.files:
        return ""
    largest = sorted(prompt.files, key=lambda file: file.start - file.stop)[:3]
    named = ", ".join(f"{file.path} with {file.stop - file.start:,}" for file in largest)
    return f"leave files out with --exclude (the largest: {named}), or "


@dataclass(frozen=True)
class BuildPlan:
    """All inputs that determine the content of an index: model, prompt and settings.

    Args:
        base: the uuid of the index that the build extends, by tokens or by methods; None: the build extends no index.

    Raises:
        UsageError: the model cannot be indexed, a method cannot be built for the model's heads, or the model's layers
            or RoPE do not allow the prefill or `checkpoints`.
    """

    loaded: LoadedModel
    prompt: FixedPrompt
    config: BuildConfig
    growth: Growth | None = None
    file_history: FileHistory | None = None
    base: str | None = None

    def __post_init__(self) -> None:
        if has_encoder(self.loaded.model.config):
            raise UsageError(f"{self.loaded.name} ({self.loaded.model.config.model_type}) {ENCODER_DECODER}")
        self._check_heads()
        for indexer in self.config.methods.values():
            indexer.check_channels(self.head_dim)
        config = self.loaded.model.config.get_text_config()
        if others := sorted(set(getattr(config, "layer_types", None) or ()) - LAYERS):
            told = f"{self.loaded.name} has layers of {', '.join(others)}"
            raise UsageError(f"{told}, which sparsekv does not support: choose another model")
        if not self.kinds.attending:
            raise UsageError(f"{self.loaded.name} has no attention layers: choose another model")
        parameters = getattr(config, "rope_parameters", None)
        self._check_states(rope_depends_on_length(parameters))
        if not self.config.prefill.exact and rope_depends_on_length(parameters):
            raise UsageError(
                f"--prefill {prefill_name(self.config.prefill)}: the RoPE of {self.loaded.name} depends on the "
                "prompt's length, so the prompt must be prefilled in one piece; leave the option out"
            )

    def _check_states(self, by_length: bool) -> None:
        """Raise UsageError if layers keep a state that this build does not support.

        Also raise it if `checkpoints` is set and no layer keeps a state. `by_length` tells whether RoPE depends on the
        prompt's length.
        """
        config, name = self.config, self.loaded.name
        if not self.kinds.keeping:
            if config.checkpoints:
                raise UsageError(
                    f"--checkpoints {config.checkpoints}: every layer of {name} attends, so there is no state to "
                    "store; leave the option out"
                )
            return
        if not config.prefill.exact:
            raise UsageError(
                f"--prefill {prefill_name(config.prefill)}: {name} has layers with a state, and a sparse prefill "
                "would change that state; leave the option out"
            )
        if by_length:
            raise UsageError(
                f"{name} has layers with a state and also a RoPE that depends on the prompt's length, which sparsekv "
                "does not support: choose another model"
            )

    def _check_heads(self) -> None:
        """Raise UsageError unless the config has one number of KV heads and one head size for all layers."""
        config = self.loaded.model.config.get_text_config()
        told = f"{self.loaded.name} ({config.model_type})"
        try:
            heads, _, _ = getattr(config, "num_key_value_heads", None), config.num_attention_heads, self.head_dim
        except RuntimeError:  # transformers raises this for a field that differs between layers
            raise UsageError(
                f"{told} has layers with heads of different sizes, and an index needs one size: choose another model"
            ) from None
        except AttributeError:
            heads = None
        if heads is None:
            raise UsageError(f"{told} does not give its number of KV heads in its config: choose another model")

    @property
    def chunk_size(self) -> int:
        """Tokens per forward pass of the prefill."""
        return choose_chunk_size(self.config.chunk_size, self.loaded.model.device, self.config.prefill)

    @property
    def prefill_record(self) -> PrefillRecord:
        prefill = self.config.prefill
        return PrefillRecord(
            kind=prefill_name(prefill),
            chunk_size=self.chunk_size,
            parameters=stored_parameters(prefill),
            exact=prefill.exact,
            revision=prefill.revision,
        )

    @property
    def dtype(self) -> str:
        """The model's dtype as the manifest names it, such as `bfloat16`."""
        return str(self.loaded.model.dtype).removeprefix("torch.")

    @property
    def kinds(self) -> LayerKinds:
        return layer_kinds(self.loaded.model.config)

    @property
    def head_dim(self) -> int:
        """Number of channels of a head's keys, by the model's config."""
        config = self.loaded.model.config.get_text_config()
        if unturned := getattr(config, "qk_nope_head_dim", None):  # multi-head latent attention
            return int(unturned + config.qk_rope_head_dim)
        return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)

    def split(self) -> Split:
        """Split the prompt's tokens into sinks, middle and tail.

        Raises:
            UsageError: the document is no longer than sinks and tail, or has more tokens than the model has positions.
        """
        tokens, ends = len(self.prompt.input_ids), self.config.sinks + self.config.tail
        if tokens <= ends:
            more = "raise --max-tokens" if self.prompt.cut else "give a longer document"
            raise UsageError(
                f"the document is too short to index: it has {tokens} tokens with the chat template, and sinks "
                f"and tail alone take {ends}; {more}{self._shorter_ends(tokens)}"
            )
        check_positions(
            self.prompt,
            self.loaded.model.config,
            self.loaded.name,
            scaling=self.config.rope_scaling,
            grows=self.growth is not None,
        )
        return Split(sinks=self.config.sinks, middle=tokens - ends, tail=self.config.tail)

    def _shorter_ends(self, tokens: int) -> str:
        """Return the options with which half of a short document is indexed, and the largest tail that is accepted.

        Return an empty string if the document is too short for any tail.
        """
        least = 2 * LEAST_TAIL
        sinks = self.config.sinks if tokens - self.config.sinks >= least else LEAST_SINKS
        if tokens - sinks < least:
            return ""
        fewer = f"--sinks {sinks} " if sinks != self.config.sinks else ""
        return f", or give {fewer}--tail {(tokens - sinks) // 2} (at most {tokens - sinks - 1})"


@dataclass(frozen=True)
class Build:
    """A running build: its plan, and the folder, processes and callbacks that it uses.

    Args:
        split: sinks, middle and tail of the plan's prompt.
        writer: writes the index's files. It holds the folder's lock, and knows the folder's finished index and
            unfinished build.
        progress: called with a stage's name, the number of steps done, and the number of steps in all.
        team: the processes that run the model and build the methods.
        tell: called with a line for the user.
    """

    plan: BuildPlan
    split: Split
    model: ModelIdentity
    tokenizer: TokenizerIdentity
    writer: ArtifactWriter
    progress: Progress
    team: Team
    tell: Callable[[str], None]

    @cached_property
    def ids_sha256(self) -> str:
        """The hash of the prompt's token ids."""
        return hash_tokens(self.plan.prompt.input_ids.tolist())

    @cached_property
    def context_recipe(self) -> str:
        plan = self.plan
        return context_recipe(
            self.model, self.ids_sha256, self.split, plan.dtype, plan.prefill_record, plan.config.kv_dtype
        )

    @cached_property
    def checkpoints(self) -> int | None:
        """Number of blocks between the states that are stored besides the needed ones; None: there are none."""
        base, config = self.writer.base, self.plan.config
        kept = None if base is None or config.force else stored_checkpoints(base)
        return config.checkpoints or kept

    @cached_property
    def marks(self) -> list[int]:
        """Numbers of prompt tokens, ascending, after which states are stored; empty if no layer keeps a state."""
        if not self.plan.kinds.keeping:
            return []
        step = (self.checkpoints or 0) * BLOCK_TOKENS
        checkpoints = range(step, self.split.tokens, step) if step else ()
        return sorted({*needed_states(self.split), *checkpoints})

    def state_recipe(self, tokens: int) -> str:
        """Compute the recipe of the states after the prompt's first `tokens` tokens; later tokens have no effect."""
        plan, ids = self.plan, self.plan.prompt.input_ids[:tokens].tolist()
        return state_recipe(self.model, ids, self.split, plan.dtype, plan.prefill_record, plan.config.kv_dtype)

    @cached_property
    def earlier(self) -> EarlierIndex | None:
        """The finished index in the folder, if there is one."""
        return None if self.writer.base is None else EarlierIndex(self.writer, self.plan.loaded.model)


LAYERS_AT_ONCE = AHEAD + 2
"""Layers whose rows may be in memory while a method is built: the prefetched layers, the current layer, and the
previous one, which may still be in use."""
METHODS_SHARE = 10
"""A layer's keys and values take about this many times the memory of the methods' tensors of the layer."""
REMEDY = "index fewer tokens, or build the index with `sparsekv --gpus N build-index`, over several GPUs"


STATES_AT_ONCE = 7
"""States in memory during a prefill: the one that the model changes, one that waits to be written, and those before the
canary's runs."""


def plan_memory(plan: BuildPlan, sampled: int, state: int) -> MemoryPlan:
    """Estimate the GPU memory of a build, including the queries at `sampled` positions, and states of `state` bytes.

    The prefill holds the keys and values of all layers, and STATES_AT_ONCE states. The working memory is the sum of one
    chunk's activations, LAYERS_AT_ONCE layers while methods are built, one layer in float32, and method tensors that
    wait to be written.
    """
    model = plan.loaded.model
    config = model.config.get_text_config()
    layers, tokens, size = len(plan.kinds.attending), plan.split().tokens, model.dtype.itemsize
    layer = 2 * config.num_key_value_heads * plan.head_dim * tokens * size
    queries = config.num_attention_heads * plan.head_dim * sampled * size
    # A mixture of experts may have no such field; the default suffices, because activations are a small part.
    inner = getattr(config, "intermediate_size", 4 * config.hidden_size)
    activations = (6 * config.hidden_size + 3 * inner) * min(plan.chunk_size, tokens) * size
    waiting = min(HELD_BYTES, layer * layers // METHODS_SHARE)
    work = LAYERS_AT_ONCE * layer + layer * 4 // size + waiting + activations
    return MemoryPlan(model_bytes(model), (layer + queries) * layers, work, STATES_AT_ONCE * state)


def tell_memory(build: Build, sampled: int, state: int) -> None:
    """Report the GPU memory that a build needs to the user.

    Does nothing on a CPU, or if the team's heads are spread over several processes.

    Raises:
        SparsekvError: the keys, values and states alone do not fit into the GPU's memory.
    """
    memory = device_memory(build.plan.loaded.model)
    if memory is None or not build.team.has_all_heads:
        return
    planned = plan_memory(build.plan, sampled, state)
    planned.check(memory, REMEDY)
    build.tell(f"the build {planned.told(memory)}")
