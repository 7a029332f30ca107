"""Building an index: prefill and capture, each method layer by layer, calibration, and the manifest last."""

from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sparsekv.formats.checksums import chained_block_hashes, hash_json
from sparsekv.formats.documents.prompt import FixedPrompt
from sparsekv.formats.errors import WaysOut, add_methods_hint
from sparsekv.formats.index.context_rows import CENTROID_FORM, with_restored_centroids
from sparsekv.formats.index.schema import (
    FIRST_SCHEMA,
    SCHEMA_VERSION,
    TOKENS,
    AdditionRecord,
    Manifest,
    MethodRecord,
    Prompt,
    RopeRecord,
    Split,
    layer_file,
    stored_parameters,
)
from sparsekv.formats.index.writer import ArtifactWriter
from sparsekv.formats.models.load import LoadedModel, identify
from sparsekv.formats.registry import told_of
from sparsekv.indexing.capture.team import Alone, LayerMaker, LayerWork, Team, ahead_on, lend, make_layers
from sparsekv.indexing.context_files import ContextFacts, listed
from sparsekv.indexing.context_stage import build_context
from sparsekv.indexing.existing_index import (
    in_order,
    refuse_what_is_lost,
    tell_damaged,
    tell_what_is_there,
    with_lost_methods,
)
from sparsekv.indexing.indexers.interface import BuiltLayer, Indexer, LayerInput, Tensors
from sparsekv.indexing.plan import Build, BuildConfig, BuildPlan, Growth, Progress, birth, choose_chunk_size
from sparsekv.indexing.prefill.prefills import Prefill
from sparsekv.indexing.reuse import plan_reuse


@dataclass(frozen=True)
class MethodFiles:
    """A method's files, one per layer. `new` is True unless the build has reused all of them."""

    work: LayerWork
    new: bool


