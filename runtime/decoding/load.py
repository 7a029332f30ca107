"""Open an index with the model that built it, or with another model that the user names.

Each of several processes (ranks) has a part of the model and of the KV heads.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from sparsekv.formats.errors import LEAVE_OUT, ArtifactError, UsageError
from sparsekv.formats.index.identity import ORIGINAL, check_model, check_tokenizer, fingerprint_weights
from sparsekv.formats.index.reader import Artifact, ArtifactShare
from sparsekv.formats.index.schema import AUTO, Weights, layer_file, weights_named
from sparsekv.formats.models.find import named_by_index, remember
from sparsekv.formats.models.kept import files_of
from sparsekv.formats.models.load import LoadedModel, identify, keep_model, load_model
from sparsekv.kernels.common.first_calls import make_first_calls
from sparsekv.kernels.common.given_rows import keys_of_one_token
from sparsekv.kernels.linear.quantised import quantise_linears
from sparsekv.runtime.attention.sparse_layer import SparseLayer
from sparsekv.runtime.cache.index_cache import LayerStats
from sparsekv.runtime.cache.kv_store import LayerRows
from sparsekv.runtime.decoding.answer import Answer, unused_settings
from sparsekv.runtime.decoding.choose_config import choose_config
from sparsekv.runtime.decoding.early import EarlyReading
from sparsekv.runtime.decoding.kept import KeptIndex, kept_index, kept_indices
from sparsekv.runtime.decoding.open import OpenIndex, open_index
from sparsekv.runtime.decoding.prepare import PreparedMethod, files_read
from sparsekv.runtime.selection.interface import MethodSpec

if TYPE_CHECKING:  # the module imports torch.distributed, which only several ranks need
    from sparsekv.formats.distributed.group import Ranks


@dataclass
class OpenShare(OpenIndex):
    """One rank's part of an index and of its model. All ranks must make the same calls.

    Each rank captures and replays its own CUDA graph of a step, which includes the all-reduces over ranks.
    """

    _: KW_ONLY
    ranks: "Ranks"

    def agreed(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the first rank's logits on all ranks, because the ranks' devices may round differently."""
        logits = logits.contiguous()
        self.ranks.spread(logits)
        return logits


def open_share(artifact: Artifact, loaded: LoadedModel, ranks: "Ranks", *, hold: bool) -> OpenShare:
    """Open this rank's part of an index, with the checks and errors of `open_index`.

    Args:
        hold: as in `open_index`.

    Raises:
        ArtifactError: another process changed the index while the ranks opened the index.
    """
    if len(set(ranks.collect(artifact.manifest.manifest_sha256))) > 1:
        raise ArtifactError(
            f"another process changed {artifact.folder} while this command ran; run the same command again"
        )
    model, tokenizer = identify(loaded, artifact.manifest)
    check_model(artifact.manifest, model, str(loaded.model.dtype).removeprefix("torch."))
    check_tokenizer(artifact.manifest, tokenizer)
    share = ArtifactShare(artifact, ranks.number, ranks.size, heads_here(loaded.model))
    index = OpenShare(share, loaded.model, loaded.tokenizer, ranks=ranks)
    index.check_probe(hold=hold)
    return index


def heads_here(model: PreTrainedModel) -> dict[int, int]:
    """Return this rank's number of KV heads for each layer that attends. All ranks must call this function together."""
    keys = keys_of_one_token(model, torch.zeros(1, dtype=torch.int64), 0)
    return {layer: len(of_layer) for layer, of_layer in keys.items()}


def join_answer(ranks: "Ranks", answer: Answer) -> Answer:
    """Return this rank's `answer` with the KV fraction and the missed mass over the heads of all ranks.

    Both are means over ranks, because all ranks have the same number of heads.
    """
    found = ranks.collect((answer.kv_fraction, answer.layers))
    layers = [_mean_stats(of_layer) for of_layer in zip(*(stats for _, stats in found), strict=True)]
    shares = [share for share, _ in found if share is not None]
    return replace(answer, kv_fraction=sum(shares) / len(shares) if shares else None, layers=layers)


def _mean_stats(of_ranks: Sequence[LayerStats]) -> LayerStats:
    names = [one.name for one in fields(LayerStats) if one.name != "layer"]
    means = {name: sum(getattr(one, name) for one in of_ranks) / len(of_ranks) for name in names}
    return LayerStats(of_ranks[0].layer, **means)


