"""Sources of an answer: the passages to which the model's retrieval heads attended while the answer was decoded.

Retrieval heads are the query heads that attend to the token that the model copies next. They are found once for each
model.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparsekv.formats.checksums import hash_json
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import ModelIdentity
from sparsekv.formats.user.cache import cache_root, read_small, replace_small
from sparsekv.kernels.attention.attention import Segment, attend_with_weights, causal_mask
from sparsekv.kernels.common.hook import AttentionCall, route_attention
from sparsekv.kernels.scores.shares import attention_shares
from sparsekv.runtime.cache.watched import WatchedQueries
from sparsekv.runtime.sources.places import Places, Source

REPEATED = 64
"""Number of random tokens that the test text has twice."""
SHARE, LEAST = 1 / 32, 4
"""Share of a model's query heads that are retrieval heads, and their minimum number."""
FOLDER, REVISION = "retrieval-heads", 1


@dataclass(frozen=True)
class Head:
    """A retrieval head: query head `head` of `layer`. The weights of a model's retrieval heads add up to 1."""

    layer: int
    head: int
    weight: float


def retrieval_heads(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, identity: ModelIdentity, layers: Mapping[int, int]
) -> list[Head]:
    """Return a model's retrieval heads from the user's cache. Heads that are not cached are measured and stored there.

    Args:
        layers: number of query heads of each layer in which retrieval heads are searched, by layer index.
    """
    key = hash_json(
        [REVISION, identity.config_hash, identity.weights_hash, identity.adapter, identity.weights, [*layers]]
    )
    file = cache_root() / FOLDER / f"{key[:32]}.json"
    if (known := _parsed(read_small(file), layers)) is not None:
        return known
    found = measure_heads(model, tokenizer, [*layers])
    replace_small(file, json.dumps([[one.layer, one.head, one.weight] for one in found]) + "\n")
    return found


def _parsed(text: str, layers: Mapping[int, int]) -> list[Head] | None:
    """Parse the heads in a cache file's text; None if the text is damaged or has no heads."""
    try:
        return [_head(layers, *one) for one in json.loads(text)] or None
    except (ValueError, TypeError, RecursionError):
        return None


def _head(layers: Mapping[int, int], layer: Any, head: Any, weight: Any) -> Head:
    if type(layer) is not int or type(head) is not int or type(weight) is not float:
        raise ValueError("no head")
    if not 0 <= head < layers.get(layer, 0) or not 0 <= weight <= 1:
        raise ValueError("no head of this model")
    return Head(layer, head, weight)


@torch.inference_mode()
def measure_heads(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, layers: Sequence[int]) -> list[Head]:
    """Run a model once over `REPEATED` random tokens followed by the same tokens; return the heads of highest score.

    A head's score is the attention weight that a token of the second half gives to the token after the same token in
    the first half, as a mean over tokens. This is the usual test for induction heads; it needs neither text nor labels.

    Args:
        layers: indices of the layers in which heads are searched.
    """
    ids = _random_tokens(model, tokenizer)
    after = torch.arange(1, REPEATED, device=model.device)
    scores = dict[int, torch.Tensor]()

    def attend(call: AttentionCall) -> torch.Tensor:
        mask = causal_mask(call.query.shape[1], call.keys.shape[1], call.window, call.query.device)
        weighed = attend_with_weights(call.grouped, [Segment(call.keys, call.values, mask)], *call.scaling)
        if call.layer in layers:
            scores[call.layer] = weighed.weights.flatten(0, 1)[:, REPEATED + after - 1, after].mean(1)
        return weighed.output.flatten(0, 1).to(call.query.dtype)

    with route_attention(model, attend):
        model(input_ids=ids[None].to(model.device), use_cache=False, logits_to_keep=1)
    return _best({layer: scores[layer].tolist() for layer in sorted(scores)})


def _random_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """Return token ids [2 R]: R = `REPEATED` random tokens without special and added tokens, twice in a row."""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    known = min(len(tokenizer), int(model.get_input_embeddings().weight.shape[0]))  # type: ignore[index]
    plain = torch.tensor([one for one in range(known) if one not in special] or [0])
    drawn = plain[torch.randint(len(plain), (REPEATED,), generator=torch.Generator().manual_seed(0))]
    return drawn.repeat(2)


def _best(scores: dict[int, list[float]]) -> list[Head]:
    """Return the heads of highest score, in order of layer and head, with weights in proportion to the scores.

    The weights are equal if all scores are zero, because they are too small for float32. `scores` has a list of the
    query heads' scores for each layer.
    """
    every = [(score, layer, head) for layer, of_layer in scores.items() for head, score in enumerate(of_layer)]
    best = sorted(every, reverse=True)[: max(LEAST, math.ceil(SHARE * len(every)))]
    total = math.fsum(score for score, _, _ in best)
    in_order = sorted(best, key=lambda one: one[1:])
    return [Head(layer, head, score / total if total else 1 / len(best)) for score, layer, head in in_order]


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
