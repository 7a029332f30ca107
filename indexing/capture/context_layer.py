"""The cache layer that a capture's prefill fills."""

import torch
from transformers.cache_utils import CacheLayerMixin


class ContextLayer(CacheLayerMixin):
    """Keys and values of one layer, [1, Hk, N, D] each, allocated once and filled from the front.

    Args:
        tokens: N.
        prefix: keys and values [Hk, P, D] of the first P tokens, if they are known.
    """

    is_sliding = False

    def __init__(self, tokens: int, prefix: tuple[torch.Tensor, torch.Tensor] | None = None):
        super().__init__()  # type: ignore[no-untyped-call]
        self.tokens, self.seen, self._prefix = tokens, 0, prefix

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys = key_states.new_empty(*key_states.shape[:2], self.tokens, key_states.shape[-1])
        self.values = value_states.new_empty(*value_states.shape[:2], self.tokens, value_states.shape[-1])
        self.is_initialized = True
        if self._prefix is not None:
            self.seen = self._prefix[0].shape[1]
            self.keys[0, :, : self.seen], self.values[0, :, : self.seen] = self._prefix
            self._prefix = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        start, self.seen = self.seen, self.seen + key_states.shape[2]
        self.keys[:, :, start : self.seen] = key_states
        self.values[:, :, start : self.seen] = value_states
        return self.keys[:, :, : self.seen], self.values[:, :, : self.seen]

    def get_seq_length(self) -> int:
        return self.seen if self._prefix is None else self._prefix[0].shape[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return self.tokens
