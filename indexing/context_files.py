"""A context's facts, and its files layer by layer: keys and values in the model's dtype or int8, held-out queries."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import torch

from sparsekv.formats.checksums import hash_json
from sparsekv.formats.context_rows import Pair
from sparsekv.formats.growing_file import RemoteSum
from sparsekv.formats.int8_rows import FORM
from sparsekv.formats.kv_storage import KVDtype, KVStorage
from sparsekv.formats.schema import (
    CanaryToken,
    LayerFacts,
    ModelIdentity,
    PrefillRecord,
    Probe,
    Split,
    layer_file,
)
from sparsekv.formats.writer import ArtifactWriter
from sparsekv.indexing.capture.stored_rows import TakenOver, in_8_bits
from sparsekv.indexing.storing_error import storing_error

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class ContextFacts:
    """Results of a prefill besides tensors: how each layer attends, the probe, the error of int8 storage, and the
    canary; a build that an earlier version began has no canary."""

    layers: list[LayerFacts]
    probe: Probe
    storage: KVStorage | None = None
    canary: list[CanaryToken] = field(default_factory=list)

    @property
    def indexed_layers(self) -> list[int]:
        """Layers with full attention; those with a sliding window are not indexed and stay dense."""
        return [number for number, layer in enumerate(self.layers) if layer.sliding_window is None]

    def note(self) -> dict[str, object]:
        """The facts as JSON values, which an interrupted build finds again."""
        return {
            "layers": [layer.model_dump() for layer in self.layers],
            "probe": self.probe.model_dump(),
            "canary": [token.model_dump() for token in self.canary],
            "kv_storage": None if self.storage is None else self.storage.model_dump(),
        }


def facts_from_note(note: object) -> ContextFacts | None:
    """The facts of an interrupted build; None for a note that this version does not write, or that is damaged."""
    if not isinstance(note, dict):
        return None
    try:
        layers = [LayerFacts.model_validate(layer) for layer in note["layers"]]
        # Earlier versions wrote none of storage, or no canary.
        storage = note.get("kv_storage")
        storage = None if storage is None else KVStorage.model_validate(storage)
        canary = [CanaryToken.model_validate(token) for token in note.get("canary", [])]
        return ContextFacts(layers, Probe.model_validate(note["probe"]), storage, canary)
    except (LookupError, TypeError, ValueError):
        return None


def context_recipe(
    model: ModelIdentity, ids_sha256: str, split: Split, dtype: str, prefill: PrefillRecord, kv_dtype: KVDtype | None
) -> str:
    """The recipe of a context's files: the hash of everything that decides their content.

    Args:
        kv_dtype: what keys and values are stored in; None for `dtype`.
    """
    decides = {**row_settings(model, split, dtype, prefill), "ids": ids_sha256, "split": split.model_dump()}
    return hash_json(decides if kv_dtype is None else {**decides, "kv_dtype": kv_dtype, "form": FORM})


def row_settings(model: ModelIdentity, split: Split, dtype: str, prefill: PrefillRecord) -> dict[str, object]:
    """Everything that decides the keys and values of a token, in the model's dtype, but for the tokens up to it.

    Rows of an index may begin another one only where these are equal. Recipes are made of them, so that a setting which
    decides rows cannot be left out here and be part of a recipe.
    """
    decides_keys = [model.config_hash, model.weights_hash, model.adapter, model.quantisation]
    if prefill.exact:
        # Dense rows depend neither on chunks nor on the split.
        return {"model": decides_keys, "dtype": dtype, "prefill": prefill.kind}
    return {"model": decides_keys, "dtype": dtype, "prefill": prefill.model_dump(), "sinks": split.sinks}


@dataclass
class ContextFiles:
    """Writes a context's files, layer by layer.

    Args:
        missing: names of the files to write; the others were reused.
        kv_dtype: what keys and values are stored in; None for their own dtype.
        taken_over: rows that are not exact, and are stored as they were.
        copies: the rows given are not the prefill's own, which are dropped for them: there may be 6 GiB that wait to be
            written.
    """

    writer: ArtifactWriter
    recipe: str
    missing: AbstractSet[str]
    kv_dtype: KVDtype | None = None
    taken_over: TakenOver | None = None
    copies: bool = False
    errors: list[float] = field(default_factory=list)

    def write(self, layer: int, rows: Pair, queries: Tensors, facts: LayerFacts) -> None:
        """Write what is missing of a layer, and measure what storing costs while its exact rows are there.

        Args:
            rows: keys and values [Hk, N, D].
            queries: `tail` [Hq, R, D], and `sink_logits` [Hq] where the layer has them.
        """
        tensors = {"keys": rows[0], "values": rows[1]}
        if self.kv_dtype is not None:
            tensors = in_8_bits(rows, layer, self.taken_over)
            if self.taken_over is None:
                self.errors.append(storing_error(queries["tail"], rows, tensors, facts, queries.get("sink_logits")))
        # Rows in 8 bits take less than the exact ones, which are dropped for them.
        self._write(layer_file("context", layer), tensors)
        self._write(layer_file("queries", layer), queries)

    def written(self, layer: int, seconds: float) -> bool:
        """Wait so long until this process's rows of a layer are in the file that it shares; returns whether they are.

        Raises:
            ArtifactError: they could not be written.
        """
        return self.writer.rows_written(layer_file("context", layer), seconds)

    def end(self, layer: int, queries: Tensors, remote_sum: RemoteSum | None) -> None:
        """Write its queries as `write` does, and end its file of rows, of which all processes have written theirs.

        Args:
            remote_sum: gives the sum of that file, if another process makes it.
        """
        if (name := layer_file("context", layer)) in self.missing:
            self.writer.end_rows(name, self.recipe, remote_sum)
        self._write(layer_file("queries", layer), queries)

    def storage(self, ids_sha256: str, tokens: int, *, exact_probe: bool) -> KVStorage | None:
        """The manifest's record of what was written, for a prompt of so many tokens with this hash.

        Args:
            exact_probe: the probe's logits are those over the exact rows.
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
