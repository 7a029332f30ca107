"""Token ids of a conversation's messages behind a stored document."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sparsekv.runtime.decoding.open import OpenIndex


@dataclass(frozen=True)
class Message:
    """One message of a conversation; `role` is `user`, `assistant` or `system`."""

    role: str
    content: str


def conversation_tokens(index: OpenIndex, messages: Sequence[Message], *, raw: bool = False) -> torch.Tensor:
    """Return the token ids [Q] behind the document of a conversation that ends with a user's message.

    They are those of `sparsekv chat` over the same index.

    Args:
        raw: encode messages without the chat template.

    Raises:
        UsageError: roles are out of order, a message is empty, or the index has no place for a system message.
    """
    raise NotImplementedError
