"""Loss of a sparse prefill: the model's perplexity on the end of a document that is prefilled in this way."""

import math

import torch
from torch.nn.functional import cross_entropy
from transformers import Cache, PreTrainedModel

from sparsekv.formats.errors import UsageError
from sparsekv.indexing.capture.capture import ContextLayer
from sparsekv.indexing.prefill.prefills import Prefill
from sparsekv.kernels.common.hook import route_attention


@torch.inference_mode()
def prefill_perplexity(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    prefill: Prefill,
    *,
    last: int,
    chunk_size: int = 128,
    sinks: int = 10,
) -> float:
    """Compute the perplexity of the last tokens of a text, each predicted from all tokens before it.

    All chunks attend by the prefill, those before the measured tokens too.

    Args:
        input_ids: [N] int64.
        last: number of tokens that are predicted, less than N.

    Raises:
        UsageError: the text has too few tokens.
    """
    if not 0 < last < len(input_ids):
        raise UsageError(
            f"the text has {len(input_ids)} tokens: its last {last} cannot be predicted; give a longer one"
        )
    ids, tokens = input_ids.to(model.device), len(input_ids)
    layers = [ContextLayer(tokens) for _ in range(model.config.get_text_config().num_hidden_layers)]
    cache, loss = Cache(layers=list(layers)), torch.zeros((), dtype=torch.float64, device=model.device)
    with route_attention(model, lambda call: prefill.attend(layers[call.layer].appended(call), sinks)):
        for start in range(0, tokens - 1, chunk_size):
            end = min(start + chunk_size, tokens - 1)
            wanted = min(end - start, max(0, end - (tokens - 1 - last)))
            # At least one token's logits are computed, because 0 would mean all.
            kept = max(1, wanted)
            logits = model(input_ids=ids[None, start:end], past_key_values=cache, logits_to_keep=kept).logits[0]
            if wanted:
                loss += cross_entropy(logits.float(), ids[end - wanted + 1 : end + 1], reduction="sum").double()
    return math.exp(float(loss) / last)