@dataclass(frozen=True)
class MethodStage:
    """Builds the methods of an index from the context's files. It needs no model.

    Args:
        device: the device that computes the methods' tensors.
        growth: set if this build appends tokens to an index. Then methods that can append extend their tensors. None:
            all methods are built from all tokens.
        make_layers: builds the tensors of layers, in this process or in several.
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
        """Reuse or write a method's file of each layer, and return the manifest's record of the method."""
        return self.record(self.write(name, indexer))

    def write(self, name: str, indexer: Indexer) -> MethodFiles:
        """Reuse or write a method's file of each layer."""
        work, layers, writer = self._work(name, indexer), self.facts.indexed_layers, self.writer
        form = [CENTROID_FORM] if work.in_8_bits else []
        decides = [name, indexer.revision, stored_parameters(indexer), self.split.model_dump(), self.dtype, *form]
        # A layer's facts are part of the recipe: two configs may give equal keys in the first layer, but other scores.
        made = {layer: hash_json([*decides, work.facts[layer].model_dump()]) for layer in layers}
        recipes = {layer: self._layer_recipe(layer_file(name, layer), recipe) for layer, recipe in made.items()}
        missing = [one for one in layers if not writer.reuse(layer_file(name, one), recipes[one], work.sources(one))]
        with closing(self.make_layers(work, missing, writer, self.device)) as built:
            for done, (layer, tensors) in enumerate(zip(missing, built, strict=True), len(recipes) - len(missing) + 1):
                writer.write(layer_file(name, layer), tensors, recipes[layer], work.sources(layer))
                self.progress(f"index {name}", done, len(recipes))
        return MethodFiles(work, new=bool(missing))

    def record(self, files: MethodFiles) -> MethodRecord:
        """Make the manifest's record of a method. Waits until the files that the method was built from are written.

        The calibration is that of the existing index if none of the method's files is new; otherwise it is computed.
        """
        indexer, layers = files.work.indexer, self.facts.indexed_layers
        sources = [path for layer in layers for path in files.work.sources(layer)]
        return MethodRecord(
            revision=indexer.revision,
            parameters=stored_parameters(indexer),
            seed=indexer.seed,
            calibration=(None if files.new else self._known_calibration(files.work.name)) or self._calibrate(files),
            built_from={path: self.writer.record(path).sha256 for path in sources},
        )

    def keep_others(self, named: Collection[str], tell: Callable[[str], None]) -> dict[str, MethodRecord]:
        """Reuse the finished index's methods that are not named, if they were built from the same context.

        Returns the records of the kept methods by name. No method is kept with `force`, or if this build appends text.
        `tell` is called with a line for the user about each method that cannot be kept.
        """
        base, writer = self.writer.base, self.writer
        if base is None or writer.force or self.growth is not None:
            return {}
        here, kept = {path: file.sha256 for path, file in writer.files.items()}, {}
        # Rows may stay the same although the split differs, such as with another --tail.
        same_context = writer.record(TOKENS).recipe == base.files[TOKENS].recipe
        for name, record in base.methods.items():
            # Query samples that no named method needs are not in the build yet. They are reused with the kept method.
            samples = [path for path in record.built_from if path.startswith("samples/") and path not in here]
            built_from = {path: sha256 for path, sha256 in record.built_from.items() if path not in samples}
            same = same_context and all(here.get(path) == sha256 for path, sha256 in built_from.items())
            paths = [*samples, *(path for path in base.files if path.startswith(f"{name}/"))]
            if name in named:
                continue
            if same and writer.reuse_all({path: base.files[path].recipe for path in paths}):
                kept[name] = record
            else:
                again = add_methods_hint(writer.folder, [name])
                tell(
                    f"{name} is not kept, because the settings or the files that it was built from have changed, or "
                    f"files are damaged; {again} builds it again"
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
        # The result of an append depends on the old file, and differs from a build of the same tokens from scratch.
        base = self.writer.base
        return hash_json([recipe, "grown from", base.files[path].sha256]) if base and self.grows(path) else recipe

    def _known_calibration(self, name: str) -> dict[str, object] | None:
        """Return the finished index's calibration of a method if all of the method's files are reused, else None."""
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

        with told_of(type(work.indexer)):
            return work.indexer.calibrate(lambda: ahead_on(self.device, self.facts.indexed_layers, read))

    def _read(self, name: str) -> Tensors:
        tensors = self.writer.read(name, self.device)
        lend(tensors.values())
        return tensors


@dataclass(frozen=True)
class _GrownWork(LayerWork):
    """Work of a build that appends tokens: methods that can append extend a layer's tensors, others build them again.

    This work is never sent to another process, because it holds the writer. A build by several ranks does not append.
    """

    stage: MethodStage

    def build(self, layer: int, rows: LayerInput) -> Tensors:
        path, writer = layer_file(self.name, layer), self.stage.writer
        if writer.base and self.stage.grows(path):
            before = writer.read_base(path, self.stage.device)
            restored = with_restored_centroids(before, getattr(torch, self.dtype))
            old_middle = writer.base.split.middle
            grown = self.checked(layer, rows, lambda: self.indexer.append_layer(restored, rows, old_middle))
            return self.stored(grown, before)
        return super().build(layer, rows)


def build_index(
    plan: BuildPlan,
    folder: Path,
    progress: Progress = lambda stage, done, of: None,
    team: Team | None = None,
    tell: Callable[[str], None] = lambda line: None,
    ways_out: WaysOut | None = None,
) -> Manifest:
    """Build, resume or update the index in `folder`, and return its manifest.

    During the prefill, this allocates the model and the keys and values of all N tokens. After the prefill, it
    allocates the layers that are not yet written, and the layers that are read again to build methods. A GPU holds
    LAYERS_AT_ONCE (`indexing/plan.py`) layers. A CPU holds one layer for each item that `share_cores` runs at a time.

    Args:
        progress: called with a stage's name, the number of steps done, and the number of steps in all.
        team: the processes that run the model and build the methods; by default this process alone.
        tell: called with lines for the user, such as the files of the folder that are kept, and the GPU memory needed.
        ways_out: remedies for a folder that cannot be written; by default those of `build-index` or `append`.

    Raises:
        SparsekvError: the keys and values do not fit the GPU; or any error of `build_context`.
        UsageError: the document does not fit the split or the model's positions.
        ArtifactError: the folder cannot be written, is locked, is damaged, holds data that would be lost without
            `force`, or holds another index than the one to append to.
    """
    # The split is computed before anything is written, because it refuses a document that is too short or too long.
    split, team, (model, tokenizer) = plan.split(), team or Alone(), identify(plan.loaded)
    usual = WaysOut("", "add less") if plan.growth else WaysOut()
    with ArtifactWriter(folder, force=plan.config.force, ways_out=ways_out or usual) as writer:
        build = Build(plan, split, model, tokenizer, writer, progress, team, tell)
        refuse_what_is_lost(build)
        build = with_lost_methods(build)
        reuse = plan_reuse(build)
        tell_what_is_there(build, reuse)
        facts = build_context(build, reuse)
        device = plan.loaded.model.device
        stage = MethodStage(split, plan.dtype, device, writer, facts, progress, plan.growth, team.make_layers)
        files = [stage.write(name, indexer) for name, indexer in build.plan.config.methods.items()]
        tell_damaged(build)
        # The other ranks are released first: waiting for the disk below may take longer than their timeout.
        team.release()
        built = {one.work.name: stage.record(one) for one in files}
        kept = stage.keep_others(build.plan.config.methods, tell)
        return _finished(writer, _manifest(build, facts, in_order(kept | built, writer)))


def _additions(build: Build) -> list[AdditionRecord]:
    base, growth = build.writer.base, build.plan.growth
    earlier = base.additions if base else []
    if growth:
        return [*earlier, growth.addition]
    # A document may itself have the text that was appended, and then has the same tokens.
    same = base is not None and base.prompt.text_sha256 == build.plan.prompt.text_sha256
    return earlier if same else []


def _finished(writer: ArtifactWriter, manifest: Manifest) -> Manifest:
    """Complete the index with a manifest and return it; keep the index's old manifest if both record the same."""
    if writer.base and _says_the_same(writer.base, manifest):
        writer.leave_as_it_was()
        return writer.base
    return writer.finish(manifest)


def _says_the_same(base: Manifest, manifest: Manifest) -> bool:
    """Whether two manifests are equal except for provenance (time, versions, ids) and the defaults found by `tune`.

    If both manifests record dense prefills, the chunk sizes may differ, too.
    """
    # Versions may hash tokenizer files in different ways, although the tokenizer itself is the same.
    came_about = {"writer_version", "uuid", "parent_uuid", "created", "versions", "tokenizer_files", "defaults"}
    came_about.add("manifest_sha256")
    if manifest.prefill.exact:
        base = base.model_copy(update={"prefill": manifest.prefill}) if base.prefill.exact else base
    return base.model_dump(exclude=came_about) == manifest.model_dump(exclude=came_about)


def _manifest(build: Build, facts: ContextFacts, methods: dict[str, MethodRecord]) -> Manifest:
    plan, base = build.plan, build.writer.base
    config = plan.loaded.model.config.get_text_config()
    schema = SCHEMA_VERSION if build.marks else FIRST_SCHEMA
    return Manifest(
        **birth(),
        schema_version=schema,
        least_reader_version=schema,
        parent_uuid=base.uuid if base else None,
        model=build.model,
        tokenizer=build.tokenizer,
        tokenizer_files=plan.loaded.tokenizer_files,
        prompt=Prompt(
            text_sha256=plan.prompt.text_sha256,
            ids_sha256=build.ids_sha256,
            block_hashes=chained_block_hashes(plan.prompt.input_ids.tolist()),
            tokens=len(plan.prompt.input_ids),
            chat=plan.prompt.chat,
            special_tokens=plan.prompt.special_tokens,
            max_tokens=plan.prompt.cut,
            border=plan.prompt.border,
            files=plan.prompt.files,
            files_behind=plan.prompt.files_behind,
            pages=plan.prompt.pages,
            first_line=plan.prompt.first_line,
        ),
        file_history=plan.file_history,
        split=build.split,
        dtype=plan.dtype,
        kv_storage=facts.storage,
        rope=RopeRecord(
            scaling=plan.config.rope_scaling,
            parameters=getattr(config, "rope_parameters", None),
            max_position_embeddings=getattr(config, "max_position_embeddings", None),
        ),
        layers=listed(facts.layers, plan.kinds.layers),
        prefill=plan.prefill_record,
        methods=methods,
        probe=facts.probe,
        canary=facts.canary,
        files=build.writer.files,
        checkpoints=build.checkpoints,
        additions=_additions(build),
    )


@dataclass(frozen=True)
class Builder:
    """Builds indices of many prompts with one model and one `BuildConfig`.

    Args:
        prefills: prefills by name; each build uses one of them instead of the config's.
    """

    loaded: LoadedModel
    config: BuildConfig
    prefills: dict[str, Prefill]

    @property
    def parameters(self) -> dict[str, dict[str, Any]]:
        """Parameters that determine each method's tensors, by method; a revision is included if it is above 1."""
        later = {name: one.revision for name, one in self.config.methods.items() if one.revision > 1}
        known = {name: {"revision": revision} for name, revision in later.items()}
        return {name: asdict(indexer) | known.get(name, {}) for name, indexer in self.config.methods.items()}

    @property
    def queries(self) -> int:
        """Size of the query sample, in queries per KV head: the largest number that a method needs."""
        return max((indexer.queries_wanted() for indexer in self.config.methods.values()), default=0)

    def decides(self, prefill: str) -> dict[str, Any]:
        """Return the settings that determine an index, besides its prompt, model and methods."""
        config, way = self.config, self.prefills[prefill]
        # kv_dtype is left out for unquantised rows, so that `eval` finds answers that it stored before int8 storage.
        stored = {} if config.kv_dtype is None else {"kv_dtype": config.kv_dtype}
        chunk_size = choose_chunk_size(config.chunk_size, self.loaded.model.device, way)
        return {"split": [config.sinks, config.tail], "prefill": [chunk_size, asdict(way)], **stored}

    def sample_of(self, name: str) -> dict[str, int]:
        """Return the size of the build's query sample, as `{"queries": n}`, if this method needs fewer queries.

        All methods of a build share one query sample, whose size is the largest number that a method needs. The dict is
        empty if this method needs that many queries, or none.
        """
        methods = self.config.methods
        own = methods[name].queries_wanted() if name in methods else 0
        return {"queries": self.queries} if own and own != self.queries else {}

    def check(self, prompt: FixedPrompt) -> None:
        """Raise UsageError if the prompt is too short for sinks and tail, or too long for the model.

        Also raises the errors of `BuildPlan`.
        """
        BuildPlan(self.loaded, prompt, self.config).split()

    def build(self, prompt: FixedPrompt, prefill: str, folder: Path, progress: Progress) -> None:
        """Build or resume the index of a prompt. Raises the errors of `build_index`, with the remedies of `eval`."""
        plan = BuildPlan(self.loaded, prompt, replace(self.config, prefill=self.prefills[prefill]))
        ways_out = WaysOut("choose another folder with --work", "give a smaller --length")
        build_index(plan, folder, progress, ways_out=ways_out)
