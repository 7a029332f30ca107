"""What a decoding loop calls for each token: one passes text on, one says when to stop."""

import time
from collections.abc import Callable

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria, TextStreamer


class Streamer(TextStreamer):
    """Passes text on as it is decoded, and records the times of the first and the last token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], None]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text = on_text
        self.first = self.last = 0.0

    def put(self, value: torch.Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.last = time.perf_counter()
            self.first = self.first or self.last
        super().put(value)  # type: ignore[no-untyped-call]

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self.on_text(text)


class Stopping(StoppingCriteria):
    """Ends an answer with the first token after which `stop` says so."""

    def __init__(self, stop: Callable[[], bool]):
        self.stop = stop

    def __call__(self, input_ids: torch.Tensor, scores: object, **more: object) -> torch.Tensor:
        return torch.full((len(input_ids),), self.stop(), dtype=torch.bool, device=input_ids.device)
