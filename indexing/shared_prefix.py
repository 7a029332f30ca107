"""What a build takes over from the finished index in its folder: the rows of tokens that both begin with."""

from functools import partial

import torch

from sparsekv.formats.checksums import chained_block_hashes, common_prefix_tokens
from sparsekv.formats.context_rows import Pair, context_rows
from sparsekv.formats.layout import in_this_form
from sparsekv.formats.models.rope import rope_depends_on_length
from sparsekv.formats.schema import Manifest, layer_file
from sparsekv.indexing.capture.canary import compare_canary
from sparsekv.indexing.capture.stored_rows import TakenOver
from sparsekv.indexing.context_files import row_settings
from sparsekv.indexing.plan import BuildJob
from sparsekv.indexing.sampling import first_unknown

LEAST_SHARE = 0.5
"""Of a document's tokens, how many must have set the scales of channels in 8 bits: where a quarter did, storing costs
half as much again, where a sixteenth did, twice as much (docs/reference/eight-bits.md)."""


def shared_prefix(job: BuildJob, positions: torch.Tensor) -> int:
    """How many leading tokens need not be prefilled again: the index in the folder has their rows, from the same model,
    dtype and prefill.

    Args:
        positions: [P], rising, of which queries are needed. One that the index lacks comes from the rows before it,
            unless these were selected for each chunk, or the model needs all before it: then the prefix ends there.
    """
    base = job.writer.base
    if base is None or job.plan.force or not job.team.starts_after_prefix or not _fits(job, base):
        return 0
    if base.kv_storage is not None and base.kv_storage.measured_tokens < len(job.plan.prompt.input_ids) * LEAST_SHARE:
        return 0
    # Damaged rows would be copied and get a valid checksum of their own, so that nobody would notice.
    if not all(job.writer.is_whole(base.files[layer_file("context", layer)]) for layer in range(len(base.layers))):
        return 0
    chain = chained_block_hashes(job.plan.prompt.input_ids.tolist())
    # Queries are stored for the tail alone, which the edit may have moved: those of the new tail are computed again.
    shared = min(common_prefix_tokens(base.prompt.block_hashes, chain), job.split.sinks + job.split.middle)
    exact = job.plan.prefill.exact
    if shared and not (exact and _runs_alone(job)) and (unknown := first_unknown(job, positions)) is not None:
        shared = min(shared, unknown)
    if exact:
        return shared
    # Rows of a sparse prefill depend on where chunks begin and end, so the prefix ends after a chunk that was whole in
    # both. The index's last token is in none: it ran alone, densely.
    return min(shared, base.split.tokens - 1) // job.plan.chunk_size * job.plan.chunk_size


def compared_prefix(job: BuildJob, positions: torch.Tensor) -> int:
    """The same, once the canary of that index has shown that this model makes the same of its rows.

    Raises:
        IdentityError: it does not: other weights made the rows, or a model that attended otherwise.
    """
    tokens = shared_prefix(job, positions)
    if tokens and job.writer.base is not None:
        rows = partial(prefix_rows, job, tokens=tokens)
        compare_canary(job.writer.base, tokens, job.plan.loaded.model, job.plan.prompt.input_ids, rows)
    return tokens


def _runs_alone(job: BuildJob) -> bool:
    """Whether a token may run without those before it: Llama 4 scales queries by how many a cache has."""
    return not getattr(job.plan.loaded.model.config.get_text_config(), "attn_temperature_tuning", False)


def _fits(job: BuildJob, base: Manifest) -> bool:
    """Whether a build's rows may follow those of an index."""
    return (
        row_settings(base.model, base.split, base.dtype, base.prefill)
        == row_settings(job.model, job.split, job.plan.dtype, job.plan.prefill_record)
        and (base.kv_storage is None or _continues_8_bits(job, base))
        and not rope_depends_on_length(base.rope.parameters)
    )


def _continues_8_bits(job: BuildJob, base: Manifest) -> bool:
    """Whether rows may follow those of an index in 8 bits: only in 8 bits, else rows would pass for exact ones, and
    after a dense prefill, because a sparse one would choose other tokens by rounded keys."""
    assert base.kv_storage is not None
    stored = base.kv_storage.dtype == job.plan.kv_dtype and in_this_form(base)
    return stored and job.plan.prefill.exact


def prefix_rows(job: BuildJob, layer: int, tokens: int) -> Pair:
    """Keys and values [Hk, tokens, D] of a layer of the index in the folder, on the model's device."""
    stored = context_rows(job.read_base(layer_file("context", layer)), job.plan.loaded.model.dtype)
    return stored.part(slice(tokens))


def taken_is_finite(job: BuildJob, tokens: int) -> bool:
    """Whether what so many tokens have in the index in the folder is finite: rows, and queries at sampled positions."""
    base = job.writer.base
    files = {} if base is None else base.files
    for layer in range(job.plan.num_hidden_layers):
        taken = list(prefix_rows(job, layer, tokens))
        if (name := layer_file("samples", layer)) in files:
            taken.append(job.read_base(name)["queries"])
        if not all(bool(rows.isfinite().all()) for rows in taken):
            return False
    return True


def taken_over(job: BuildJob, tokens: int) -> TakenOver | None:
    """The rows in 8 bits that the build begins with; None where all of its rows are exact."""
    base = job.writer.base
    if not tokens or base is None or base.kv_storage is None:
        return None
    return TakenOver(tokens, lambda layer: job.read_base(layer_file("context", layer)), base.kv_storage)
