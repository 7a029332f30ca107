"""The second stage of a build, for one method: its tensors layer by layer, then the calibration over all layers."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import torch

from sparsekv.formats.checksums import hash_json
from sparsekv.formats.hints import add_methods_hint
from sparsekv.formats.int8_centroids import FORM, with_restored_centroids
from sparsekv.formats.parameters import stored_parameters
from sparsekv.formats.schema import MethodRecord, layer_file
from sparsekv.indexing.context_stage import ContextFacts
from sparsekv.indexing.indexers.interface import BuiltLayer, Indexer, LayerInput
from sparsekv.indexing.indexers.layer_maker import ahead_on
from sparsekv.indexing.indexers.layer_work import LayerWork, lend
from sparsekv.indexing.plan import MethodJob


@dataclass(frozen=True)
class MethodFiles:
    """A method's files, one a layer, as a build has written or reused them: `new` says whether it wrote any."""

    work: LayerWork
    layers: list[int]
    new: bool


def build_method(job: MethodJob, name: str, indexer: Indexer, facts: ContextFacts) -> MethodRecord:
    """Reuse or write each layer's file; then calibrate, or keep the old calibration where no file changed."""
    return record_method(job, build_files(job, name, indexer, facts))


def build_files(job: MethodJob, name: str, indexer: Indexer, facts: ContextFacts) -> MethodFiles:
    """Reuse or write each layer's file."""
    work, layers = _work(job, name, indexer, facts), facts.indexed_layers
    form = [FORM] if work.in_8_bits else []
    decides = [name, indexer.revision, stored_parameters(indexer), job.split.model_dump(), job.dtype, *form]
    # The first layer's keys are the same whatever a model's config makes of their logits.
    made = {layer: hash_json([*decides, work.facts[layer].model_dump()]) for layer in layers}
    recipes = {layer: _layer_recipe(job, layer_file(name, layer), recipe) for layer, recipe in made.items()}
    missing = [one for one in layers if not job.writer.reuse(layer_file(name, one), recipes[one], work.sources(one))]
    with closing(job.make_layers(work, missing, job.writer, job.device)) as built:
        for done, (layer, tensors) in enumerate(zip(missing, built, strict=True), len(recipes) - len(missing) + 1):
            job.writer.write(layer_file(name, layer), tensors, recipes[layer], work.sources(layer))
            job.progress(f"index {name}", done, len(recipes))
    return MethodFiles(work, layers, new=bool(missing))


def record_method(job: MethodJob, files: MethodFiles) -> MethodRecord:
    """The manifest's record of a method, once its files' sources are on disk: its calibration, made or kept."""
    indexer, sources = files.work.indexer, [path for layer in files.layers for path in files.work.sources(layer)]
    return MethodRecord(
        revision=indexer.revision,
        parameters=stored_parameters(indexer),
        seed=indexer.seed,
        calibration=(None if files.new else _known_calibration(job, files.work.name)) or _calibrate(job, files),
        built_from={path: job.writer.record(path).sha256 for path in sources},
    )


def _work(job: MethodJob, name: str, indexer: Indexer, facts: ContextFacts) -> LayerWork:
    own = (name, indexer, job.split, job.dtype, facts.layers, facts.storage is not None)
    return LayerWork(*own) if job.growth is None else _GrownWork(*own, job)


@dataclass(frozen=True)
class _GrownWork(LayerWork):
    """The work of an append: what a method has of a layer grows, where the method takes tokens.

    It stays in this process, which holds the writer: a build by several ranks appends nothing.
    """

    job: MethodJob

    def build(self, layer: int, rows: LayerInput) -> dict[str, torch.Tensor]:
        path, base = layer_file(self.name, layer), self.job.writer.base
        if base and _grows(self.job, path):
            before = self.job.read_base(path)
            restored = with_restored_centroids(before, getattr(torch, self.dtype))
            return self.stored(self.indexer.append_layer(restored, rows, base.split.middle), before)
        return super().build(layer, rows)


def _grows(job: MethodJob, path: str) -> bool:
    return job.growth is not None and path.partition("/")[0] in job.growth.online


def _layer_recipe(job: MethodJob, path: str, recipe: str) -> str:
    # The result of an append depends on the old file: a build from scratch of the same tokens gives another one.
    base = job.writer.base
    return hash_json([recipe, "grown from", base.files[path].sha256]) if base and _grows(job, path) else recipe


def keep_methods(job: MethodJob, tell: Callable[[str], None]) -> dict[str, MethodRecord]:
    """Reuse the finished index's methods that this build does not name, if they were built from the same context; tell
    which are lost."""
    base = job.writer.base
    if base is None or job.force or job.growth is not None:
        return {}
    here, kept = {path: file.sha256 for path, file in job.writer.files.items()}, {}
    for name, record in base.methods.items():
        # Query samples that no named method needs are not in the build yet: they are reused with the kept method.
        samples = [path for path in record.built_from if path.startswith("samples/") and path not in here]
        same = all(here.get(path) == sha256 for path, sha256 in record.built_from.items() if path not in samples)
        paths = [*samples, *(path for path in base.files if path.startswith(f"{name}/"))]
        if name in job.methods:
            continue
        if same and job.writer.reuse_all({path: base.files[path].recipe for path in paths}):
            kept[name] = record
        else:
            again = add_methods_hint(job.writer.folder, [name])
            tell(f"{name} is not kept, as what it was built from has changed or is damaged; {again} builds it again")
    return kept


def _known_calibration(job: MethodJob, name: str) -> dict[str, object] | None:
    """The finished index's calibration, if all files that it was made from are reused."""
    base = job.writer.base
    if base is None or job.force or name not in base.methods:
        return None
    files = {path: record for path, record in base.files.items() if path.startswith(f"{name}/")}
    same = all(job.writer.record(path).recipe == record.recipe for path, record in files.items())
    return base.methods[name].calibration if same else None


def _calibrate(job: MethodJob, files: MethodFiles) -> dict[str, object]:
    work = files.work

    def read(layer: int) -> BuiltLayer:
        queries = _read(job, layer_file("queries", layer))["tail"]
        tensors = with_restored_centroids(_read(job, layer_file(work.name, layer)), getattr(torch, job.dtype))
        lend(tensors.values())
        return BuiltLayer(tensors, queries, work.facts[layer])

    return work.indexer.calibrate(lambda: ahead_on(job.device, files.layers, read))


def _read(job: MethodJob, name: str) -> dict[str, torch.Tensor]:
    tensors = job.read(name)
    lend(tensors.values())
    return tensors
