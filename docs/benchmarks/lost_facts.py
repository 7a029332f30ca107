"""Find the heads and tokens in which a choice of clusters loses a fact, and compare other clusters.

Usage: lost_facts.py MODEL TEXT [CONTEXTS], for a model of Llama's kind without a soft cap. Contexts are those of `eval
--task niah-facts --raw --seed 0`, with ten questions each. Queries are those of a run with dense attention, of the
question's last token and of the answer's tokens. Attention here is that to the context, without its first four tokens.
A head is counted at a token if more than a tenth of this attention is on the number that answers the question. The
number is lost if its token with the most attention is not among the 5% of the document that multipole would choose.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from sparsekv.indexing.indexers.cluster_indexer import kmeans
from sparsekv.kernels.kmeans.hierarchy import single_out
from sparsekv.kernels.kmeans.kmeans import cluster_means, to_space
from sparsekv.kernels.scores.logits import attention_logits, cluster_scores
from sparsekv.runtime.tasks.interface import Context, Request, choose_task

TOKENS, CHUNK, SINKS, ITERATIONS, SEED = 4096, 1024, 4, 10, 0
SHARE, HEAVY = 0.05, 0.1
BUDGETS = (0.02, 0.05, 0.08, 0.1, 0.15, 0.2)
CLUSTERS = {
    "multipole's, one for 16 tokens": ("normalised", 1 / 16, 0.0),
    "and 1% outliers": ("normalised", 1 / 16, 0.01),
    "and 2% outliers": ("normalised", 1 / 16, 0.02),
    "and 3.1% outliers": ("normalised", 1 / 16, 1 / 32),
    "and 6.3% outliers": ("normalised", 1 / 16, 1 / 16),
    "one for 32, and 3.1% outliers": ("normalised", 1 / 32, 1 / 32),
    "one for 8": ("normalised", 1 / 8, 0.0),
    "one for 4": ("normalised", 1 / 4, 0.0),
    "one for 16, raw": ("raw", 1 / 16, 0.0),
    "one for 16, raw, and 3.1% outliers": ("raw", 1 / 16, 1 / 32),
}
"""Clusters to compare: the space of k-means, and the numbers of centroids and of outliers as shares of the tokens."""


@dataclass(frozen=True)
class Asked:
    """A question: its queries [layers, Hq, Q, D] in all layers, and the positions of the number that answers it."""

    queries: torch.Tensor
    number: torch.Tensor


class Recorder:
    """A model whose attention records the queries of each layer."""

    def __init__(self, name: str):
        AttentionInterface.register("recorded", self._attend)
        AttentionMaskInterface.register("recorded", sdpa_mask)
        self.tokenizer = AutoTokenizer.from_pretrained(name)
        self.model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, attn_implementation="recorded")
        self.queries: list[torch.Tensor] = []

    def _attend(self, module: Any, query: torch.Tensor, *rest: Any, **more: Any) -> Any:
        self.queries.append(query[0])
        return sdpa_attention_forward(module, query, *rest, **more)

    @torch.inference_mode()
    def forward(self, ids: list[int], cache: DynamicCache) -> torch.Tensor:
        """Run some tokens over a cache, and append them to it; return their queries [layers, Hq, Q, D]."""
        self.queries.clear()
        self.model(torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        return torch.stack(self.queries)

    def contexts(self, text: str, number: int) -> list[Context]:
        def count(some: str) -> int:
            return len(self.tokenizer(some).input_ids)

        return choose_task("niah-facts").make(Request(text, count, TOKENS, number, questions=10, seed=SEED))

    def ask(self, context: Context) -> tuple[torch.Tensor, list[Asked]]:
        """Return the keys [layers, Hk, N, D] of a context, and its questions."""
        encoded = self.tokenizer(context.text, return_offsets_mapping=True)
        cache, asked = DynamicCache(), []
        for start in range(0, len(encoded.input_ids), CHUNK):
            self.forward(encoded.input_ids[start : start + CHUNK], cache)
        keys = torch.stack([layer.keys[0].clone() for layer in cache.layers])
        for question in context.questions:
            before, answer = f"{question.text}{question.prefix}", question.answers[0]
            parts = [self.tokenizer(part, add_special_tokens=False).input_ids for part in (before, f" {answer}")]
            queries = self.forward(parts[0] + parts[1], cache)[:, :, len(parts[0]) - 1 : -1]
            cache.crop(-len(parts[0] + parts[1]))
            first = context.text.index(answer)
            inside = [
                one
                for one, (start, end) in enumerate(encoded.offset_mapping)
                if end > first and start < first + len(answer)
            ]
            asked.append(Asked(queries, torch.tensor(inside)))
        return keys, asked


@dataclass(frozen=True)
class Found:
    """A head that attends to the number that answers a question, and the number's token with the most attention.

    Args:
        head: layer and KV head.
        before: share of the document in the clusters that are chosen before the token's cluster.
        size: number of tokens of the token's cluster.
        away: the token's distance to its centroid, divided by the median distance of all tokens.
        underestimated: the token's attention weight, divided by the weight that its centroid suggests.
    """

    head: tuple[int, int]
    before: float
    size: float
    away: float
    underestimated: float

    @property
    def lost(self) -> bool:
        return self.before >= SHARE


def looked_at(
    keys: torch.Tensor, asked: list[Asked], layer: int, clusters: tuple[str, float, float]
) -> Iterator[Found]:
    """Cluster the keys [Hk, M, D] of one layer; yield each head that attends to the number of a question.

    `clusters` is a value of CLUSTERS.
    """
    space, share, outliers = clusters
    M, scale = keys.shape[1], keys.shape[2] ** -0.5
    wanted = round(share * M)
    labels, size = single_out(keys, kmeans(to_space(keys, space), wanted, ITERATIONS, SEED), wanted, outliers)
    centroids, counts = cluster_means(keys, labels, size)
    away = (keys - centroids.gather(1, labels[..., None].expand_as(keys))).norm(dim=-1)
    away /= away[away > 0].median()
    for one in asked:
        query = one.queries[layer].unflatten(0, (len(keys), -1))
        weights = attention_logits(query, keys, scale, None).softmax(-1).mean(1)
        scores = cluster_scores(query, centroids, counts, scale, None)
        order = scores.argsort(-1, descending=True)
        held = counts[:, None].expand_as(order).gather(-1, order)
        before = torch.zeros_like(held).scatter(-1, order, held.cumsum(-1) - held)
        on_number = weights[..., one.number - SINKS]
        for head, step in (on_number.sum(-1) > HEAVY).nonzero().tolist():
            token = int(one.number[on_number[head, step].argmax()]) - SINKS
            cluster = int(labels[head, token])
            yield Found(
                (layer, head),
                float(before[head, step, cluster]) / M,
                float(counts[head, cluster]),
                float(away[head, token]),
                float(weights[head, step, token] / scores[head, step, cluster].clamp(min=1e-12)),
            )


def main() -> None:
    recorder, text = Recorder(sys.argv[1]), Path(sys.argv[2]).read_text(encoding="utf-8")
    found: dict[str, list[Found]] = {name: [] for name in CLUSTERS}
    for context in recorder.contexts(text, int(sys.argv[3]) if len(sys.argv) > 3 else 3):
        keys, asked = recorder.ask(context)
        for layer in range(len(keys)):
            for name, clusters in CLUSTERS.items():
                found[name] += looked_at(keys[layer][:, SINKS:].contiguous(), asked, layer, clusters)
    plain = next(iter(found.values()))
    losers = Counter(one.head for one in plain if one.lost)
    ((worst, most),) = losers.most_common(1)
    print("| clusters | lost | of the heaviest loser |\n|---|---:|---:|")
    for name, some in found.items():
        print(f"| {name} | {_share(some):.3f} | {_share([one for one in some if one.head == worst]):.3f} |")
    print(f"\n{len(plain)} looks at a number, {losers.total()} lost, {most} in layer {worst[0]}, KV head {worst[1]};")
    print(f"in {len(losers)} of {len({one.head for one in plain})} heads that look at any")
    for lost in (False, True):
        print("lost:" if lost else "kept:", _medians([one for one in plain if one.lost == lost]))
    by_budget = {budget: sum(one.before >= budget for one in plain) / len(plain) for budget in BUDGETS}
    print("lost at a budget of", ", ".join(f"{budget:.0%}: {share:.3f}" for budget, share in by_budget.items()))


def _medians(some: list[Found]) -> str:
    size, away, under = (median(getattr(one, name) for one in some) for name in ("size", "away", "underestimated"))
    return f"cluster of {size:.0f}, {away:.2f} times as far as a typical token, weighs {under:,.0f} times the estimate"


def _share(some: list[Found]) -> float:
    return sum(one.lost for one in some) / max(len(some), 1)


if __name__ == "__main__":
    main()