def load_and_open(
    artifact: Artifact,
    model: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    progress: Callable[[str], None] = lambda text: None,
    *,
    weights: str = AUTO,
    hold: bool = False,
    loaded_in: Callable[[float], None] = lambda seconds: None,
    ranks: "Ranks | None" = None,
    early: EarlyReading | None = None,
) -> OpenIndex:
    """Load a model and open an index with it, by default the model that built the index.

    The model is loaded with the RoPE scaling and the precision of weights that the index was built with, and by default
    in the index's dtype.

    Args:
        model: a local folder or a hub id. The name is remembered: indices that name this model may load it later.
        dtype: `auto` is the index's dtype.
        weights: the precision that the index must have been built with; `auto` is any.
        progress: called with one line at the start of each step that takes a while, and with `unused_settings`.
        loaded_in: called with the seconds that loading the model took, before the index is opened.
        hold: keep the keys and values that the checks read (copied to a GPU, or mapped) for the next cache.
        ranks: the processes that share the model; each opens its own heads.
        early: a reading of this index's files that has already begun.

    Raises:
        SparsekvError: the model cannot be loaded; no model is given, and the user has never named the model that the
            index names; or with `hold`, the model and the index's rows do not fit on the GPU.
        UsageError: the model, device or dtype does not exist; the index was built with weights of another precision; or
            several ranks open an index that was built with rounded weights. Also raises the errors of `with_weights`.
        IdentityError: the index does not belong to this model.
        ArtifactError: the index's tensors do not fit the model, or are damaged.
    """
    manifest = artifact.manifest
    if weights_named(weights) not in (None, manifest.model.weights):
        raise UsageError(
            f"--weights {weights}: the index was built with {manifest.model.weights or ORIGINAL} weights; leave the "
            f"option out, or build the index again with --weights {weights}"
        )
    if ranks is not None and ranks.size > 1 and manifest.model.weights is not None:
        raise UsageError(
            f"--gpus {ranks.size}: the index was built with --weights {manifest.model.weights}, and rounded weights "
            "are not split over ranks; leave --gpus out, or build the index again without --weights"
        )
    started = time.perf_counter()
    early = None if ranks is not None else (early or EarlyReading(artifact, device, hold=hold)).begin_loading()
    if ranks is not None and ranks.size > 1:
        # The module imports torch.distributed, which only several ranks need.
        from sparsekv.kernels.distributed.row_style import sum_in_one_launch

        sum_in_one_launch()
    loaded = load_model(
        named_by_index(manifest.model.id, progress) if model is None else model,
        device=device,
        dtype=manifest.dtype if dtype == "auto" else dtype,
        rope_scaling=manifest.rope.scaling,
        progress=progress,
        meanwhile=make_first_calls,
        ranks=1 if ranks is None else ranks.size,
    )
    loaded = with_weights(loaded, manifest.model.weights, progress)
    if model is not None and (ranks is None or ranks.first):
        remember(loaded.name)
    if (ranks is None or ranks.first) and (told := unused_settings(loaded.model)):
        progress(told)
    loaded_in(time.perf_counter() - started)
    if ranks is not None:
        return open_share(artifact, loaded, ranks, hold=hold)
    kept = kept_index(artifact)
    if kept is not None and kept.loaded is loaded:
        return OpenIndex(artifact, loaded.model, loaded.tokenizer, {}, kept.prepared, loaded.tokenizer_files, kept)
    its, files = identify(loaded, manifest), loaded.tokenizer_files
    return open_index(artifact, loaded.model, loaded.tokenizer, its, hold=hold, early=early, files=files)


def keep_index(folder: Path) -> None:
    """Load the model of an index on the CPU, and prepare the index's default method, for the forks of this process.

    The caller must have checked the probe, the stored logits of the last prompt token. If the model's weights are
    rounded, only the model is kept, not the index.

    Raises:
        SparsekvError: the model may not or cannot be loaded, or the index is damaged.
    """
    files, artifact = files_of(folder), Artifact(folder)
    manifest, config = artifact.manifest, choose_config(artifact, None, {})
    name = named_by_index(manifest.model.id, lambda text: None)
    loaded = keep_model(name, manifest.dtype, manifest.rope.scaling)
    if manifest.model.weights is not None:
        return
    opened = OpenIndex(artifact, loaded.model, loaded.tokenizer)
    prepared = None
    if isinstance(config.attention, MethodSpec):
        artifact.check_sums(files_read(artifact, config.attention))
        prepared = PreparedMethod(config.attention)
        for layer in manifest.indexed_layers:
            prepared.prepare(LayerRows(artifact, layer))
        opened.prepared = prepared.copy()
    cache = opened.cache(config)
    if sum(manifest.files[layer_file("context", layer)].bytes for layer in manifest.attending) < LAID_OUT:
        for of_layer in cache.stored_layers:
            if isinstance(of_layer, SparseLayer):
                of_layer.plan.middle.in_place()
    kept_indices.keep(folder, None, files, KeptIndex(artifact, loaded, prepared, config, cache))


LAID_OUT = 1 << 30
"""A server copies an index's keys and values to memory, in the order in which steps read them, if they have fewer bytes
than this."""

BITS: dict[Weights, int] = {"int8": 8, "int4": 4}
MOST_ROUNDED = 0.9
"""If less than this share of a model's weights is rounded, the user gets a note."""


def with_weights(loaded: LoadedModel, weights: Weights | None, progress: Callable[[str], None]) -> LoadedModel:
    """Round the weights of a loaded model's linear layers in place; None leaves them as they are.

    Peak memory is the loaded model and one layer, because rounded weights replace loaded weights layer by layer.

    Args:
        progress: called with a line if the rounded weights are less than MOST_ROUNDED of all weights.

    Raises:
        UsageError: the checkpoint is quantised already, or the model has no linear layers.
    """
    if weights is None:
        return loaded
    from sparsekv.formats.models.quantised import checkpoint_of  # the module imports transformers

    if checkpoint_of(loaded.model) is not None:
        raise UsageError(f"--weights {weights}: model '{loaded.name}' is quantised already; {LEAVE_OUT}")
    before = fingerprint_weights(loaded.model.state_dict().items())
    share = quantise_linears(loaded.model, BITS[weights])
    if not share:
        raise UsageError(f"--weights {weights}: model '{loaded.name}' has no linear layers; {LEAVE_OUT}")
    if share < MOST_ROUNDED:
        progress(
            f"--weights {weights} rounds {share:.0%} of the weights: those of experts and routers stay as they are"
        )
    if loaded.model.device.type == "cuda":
        torch.cuda.empty_cache()
    return replace(loaded, weights=weights, weights_hash=before)
