"""Open an index with its model: check identities, GPU memory and the probe, and make caches for decoding."""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparsekv.formats.device import MemoryPlan, device_memory, model_bytes
from sparsekv.formats.errors import REBUILD, ArtifactError, IdentityError, SparsekvError
from sparsekv.formats.index.context_rows import Int8Stored, row_bytes
from sparsekv.formats.index.identity import check_model, check_tokenizer
from sparsekv.formats.index.manifest import (
    ROW_TOLERANCE,
    difference,
    is_over_exact,
    probe_tolerance,
    why_logits_differ,
)
from sparsekv.formats.index.reader import CPU, Artifact
from sparsekv.formats.index.schema import Manifest, ModelIdentity, Split, TokenizerIdentity, state_file
from sparsekv.formats.models.load import LoadedModel
from sparsekv.kernels.common.given_rows import RowPair, Rows, pass_over_rows
from sparsekv.kernels.common.states import LayerKinds, State, layer_kinds, relative_distance, state_distance
from sparsekv.runtime.attention.config import DecodeConfig, Dense
from sparsekv.runtime.attention.executors import GatherMaker
from sparsekv.runtime.cache.index_cache import BuiltLayers, IndexCache
from sparsekv.runtime.cache.kv_store import LayerRows, Pair, of_tokens
from sparsekv.runtime.cache.stored_layer import DenseLayer, DenseLayerIn8Bits, DocumentState, StoredLayer
from sparsekv.runtime.decoding.early import EarlyReading
from sparsekv.runtime.decoding.kept import KeptIndex
from sparsekv.runtime.decoding.prepare import PreparedMethod, files_read
from sparsekv.runtime.decoding.sparse_layers import SparseLayers, search_device
from sparsekv.runtime.decoding.threads import all_cores
from sparsekv.runtime.sources.finder import SourceFinder

REMEDY = (
    "spread the model over several GPUs with `sparsekv --gpus`, or ask with `generate` or `chat` by a sparse method "
    "and --placement host"
)


def document_bytes(artifact: Artifact, itemsize: int) -> tuple[int, int]:
    """Return the bytes of keys and values, and the bytes of recurrent states, in the memory of one cache of an index.

    Keys and values have `itemsize` bytes per element, or are in int8 if the index stores int8. A layer with a sliding
    window needs only the rows in the window, in the model's dtype. Each state needs two copies: the stored state, and
    the state that steps change.
    """
    tokens, rows = artifact.manifest.split.tokens, 0
    for layer, facts in artifact.manifest.attending.items():
        heads, channels = artifact.heads_and_channels(layer)
        in_8_bits = artifact.manifest.kv_storage is not None and facts.sliding_window is None
        row = row_bytes(channels) if in_8_bits else channels * itemsize
        rows += 2 * heads * row * min(tokens, facts.sliding_window or tokens)
    states = artifact.manifest.files[state_file(tokens)].bytes if artifact.manifest.states else 0
    return rows, 2 * states


def plan_opening(artifact: Artifact, model: nn.Module) -> MemoryPlan:
    """Return the memory that a model and an index's keys, values and states need on the model's device."""
    rows, states = document_bytes(artifact, next(model.parameters()).itemsize)
    return MemoryPlan(model_bytes(model), rows, states=states)


def check_room(artifact: Artifact, model: nn.Module) -> None:
    """Raise SparsekvError if a model on a GPU and an index's keys, values and states do not fit there together."""
    memory = device_memory(model)
    if memory is not None:
        plan_opening(artifact, model).check(memory, REMEDY)


