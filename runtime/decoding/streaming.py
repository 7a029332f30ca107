"""What a decoding loop calls for each token: one passes text on, one says when to stop."""

import time
from collections.abc import Callable, Collection

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria, TextStreamer

from sparsekv.kernels.common.hook import calling_back


class Streamer(TextStreamer):
    """Passes text on as it is decoded, and records the times of the first and the last token.

    Args:
        ends: tokens that end an answer and are no part of its text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], None], ends: Collection[int] = ()):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text, self.ends = on_text, ends
        self.first = self.last = 0.0

    def put(self, value: torch.Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.last = time.perf_counter()
            self.first = self.first or self.last
            if self.ends and int(value) in self.ends:
                return
        before = self.token_cache
        super().put(value)  # type: ignore[no-untyped-call]
        if not self.token_cache and not self.next_tokens_are_prompt:
            self._begin_line(before)

    def _begin_line(self, tokens: list[int]) -> None:
        """Keep the last token that is text before the next ones, and as printed: a decoder that takes the space from
        the first token would take one of the line's own."""
        for start in range(len(tokens) - 1, -1, -1):
            text = self.tokenizer.decode(tokens[start:], **self.decode_kwargs)
            if text:
                self.token_cache, self.print_len = tokens[start:], len(text)
                return

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            with calling_back():
                self.on_text(text)


class Stopping(StoppingCriteria):
    """Ends an answer with the first token after which `stop` says so."""

    def __init__(self, stop: Callable[[], bool]):
        self.stop = stop

    def __call__(self, input_ids: torch.Tensor, scores: object, **more: object) -> torch.Tensor:
        with calling_back():
            stopped = bool(self.stop())
        return torch.full((len(input_ids),), stopped, dtype=torch.bool, device=input_ids.device)
