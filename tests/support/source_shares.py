"""Attention of the retrieval heads to all tokens by the model's own attention, which defines the scores of sources."""

import torch

from sparsekv.runtime.decoding.answer import Answer
from sparsekv.runtime.decoding.open import OpenIndex


@torch.inference_mode()
def retrieval_shares(index: OpenIndex, question: torch.Tensor, answer: Answer) -> torch.Tensor:
    """Return the mean attention weights [N] of the retrieval heads to all tokens, over the answer's steps.

    The tokens are the prompt, the question [Q] and the answer. The model keeps eager attention.
    """
    ids = torch.cat([index.input_ids.cpu(), question, torch.tensor(answer.ids[:-1])]).to(index.model.device)
    index.model.set_attn_implementation("eager")
    weights = index.model(input_ids=ids[None], use_cache=False, output_attentions=True).attentions
    steps = slice(-len(answer.ids), None)
    heads = index.source_finder.heads
    return torch.stack([one.weight * weights[one.layer][0, one.head, steps].mean(0) for one in heads]).sum(0)
