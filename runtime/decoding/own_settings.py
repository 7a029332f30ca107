"""What `model.generate` takes from the model's `generation_config` where a call leaves it open."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import GenerationConfig, PreTrainedModel


@contextmanager
def only_special_tokens(model: PreTrainedModel) -> Iterator[None]:
    """Within the context, nothing of the model's own `generation_config` counts but its special tokens.

    A repetition penalty there would act on greedy answers, by all of the document's tokens, and `use_cache: false`
    would run the document again for each token; a batch, whose loop is ours, would answer otherwise.
    """
    own = model.generation_config
    model.generation_config = GenerationConfig(
        bos_token_id=own.bos_token_id, eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id
    )
    try:
        yield
    finally:
        model.generation_config = own
