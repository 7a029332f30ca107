"""Methods prepared for each layer of an index, with a residual if requested, and tensors read while libraries and
models load."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch

from sparsekv.formats.device import choose_device, map_pages, run_beside
from sparsekv.formats.errors import ArtifactError, SparsekvError, UsageError
from sparsekv.formats.hints import add_methods_hint
from sparsekv.formats.index.manifest import REBUILD
from sparsekv.formats.index.reader import CPU, Artifact
from sparsekv.formats.index.schema import layer_file
from sparsekv.runtime.attention.config import DecodeConfig, Dense
from sparsekv.runtime.cache.kv_store import LayerRows, read_centroids
from sparsekv.runtime.selection.interface import LayerPosition, MethodSpec, MiddleContext, Selector
from sparsekv.runtime.selection.registry import methods
from sparsekv.runtime.selection.wrappers import ResidualSelector, residual_clusters


def files_read(artifact: Artifact, attention: MethodSpec | Dense) -> list[str]:
    """The index's files that decoding reads beside keys and values; dense attention reads none."""
    if isinstance(attention, Dense):
        return []
    folders = [attention.name, "queries"] if attention.method.needs_index else ["queries"]
    return [layer_file(folder, layer) for folder in folders for layer in artifact.manifest.indexed_layers]


def stored_context(
    rows: LayerRows, name: str, device: torch.device = CPU, shared: dict[str, Any] | None = None
) -> MiddleContext:
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
    return MiddleContext(
        load_keys=partial(rows.middle, "keys", device),
        load_values=partial(rows.middle, "values", device),
        load_observed=partial(rows.observed_queries, device),
        facts=manifest.layers[layer],
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
    """A selector, the context it was prepared with, and the views of the index's files that it may read."""

    selector: Selector
    context: MiddleContext
    mapped: tuple[torch.Tensor, ...]


def prepare_layer(
    rows: LayerRows, form: MethodSpec, device: torch.device = CPU, shared: dict[str, Any] | None = None
) -> PreparedLayer:
    """A method's selector for one layer of an index, the one of `rows`. A residual's centroids are the method's own, or
    another method's of the index.

    Args:
        shared: the state shared by the layers of one cache or report; new by default.

    Raises:
        UsageError: a residual, and no method of the index has value centroids, or the method appends tokens, which are
            in no cluster.
        ArtifactError: the parameters or the calibration in the manifest are not valid, or tensors are missing; of the
            method, or of the one whose clusters are the residual's.
    """
    artifact, context = rows.artifact, stored_context(rows, form.name, device, shared)
    with _told_of(form.name, artifact):
        selector = form.method.prepare(context)
    if not form.residual or form.method.replaces() or selector.replace_by_own():
        return PreparedLayer(selector, context, context.mapped)
    if selector.append is not None:
        raise UsageError(
            f"--residual: {form.name} takes generated tokens in, and no cluster holds these; leave out --residual, or "
            "let them stay exact"
        )
    source = residual_source(artifact)
    lender = stored_context(rows, source, device)
    with _told_of(source, artifact):
        replacing = ResidualSelector(selector, residual_clusters(lender.tensors))
    return PreparedLayer(replacing, context, context.mapped + lender.mapped)


@dataclass
class PreparedMethod:
    """A method for the layers of one cache, some of which may be prepared before they are asked for.

    Args:
        device: where its tensors are searched.
        shared: the state shared by the layers.
    """

    form: MethodSpec
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
        return held or prepare_layer(rows, self.form, self.device, self.shared)


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


BESIDE_LOADING = 4
"""Sums that are made at a time while a GPU gets the model's weights; with sixteen, those that read these would wait."""


class EarlyReading:
    """The sums of an index's files, its keys and values, and a method's tensors: a thread checks the sums, maps the
    rows' pages, and prepares the method.

    What cannot be read is left for whoever needs it to read, and to tell why it cannot. For a GPU the thread only
    checks sums, and only from `begin_loading` on: threads that read and the one that imports would take turns, and the
    whole command would gain nothing.

    Args:
        device: as `choose_device` takes it.
        files: files of the index whose sums are checked.
        hold: map the rows of all layers but those with a window, and prepare the method.
        form: what the index will be asked by; one that has no tensors in it is not prepared.
    """

    def __init__(
        self,
        artifact: Artifact,
        device: str,
        files: Sequence[str] = (),
        *,
        hold: bool = False,
        form: MethodSpec | None = None,
    ):
        self.rows: dict[int, LayerRows] = {}
        """The layers' rows whose pages are being mapped."""
        self.prepared: PreparedMethod | None = None
        """The method, once all of its layers are prepared."""
        self._artifact, self._files, self._later = artifact, files, not _is_cpu(device)
        self._loading = False
        if self._later:
            return
        if hold:
            self.rows = {layer: LayerRows(artifact, layer) for layer in artifact.manifest.indexed_layers}
        # Asked here, so that this thread has its number before the other sets its own.
        self._begin(
            self._read(form if form and form.name in artifact.manifest.methods else None, torch.get_num_threads())
        )

    @classmethod
    def of(cls, artifact: Artifact, device: str, config: DecodeConfig) -> Self:
        """Begin to read what answers by a config need, before transformers is imported."""
        form = config.attention if isinstance(config.attention, MethodSpec) else None
        files, hold = files_read(artifact, config.attention), config.placement == "device"
        return cls(artifact, device, files, hold=hold, form=form)

    def begin_loading(self) -> Self:
        """To be called once all is imported, before the model is loaded.

        A method that is not prepared by then is left to opening: torch's default dtype is the model's meanwhile.
        """
        self._loading = True
        if self._later:
            self._begin(_check(self._artifact, self._files, BESIDE_LOADING))
        return self

    def _begin(self, steps: Iterator[None]) -> None:
        run_beside(_as_far_as_can_be(steps), "early-reading")

    def _read(self, form: MethodSpec | None, threads: int) -> Iterator[None]:
        yield from _check(self._artifact, self._files, 1)  # by this thread alone: another core imports
        rows = list(self.rows.values())  # opening takes them out one by one
        for layer in rows:
            yield from map_pages(layer.stored.tensors.values())
        if rows and form is not None:
            yield from self._prepare(form, rows, threads)

    def _prepare(self, form: MethodSpec, rows: list[LayerRows], threads: int) -> Iterator[None]:
        # By this thread alone: with another of torch's it would wait at each operation for a core, which the one that
        # imports has. The number is each thread's own once it was asked for it; others get what was set last.
        torch.set_num_threads(1)
        try:
            prepared = PreparedMethod(form)
            for layer in rows:
                prepared.prepare(layer)
                if self._loading:
                    return
                yield
            self.prepared = prepared
        finally:
            torch.set_num_threads(threads)


def _is_cpu(device: str) -> bool:
    # A device that there is not is told by whoever loads the model for it.
    with suppress(SparsekvError):
        return choose_device(device).type == "cpu"
    return False


def _as_far_as_can_be(steps: Iterator[None]) -> Iterator[None]:
    # Whatever cannot be read here, and why, is met again and told by whoever needs it.
    with suppress(Exception):
        yield from steps


def _check(artifact: Artifact, files: Sequence[str], together: int) -> Iterator[None]:
    """The sums of files, so many at a time; what is left of them when they are wanted is checked by all cores."""
    for first in range(0, len(files), together):
        artifact.check_sums(files[first : first + together])
        yield
