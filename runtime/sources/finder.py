"""Find the passages of a document to which the retrieval heads attended while an answer was decoded."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparsekv.formats.index.reader import Artifact
from sparsekv.kernels.scores.shares import attention_shares
from sparsekv.runtime.cache.watched import WatchedQueries
from sparsekv.runtime.sources.heads import Head, retrieval_heads
from sparsekv.runtime.sources.places import Places, Source


@dataclass
class SourceFinder:
    """Finds an answer's sources, by dense attention of the retrieval heads' queries to the stored keys of all tokens.

    Dense attention is computed even if the answer was decoded with a sparse method. From the first answer on, the
    retrieval heads' stored keys stay on the model's device.

    Args:
        heads: the retrieval heads.
        query_heads: number of query heads of each indexed layer.
        places: the passages of the document.
        device: the model's device.
    """

    artifact: Artifact
    heads: Sequence[Head]
    query_heads: Mapping[int, int]
    places: Places
    device: torch.device
    _keys: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, artifact: Artifact, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> "SourceFinder":
        """Make the finder of an open index. Runs the model over random tokens if its retrieval heads are not cached."""
        manifest = artifact.manifest
        query_heads = {layer: len(artifact.queries(layer)["tail"]) for layer in manifest.indexed_layers}
        heads = retrieval_heads(model, tokenizer, manifest.model, query_heads)
        return cls(artifact, heads, query_heads, Places(artifact, tokenizer), model.device)

    def watched(self, slots: int) -> WatchedQueries:
        """Return a buffer for the retrieval heads' queries, for passes of up to `slots` sequences."""
        layers = [*dict.fromkeys(one.layer for one in self.heads)]
        heads = {layer: torch.tensor([one.head for one in self._of(layer)], device=self.device) for layer in layers}
        channels = {layer: self.artifact.heads_and_channels(layer)[1] for layer in layers}
        return WatchedQueries(heads, channels, slots)

    def _of(self, layer: int) -> list[Head]:
        return [one for one in self.heads if one.layer == layer]

    @torch.inference_mode()
    def sources(
        self,
        queries: Mapping[int, torch.Tensor],
        sinks: Mapping[int, torch.Tensor | None],
        own_keys: Callable[[int], torch.Tensor],
        most: int,
    ) -> list[Source]:
        """Return up to `most` sources of an answer, by descending score.

        Args:
            queries: for each layer, the queries [H, T, D] of its H retrieval heads for the T tokens whose logits gave
                the answer's tokens.
            sinks: for each layer, the learned sink logits [H] of these heads; None without them.
            own_keys: returns a layer's keys [Hk, U, D] of the tokens after the stored prompt, up to the last of the T
                tokens.
        """
        shares = torch.zeros(self.artifact.manifest.split.tokens, device=self.device)
        for layer, of_layer in queries.items():
            own, scaling = own_keys(layer), self.artifact.manifest.attending[layer].scaling
            used, count = own.shape[1], of_layer.shape[1]
            # The query of step t attends to the new keys up to that of its own token. Thus the last of the T steps
            # attends to all `used` keys, the step before it to one key less, and so on.
            seen, weight = torch.arange(used - count + 1, used + 1, device=self.device), own.new_ones(count).float()
            of_sinks = sinks[layer]
            for place, (head, query) in enumerate(zip(self._of(layer), of_layer, strict=True)):
                kv_head = head.head * len(own) // self.query_heads[layer]
                stored, weights = self._stored_keys(layer, kv_head).to(own), weight * (head.weight / count)
                sink = None if of_sinks is None else of_sinks[place]
                shares += attention_shares(query, stored, own[kv_head], seen, weights, *scaling, sink)
        return self.places.sources(shares.cpu(), most)

    def _stored_keys(self, layer: int, kv_head: int) -> torch.Tensor:
        """Return the stored keys [N, D] of a KV head on the model's device, in the index's dtype."""
        if (layer, kv_head) not in self._keys:
            rows = self.artifact.context_rows(layer).some("keys", slice(None))
            self._keys[layer, kv_head] = rows[kv_head].to(self.device)
        return self._keys[layer, kv_head]
