"""Compute the perplexity of a text that follows the stored prompt, for a model that decodes over an index."""

import math

import torch
from torch.nn.functional import cross_entropy

from sparsekv.formats.errors import UsageError
from sparsekv.kernels.common.given_rows import tokens_at, with_cache
from sparsekv.kernels.common.hook import route_attention
from sparsekv.runtime.attention.sparse_layer import SparseLayer
from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.threads import all_cores, exclusive, free_cores

DENSE_CHUNK = 256  # tokens per forward pass without sparse layers; the logits are [256, vocabulary]


@torch.inference_mode()
def perplexity(index: OpenIndex, cache: IndexCache, continuation_ids: torch.Tensor) -> float:
    """Return the perplexity of tokens [T] that follow the whole stored prompt: exp of the mean of their `losses`."""
    return math.exp(float(losses(index, cache, continuation_ids, index.split.tokens).mean()))


@torch.inference_mode()
def losses(index: OpenIndex, cache: IndexCache, ids: torch.Tensor, prompt_tokens: int) -> torch.Tensor:
    """Return the negative log-likelihoods [T], float64, of tokens that follow the first tokens of the stored prompt.

    Each token is conditioned on all tokens before it. The cache is rewound first. With sparse layers tokens are fed one
    by one, as in generation, so that each query makes its own selection. Without sparse layers tokens are fed in
    chunks; the result is the same. The first token is predicted from the last prompt token, which attends densely.

    Args:
        cache: a cache of this index, over the prompt's first `prompt_tokens` tokens.
        ids: [T] int64, the tokens.
        prompt_tokens: number of tokens of the stored prompt that precede `ids`.

    Raises:
        UsageError: `ids` is empty.
    """
    if not len(ids):
        raise UsageError("there is no text to measure perplexity on; give at least one token after the document")
    ids = ids.to(index.model.device)
    step = 1 if any(isinstance(layer, SparseLayer) for layer in cache.stored_layers) else DENSE_CHUNK
    with exclusive(index.model):
        cache.rewind()
        prompt, last = index.dense_cache(prompt_tokens - 1), index.input_ids[prompt_tokens - 1 : prompt_tokens]
        with route_attention(index.model, prompt.attend):
            found = [_losses(index, prompt, torch.cat([last.to(ids), ids[:1]]))]
        with route_attention(index.model, cache.attend), free_cores(index.model) as cores, all_cores(index.model):
            for start in range(0, len(ids) - 1, step):
                cores.follow()
                found.append(_losses(index, cache, ids[start : start + step + 1]))
    return torch.cat(found)


def _losses(index: OpenIndex, cache: IndexCache, ids: torch.Tensor) -> torch.Tensor:
    """Feed all but the last of ids [T + 1]; return the negative log-likelihoods [T] of all but the first id."""
    fed = tokens_at(index.model, ids[:-1], cache.get_seq_length())
    logits = index.model(**fed, **with_cache(index.model, cache)).logits[0]
    return cross_entropy(logits.float(), ids[1:], reduction="none").double()
