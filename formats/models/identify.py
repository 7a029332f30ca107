"""Identity of a loaded model and tokenizer, stored in an index's manifest and checked when the index is opened."""

from typing import TYPE_CHECKING

import torch

from sparsekv.formats.fingerprints import identify_model, identify_tokenizer
from sparsekv.formats.models.load import LoadedModel
from sparsekv.formats.schema import ModelIdentity, TokenizerIdentity

if TYPE_CHECKING:  # transformers takes a second to import
    from transformers import PreTrainedTokenizerBase


def identify(loaded: LoadedModel) -> tuple[ModelIdentity, TokenizerIdentity]:
    """Fingerprints of the model's KV-relevant config and weights, and of its tokenizer and chat template."""
    # The tokenizer first: the pages of weights that were loaded just now are being mapped meanwhile.
    tokenizer, model = tokenizer_identity(loaded.tokenizer), loaded.model
    adapters = getattr(model, "peft_config", None)
    with torch.no_grad():
        model_identity = identify_model(
            loaded.name,
            loaded.revision,
            model.config.get_text_config().to_dict(),
            model.state_dict().items(),
            ",".join(sorted(adapters)) if adapters else None,
        )
    return model_identity, tokenizer


def tokenizer_identity(tokenizer: "PreTrainedTokenizerBase") -> TokenizerIdentity:
    """Fingerprints of a tokenizer, its chat template and its special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    serialized = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    template = tokenizer.chat_template
    return identify_tokenizer(
        serialized,
        template if template is None else str(template),
        tokenizer.special_tokens_map,
    )
