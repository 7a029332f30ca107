"""Write the files of a context layer by layer, and measure the error of dense attention that int8 storage causes."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import torch

from sparsekv.formats.checksums import hash_json, hash_tokens
from sparsekv.formats.index.context_rows import FORM, Pair, context_rows
from sparsekv.formats.index.schema import (
    CanaryToken,
    KVDtype,
    KVStorage,
    LayerFacts,
    ModelIdentity,
    PrefillRecord,
    Probe,
    Split,
    layer_file,
)
from sparsekv.formats.index.writer import ArtifactWriter
from sparsekv.indexing.capture.capture import CapturedQueries, TakenOver, in_8_bits
from sparsekv.indexing.capture.team import Captured, SharedRows
from sparsekv.kernels.attention.attention import Segment, attend, causal_mask

LOGITS_AT_ONCE = 64 * 2**20  # elements of [Hq, Q, N] float32 logits: 256 MB


def storing_error(
    queries: torch.Tensor,
    exact: Pair,
    tensors: Mapping[str, torch.Tensor],
    facts: LayerFacts,
    sink_logits: torch.Tensor | None,
) -> float:
    """Compute the relative error of dense attention over int8 rows against dense attention over the unquantised rows.

    With outputs o, the error is the mean of |o_stored - o_exact| / |o_exact| over queries and heads. Reports call this
    error the output error. Allocates 256 MB of logits a few times over, the layer's dequantised rows, and the rows of
    the current heads in float32.

    Args:
        queries: [Hq, R, D], queries of the prompt's last R tokens.
        exact: keys and values [Hk, N, D].
        tensors: the tensors of the file that stores these keys and values in int8.
        sink_logits: [Hq], if the layer has attention sinks.
    """
    stored = context_rows(tensors, exact[0].dtype).part(slice(None))
    Hk, tokens, _ = exact[0].shape
    # Attention runs in float32, so that the error is that of the rows, without the rounding of outputs.
    grouped = queries.float().unflatten(0, (Hk, -1))
    sinks = None if sink_logits is None else sink_logits.view(Hk, -1)
    visible = causal_mask(queries.shape[1], tokens, facts.sliding_window, queries.device)
    _, G, Q, _ = grouped.shape
    # As many queries of a head as possible run together, because each call converts the head's rows to float32.
    heads, at_once, errors = max(1, LOGITS_AT_ONCE // (G * Q * tokens)), max(1, LOGITS_AT_ONCE // (G * tokens)), []
    for start in range(0, Hk, heads):
        part = slice(start, start + heads)
        how = facts.softmax_scale, facts.softcap, None if sinks is None else sinks[part]
        for some, seen in zip(grouped[part].split(at_once, 2), visible.split(at_once), strict=True):
            there, right = (
                attend(some, [Segment(keys[part], values[part], seen)], *how) for keys, values in (stored, exact)
            )
            lengths = right.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
            errors.append(((there - right).norm(dim=-1) / lengths).flatten())
    return float(torch.cat(errors).double().mean())


Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class ContextFacts:
    """Results of a prefill other than tensors: each layer's attention settings, probe, int8 storage error and canary.

    `layers` has the layers that attend. The probe is the model's top logits at the last prompt token. The canary is the
    model's top logits at a few earlier tokens. The canary is empty if an earlier version of sparsekv began the build,
    or if `canary_positions` has only the last token.
    """

    layers: dict[int, LayerFacts]
    probe: Probe
    storage: KVStorage | None = None
    canary: list[CanaryToken] = field(default_factory=list)

    @property
    def indexed_layers(self) -> list[int]:
        """Indices of the layers with full attention; layers with a sliding window are not indexed and stay dense."""
        return [number for number, layer in self.layers.items() if layer.sliding_window is None]

    def note(self) -> dict[str, object]:
        """Convert the facts to JSON values, which a resumed build reads with `facts_from_note`."""
        return {
            "layers": [layer and layer.model_dump() for layer in listed(self.layers)],
            "probe": self.probe.model_dump(),
            "canary": [token.model_dump() for token in self.canary],
            "kv_storage": None if self.storage is None else self.storage.model_dump(),
        }


def listed(layers: Mapping[int, LayerFacts], count: int | None = None) -> list[LayerFacts | None]:
    """Return the facts of the first `count` layers as a list, with None for a layer that does not attend.

    By default the list ends with the last layer that attends.
    """
    return [layers.get(layer) for layer in range(1 + max(layers) if count is None else count)]


def facts_from_note(note: object) -> ContextFacts | None:
    """Parse an interrupted build's note of the facts; None if the note is damaged or in an unknown format."""
    if not isinstance(note, dict):
        return None
    try:
        layers = {
            number: LayerFacts.model_validate(layer) for number, layer in enumerate(note["layers"]) if layer is not None
        }
        # Notes that earlier versions wrote may lack the storage error or the canary.
        storage = note.get("kv_storage")
        storage = None if storage is None else KVStorage.model_validate(storage)
        canary = [CanaryToken.model_validate(token) for token in note.get("canary", [])]
        return ContextFacts(layers, Probe.model_validate(note["probe"]), storage, canary)
    except (LookupError, TypeError, ValueError):
        return None


