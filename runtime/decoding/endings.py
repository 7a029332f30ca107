"""How an answer ends: with which tokens, why, and its text without them."""

from collections.abc import Sequence

from sparsekv.formats.documents.turns import end_of_turn
from sparsekv.runtime.decoding.open import OpenIndex


def ending_tokens(index: OpenIndex) -> set[int]:
    """The tokens with which an answer ends: those of the model's `generation_config`, and where the index has a chat
    frame the one that the chat template puts behind an answer, without which the model goes on with invented turns."""
    ends = index.model.generation_config.eos_token_id
    found = {ends} if isinstance(ends, int) else set(ends or ())
    if index.artifact.manifest.prompt.chat is None or (end := end_of_turn(index.tokenizer)) is None:
        return found
    return found | {end}


def finish_reason(answer: Sequence[int], ends: set[int]) -> str:
    """Why an answer has no more tokens."""
    return "stop" if answer and answer[-1] in ends else "length"


def unshown_endings(index: OpenIndex) -> set[int]:
    """The ending tokens that are no text: added tokens, whether the tokenizer marks them as special or not."""
    return ending_tokens(index) & index.tokenizer.added_tokens_decoder.keys()


def answer_text(index: OpenIndex, answer: Sequence[int]) -> str:
    """An answer's text, without special tokens and the token that ends it."""
    shown = answer[:-1] if answer and answer[-1] in unshown_endings(index) else answer
    return str(index.tokenizer.decode(list(shown), skip_special_tokens=True))
