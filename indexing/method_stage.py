"""One method's part of an index: its tensors layer by layer, then the numbers that need all layers."""

import json
from collections.abc import Iterator
from dataclasses import asdict

from sparsekv.formats.checksums import hash_json
from sparsekv.formats.schema import MethodRecord, layer_file
from sparsekv.indexing.context_stage import ContextFacts
from sparsekv.indexing.methods import BuiltLayer, Indexer, LayerInput
from sparsekv.indexing.plan import BuildJob


def build_method(job: BuildJob, name: str, indexer: Indexer, facts: ContextFacts) -> MethodRecord:
    """Take over or write one file a layer, then calibrate, unless nothing changed since the finished index."""
    # Through JSON, so that the parameters compare equal to those read back from a manifest.
    parameters = json.loads(json.dumps(asdict(indexer)))
    folders = ["context", "samples"] if indexer.queries_wanted() else ["context"]
    sources = [layer_file(folder, layer) for folder in folders for layer in facts.indexed_layers]
    built_from = {path: job.writer.files[path].sha256 for path in sources}
    recipe = hash_json([name, indexer.revision, parameters, job.split.model_dump(), built_from])
    for done, layer in enumerate(facts.indexed_layers, 1):
        _build_layer(job, layer_file(name, layer), indexer, facts, layer, recipe)
        job.progress(f"index {name}", done, len(facts.indexed_layers))
    return MethodRecord(
        revision=indexer.revision,
        parameters=parameters,
        seed=indexer.seed,
        calibration=_known_calibration(job, name, recipe) or _calibrate(job, name, indexer, facts),
        built_from=built_from,
    )


def _build_layer(job: BuildJob, path: str, indexer: Indexer, facts: ContextFacts, layer: int, recipe: str) -> None:
    base = job.writer.base
    if base is None or job.plan.growth is None or path.partition("/")[0] not in job.plan.growth.online:
        if not job.writer.reuse(path, recipe):
            job.writer.write(path, indexer.build_layer(_layer_input(job, indexer, layer, facts)), recipe)
        return
    # What a method grew into depends on what it was: a plain build of the same tokens is another file.
    recipe = hash_json([recipe, "grown from", base.files[path].sha256])
    if not job.writer.reuse(path, recipe):
        grown = indexer.append_layer(job.read_base(path), _layer_input(job, indexer, layer, facts), base.split.middle)
        job.writer.write(path, grown, recipe)


def keep_methods(job: BuildJob) -> dict[str, MethodRecord]:
    """Take over the methods of the finished index that this build does not name and that fit the same context."""
    base = job.writer.base
    if base is None or job.plan.force or base.split != job.split:
        return {}
    here, kept = {path: file.sha256 for path, file in job.writer.files.items()}, {}
    for name, record in base.methods.items():
        # Samples that no named method wants are not in the build yet: they are taken over with what is built from them.
        samples = [path for path in record.built_from if path.startswith("samples/") and path not in here]
        same = all(here.get(path) == sha256 for path, sha256 in record.built_from.items() if path not in samples)
        paths = [*samples, *(path for path in base.files if path.startswith(f"{name}/"))]
        if name not in job.plan.methods and same and all(job.writer.reuse(p, base.files[p].recipe) for p in paths):
            kept[name] = record
    return kept


def _known_calibration(job: BuildJob, name: str, recipe: str) -> dict[str, object] | None:
    base = job.writer.base
    if base is None or job.plan.force or name not in base.methods:
        return None
    same = all(record.recipe == recipe for path, record in base.files.items() if path.startswith(f"{name}/"))
    return base.methods[name].calibration if same else None


def _calibrate(job: BuildJob, name: str, indexer: Indexer, facts: ContextFacts) -> dict[str, object]:
    def layers() -> Iterator[BuiltLayer]:
        for layer in facts.indexed_layers:
            queries = job.read(layer_file("queries", layer))["tail"]
            yield BuiltLayer(job.read(layer_file(name, layer)), queries, facts.layers[layer])

    return indexer.calibrate(layers)


def _layer_input(job: BuildJob, indexer: Indexer, layer: int, facts: ContextFacts) -> LayerInput:
    tensors = job.read(layer_file("context", layer))
    middle = slice(job.split.sinks, job.split.sinks + job.split.middle)
    sample = job.read(layer_file("samples", layer)) if indexer.queries_wanted() else {}
    return LayerInput(
        keys=tensors["keys"][:, middle],
        values=tensors["values"][:, middle],
        facts=facts.layers[layer],
        split=job.split,
        queries=sample.get("queries"),
        positions=sample.get("positions"),
        sink_keys=tensors["keys"][:, : middle.start],
        sink_logits=job.read(layer_file("queries", layer)).get("sink_logits"),
    )
