"""Find the passages that an answer's steps attended to, in the heads that retrieve."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparsekv.formats.index.reader import Artifact
from sparsekv.kernels.scores.logits import attention_logits
from sparsekv.runtime.cache.watched import LayerQueries
from sparsekv.runtime.sources.heads import Head, retrieval_heads
from sparsekv.runtime.sources.places import Places, Source

LOGITS_AT_ONCE = 4 * 2**20  # elements of float32 logits: 16 MB


@dataclass
class SourceFinder:
    """Finds an answer's sources by the attention of its steps' queries to the stored keys of all tokens.

    This is the true attention of the queries, also where a sparse method read only some of the keys. Keeps the keys of
    the retrieval heads on the model's device from the first answer on.

    Args:
        query_heads: the number of query heads by layer.
    """

    artifact: Artifact
    heads: Sequence[Head]
    query_heads: Mapping[int, int]
    places: Places
    device: torch.device
    _keys: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, artifact: Artifact, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> "SourceFinder":
        """Make the finder of an open index. Runs the model over a short text if its retrieval heads are not known."""
        manifest = artifact.manifest
        query_heads = {layer: len(artifact.queries(layer)["tail"]) for layer in manifest.indexed_layers}
        heads = retrieval_heads(model, tokenizer, manifest.model, query_heads)
        return cls(artifact, heads, query_heads, Places(artifact, tokenizer), model.device)

    def watched(self) -> dict[int, torch.Tensor]:
        """Return the numbers [H] of the retrieval heads by layer, on the model's device."""
        return {
            layer: torch.tensor([one.head for one in heads], device=self.device) for layer, heads in self._by_layer()
        }

    def _by_layer(self) -> list[tuple[int, list[Head]]]:
        return [(layer, [*heads]) for layer, heads in groupby(self.heads, lambda one: one.layer)]

    @torch.inference_mode()
    def sources(
        self, steps: Sequence[LayerQueries], own_keys: Callable[[int], torch.Tensor], most: int
    ) -> list[Source]:
        """Return up to `most` sources of an answer, those of the largest score first.

        Args:
            steps: the queries of the tokens from which the answer's tokens were chosen.
            own_keys: returns a layer's keys [Hk, U, D] of the tokens after the stored prompt, up to the last step's.
        """
        shares = torch.zeros(self.artifact.manifest.split.tokens, device=self.device)
        for layer, heads in self._by_layer():
            own, queries = own_keys(layer), torch.stack([step[layer] for step in steps], 1)  # [H, T, D]
            for number, head in enumerate(heads):
                kv_head = head.head * len(own) // self.query_heads[layer]
                shares += head.weight * self._mean_shares(layer, kv_head, queries[number], own[kv_head])
        return self.places.sources(shares.cpu(), most)

    def _mean_shares(self, layer: int, kv_head: int, queries: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Return the attention that a head's queries [T, D] pay to the stored tokens, their mean [N].

        Query t sees the own keys [U, D] up to its token's, which are all but the last T - 1 - t.
        """
        stored, scaling = self._stored_keys(layer, kv_head), self.artifact.manifest.attending[layer].scaling
        count, used, tokens = len(queries), len(own), stored.shape[1]
        seen = torch.arange(used - count, used, device=self.device)[:, None] >= torch.arange(used, device=self.device)
        total, step = torch.zeros(tokens, device=self.device), max(1, LOGITS_AT_ONCE // (tokens + used))
        for first in range(0, count, step):
            some = queries[None, None, first : first + step]
            beside = attention_logits(some, own[None], *scaling).masked_fill(~seen[first : first + step], -torch.inf)
            logits = torch.cat([attention_logits(some, stored, *scaling), beside], -1)
            total += logits.softmax(-1)[0, 0, :, :tokens].sum(0)
        return total / count

    def _stored_keys(self, layer: int, kv_head: int) -> torch.Tensor:
        """Return the stored keys [1, N, D] of a KV head."""
        if (layer, kv_head) not in self._keys:
            rows = self.artifact.context_rows(layer).some("keys", slice(None))
            self._keys[layer, kv_head] = rows[kv_head : kv_head + 1].to(self.device)
        return self._keys[layer, kv_head]
