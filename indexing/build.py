"""Building an index: prefill and capture, each method layer by layer, calibration, and the manifest last.

Every file has a recipe, the hash of everything that decides its content. A file of an interrupted build, or of an
earlier index in the same folder, is reused if its recipe is the same, and rebuilt otherwise.
"""

import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from sparsekv.formats.checksums import chained_block_hashes
from sparsekv.formats.models.identify import identify
from sparsekv.formats.schema import AdditionRecord, Manifest, MethodRecord, Prompt, RopeRecord
from sparsekv.formats.ways_out import WaysOut
from sparsekv.formats.writer import ArtifactWriter
from sparsekv.indexing.capture.team import Alone, Team
from sparsekv.indexing.context_files import ContextFacts
from sparsekv.indexing.context_stage import build_context
from sparsekv.indexing.existing_index import in_order, refuse_what_is_lost, tell_what_is_there, with_lost_methods
from sparsekv.indexing.method_stage import MethodStage
from sparsekv.indexing.plan import Build, BuildPlan, Progress
from sparsekv.indexing.reuse import plan_reuse
from sparsekv.indexing.versions import library_versions


def build_index(
    plan: BuildPlan,
    folder: Path,
    progress: Progress = lambda stage, done, of: None,
    team: Team | None = None,
    tell: Callable[[str], None] = lambda line: None,
    ways_out: WaysOut | None = None,
) -> Manifest:
    """Build, resume or update the index in `folder`, and return its manifest.

    Memory: the model and its cache of N rows during the prefill; then those of its layers that are not yet written, and
    LAYERS_AT_ONCE of `memory` that are read again; on a CPU those that `share_cores` has at a time.

    Args:
        progress: called with a stage's name, the steps of it that are done, and the steps in all.
        team: the processes that run the model and make the indices; this one alone by default.
        tell: called with a line for the user: what of the folder stays, and what memory a prefill on a GPU needs.
        ways_out: remedies where the folder cannot be written; by default those of `build-index` or `append`.

    Raises:
        SparsekvError: the keys and values do not fit the GPU.
        UsageError: the document does not fit the split or the model's positions.
        ArtifactError: the folder cannot be written, is locked, is damaged, or holds another index than the one to
            append to.
    """
    # Before anything is written: it refuses a document that is too short or too long.
    split, team, (model, tokenizer) = plan.split(), team or Alone(), identify(plan.loaded)
    usual = WaysOut("", "add less") if plan.growth else WaysOut()
    with ArtifactWriter(folder, force=plan.config.force, ways_out=ways_out or usual) as writer:
        build = Build(plan, split, model, tokenizer, writer, progress, team, tell)
        refuse_what_is_lost(build)
        build = with_lost_methods(build)
        reuse = plan_reuse(build)
        tell_what_is_there(build, reuse)
        facts = build_context(build, reuse)
        stage = _method_stage(build, facts)
        files = [stage.write(name, indexer) for name, indexer in build.plan.config.methods.items()]
        # Before this process waits for its disk, which may take longer than another one waits for it.
        team.release()
        built = {one.work.name: stage.record(one) for one in files}
        kept = stage.keep_others(build.plan.config.methods, tell)
        return _finished(writer, _manifest(build, facts, in_order(kept | built, writer.base)))


def _method_stage(build: Build, facts: ContextFacts) -> MethodStage:
    plan = build.plan
    return MethodStage(
        build.split,
        plan.dtype,
        plan.loaded.model.device,
        build.writer,
        facts,
        build.progress,
        plan.growth,
        build.team.make_layers,
    )


def _additions(build: Build) -> list[AdditionRecord]:
    base, growth = build.writer.base, build.plan.growth
    earlier = base.additions if base else []
    if growth:
        return [*earlier, growth.addition]
    same = base is not None and base.prompt.ids_sha256 == build.ids_sha256
    return earlier if same else []


def _finished(writer: ArtifactWriter, manifest: Manifest) -> Manifest:
    """Seal the index with this manifest, or keep the finished one where it says the same."""
    if writer.base and _says_the_same(writer.base, manifest):
        writer.leave_as_it_was()
        return writer.base
    return writer.finish(manifest)


def _says_the_same(base: Manifest, manifest: Manifest) -> bool:
    """Whether a finished index differs from this one at most in how it came about and in what `tune` found of it."""
    # Tokenizer files are hashed by another form in another version, while the tokenizer itself is the same.
    came_about = {"writer_version", "uuid", "parent_uuid", "created", "versions", "tokenizer_files", "defaults"}
    came_about.add("manifest_sha256")
    if manifest.prefill.exact:
        base = base.model_copy(update={"prefill": manifest.prefill}) if base.prefill.exact else base
    return base.model_dump(exclude=came_about) == manifest.model_dump(exclude=came_about)


def _manifest(build: Build, facts: ContextFacts, methods: dict[str, MethodRecord]) -> Manifest:
    plan, base = build.plan, build.writer.base
    config = plan.loaded.model.config.get_text_config()
    return Manifest(
        writer_version=version("sparsekv"),
        uuid=str(uuid.uuid4()),
        parent_uuid=base.uuid if base else None,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
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
        ),
        split=build.split,
        dtype=plan.dtype,
        kv_storage=facts.storage,
        rope=RopeRecord(
            scaling=plan.config.rope_scaling,
            parameters=getattr(config, "rope_parameters", None),
            max_position_embeddings=getattr(config, "max_position_embeddings", None),
        ),
        layers=facts.layers,
        prefill=plan.prefill_record,
        versions=library_versions(),
        methods=methods,
        probe=facts.probe,
        canary=facts.canary,
        files=build.writer.files,
        additions=_additions(build),
    )
