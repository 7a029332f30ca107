"""The second stage of a build: each method's tensors layer by layer, then its calibration over all layers."""

from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import dataclass

import torch

from sparsekv.formats.checksums import hash_json
from sparsekv.formats.hints import add_methods_hint
from sparsekv.formats.int8_centroids import FORM, with_restored_centroids
from sparsekv.formats.parameters import stored_parameters
from sparsekv.formats.schema import MethodRecord, Split, layer_file
from sparsekv.formats.writer import ArtifactWriter
from sparsekv.indexing.context_files import ContextFacts
from sparsekv.indexing.indexers.interface import BuiltLayer, Indexer, LayerInput
from sparsekv.indexing.indexers.layer_maker import LayerMaker, ahead_on, make_layers
from sparsekv.indexing.indexers.layer_work import LayerWork, lend
from sparsekv.indexing.plan import Growth, Progress


@dataclass(frozen=True)
class MethodFiles:
    """A method's files, one a layer, as a build has written or reused them: `new` says whether it wrote any."""

    work: LayerWork
    layers: list[int]
    new: bool


@dataclass(frozen=True)
class MethodStage:
    """Builds the methods of an index over the context's files; needs no model.

    Args:
        dtype: the index's, such as `bfloat16`.
        device: where indices are made.
        growth: the tokens that methods take in; None where they are built from all tokens.
        make_layers: makes the tensors of layers, in this process or in several.
    """

    split: Split
    dtype: str
    device: torch.device
    writer: ArtifactWriter
    facts: ContextFacts
    progress: Progress
    growth: Growth | None = None
    make_layers: LayerMaker = make_layers

    def build(self, name: str, indexer: Indexer) -> MethodRecord:
        """Reuse or write each layer's file; then calibrate, or keep the old calibration where no file changed."""
        return self.record(self.write(name, indexer))

    def write(self, name: str, indexer: Indexer) -> MethodFiles:
        """Reuse or write each layer's file."""
        work, layers, writer = self._work(name, indexer), self.facts.indexed_layers, self.writer
        form = [FORM] if work.in_8_bits else []
        decides = [name, indexer.revision, stored_parameters(indexer), self.split.model_dump(), self.dtype, *form]
        # The first layer's keys are the same whatever a model's config makes of their logits.
        made = {layer: hash_json([*decides, work.facts[layer].model_dump()]) for layer in layers}
        recipes = {layer: self._layer_recipe(layer_file(name, layer), recipe) for layer, recipe in made.items()}
        missing = [one for one in layers if not writer.reuse(layer_file(name, one), recipes[one], work.sources(one))]
        with closing(self.make_layers(work, missing, writer, self.device)) as built:
            for done, (layer, tensors) in enumerate(zip(missing, built, strict=True), len(recipes) - len(missing) + 1):
                writer.write(layer_file(name, layer), tensors, recipes[layer], work.sources(layer))
                self.progress(f"index {name}", done, len(recipes))
        return MethodFiles(work, layers, new=bool(missing))

    def record(self, files: MethodFiles) -> MethodRecord:
        """The manifest's record of a method, once its files' sources are on disk: its calibration, made or kept."""
        indexer, sources = files.work.indexer, [path for layer in files.layers for path in files.work.sources(layer)]
        return MethodRecord(
            revision=indexer.revision,
            parameters=stored_parameters(indexer),
            seed=indexer.seed,
            calibration=(None if files.new else self._known_calibration(files.work.name)) or self._calibrate(files),
            built_from={path: self.writer.record(path).sha256 for path in sources},
        )

    def keep_others(self, named: Collection[str], tell: Callable[[str], None]) -> dict[str, MethodRecord]:
        """Reuse the finished index's methods that are not named, if they were built from the same context; tell which
        are lost."""
        base, writer = self.writer.base, self.writer
        if base is None or writer.force or self.growth is not None:
            return {}
        here, kept = {path: file.sha256 for path, file in writer.files.items()}, {}
        for name, record in base.methods.items():
            # Query samples that no named method needs are not in the build yet: they are reused with the kept method.
            samples = [path for path in record.built_from if path.startswith("samples/") and path not in here]
            same = all(here.get(path) == sha256 for path, sha256 in record.built_from.items() if path not in samples)
            paths = [*samples, *(path for path in base.files if path.startswith(f"{name}/"))]
            if name in named:
                continue
            if same and writer.reuse_all({path: base.files[path].recipe for path in paths}):
                kept[name] = record
            else:
                again = add_methods_hint(writer.folder, [name])
                tell(
                    f"{name} is not kept, as what it was built from has changed or is damaged; {again} builds it again"
                )
        return kept

    def _work(self, name: str, indexer: Indexer) -> LayerWork:
        facts = self.facts
        of_method = (name, indexer, self.split, self.dtype, facts.layers, facts.storage is not None)
        return LayerWork(*of_method) if self.growth is None else _GrownWork(*of_method, self)

    def grows(self, path: str) -> bool:
        """Whether tokens are appended to a method's file, instead of the file being built from all tokens."""
        return self.growth is not None and path.partition("/")[0] in self.growth.online

    def _layer_recipe(self, path: str, recipe: str) -> str:
        # The result of an append depends on the old file: a build from scratch of the same tokens gives another one.
        base = self.writer.base
        return hash_json([recipe, "grown from", base.files[path].sha256]) if base and self.grows(path) else recipe

    def _known_calibration(self, name: str) -> dict[str, object] | None:
        """The finished index's calibration, if all files that it was made from are reused."""
        base = self.writer.base
        if base is None or self.writer.force or name not in base.methods:
            return None
        files = {path: record for path, record in base.files.items() if path.startswith(f"{name}/")}
        same = all(self.writer.record(path).recipe == record.recipe for path, record in files.items())
        return base.methods[name].calibration if same else None

    def _calibrate(self, files: MethodFiles) -> dict[str, object]:
        work = files.work

        def read(layer: int) -> BuiltLayer:
            queries = self._read(layer_file("queries", layer))["tail"]
            stored = self._read(layer_file(work.name, layer))
            tensors = with_restored_centroids(stored, getattr(torch, self.dtype))
            lend(tensors.values())
            return BuiltLayer(tensors, queries, work.facts[layer])

        return work.indexer.calibrate(lambda: ahead_on(self.device, files.layers, read))

    def _read(self, name: str) -> dict[str, torch.Tensor]:
        tensors = self.writer.read(name, self.device)
        lend(tensors.values())
        return tensors


@dataclass(frozen=True)
class _GrownWork(LayerWork):
    """The work of an append: a method's tensors of a layer grow, where the method takes tokens.

    It stays in this process, which holds the writer: a build by several ranks appends nothing.
    """

    stage: MethodStage

    def build(self, layer: int, rows: LayerInput) -> dict[str, torch.Tensor]:
        path, writer = layer_file(self.name, layer), self.stage.writer
        if writer.base and self.stage.grows(path):
            before = writer.read_base(path, self.stage.device)
            restored = with_restored_centroids(before, getattr(torch, self.dtype))
            return self.stored(self.indexer.append_layer(restored, rows, writer.base.split.middle), before)
        return super().build(layer, rows)
