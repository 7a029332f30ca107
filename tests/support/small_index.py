"""Small indices of the tiny models, built by the real build over a real text."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from sparsekv.formats.documents.prompt import encode_prompt
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.models.load import LoadedModel, identify
from sparsekv.indexing.build import build_index
from sparsekv.indexing.capture.canary import RUN, SINGLE, TOKENS
from sparsekv.indexing.methods.codes import CodesIndexer
from sparsekv.indexing.methods.csattention import CSAttentionIndexer
from sparsekv.indexing.methods.h2o import H2OIndexer
from sparsekv.indexing.methods.multipole import MultipoleIndexer, WindowedMultipoleIndexer
from sparsekv.indexing.methods.pqcache import PQCacheIndexer
from sparsekv.indexing.methods.squeezed import SqueezedIndexer
from sparsekv.indexing.plan import BuildConfig, BuildPlan
from sparsekv.kernels.common.given_rows import tokens_at, with_cache
from sparsekv.kernels.common.hook import AttentionCall, AttentionFunction, route_attention
from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.decoding.open import OpenIndex, open_index

from .python_help import BY_NAME
from .tiny_models import FAMILIES, tiny_tokenizer

INDEXERS = {
    "squeezed": SqueezedIndexer(levels=(0.2, 0.06)),
    "multipole": MultipoleIndexer(levels=(0.25, 0.06), block=80),
    "multipole-windowed": WindowedMultipoleIndexer(levels=(0.25, 0.06), block=80),
    "csattention": CSAttentionIndexer(subspace_size=4, centroids=8, iterations=3, query_sample=128),
    "h2o": H2OIndexer(query_sample=128),
    "pqcache": PQCacheIndexer(pq_bytes=4),
    "codes": CodesIndexer(levels=(0.1,), block=80, code_bytes=4, iterations=3, query_sample=64),
}
"""An indexer of every method with an index, with sizes for a prompt of a few hundred tokens."""
TEXT = BY_NAME[:20_000]


def without_window(family: str) -> PreTrainedModel:
    """Return a family's tiny model; Mistral without its window, because a model with a window in every layer has no
    index."""
    model = FAMILIES[family]()
    if family == "mistral":
        model.config.sliding_window = None
    return model


def small_plan(family: str = "llama", *, tokens: int = 300, text: str = TEXT, **changes: Any) -> BuildPlan:
    """Return a plan over the first `tokens` bytes of a text, with few sinks, a short tail and two levels of
    clusters."""
    loaded = small_model(family)
    read = text[: 2 * tokens]  # only the part that is needed, because encoding takes time
    plan = BuildPlan(
        loaded=loaded,
        prompt=encode_prompt(loaded.tokenizer, read, max_tokens=tokens),
        config=BuildConfig({"squeezed": SqueezedIndexer(levels=(0.2, 0.06))}, sinks=4, tail=16, chunk_size=128),
    )
    return with_changes(plan, **changes)


def small_model(family: str = "llama") -> LoadedModel:
    """Return a family's tiny model with its tokenizer, as in `small_plan`."""
    return LoadedModel(without_window(family), tiny_tokenizer(), f"tiny-{family}", None)


def with_changes(plan: BuildPlan, **changes: Any) -> BuildPlan:
    """Return a plan with other fields of `BuildPlan` or of `BuildConfig`."""
    settings = {name: changes.pop(name) for name in changes.keys() & {field.name for field in fields(BuildConfig)}}
    return replace(plan, config=replace(plan.config, **settings), **changes)


def reopen(plan: BuildPlan, folder: Path) -> OpenIndex:
    """Open the index that was built from a plan, with the same model."""
    loaded = plan.loaded
    return open_index(Artifact(folder), loaded.model, loaded.tokenizer, identify(loaded))


def build_small(folder: Path, family: str = "llama", **changes: Any) -> OpenIndex:
    """Build a small index and open it; `changes` are the arguments of `small_plan`."""
    plan = small_plan(family, **changes)
    build_index(plan, folder)
    return reopen(plan, folder)