def context_recipe(
    model: ModelIdentity, ids_sha256: str, split: Split, dtype: str, prefill: PrefillRecord, kv_dtype: KVDtype | None
) -> str:
    """Compute the recipe of a context's files: the hash of everything that determines their content.

    Args:
        kv_dtype: the storage dtype of keys and values; None for `dtype`.
    """
    decides = {**row_settings(model, split, dtype, prefill), "ids": ids_sha256, "split": split.model_dump()}
    return hash_json(decides if kv_dtype is None else {**decides, "kv_dtype": kv_dtype, "form": FORM})


def state_recipe(
    model: ModelIdentity, ids: Sequence[int], split: Split, dtype: str, prefill: PrefillRecord, kv_dtype: KVDtype | None
) -> str:
    """Compute the recipe of the states after the first tokens `ids` of a prompt; later tokens have no effect.

    The recipe includes the storage dtype, because the states of appended tokens depend on the int8 rows before them.
    """
    decides = {**row_settings(model, split, dtype, prefill), "state": hash_tokens(ids)}
    return hash_json(decides if kv_dtype is None else {**decides, "kv_dtype": kv_dtype, "form": FORM})


def row_settings(model: ModelIdentity, split: Split, dtype: str, prefill: PrefillRecord) -> dict[str, object]:
    """Return the settings that, with the prompt's tokens, determine a token's keys and values in the model's dtype.

    A build reuses rows of an index only if these settings are equal. `context_recipe` uses these settings too, so that
    no setting can be part of the recipe but missing here.
    """
    decides_keys = [model.config_hash, model.weights_hash, model.adapter, model.quantisation]
    if model.weights is not None:  # left out for the checkpoint's weights, so that earlier indices stay valid
        decides_keys.append(model.weights)
    if prefill.exact:
        # Rows of a dense prefill depend neither on chunks nor on the split.
        return {"model": decides_keys, "dtype": dtype, "prefill": prefill.kind}
    return {"model": decides_keys, "dtype": dtype, "prefill": prefill.model_dump(), "sinks": split.sinks}


@dataclass
class ContextFiles:
    """Writes a context's files, layer by layer.

    Args:
        recipe: the recipe of all these files.
        missing: names of the files to write; the others were reused.
        kv_dtype: the storage dtype of keys and values; None for their own dtype.
        taken_over: int8 rows of an earlier index, which are stored unchanged.
        shared: lets all processes of a team write rows to the same files; None if this process writes all rows.
        copies: the rows to write are copies, which need memory besides the prefill's. Then a write waits until at most
            6 GiB of tensors are still to be written.
    """

    writer: ArtifactWriter
    recipe: str
    missing: AbstractSet[str]
    kv_dtype: KVDtype | None = None
    taken_over: TakenOver | None = None
    shared: SharedRows | None = None
    copies: bool = False
    errors: list[float] = field(default_factory=list)

    def write(self, layer: int, rows: Pair, queries: Tensors, facts: LayerFacts) -> None:
        """Write a layer's missing files. For int8 storage, also measure its error, unless rows are taken over.

        Args:
            rows: keys and values [Hk, N, D].
            queries: `tail` [Hq, R, D], and `sink_logits` [Hq] if the layer has attention sinks.
        """
        tensors = {"keys": rows[0], "values": rows[1]}
        if self.kv_dtype is not None:
            tensors = in_8_bits(rows, layer, self.taken_over)
            if self.taken_over is None:
                self.errors.append(storing_error(queries["tail"], rows, tensors, facts, queries.get("sink_logits")))
        # int8 rows need less memory than the unquantised rows, which are released.
        self._write(layer_file("context", layer), tensors)
        self._write(layer_file("queries", layer), queries)

    def take(self, captured: Captured, layer: int, facts: LayerFacts) -> CapturedQueries:
        """Write a captured layer's missing files, release its rows, and return its queries.

        Raises:
            ArtifactError: the rows could not be written.
        """
        if self.shared is None:
            rows = captured.take(layer)
            self.write(layer, (rows.keys, rows.values), rows.queries, facts)
            return rows
        name, writer = layer_file("context", layer), self.writer
        missing = name in self.missing
        queries, summed = self.shared.end(layer, lambda seconds: not missing or writer.rows_written(name, seconds))
        if missing:
            writer.end_rows(name, self.recipe, summed)
        self._write(layer_file("queries", layer), queries.queries)
        return queries

    def storage(self, ids_sha256: str, tokens: int, *, exact_probe: bool) -> KVStorage | None:
        """Make the manifest's record of int8 storage; None if rows are stored in their own dtype.

        Args:
            ids_sha256: the hash of the prompt's token ids.
            tokens: the number of the prompt's tokens.
            exact_probe: the probe's logits were computed over the unquantised rows.
        """
        if self.kv_dtype is None:
            return None
        if self.taken_over is not None:
            return self.taken_over.storage.model_copy(update={"exact_probe": exact_probe})
        return KVStorage(
            dtype=self.kv_dtype,
            errors=self.errors,
            measured_ids=ids_sha256,
            measured_tokens=tokens,
            exact_probe=exact_probe,
        )

    def _write(self, name: str, tensors: Tensors) -> None:
        if name in self.missing:
            self.writer.write(name, tensors, self.recipe, wait=self.copies)
