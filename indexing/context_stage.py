"""The first stage of a build: every layer's keys and values as attended, the held-out queries, probe and canary."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from sparsekv.formats.checksums import hash_tokens
from sparsekv.formats.context_rows import Pair, context_rows
from sparsekv.formats.errors import SparsekvError
from sparsekv.formats.int8_rows import row_bytes as int8_row_bytes
from sparsekv.formats.kv_storage import KVStorage
from sparsekv.formats.manifest import REBUILD
from sparsekv.formats.schema import TOKENS, CanaryToken, LayerFacts, Probe, layer_file
from sparsekv.indexing.capture.canary import canary_positions, judge_canary, run_canary
from sparsekv.indexing.capture.capture import CapturedQueries, RowsDone, capture
from sparsekv.indexing.capture.preflight import preflight
from sparsekv.indexing.capture.rotation import measure_rotations
from sparsekv.indexing.capture.stored_rows import TakenOver, rows_as_stored
from sparsekv.indexing.capture.team import Captured
from sparsekv.indexing.context_files import ContextFiles, context_recipe
from sparsekv.indexing.early_rows import early_rows
from sparsekv.indexing.memory import tell_memory
from sparsekv.indexing.plan import BuildJob
from sparsekv.indexing.sampling import (
    prefix_queries,
    reuse_samples,
    sample_recipe,
    wanted_positions,
    write_sample,
)
from sparsekv.indexing.shared_prefix import compared_prefix, prefix_rows, taken_is_finite, taken_over


@dataclass(frozen=True)
class ContextFacts:
    """Results of a prefill besides tensors: how each layer attends, the probe, what storing in 8 bits costs, and the
    canary; none in a build that an earlier version began."""

    layers: list[LayerFacts]
    probe: Probe
    storage: KVStorage | None = None
    canary: list[CanaryToken] = field(default_factory=list)

    @property
    def indexed_layers(self) -> list[int]:
        """Layers with full attention; those with a sliding window are not indexed and stay dense."""
        return [number for number, layer in enumerate(self.layers) if layer.sliding_window is None]


def build_context(job: BuildJob) -> ContextFacts:
    """Reuse or write the context's files; runs the model only if one of them is missing.

    Raises:
        SparsekvError: an index cannot follow the model, keys, values, queries or logits are not finite, or the model's
            own attention over the stored rows differs from ours.
    """
    ids_sha256, layers = hash_tokens(job.plan.prompt.input_ids.tolist()), range(job.plan.num_hidden_layers)
    recipe = _recipe(job, ids_sha256)
    names = [TOKENS, *(layer_file(folder, layer) for layer in layers for folder in ("context", "queries"))]
    missing = {name for name in names if not job.writer.reuse(name, recipe)}
    known, positions = _known_facts(job, recipe), wanted_positions(job)
    sampled = sample_recipe(recipe, positions)
    if known and not missing and reuse_samples(job, known.indexed_layers, positions, sampled):
        return _with_canary(job, known)
    _check_room(job, len(positions), sum(layer_file("context", layer) in missing for layer in layers))
    job.team.begin_preflight(job.plan.prompt.input_ids)
    preflight(job.plan.loaded.model, job.plan.prompt.input_ids, job.plan.loaded.name)
    prefix_tokens = compared_prefix(job, positions)
    early = early_rows(job, recipe, missing)
    captured = _capture(job, positions, prefix_tokens, early.rows_done)
    if what := captured.not_finite():
        raise SparsekvError(f"{what} are not finite in {job.plan.dtype}; {_remedy(job, prefix_tokens)}")
    taken = taken_over(job, prefix_tokens)
    if known and not missing:  # queries at other positions alone: rows stay, and what was measured over them
        found = _with_canary(job, known)
    else:
        canary, probe = _canary(job, captured, taken)
        found = ContextFacts(_layer_facts(job, captured), probe, canary=canary)
    files = ContextFiles(job.writer, recipe, missing, job.plan.kv_dtype, taken, copies=not job.team.has_all_heads)
    if job.plan.kv_dtype is None:
        job.writer.note(recipe, _note(found))
    if TOKENS in missing:
        job.writer.write(TOKENS, {"input_ids": job.plan.prompt.input_ids}, recipe)
    _write_layers(job, partial(early.write_layer, captured, files), found.layers, (positions, sampled))
    if job.plan.kv_dtype is not None and found is not known:
        # Not earlier: what storing costs is known once all layers were written, as long as their exact rows are there.
        found = replace(found, storage=files.storage(ids_sha256, job.split.tokens, exact_probe=False))
        job.writer.note(recipe, _note(found))
    return found


def _layer_facts(job: BuildJob, captured: Captured) -> list[LayerFacts]:
    """How each layer attends."""
    # After the prefill: RoPE frequencies that depend on the sequence's length are then those of the prompt.
    job.team.begin_rotations(job.plan.prompt.input_ids)
    rotations = measure_rotations(job.plan.loaded.model, job.plan.prompt.input_ids)
    return [captured.facts(layer).model_copy(update={"rope": rope}) for layer, rope in enumerate(rotations)]


def _check_room(job: BuildJob, sampled: int, missing: int) -> None:
    """Raise SparsekvError where the disk, or a GPU, has too little for a build with queries at so many positions, and
    keys and values of so many layers that are not there yet."""
    job.writer.need_space(_bytes_to_write(job, sampled, missing))
    tell_memory(job, sampled)


def _recipe(job: BuildJob, ids_sha256: str) -> str:
    plan = job.plan
    return context_recipe(job.model, ids_sha256, job.split, plan.dtype, plan.prefill_record, plan.kv_dtype)


def _write_layers(
    job: BuildJob,
    write: Callable[[int, LayerFacts], CapturedQueries],
    facts: list[LayerFacts],
    sample: tuple[torch.Tensor, str],
) -> None:
    """Write each layer's files, and its queries at sampled positions [P], whose recipe follows them in `sample`."""
    positions, recipe = sample
    for layer, of_layer in enumerate(facts):
        queries = write(layer, of_layer)
        if queries.sample is not None and len(positions):
            write_sample(job.writer, layer, queries.sample, positions, recipe)
        job.progress("write context", layer + 1, len(facts))


