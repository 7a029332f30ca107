"""Identity of a loaded model and tokenizer, stored in an index's manifest and checked when the index is opened."""

from typing import TYPE_CHECKING

from sparsekv.formats.fingerprints import fingerprint_weights, identify_model, identify_tokenizer
from sparsekv.formats.models.load import LoadedModel
from sparsekv.formats.schema import Manifest, ModelIdentity, TokenizerIdentity

if TYPE_CHECKING:  # transformers takes a second to import
    from transformers import PreTrainedTokenizerBase


def identify(loaded: LoadedModel, index: Manifest | None = None) -> tuple[ModelIdentity, TokenizerIdentity]:
    """Fingerprints of the model's KV-relevant config and weights, and of its tokenizer and chat template.

    Args:
        index: one whose tokenizer this is, if both were loaded from the same files. Its identity is returned then:
            serialising a tokenizer takes ten times as long as hashing its files, and holds Python's lock.
    """
    model = loaded.model
    adapters = getattr(model, "peft_config", None)
    model_identity = identify_model(
        loaded.name,
        loaded.revision,
        model.config.get_text_config().to_dict(),
        fingerprint_weights(model.state_dict().items()),
        ",".join(sorted(adapters)) if adapters else None,
    )
    if index is not None and loaded.tokenizer_files is not None and index.tokenizer_files == loaded.tokenizer_files:
        return model_identity, index.tokenizer
    return model_identity, tokenizer_identity(loaded.tokenizer)


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
