"""The first stage of a build: every layer's keys and values as attended, the held-out queries, and the probe."""

from dataclasses import dataclass
from typing import Any

import torch

from sparsekv.formats.checksums import chained_block_hashes, common_prefix_tokens, hash_json, hash_tokens
from sparsekv.formats.errors import SparsekvError
from sparsekv.formats.schema import TOKENS, LayerFacts, ModelIdentity, Prefill, Probe, layer_file
from sparsekv.indexing.capture.capture import CapturedLayer, RowsDone, capture
from sparsekv.indexing.capture.rotation import measure_rotations
from sparsekv.indexing.capture.team import Captured
from sparsekv.indexing.plan import BuildJob
from sparsekv.indexing.sampling import (
    first_unknown,
    known_queries,
    reuse_samples,
    sample_recipe,
    wanted_positions,
    write_sample,
)


@dataclass(frozen=True)
class ContextFacts:
    """What a prefill yields besides tensors: how each layer attends, and the probe."""

    layers: list[LayerFacts]
    probe: Probe

    @property
    def indexed_layers(self) -> list[int]:
        """Layers with full attention; those with a sliding window are not indexed and stay dense."""
        return [number for number, layer in enumerate(self.layers) if layer.sliding_window is None]


def build_context(job: BuildJob) -> ContextFacts:
    """Reuse or write the context's files; runs the model only if one of them is missing.

    Raises:
        SparsekvError: every layer of the model has a sliding window, or keys, values, queries or logits are not finite.
    """
    recipe = _recipe(job)
    layers = range(job.plan.num_hidden_layers)
    names = [TOKENS, *(layer_file(folder, layer) for layer in layers for folder in ("context", "queries"))]
    missing = {name for name in names if not job.writer.reuse(name, recipe)}
    known = _known_facts(job, recipe)
    positions = wanted_positions(job)
    sampled = sample_recipe(recipe, positions)
    if known and not missing and reuse_samples(job, known.indexed_layers, positions, sampled):
        return known
    job.writer.need_space(_context_bytes(job, len(positions)))
    captured = _capture(job, positions, _write_early(job, recipe, missing))
    if what := captured.not_finite():
        raise SparsekvError(f"{what} are not finite in {job.plan.dtype}; {_remedy(job.plan.dtype)}")
    # After the prefill: RoPE frequencies that depend on the sequence's length are then those of the prompt.
    job.team.begin_rotations(job.plan.prompt.input_ids)
    rotations = measure_rotations(job.plan.loaded.model, job.plan.prompt.input_ids)
    facts = ContextFacts(
        [captured.facts(layer).model_copy(update={"rope": rotations[layer]}) for layer in layers], captured.probe
    )
    if not facts.indexed_layers:
        raise SparsekvError(f"every layer of {job.plan.loaded.name} has a sliding window: there is nothing to index")
    job.writer.note(recipe, _note(facts))
    if TOKENS in missing:
        job.writer.write(TOKENS, {"input_ids": job.plan.prompt.input_ids}, recipe)
    for layer in layers:
        rows = captured.take(layer)
        _write_layer(job, rows, layer, recipe, missing)
        if rows.sample is not None and len(positions):
            write_sample(job, layer, rows.sample, positions, sampled)
        job.progress("write context", layer + 1, job.plan.num_hidden_layers)
    return facts


def _remedy(dtype: str) -> str:
    if dtype == "float32":
        return "the model's weights may be damaged: use another checkpoint"
    return "use --dtype bfloat16 or float32" if dtype == "float16" else "use --dtype float32"


def _recipe(job: BuildJob) -> str:
    return hash_json(
        {
            "model": _decides_keys(job.model),
            "ids": hash_tokens(job.plan.prompt.input_ids.tolist()),
            "split": job.split.model_dump(),
            "dtype": job.plan.dtype,
            "prefill": _decides_context(job.plan.prefill_record),
        }
    )


def _decides_keys(model: ModelIdentity) -> list[str | None]:
    return [model.config_hash, model.weights_hash, model.adapter, model.quantisation]


def _decides_context(prefill: Prefill) -> object:
    # The chunk size of a dense prefill does not change its result.
    return prefill.kind if prefill.exact else prefill.model_dump()


def _note(facts: ContextFacts) -> dict[str, object]:
    return {"layers": [layer.model_dump() for layer in facts.layers], "probe": facts.probe.model_dump()}