def _remedy(job: BuildJob, prefix_tokens: int) -> str:
    dtype = job.plan.dtype
    if prefix_tokens and not taken_is_finite(job, prefix_tokens):
        return f"they were taken from {job.writer.folder}, where they are not; {REBUILD}"
    if dtype == "float32":
        return "the model's weights may be damaged: use another checkpoint"
    return "use --dtype bfloat16 or float32" if dtype == "float16" else "use --dtype float32"


def _note(facts: ContextFacts) -> dict[str, object]:
    storage = None if facts.storage is None else facts.storage.model_dump()
    return {
        "layers": [layer.model_dump() for layer in facts.layers],
        "probe": facts.probe.model_dump(),
        "canary": [token.model_dump() for token in facts.canary],
        "kv_storage": storage,
    }


def _noted(note: object) -> ContextFacts | None:
    """What a note of an interrupted build says; None for one that this version does not write, or that is damaged."""
    if not isinstance(note, dict):
        return None
    try:
        layers = [LayerFacts.model_validate(layer) for layer in note["layers"]]
        # Earlier versions wrote none of storage, or no canary.
        storage = note.get("kv_storage")
        storage = None if storage is None else KVStorage.model_validate(storage)
        canary = [CanaryToken.model_validate(token) for token in note.get("canary", [])]
        return ContextFacts(layers, Probe.model_validate(note["probe"]), storage, canary)
    except (LookupError, TypeError, ValueError):
        return None


def _known_facts(job: BuildJob, recipe: str) -> ContextFacts | None:
    if (noted := _noted(job.writer.notes.get(recipe))) and len(noted.layers) == job.plan.num_hidden_layers:
        return noted
    base = job.writer.base
    if base and base.files[TOKENS].recipe == recipe:
        return ContextFacts(base.layers, base.probe, base.kv_storage, base.canary)
    return None


def _capture(job: BuildJob, positions: torch.Tensor, prefix_tokens: int, rows_done: RowsDone) -> Captured:
    input_ids = job.plan.prompt.input_ids
    options: dict[str, Any] = {
        "tail": job.split.tail,
        "positions": positions,
        "chunk_size": job.plan.chunk_size,
        "prefill": job.plan.prefill,
        "sinks": job.split.sinks,
    }
    rows = partial(prefix_rows, job, tokens=prefix_tokens)
    known = positions[positions < prefix_tokens]
    queries = prefix_queries(job, known, rows) if len(known) else None
    job.team.begin_capture(input_ids, options)
    own = capture(
        job.plan.loaded.model,
        input_ids,
        **options,
        prefix_tokens=prefix_tokens,
        prefix=rows,
        prefix_queries=queries,
        rows_done=rows_done,
        progress=lambda done: job.progress("prefill", done, len(input_ids)),
    )
    return job.team.whole(own)


def _canary(job: BuildJob, captured: Captured, taken: TakenOver | None) -> tuple[list[CanaryToken], Probe]:
    """Logits of the model's own attention over the rows as they will be stored; SparsekvError where ours differ."""
    plan = job.plan
    job.team.begin_canary(plan.prompt.input_ids, plan.kv_dtype)
    rows = partial(rows_as_stored, captured.rows, kv_dtype=plan.kv_dtype, taken=taken)
    runs = run_canary(plan.loaded.model, plan.prompt.input_ids, rows)
    return judge_canary(runs, plan.loaded.model.dtype, plan.loaded.name)


def _with_canary(job: BuildJob, known: ContextFacts) -> ContextFacts:
    """Facts of a context whose files stay, with the canary and the probe that an earlier version did not store.

    Processes that share a model hold no rows of a context that stays: there it stays without.

    Raises:
        SparsekvError: the model's own attention over the stored rows differs from ours.
    """
    model, ids = job.plan.loaded.model, job.plan.prompt.input_ids
    if known.canary or len(canary_positions(model, len(ids))) == 1 or not job.team.starts_after_prefix:
        return known

    def rows(layer: int) -> Pair:
        stored = job.writer.read(layer_file("context", layer), model.device)
        return context_rows(stored, model.dtype).part(slice(None))

    canary, probe = judge_canary(run_canary(model, ids, rows), model.dtype, job.plan.loaded.name)
    storage = known.storage and known.storage.model_copy(update={"exact_probe": False})
    return replace(known, canary=canary, probe=probe, storage=storage)


def _bytes_to_write(job: BuildJob, sampled: int, missing: int) -> int:
    """Disk space in bytes that a build needs: keys and values of `missing` layers, a tenth of all layers' for the
    methods, the queries at `sampled` positions, and what methods with larger files state themselves."""
    model = job.plan.loaded.model
    config = model.config.get_text_config()
    head_dim = job.plan.head_dim
    row = head_dim * model.dtype.itemsize
    stored = row if job.plan.kv_dtype is None else int8_row_bytes(head_dim)
    rows = config.num_key_value_heads * job.split.tokens
    samples = row * config.num_attention_heads * sampled
    tables = sum(indexer.bytes_per_token(head_dim) for indexer in job.plan.methods.values())
    methods = tables * config.num_key_value_heads * job.split.middle
    return int(2 * stored * rows * missing + (0.2 * row * rows + samples + methods) * config.num_hidden_layers)
