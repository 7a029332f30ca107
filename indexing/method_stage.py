"""The second stage of a build, for one method: its tensors layer by layer, then the calibration over all layers."""

from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from typing import TypeVar

import torch

from sparsekv.formats.ahead import read_ahead
from sparsekv.formats.checksums import hash_json
from sparsekv.formats.context_rows import context_rows
from sparsekv.formats.parameters import stored_parameters
from sparsekv.formats.schema import MethodRecord, layer_file
from sparsekv.indexing.context_stage import ContextFacts
from sparsekv.indexing.cores import share_cores
from sparsekv.indexing.indexers.interface import BuiltLayer, Indexer, LayerInput
from sparsekv.indexing.memory import AHEAD
from sparsekv.indexing.plan import MethodJob

T = TypeVar("T")


def build_method(job: MethodJob, name: str, indexer: Indexer, facts: ContextFacts) -> MethodRecord:
    """Reuse or write each layer's file; then calibrate, or keep the old calibration where no file changed."""
    parameters = stored_parameters(indexer)
    layers, recipe = facts.indexed_layers, hash_json([name, indexer.revision, parameters, job.split.model_dump()])
    sources = {layer: _sources(indexer, layer) for layer in layers}
    recipes = {layer: _layer_recipe(job, layer_file(name, layer), recipe) for layer in layers}
    missing = [one for one in layers if not job.writer.reuse(layer_file(name, one), recipes[one], sources[one])]
    with closing(_built_layers(job, name, indexer, facts, missing)) as built:
        for done, (layer, tensors) in enumerate(zip(missing, built, strict=True), len(recipes) - len(missing) + 1):
            job.writer.write(layer_file(name, layer), tensors, recipes[layer], sources[layer])
            job.progress(f"index {name}", done, len(recipes))
    calibration = (None if missing else _known_calibration(job, name)) or _calibrate(job, name, indexer, facts)
    return MethodRecord(
        revision=indexer.revision,
        parameters=parameters,
        seed=indexer.seed,
        calibration=calibration,
        built_from={path: job.writer.record(path).sha256 for paths in sources.values() for path in paths},
    )


def _sources(indexer: Indexer, layer: int) -> list[str]:
    """The files that a method's file of a layer is made from."""
    folders = ["context", "samples"] if indexer.queries_wanted() else ["context"]
    return [layer_file(folder, layer) for folder in folders]


def _grows(job: MethodJob, path: str) -> bool:
    return job.growth is not None and path.partition("/")[0] in job.growth.online


def _layer_recipe(job: MethodJob, path: str, recipe: str) -> str:
    # The result of an append depends on the old file: a build from scratch of the same tokens gives another one.
    base = job.writer.base
    return hash_json([recipe, "grown from", base.files[path].sha256]) if base and _grows(job, path) else recipe


def _built_layers(
    job: MethodJob, name: str, indexer: Indexer, facts: ContextFacts, layers: list[int]
) -> Generator[dict[str, torch.Tensor], None, None]:
    """What a method makes of each layer, in order: on a GPU of one after the other, on a CPU of several at a time."""

    def read(layer: int) -> LayerInput:
        return _layer_input(job, indexer, layer, facts)

    def build(layer: int, rows: LayerInput) -> dict[str, torch.Tensor]:
        return _build_layer(job, layer_file(name, layer), indexer, rows)

    if job.device.type == "cpu":
        yield from share_cores(layers, job.split.middle, lambda layer: build(layer, read(layer)))
    else:
        with closing(_read_ahead(job, layers, read)) as inputs:
            yield from map(build, layers, inputs)


def _build_layer(job: MethodJob, path: str, indexer: Indexer, rows: LayerInput) -> dict[str, torch.Tensor]:
    base = job.writer.base
    if base and _grows(job, path):
        return indexer.append_layer(job.read_base(path), rows, base.split.middle)
    return indexer.build_layer(rows)


def _read_ahead(job: MethodJob, layers: list[int], read: Callable[[int], T]) -> Generator[T, None, None]:
    """Yields `read(layer)` for each layer; threads read the next ones, so up to LAYERS_AT_ONCE are on the device."""
    device = job.device

    def use_own_stream() -> None:
        # On the default stream, a copy to the device would wait for the layer that is being built.
        if device.type == "cuda":
            torch.cuda.set_stream(torch.cuda.Stream(device))

    def read_whole(layer: int) -> T:
        rows = read(layer)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return rows

    return read_ahead(layers, read_whole, AHEAD, use_own_stream)


def _read(job: MethodJob, name: str) -> dict[str, torch.Tensor]:
    tensors = job.read(name)
    _lend(tensors.values())
    return tensors


def _lend(tensors: Iterable[torch.Tensor]) -> None:
    """Let the default stream use tensors that were allocated on a thread's stream."""
    for tensor in tensors:
        if tensor.is_cuda:
            # The thread's stream must not reuse the memory before the default stream is done.
            tensor.record_stream(torch.cuda.default_stream(tensor.device))


def keep_methods(job: MethodJob) -> dict[str, MethodRecord]:
    """Reuse the finished index's methods that this build does not name, if they were built from the same context."""
    base = job.writer.base
    if base is None or job.force or base.split != job.split:
        return {}
    here, kept = {path: file.sha256 for path, file in job.writer.files.items()}, {}
    for name, record in base.methods.items():
        # Query samples that no named method needs are not in the build yet: they are reused with the kept method.
        samples = [path for path in record.built_from if path.startswith("samples/") and path not in here]
        same = all(here.get(path) == sha256 for path, sha256 in record.built_from.items() if path not in samples)
        paths = [*samples, *(path for path in base.files if path.startswith(f"{name}/"))]
        if name not in job.methods and same and all(job.writer.reuse(p, base.files[p].recipe) for p in paths):
            kept[name] = record
    return kept


def _known_calibration(job: MethodJob, name: str) -> dict[str, object] | None:
    """The finished index's calibration, if all files that it was made from are reused."""
    base = job.writer.base
    if base is None or job.force or name not in base.methods:
        return None
    files = {path: record for path, record in base.files.items() if path.startswith(f"{name}/")}
    same = all(job.writer.record(path).recipe == record.recipe for path, record in files.items())
    return base.methods[name].calibration if same else None


def _calibrate(job: MethodJob, name: str, indexer: Indexer, facts: ContextFacts) -> dict[str, object]:
    def read(layer: int) -> BuiltLayer:
        queries = _read(job, layer_file("queries", layer))["tail"]
        return BuiltLayer(_read(job, layer_file(name, layer)), queries, facts.layers[layer])

    return indexer.calibrate(lambda: _read_ahead(job, facts.indexed_layers, read))


def _layer_input(job: MethodJob, indexer: Indexer, layer: int, facts: ContextFacts) -> LayerInput:
    stored = context_rows(_read(job, layer_file("context", layer)), getattr(torch, job.dtype))
    # From what is stored, not from what was captured: a resumed build and a converted index have nothing else.
    keys, values = stored.part(slice(job.split.sinks + job.split.middle))
    _lend([keys, values])
    middle = slice(job.split.sinks, job.split.sinks + job.split.middle)
    sample = _read(job, layer_file("samples", layer)) if indexer.queries_wanted() else {}
    return LayerInput(
        keys=keys[:, middle],
        values=values[:, middle],
        facts=facts.layers[layer],
        split=job.split,
        queries=sample.get("queries"),
        positions=sample.get("positions"),
        sink_keys=keys[:, : middle.start],
        sink_logits=_read(job, layer_file("queries", layer)).get("sink_logits"),
    )
