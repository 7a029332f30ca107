"""Open an index in one of several processes (ranks). Each rank has a part of the model and of the KV heads."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace

import torch
from transformers import PreTrainedModel

from sparsekv.formats.distributed.group import Ranks
from sparsekv.formats.errors import ArtifactError
from sparsekv.formats.index.identity import check_model, check_tokenizer
from sparsekv.formats.index.reader import Artifact, ArtifactShare
from sparsekv.formats.models.load import LoadedModel, identify
from sparsekv.kernels.common.given_rows import keys_of_one_token
from sparsekv.runtime.cache.index_cache import LayerStats
from sparsekv.runtime.decoding.answer import Answer
from sparsekv.runtime.decoding.open import OpenIndex


@dataclass
class OpenShare(OpenIndex):
    """One rank's part of an index and of its model. All ranks must make the same calls.

    Each rank captures and replays its own CUDA graph of a step, which includes the all-reduces over ranks.
    """

    _: KW_ONLY
    ranks: Ranks

    def agreed(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the first rank's logits on all ranks, because the ranks' devices may round differently."""
        logits = logits.contiguous()
        self.ranks.spread(logits)
        return logits


def open_share(artifact: Artifact, loaded: LoadedModel, ranks: Ranks, *, hold: bool) -> OpenShare:
    """Open this rank's part of an index, with the checks and errors of `open_index`.

    Args:
        hold: as in `open_index`.

    Raises:
        ArtifactError: another process changed the index while the ranks opened the index.
    """
    if len(set(ranks.collect(artifact.manifest.manifest_sha256))) > 1:
        raise ArtifactError(f"{artifact.folder} was changed meanwhile by another process; run the same command again")
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


def join_answer(ranks: Ranks, own: Answer) -> Answer:
    """Return an answer with the KV fraction and the missed mass over the heads of all ranks.

    Both are means over ranks, because all ranks have the same number of heads.
    """
    found = ranks.collect((own.kv_fraction, own.layers))
    layers = [_mean_stats(of_layer) for of_layer in zip(*(stats for _, stats in found), strict=True)]
    return replace(own, kv_fraction=sum(share for share, _ in found) / len(found), layers=layers)


def _mean_stats(of_ranks: Sequence[LayerStats]) -> LayerStats:
    names = [one.name for one in fields(LayerStats) if one.name != "layer"]
    means = {name: sum(getattr(one, name) for one in of_ranks) / len(of_ranks) for name in names}
    return LayerStats(of_ranks[0].layer, **means)
