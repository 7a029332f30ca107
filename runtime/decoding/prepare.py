"""Prepare a method for each layer of an index, with a residual if requested."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from sparsekv.formats.errors import REBUILD, ArtifactError, UsageError, add_methods_hint
from sparsekv.formats.index.reader import CPU, Artifact
from sparsekv.formats.index.schema import layer_file
from sparsekv.runtime.attention.config import Dense
from sparsekv.runtime.cache.kv_store import LayerRows, read_centroids
from sparsekv.runtime.selection.checked import prepare_selector
from sparsekv.runtime.selection.interface import LayerPosition, MethodSpec, MiddleContext, Selector, methods
from sparsekv.runtime.selection.wrappers import ResidualSelector, residual_clusters


def files_read(artifact: Artifact, attention: MethodSpec | Dense) -> list[str]:
    """Return the index's files that a method reads in addition to keys and values; none for dense attention.

    The files of the method whose clusters a residual uses are not included.
    """
    if isinstance(attention, Dense):
        return []
    folders = [attention.name, "queries"] if attention.method.needs_index else ["queries"]
    return [layer_file(folder, layer) for folder in folders for layer in artifact.manifest.indexed_layers]


def stored_context(
    rows: LayerRows, name: str, device: torch.device = CPU, shared: dict[str, Any] | None = None
) -> MiddleContext:
    """Return a selector's input for the layer of `rows`, with the index's tensors of the method `name`.

    Keys and values are read at first use.

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
    return MiddleContext(
        load_keys=partial(rows.middle, "keys", device),
        load_values=partial(rows.middle, "values", device),
        load_observed=partial(rows.observed_queries, device),
        facts=manifest.attending[layer],
        tensors=tensors,
        calibration={} if record is None else record.calibration,
        parameters={} if record is None else record.parameters,
        first_token=split.sinks,
        position=LayerPosition(indexed.index(layer), len(indexed), {} if shared is None else shared),
        centroids_in_8_bits=in_8_bits,
        mapped=(*rows.mapped_keys, *stored.values()) if device.type == "cpu" else (),
    )


@dataclass(frozen=True)
class PreparedLayer:
    """A selector, the context that the selector was prepared with, and the views of index files that it may read."""

    selector: Selector
    context: MiddleContext
    mapped: tuple[torch.Tensor, ...]


def prepare_layer(
    rows: LayerRows, form: MethodSpec, device: torch.device = CPU, shared: dict[str, Any] | None = None
) -> PreparedLayer:
    """Make a method's selector for the layer of `rows`, with a residual if requested.

    The centroids of the residual are the method's own, or those of another method of the index.

    Args:
        shared: the state shared by the layers of one cache or report; new by default.

    Raises:
        UsageError: a residual is requested, but no method of the index has value centroids, or the method appends
            tokens, which are in no cluster.
        ArtifactError: for the method, or for the method whose clusters the residual uses, parameters or calibration in
            the manifest are not valid, or tensors are missing.
    """
    artifact, context = rows.artifact, stored_context(rows, form.name, device, shared)
    with _told_of(form.name, artifact):
        selector = prepare_selector(form.method, context)
    if not form.residual or form.method.replaces() or selector.replace_by_own():
        return PreparedLayer(selector, context, context.mapped)
    if selector.append is not None:
        raise UsageError(
            f"--residual: with --stream, {form.name} adds generated tokens to its index, and the residual's clusters "
            "lack them; leave out one of the two options"
        )
    source = residual_source(artifact)
    lender = stored_context(rows, source, device)
    with _told_of(source, artifact):
        replacing = ResidualSelector(selector, residual_clusters(lender.tensors))
    return PreparedLayer(replacing, context, context.mapped + lender.mapped)


@dataclass
class PreparedMethod:
    """A method for the layers of one cache. Layers may be prepared before the cache takes them.

    Args:
        form: the method and its parameters.
        device: the device that searches the method's tensors.
        shared: the state shared by the layers.
    """

    form: MethodSpec
    device: torch.device = CPU
    shared: dict[str, Any] = field(default_factory=dict)
    _prepared: dict[int, PreparedLayer] = field(default_factory=dict)

    def is_like(self, other: "PreparedMethod") -> bool:
        """Whether both have the same method, residual and device, so that prepared layers are interchangeable."""
        mine, theirs = ((one.form.name, one.form.method, one.form.residual, one.device) for one in (self, other))
        return mine == theirs

    def copy(self) -> "PreparedMethod":
        """Return a copy that refers to the same prepared layers."""
        return replace(self, _prepared=dict(self._prepared))

    def prepare(self, rows: LayerRows) -> None:
        """Prepare the layer of `rows`, and store the result until `take`. Raises the errors of `prepare_layer`."""
        self._prepared[rows.layer] = self.take(rows)

    def take(self, rows: LayerRows) -> PreparedLayer:
        """Return the prepared layer of `rows`, and drop the reference to it. Prepares the layer first if necessary.

        Raises the errors of `prepare_layer`.
        """
        held = self._prepared.pop(rows.layer, None)
        return held or prepare_layer(rows, self.form, self.device, self.shared)


@contextmanager
def _told_of(name: str, artifact: Artifact) -> Iterator[None]:
    """Within the context, convert errors of preparing a method to an ArtifactError that names the method.

    Methods use an index's tensors, parameters and calibration without checking them first.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ArtifactError(
            f"{name} of {artifact.folder} does not have the tensors and parameters that this version builds "
            f"({type(error).__name__}: {error}); {REBUILD}"
        ) from error


def residual_source(artifact: Artifact) -> str:
    """Return the name of the index's method with the fewest value centroids, because these cost least to read.

    Raises:
        UsageError: no method has value centroids.
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
