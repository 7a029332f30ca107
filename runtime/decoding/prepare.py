"""Preparing a method for one layer of an index, with a residual if one is requested."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from sparsekv.formats.errors import ArtifactError, UsageError
from sparsekv.formats.hints import add_methods_hint
from sparsekv.formats.manifest import REBUILD
from sparsekv.formats.reader import CPU, Artifact
from sparsekv.formats.schema import layer_file
from sparsekv.runtime.attention.config import Dense
from sparsekv.runtime.cache.layer_rows import LayerRows
from sparsekv.runtime.cache.rows_in_8_bits import read_centroids
from sparsekv.runtime.selection.capabilities import Appendable, OwnCentroids
from sparsekv.runtime.selection.context import LayerPosition, MiddleContext
from sparsekv.runtime.selection.form import Form
from sparsekv.runtime.selection.interface import Method, Selector
from sparsekv.runtime.selection.registry import methods
from sparsekv.runtime.selection.residual import ResidualSelector, residual_clusters


def files_read(artifact: Artifact, attention: Form | Dense) -> list[str]:
    """The index's files that decoding reads beside keys and values; dense attention reads none."""
    if isinstance(attention, Dense):
        return []
    folders = [attention.name, "queries"] if attention.method.needs_index else ["queries"]
    return [layer_file(folder, layer) for folder in folders for layer in artifact.manifest.indexed_layers]


@dataclass(frozen=True)
class StoredContext:
    """A method's input for one layer of an index, and the views of the index's files in it."""

    context: MiddleContext
    mapped: tuple[torch.Tensor, ...]


def stored_context(
    rows: LayerRows, name: str, device: torch.device = CPU, shared: dict[str, Any] | None = None
) -> StoredContext:
    """Read what the method called `name` built for the layer of `rows`; keys and values are read at first use.

    Args:
        shared: the state shared by the layers of one cache or report; new by default.
    """
    artifact, layer = rows.artifact, rows.layer
    manifest = artifact.manifest
    record = manifest.methods.get(name) if methods()[name].needs_index else None
    stored = {} if record is None else rows.method_tensors(name, device)
    tensors, in_8_bits = read_centroids(stored, getattr(torch, manifest.dtype))
    if "token_order" in tensors:
        tensors["token_order"] = tensors["token_order"] - manifest.split.sinks
    split, indexed = manifest.split, manifest.indexed_layers
    context = MiddleContext(
        load_keys=partial(rows.middle_keys, device),
        load_values=partial(rows.middle_values, device),
        load_observed=partial(rows.observed_queries, device),
        facts=manifest.layers[layer],
        tensors=tensors,
        calibration={} if record is None else record.calibration,
        parameters={} if record is None else record.parameters,
        first_token=split.sinks,
        position=LayerPosition(indexed.index(layer), len(indexed), {} if shared is None else shared),
        centroids_in_8_bits=in_8_bits,
    )
    return StoredContext(context, (*rows.mapped_keys, *stored.values()) if device.type == "cpu" else ())


@dataclass(frozen=True)
class PreparedLayer:
    """A selector, the context it was prepared with, and the views of the index's files that it may read."""

    selector: Selector
    context: MiddleContext
    mapped: tuple[torch.Tensor, ...]


def prepare_layer(
    rows: LayerRows,
    name: str,
    method: Method,
    device: torch.device = CPU,
    *,
    residual: bool = False,
    shared: dict[str, Any] | None = None,
) -> PreparedLayer:
    """A method's selector for one layer of an index, the one of `rows`.

    Args:
        residual: attend to centroids for the tokens not chosen: the method's own, or another method's of the index.
        shared: the state shared by the layers of one cache or report; new by default.

    Raises:
        UsageError: `residual`, and no method of the index has value centroids, or the method appends tokens, which are
            in no cluster.
        ArtifactError: the parameters or the calibration in the manifest are not valid, or tensors are missing; of the
            method, or of the one whose clusters are the residual's.
    """
    artifact, stored = rows.artifact, stored_context(rows, name, device, shared)
    with _told_of(name, artifact):
        selector = method.prepare(stored.context)
    if not residual or method.replaces() or (isinstance(selector, OwnCentroids) and selector.replace_by_own()):
        return PreparedLayer(selector, stored.context, stored.mapped)
    if isinstance(selector, Appendable) and selector.append_size:
        raise UsageError(
            f"--residual: {name} takes generated tokens in, and no cluster holds these; leave out --residual, or let "
            "them stay exact"
        )
    source = residual_source(artifact)
    lender = stored_context(rows, source, device)
    with _told_of(source, artifact):
        replacing = ResidualSelector(selector, residual_clusters(lender.context.tensors))
    return PreparedLayer(replacing, stored.context, stored.mapped + lender.mapped)


@dataclass
class PreparedMethod:
    """A method for the layers of one cache, some of which may be prepared before they are asked for.

    Args:
        device: where its tensors are searched.
        shared: the state shared by the layers.
    """

    form: Form
    device: torch.device = CPU
    shared: dict[str, Any] = field(default_factory=dict)
    _prepared: dict[int, PreparedLayer] = field(default_factory=dict)

    def is_like(self, other: "PreparedMethod") -> bool:
        """Whether its layers are prepared as the other's would be."""
        mine, theirs = ((one.form.name, one.form.method, one.form.residual, one.device) for one in (self, other))
        return mine == theirs

    def prepare(self, rows: LayerRows) -> None:
        """Prepare the layer of `rows`, and hold it until it is taken; raises what `prepare_layer` raises."""
        self._prepared[rows.layer] = self.take(rows)

    def take(self, rows: LayerRows) -> PreparedLayer:
        """The layer of `rows`, which no other cache gets; raises what `prepare_layer` raises."""
        held = self._prepared.pop(rows.layer, None)
        if held is not None:
            return held
        form = self.form
        return prepare_layer(rows, form.name, form.method, self.device, residual=form.residual, shared=self.shared)


@contextmanager
def _told_of(name: str, artifact: Artifact) -> Iterator[None]:
    """Only who uses a method's tensors, parameters and calibration can detect that they are not its own."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ArtifactError(
            f"{name} of {artifact.folder} is not what this version builds ({type(error).__name__}: {error}); {REBUILD}"
        ) from error


def residual_source(artifact: Artifact) -> str:
    """Name of the index's method with the fewest value centroids, which cost least to read.

    Raises:
        UsageError: none has any.
    """
    manifest = artifact.manifest
    first_layers = {name: manifest.files[layer_file(name, manifest.indexed_layers[0])] for name in manifest.methods}
    key = "level0.value_centroids"
    found = {name: file.tensors[key].shape[1] for name, file in first_layers.items() if key in file.tensors}
    if not found:
        raise UsageError(
            "--residual needs clusters with value centroids, and the index has none; add them with "
            + add_methods_hint(artifact.folder, ["multipole"])
        )
    return min(found, key=lambda name: found[name])
