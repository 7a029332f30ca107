"""Building an index: prefill and capture, each method layer by layer, calibration, and the manifest last.

Every file has a recipe, the hash of everything that decides its content. A file of an interrupted build, or of an
earlier index in the same folder, is reused if its recipe is the same, and rebuilt otherwise.
"""

import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from sparsekv.formats.checksums import chained_block_hashes, hash_tokens
from sparsekv.formats.models.identify import identify
from sparsekv.formats.schema import AdditionRecord, Manifest, MethodRecord, Prompt, RopeRecord
from sparsekv.formats.ways_out import WaysOut
from sparsekv.formats.writer import ArtifactWriter
from sparsekv.indexing.capture.team import Alone, Team
from sparsekv.indexing.context_stage import ContextFacts, build_context
from sparsekv.indexing.earlier_index import in_order, keep_what_is_there, tell_what_is_there, with_methods_there
from sparsekv.indexing.method_stage import build_files, keep_methods, record_method
from sparsekv.indexing.plan import BuildJob, BuildPlan, Progress
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
    split, team, (model, tokenizer) = plan.split(), team or Alone(), identify(plan.loaded)
    usual = WaysOut("", "add less") if plan.growth else WaysOut()
    with ArtifactWriter(folder, force=plan.force, ways_out=ways_out or usual) as writer:
        keep_what_is_there(plan, model, writer)
        plan = with_methods_there(plan, model, writer, tell)
        job = BuildJob(plan, split, model, tokenizer, writer, progress, team, tell)
        tell_what_is_there(job)
        facts = build_context(job)
        methods = job.method_job
        made = [build_files(methods, name, indexer, facts) for name, indexer in plan.methods.items()]
        # Before this process waits for its disk, which may take longer than another one waits for it.
        team.release()
        built = {files.work.name: record_method(methods, files) for files in made}
        kept = keep_methods(methods, tell)
        return _finished(writer, _manifest(job, facts, in_order(kept | built, writer.base)))


def _additions(plan: BuildPlan, base: Manifest | None) -> list[AdditionRecord]:
    earlier = base.additions if base else []
    if plan.growth:
        return [*earlier, plan.growth.addition]
    same = base is not None and base.prompt.ids_sha256 == hash_tokens(plan.prompt.input_ids.tolist())
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


def _manifest(job: BuildJob, facts: ContextFacts, methods: dict[str, MethodRecord]) -> Manifest:
    plan, ids = job.plan, job.plan.prompt.input_ids.tolist()
    config = plan.loaded.model.config.get_text_config()
    return Manifest(
        writer_version=version("sparsekv"),
        uuid=str(uuid.uuid4()),
        parent_uuid=job.writer.base.uuid if job.writer.base else None,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        model=job.model,
        tokenizer=job.tokenizer,
        tokenizer_files=plan.loaded.tokenizer_files,
        prompt=Prompt(
            text_sha256=plan.prompt.text_sha256,
            ids_sha256=hash_tokens(ids),
            block_hashes=chained_block_hashes(ids),
            tokens=len(ids),
            chat=plan.prompt.chat,
            special_tokens=plan.prompt.special_tokens,
            max_tokens=plan.prompt.cut,
            border=plan.prompt.border,
        ),
        split=job.split,
        dtype=plan.dtype,
        kv_storage=facts.storage,
        rope=RopeRecord(
            scaling=plan.rope_scaling,
            parameters=getattr(config, "rope_parameters", None),
            max_position_embeddings=getattr(config, "max_position_embeddings", None),
        ),
        layers=facts.layers,
        prefill=plan.prefill_record,
        versions=library_versions(),
        methods=methods,
        probe=facts.probe,
        canary=facts.canary,
        files=job.writer.files,
        additions=_additions(plan, job.writer.base),
    )
