"""transformers' decoding loop for one sequence, with our decode step."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from sparsekv.runtime.decoding.finite_logits import NotFiniteError
from sparsekv.runtime.decoding.step import DecodeStep

NO_TOKEN = -1


class DecodeLoop:
    """For `model.generate(custom_generate=...)`: prefills by the model, then decodes by a `DecodeStep`.

    Logits processing, sampling, streaming and stopping are as in transformers' own loop, with the same random numbers.
    One sequence only. `streamer` is passed here because transformers passes none to a custom loop.
    """

    def __init__(self, step: DecodeStep, streamer: BaseStreamer):
        self.step, self.streamer = step, streamer

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        """Token ids [1, T] of the prompt and its continuation.

        Raises:
            NotFiniteError: the model's logits are not finite.
        """
        logits = self._prefill(model, input_ids, model_kwargs)
        try:
            self.step.begin(int(stopping_criteria.max_length or 0) - input_ids.shape[1])
            with _experts_as_for_decoding(model):
                while True:
                    wide = logits.to(torch.float32, copy=True)
                    scores = logits_processor(input_ids, wide)  # type: ignore[arg-type]  # any tensors will do
                    token = _choose(scores, sample=bool(generation_config.do_sample))
                    input_ids = torch.cat([input_ids, token], 1)
                    told = token[:, 0].cpu()
                    if int(told) == NO_TOKEN:
                        raise NotFiniteError
                    self.streamer.put(told)
                    if bool(stopping_criteria(input_ids, None).all()):
                        break
                    logits = self.step(token)
        finally:
            self.step.cache.release()
        self.streamer.end()
        return input_ids

    def _prefill(self, model: PreTrainedModel, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> torch.Tensor:
        """Prefill the tokens that are not in the cache; returns the logits [1, V] of the last one."""
        known, tokens = self.step.cache.get_seq_length(), input_ids.shape[1]
        only_last = {name: value for name, value in model_kwargs.items() if name == "logits_to_keep"}
        logits: torch.Tensor = model(
            input_ids=input_ids[:, known:],
            position_ids=torch.arange(known, tokens, device=input_ids.device)[None],
            past_key_values=self.step.cache,
            use_cache=True,
            **only_last,
        ).logits[:, -1]
        return logits


def _choose(scores: torch.Tensor, *, sample: bool) -> torch.Tensor:
    """The next token [1, 1] by scores [1, V]; `NO_TOKEN` if they are not finite, so that this needs no extra sync."""
    if sample:
        probability = scores.softmax(-1)
        token = torch.multinomial(probability.nan_to_num(1.0), 1)
        found = probability.gather(-1, token)
    else:
        token = scores.argmax(-1, keepdim=True)
        found = scores.gather(-1, token)
    return torch.where(found.isfinite(), token, NO_TOKEN)


@contextmanager
def _experts_as_for_decoding(model: PreTrainedModel) -> Iterator[None]:
    """On a GPU, compute mixtures of experts as transformers does for few tokens: by batched_mm, not grouped_mm."""
    before = model.get_experts_implementation()
    if model.device.type == "cpu" or "grouped_mm" not in before.values():
        yield
        return
    model.set_experts_implementation(
        {name: "batched_mm" if one == "grouped_mm" else one for name, one in before.items()}
    )
    try:
        yield
    finally:
        model.set_experts_implementation(before)