def compare_probe(
    artifact: Artifact, model: PreTrainedModel, last: int, rows: Rows, state: State, after: State
) -> None:
    """Compute the logits after the last prompt token and compare them with the stored logits.

    The model runs its own attention and not this project's. A model with a mask of its own is therefore refused even if
    this project's attention would ignore the mask. The model attends to the stored rows of all tokens. Unless the index
    stores int8 rows, the stored rows of the last token are also compared with the keys and values that the model
    computes for this token. The stored state after the last token, from which answers begin, is compared with
    the model's state.

    Args:
        last: id of the last prompt token.
        rows: returns a layer's stored keys and values of all tokens.
        state, after: the stored states before and after the last token, if the model has layers with a state.

    Raises:
        IdentityError: logits or rows differ beyond rounding, so the index was built with another model, or with a
            model that attended differently.
        ArtifactError: the state differs beyond rounding, or the index's tensors have other sizes than the model's.
    """
    compared: list[RowPair] = []

    def given(layer: int, own: RowPair) -> RowPair:
        _check_heads(artifact, layer, own[0])
        stored = rows(layer, own)
        compared.append((_apart(own[0], stored[0]), _apart(own[1], stored[1])))
        return stored

    manifest = artifact.manifest
    with all_cores(model):
        logits, own = pass_over_rows(model, torch.tensor([last]), manifest.split.tokens - 1, given, state)
    _check_probe_logits(manifest, model, logits[-1])
    _check_state(artifact, model, own, after)
    if manifest.kv_storage is not None:  # int8 rounding may route the token to another expert, which changes its rows
        return
    rows_off = float(torch.stack([torch.stack(pair) for pair in compared]).amax())
    if not rows_off <= ROW_TOLERANCE * probe_tolerance(manifest, model.dtype, over_exact=False):
        raise _other(manifest, "keys and values", "the stored ones", f"{rows_off:.1%} away")


def _check_probe_logits(manifest: Manifest, model: PreTrainedModel, logits: torch.Tensor) -> None:
    """Raise IdentityError if logits [vocabulary] differ from the stored logits beyond rounding."""
    off = difference(manifest.probe, logits)
    if not off <= probe_tolerance(manifest, model.dtype, over_exact=is_over_exact(manifest)):
        stored, found = f"{manifest.probe.logits[0]:.4f} at its top", f"{logits[manifest.probe.token_ids[0]]:.4f}"
        raise _other(manifest, "logits", stored, f"{found}, {off:.1%} away")


def _check_state(artifact: Artifact, model: PreTrainedModel, own: State, stored: State) -> None:
    """Raise ArtifactError if the stored state after the last token differs from the model's state beyond rounding."""
    if not stored:
        return
    if {name: one.shape for name, one in own.items()} != {name: one.shape for name, one in stored.items()}:
        raise ArtifactError(f"the states stored in {artifact.folder} have other sizes than the model's; {REBUILD}")
    manifest = artifact.manifest
    off = state_distance(own, stored, exact=manifest.kv_storage is None)
    if not off <= ROW_TOLERANCE * probe_tolerance(manifest, model.dtype, over_exact=manifest.kv_storage is not None):
        remedy = REBUILD
        if is_over_exact(manifest):
            remedy = (
                f"int8 storage changes it too much, or it is damaged; use the index that was converted, or {REBUILD}"
            )
        raise ArtifactError(
            f"the state that {artifact.folder} stores for the end of the document differs by {off:.1%} from "
            f"the model's; {remedy}"
        )


def behind_zeros(pair: RowPair, first: int) -> RowPair:
    """Return keys and values [Hk, T, D] with `first` rows of zeros before them; without a copy if `first` is 0."""
    return pair if not first else (pad(pair[0], (0, 0, first, 0)), pad(pair[1], (0, 0, first, 0)))


def _other(manifest: Manifest, part: str, stored: str, found: str) -> IdentityError:
    return IdentityError(
        f"the probe ({part} of the last prompt token over the stored context)",
        stored,
        found,
        (
            f"{why_logits_differ(manifest)} or build the index again for this one; "
            "damaged keys and values look the same, and `sparsekv inspect --verify` finds them"
        ),
    )