class SmallIndices:
    """Small indices for tests that change an index or its model: each is built once and copied for every such test.

    Args:
        folder: where the indices are built.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.built: dict[str, Path] = {}

    def copy(self, folder: Path, family: str = "llama", **changes: Any) -> OpenIndex:
        """Copy the index that `build_small` would build, and open it with a model of its own."""
        key = f"{family} {changes}"
        if key not in self.built:
            self.built[key] = self.folder / f"{len(self.built)}.skv"
            build_index(small_plan(family, **changes), self.built[key])
        shutil.copytree(self.built[key], folder)
        loaded = small_model(family)
        return open_index(Artifact(folder), loaded.model, loaded.tokenizer, identify(loaded))


@torch.inference_mode()
def plain_logits(model: PreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
    """Compute the logits [N, vocabulary] of a plain forward pass over token ids [N], with transformers' eager
    attention."""
    model.set_attn_implementation("eager")
    logits: torch.Tensor = model(input_ids=input_ids[None], use_cache=False).logits[0]
    return logits


def plain_logits_after(index: OpenIndex, tokens: torch.Tensor) -> torch.Tensor:
    """Compute the plain model's logits [T, vocabulary] of tokens [T] after an index's stored prompt."""
    return plain_logits(index.model, torch.cat([index.input_ids, tokens]))[len(index.input_ids) :]


@contextmanager
def recorded_attention(model: PreTrainedModel) -> Iterator[list[list[torch.Tensor]]]:
    """Within the context, record each layer's attention output, [Q, Hq * D] for each forward pass."""
    projections = [module for name, module in model.named_modules() if name.endswith("self_attn.o_proj")]
    outputs: list[list[torch.Tensor]] = [[] for _ in projections]
    handles = [
        module.register_forward_pre_hook(lambda module, rows, seen=seen: seen.append(rows[0][0]))
        for module, seen in zip(projections, outputs, strict=True)
    ]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def prefilled(outputs: list[list[torch.Tensor]]) -> int:
    """Return the number of tokens of the recorded passes that a build has prefilled, those of the preflight excluded.

    Passes over one token belong to the preflight, or measure RoPE. Passes over RUN tokens belong to the canary.
    """
    passes = [len(rows) for rows in outputs[0] if len(rows) not in (1, RUN)]
    if not passes:
        return 0
    assert passes[0] == TOKENS
    return sum(passes) - (2 * TOKENS - SINGLE)


def attention_outputs(model: PreTrainedModel, input_ids: torch.Tensor) -> list[torch.Tensor]:
    """Compute each layer's attention output [N, Hq * D] in a plain forward pass over token ids [N]."""
    with recorded_attention(model) as outputs:
        plain_logits(model, input_ids)
    return [passes[0] for passes in outputs]


@torch.inference_mode()
def stepped_logits(
    index: OpenIndex, cache: IndexCache, tokens: torch.Tensor, question: int, attend: AttentionFunction | None = None
) -> torch.Tensor:
    """Compute the logits [T, vocabulary] of tokens [T] after the stored prompt: `question` tokens at once, then one by
    one.

    The model's attention is `attend`, or else the cache's own.
    """
    cache.rewind()
    cache.expect_prompt(index.split.tokens + question)
    with route_attention(index.model, attend or cache.attend):
        return torch.cat(
            [
                index.model(
                    **tokens_at(index.model, part, cache.get_seq_length()), **with_cache(index.model, cache)
                ).logits[0]
                for part in (tokens[:question], *tokens[question:, None])
            ]
        )


def both_outputs(
    index: OpenIndex, first: IndexCache, second: IndexCache, tokens: torch.Tensor, question: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Compute each layer's attention output [Hq, Q, D] over two caches, for the same queries; steps as in
    `stepped_logits`.

    The first cache's outputs go on to the model's next layer, for both caches. So rounding in one layer cannot change a
    choice of the second cache in the next layer.
    """
    outputs = []
    second.rewind()
    second.expect_prompt(index.split.tokens + question)

    def attend(call: AttentionCall) -> torch.Tensor:
        other, output = second.attend(call), first.attend(call)
        outputs.append((output.clone(), other))
        return output

    stepped_logits(index, first, tokens, question, attend)
    return outputs


def random_ids(tokens: int, seed: int = 0) -> torch.Tensor:
    """Return random token ids [T] of bytes; none is a special token."""
    return torch.randint(256, (tokens,), generator=torch.Generator().manual_seed(seed))