def _known_facts(job: BuildJob, recipe: str) -> ContextFacts | None:
    if note := job.writer.notes.get(recipe):
        return ContextFacts([LayerFacts(**layer) for layer in note["layers"]], Probe(**note["probe"]))
    base = job.writer.base
    if base and base.files[TOKENS].recipe == recipe:
        return ContextFacts(base.layers, base.probe)
    return None


def _write_early(job: BuildJob, recipe: str, missing: set[str]) -> RowsDone:
    """Writes the rows of missing files as chunks are done: a disk may be slower than the prefill."""

    def rows_done(layer: int, keys: torch.Tensor, values: torch.Tensor, end: int) -> None:
        if job.team.has_all_heads and (name := layer_file("context", layer)) in missing:
            job.writer.write_rows(name, {"keys": keys, "values": values}, recipe, end)

    return rows_done


def _capture(job: BuildJob, positions: torch.Tensor, rows_done: RowsDone) -> Captured:
    input_ids, prefix_tokens = job.plan.prompt.input_ids, _shared_prefix(job)
    options: dict[str, Any] = {
        "tail": job.split.tail,
        "positions": positions,
        "chunk_size": job.plan.chunk_size,
        "prefill": job.plan.prefill,
        "sinks": job.split.sinks,
    }
    if prefix_tokens and (unknown := first_unknown(job, positions)) is not None:
        prefix_tokens = min(prefix_tokens, unknown)
    job.team.begin_capture(input_ids, options)
    own = capture(
        job.plan.loaded.model,
        input_ids,
        **options,
        prefix_tokens=prefix_tokens,
        prefix=lambda layer: _base_rows(job, layer),
        prefix_queries=lambda layer, at: known_queries(job, layer, at),
        rows_done=rows_done,
        progress=lambda done: job.progress("prefill", done, len(input_ids)),
    )
    return job.team.whole(own)


def _shared_prefix(job: BuildJob) -> int:
    """How many leading tokens the index in the folder has captured already, with the same model, dtype and prefill."""
    base = job.writer.base
    if base is None or job.plan.force or not job.team.starts_after_prefix:
        return 0
    if _decides_keys(base.model) != _decides_keys(job.model) or base.dtype != job.plan.dtype:
        return 0
    if _decides_context(base.prefill) != _decides_context(job.plan.prefill_record):
        return 0
    chain = chained_block_hashes(job.plan.prompt.input_ids.tolist())
    # Damaged rows would be copied and get a valid checksum of their own, so that nobody would notice.
    if not all(job.writer.is_whole(base.files[layer_file("context", layer)]) for layer in range(len(base.layers))):
        return 0
    # Queries are stored for the tail alone, which the edit may have moved: those of the new tail are computed again.
    shared = min(common_prefix_tokens(base.prompt.block_hashes, chain), job.split.sinks + job.split.middle)
    # With a sparse prefill the result depends on where chunks begin, so the prefix ends between two chunks.
    return shared if job.plan.prefill.exact else shared // job.plan.chunk_size * job.plan.chunk_size


def _base_rows(job: BuildJob, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = job.writer.read_base(layer_file("context", layer))
    return tensors["keys"], tensors["values"]


def _write_layer(job: BuildJob, rows: CapturedLayer, layer: int, recipe: str, missing: set[str]) -> None:
    # Rows that came from other processes are copies, and take memory of their own until they are written.
    copies = not job.team.has_all_heads
    queries = {"tail": rows.tail}
    if rows.sink_logits is not None:
        queries["sink_logits"] = rows.sink_logits
    for folder, tensors in (("context", {"keys": rows.keys, "values": rows.values}), ("queries", queries)):
        name = layer_file(folder, layer)
        if name in missing:
            job.writer.write(name, tensors, recipe, wait=copies)


def _context_bytes(job: BuildJob, sampled: int) -> int:
    """Disk space in bytes that a build needs: the context's files plus a tenth for the methods, the queries at
    `sampled` positions, and what methods with larger files state themselves."""
    model = job.plan.loaded.model
    config = model.config.get_text_config()
    head_dim = job.plan.head_dim
    row = head_dim * model.dtype.itemsize
    context = 2.2 * row * config.num_key_value_heads * job.split.tokens
    samples = row * config.num_attention_heads * sampled
    tables = sum(indexer.bytes_per_token(head_dim) for indexer in job.plan.methods.values())
    methods = tables * config.num_key_value_heads * job.split.middle
    return int((context + samples + methods) * config.num_hidden_layers)