def _apart(own: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """Return the relative distance of a token's rows [Hk, 1, D] from the last of the stored rows [Hk, T, D]."""
    return relative_distance(own, stored[:, -1:])


def _check_layers(artifact: Artifact, kinds: LayerKinds) -> None:
    """Raise ArtifactError if index and model differ in their layers.

    It compares the number of layers, the layers that attend, and the layers with a recurrent state.
    """
    manifest = artifact.manifest
    compared = (
        ("layers", range(len(manifest.layers)), range(kinds.layers)),
        ("layers with keys and values", manifest.attending, kinds.attending),
        ("layers with a state", manifest.keeping, kinds.keeping),
    )
    for what, stored, wanted in compared:
        if tuple(stored) != tuple(wanted):
            other = "other ones" if len(stored) == len(wanted) else str(len(wanted))
            raise ArtifactError(f"{artifact.folder} has {len(stored)} {what}, and the model {other}; {REBUILD}")


@contextmanager
def _states_fit(artifact: Artifact) -> Iterator[None]:
    """Within the context, convert a model's error to an ArtifactError if the index stores states.

    The states are then the likely reason: the manifest does not record their sizes, so no earlier check compares them.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        if not artifact.manifest.states or isinstance(error, SparsekvError):
            raise
        reason = str(error).partition("\n")[0]
        raise ArtifactError(
            f"the states stored in {artifact.folder} do not fit the model ({reason}); {REBUILD}"
        ) from None


def _check_heads(artifact: Artifact, layer: int, keys: torch.Tensor) -> None:
    """Raise ArtifactError if index and model differ in a layer's number of KV heads or channels."""
    heads, _, channels = keys.shape
    if (found := artifact.heads_and_channels(layer)) != (heads, channels):
        has, wants = f"{found[0]} heads of {found[1]} channels", f"{heads} of {channels}"
        raise ArtifactError(f"layer {layer} of {artifact.folder} has {has}, and the model {wants}; {REBUILD}")


def embeddings_of(model: PreTrainedModel) -> int:
    """Return the number of token ids that a model knows. Its tokenizer may have more."""
    return int(model.get_input_embeddings().weight.shape[0])  # type: ignore[index]


AHEAD = 2
"""Number of layers that are read to a GPU concurrently. A read begins before the previous read has finished."""


@dataclass(eq=False)
class OpenIndex:
    """An index together with the model that it was built with.

    Args:
        rows: keys and values, by layer, that a thread has begun to read; the probe uses them.
        prepared: a method that is already prepared. The first sparse cache uses it if the method is that of the cache.
        tokenizer_files: the hash of the files that the tokenizer was loaded from; None: unknown.
        kept: the same index as opened by the server that forked this process. The first call of `cache` returns the
            server's cache if the config is the server's and no other argument is given.

    Raises:
        ArtifactError: index and model differ in their layers, or the model has no embedding for a token of the index.
    """

    artifact: Artifact
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    rows: dict[int, LayerRows] = field(default_factory=dict)
    prepared: PreparedMethod | None = None
    tokenizer_files: str | None = None
    kept: KeptIndex | None = None

    def __post_init__(self) -> None:
        # Stored here, because the model searches its modules at each access to these properties.
        self.device, self.dtype = self.model.device, self.model.dtype
        self.input_ids = self.artifact.input_ids().clone()
        self._held: dict[int, LayerRows] = {}
        _check_layers(self.artifact, layer_kinds(self.model.config))
        if not self.knows(torch.cat([self.input_ids, torch.tensor(self.artifact.manifest.probe.token_ids)])):
            raise ArtifactError(f"{self.artifact.folder} has token ids that its model does not have; {REBUILD}")

    def knows(self, ids: torch.Tensor) -> bool:
        """Whether the model has embeddings for all of the token ids [T]."""
        return bool(((ids >= 0) & (ids < embeddings_of(self.model))).all())

    @cached_property
    def source_finder(self) -> SourceFinder:
        """The finder of answers' sources, made on first use. May run the model; see `SourceFinder.of`."""
        return SourceFinder.of(self.artifact, self.model, self.tokenizer)

    @property
    def split(self) -> Split:
        return self.artifact.manifest.split

    @property
    def document_bytes(self) -> int:
        """Bytes of the document's keys, values and states in the memory of one cache."""
        return sum(document_bytes(self.artifact, self.dtype.itemsize))

    @property
    def loaded(self) -> LoadedModel:
        """The loaded model with its tokenizer, under the model id and revision that the index records."""
        named = self.artifact.manifest.model
        unrounded = None if named.weights is None else named.weights_hash
        of_files = named.id, named.revision, self.tokenizer_files
        return LoadedModel(self.model, self.tokenizer, *of_files, named.weights, unrounded)

    def cache(
        self, config: DecodeConfig, *, tail: bool = True, gather_makers: Callable[[int], GatherMaker] | None = None
    ) -> IndexCache:
        """Make a cache that decodes by a config; layers with a sliding window stay dense.

        For a model on a GPU, allocates the context's keys and values on the GPU or in page-locked host memory. They
        have the model's dtype, or on the GPU int8 if the index stores int8. For a model on a CPU, or with placement
        `disk`, the keys and values between sinks and tail are read from the index's files. On a CPU without `disk`,
        they are copied to memory when a step first needs them in the method's layout. A config with dense attention
        gets the cache of `dense_cache`, without a placement.

        Args:
            tail: False: the stored context ends before the tail, and the tokens fed next replace the tail.
            gather_makers: returns, for a layer, the function that makes the executor of all of the layer's steps.

        Raises the errors of `prepare_layer`, and ArtifactError if a file that the method reads has changed.
        """
        kept, self.kept = self.kept, None
        if kept is not None and kept.config == config and tail and gather_makers is None:
            self.prepared = None  # its selectors are those of `kept.cache`, and a selector serves only one cache
            return kept.cache
        if isinstance(config.attention, Dense):
            return self.dense_cache()
        self.artifact.check_sums(files_read(self.artifact, config.attention))
        split = self.split if tail else self.split.model_copy(update={"tail": 0})
        where = search_device(config.attention.method, config.placement, self.device)
        prepared = PreparedMethod(config.attention, where)
        # The selectors of a prepared method serve one cache.
        early, self.prepared = self.prepared, None
        if early is not None and early.is_like(prepared):
            prepared = early
        about = self.artifact, self.device, self.dtype, self.take_rows
        sparse, manifest = SparseLayers(*about, prepared, split, config, gather_makers), self.artifact.manifest
        layers: list[StoredLayer] = [
            sparse.make(layer) if of_layer.sliding_window is None else self._dense_layer(layer, split.tokens)
            for layer, of_layer in manifest.attending.items()
        ]
        return IndexCache(layers, BuiltLayers(manifest.layers), states=self._state(split.tokens))

    def dense_cache(self, tokens: int | None = None) -> IndexCache:
        """Make a cache for dense attention over the first `tokens` tokens of the stored context, by default all.

        Rows are views of the index's files if their device and dtype are the model's. Otherwise they are copies, on a
        GPU in int8 if the index stores int8 and the layer has no sliding window.
        """
        tokens = self.split.tokens if tokens is None else tokens
        manifest = self.artifact.manifest
        layers: list[StoredLayer] = [self._dense_layer(layer, tokens) for layer in manifest.attending]
        return IndexCache(layers, BuiltLayers(manifest.layers), states=self._state(tokens))

    def _state(self, tokens: int) -> DocumentState:
        """Read the states of layers after the first `tokens` tokens; states of convolutions get the model's dtype."""
        state = {
            # Recurrent states may be in float32 in a model of any dtype.
            name: one.to(self.device, self.dtype if ".conv_" in name else one.dtype)
            for name, one in self.artifact.state(tokens, self.device).items()
        }
        return DocumentState(layer_kinds(self.model.config), state)

    def agreed(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, V] from which tokens are chosen: unchanged, as this process has the whole model."""
        return logits

    def take_rows(self, layer: int) -> LayerRows:
        """Return one layer's stored keys and values: rows that `check_probe` left in memory, or rows to be read later.

        The rows that `check_probe` left in memory are returned only once.
        """
        return self._held.pop(layer, LayerRows(self.artifact, layer))

    def _dense_layer(self, layer: int, tokens: int) -> DenseLayer:
        """Make a dense layer; with a sliding window it has only the rows that the next token can attend to."""
        first, window = self._first_seen(layer, tokens), self._window(layer)
        held = self.take_rows(layer)
        if window is None and self.device.type == "cuda" and isinstance(held.stored_on(self.device), Int8Stored):
            stored = of_tokens(held.stored_on(self.device).tensors, slice(tokens))
            nothing = torch.empty(len(stored["keys"]), 0, stored["keys"].shape[2], dtype=self.dtype, device=self.device)
            return DenseLayerIn8Bits(stored, nothing)
        return DenseLayer(*self._rows(held, slice(first, tokens)), out_of_sight=first, window=window)

    def _probed_rows(self, layer: int, ahead: Executor | None, *, hold: bool) -> Callable[[], Pair]:
        """Return a function that returns a layer's rows.

        With `hold`, the rows of a layer without a sliding window stay in memory for the next cache. In a layer with a
        sliding window only the rows of the last two windows are read, and the rows before are zeros. A model that lost
        its window attends to the zeros, which changes its logits.

        Args:
            ahead: executor in which the rows are already read, with `hold`; None: the returned function reads them.
        """
        rows, window = self.rows.pop(layer, None) or LayerRows(self.artifact, layer), self._window(layer)
        early = None
        if hold and window is None:
            self._held[layer] = rows
            early = ahead.submit(rows.stored_on, self.device) if ahead else None

        def read() -> Pair:
            if early:
                early.result()
            tokens = self.split.tokens
            first = 0 if window is None else max(0, tokens - 2 * window)
            pair = self._rows(rows, slice(first, tokens))
            if layer not in self._held:
                rows.release()
            return behind_zeros(pair, first)

        return read

    def _window(self, layer: int) -> int | None:
        return self.artifact.manifest.attending[layer].sliding_window

    def _first_seen(self, layer: int, tokens: int) -> int:
        window = self._window(layer)
        return 0 if window is None else max(0, tokens - window + 1)

    def _rows(self, rows: LayerRows, tokens: slice) -> Pair:
        """Return some tokens' keys and values in the model's dtype on its device.

        On a GPU, only the rows of these tokens are copied to the device if `tokens` do not begin at 0, as in a sliding
        window. Otherwise all rows of the layer are copied.
        """
        keys, values = rows.part(tokens, CPU if tokens.start else self.device)
        return keys.to(self.device, self.dtype), values.to(self.device, self.dtype)

    def check_probe(self, *, hold: bool = False) -> None:
        """Recompute the last prompt token over the stored context, and compare its logits with the stored logits.

        The model uses its own attention.

        Args:
            hold: leave the rows that the probe reads in memory, on a GPU or mapped, for the next cache.

        Raises:
            IdentityError: logits or rows differ beyond rounding, so the index was built with another model or mask.
            ArtifactError: the stored state differs beyond rounding, or tensors have other sizes than the model's.
            SparsekvError: with `hold`, model and rows do not fit on the GPU.
        """
        if hold:
            check_room(self.artifact, self.model)
        with ThreadPoolExecutor(AHEAD) as threads:
            # Threads read ahead only for a GPU, because rows are copied to its memory. On a CPU the rows are a mapped
            # file, whose pages are read when they are accessed.
            ahead = threads if hold and self.device.type == "cuda" else None
            rows = {layer: self._probed_rows(layer, ahead, hold=hold) for layer in self.artifact.manifest.attending}
            last, tokens = int(self.input_ids[-1]), self.split.tokens
            states = self._state(tokens - 1).stored, self._state(tokens).stored
            with _states_fit(self.artifact):
                compare_probe(self.artifact, self.model, last, lambda layer, own: rows[layer](), *states)


def open_index(
    artifact: Artifact,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    identity: tuple[ModelIdentity, TokenizerIdentity],
    *,
    hold: bool = False,
    early: EarlyReading | None = None,
    files: str | None = None,
) -> OpenIndex:
    """Open an index after checking, by hashes and the probe (the last token's logits), that model and tokenizer match.

    Args:
        hold: leave the keys and values that the probe reads in memory, copied to a GPU or mapped, for the next cache.
        early: reading of the index's files and preparation of its method that have already begun.
        files: the hash of the files that the tokenizer was loaded from.

    Raises:
        IdentityError: index and model do not match; the error names the field that differs, both values and the remedy.
        ArtifactError: the index's tensors do not fit the model, or are damaged.
        SparsekvError: with `hold`, model, keys and values do not fit on the GPU.
    """
    check_model(artifact.manifest, identity[0], str(model.dtype).removeprefix("torch."))
    check_tokenizer(artifact.manifest, identity[1])
    rows, prepared = ({}, None) if early is None else (early.rows, early.prepared)
    index = OpenIndex(artifact, model, tokenizer, rows, prepared, files)
    index.check_probe(hold=hold)
    return index
