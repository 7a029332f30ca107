"""transformers' decoding loop for one sequence, with our decode step."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from sparsekv.kernels.common.cache_argument import with_cache
from sparsekv.runtime.decoding.finite_logits import NotFiniteError
from sparsekv.runtime.decoding.step import DecodeStep

NO_TOKEN = -1


class DecodeLoop:
    """For `model.generate(custom_generate=...)`: prefills by the model, then decodes by a `DecodeStep`.

    Logits processing, sampling and stopping are as in transformers' own loop, with the same random numbers. A token is
    streamed when the next step has begun.
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
        before, longest = input_ids.shape[1], int(stopping_criteria.max_length or 0)
        # Criteria look at the host's ids: they would wait for a device.
        ids, on_host = (_with_room(input_ids, longest, device) for device in (input_ids.device, "cpu"))
        try:
            self.step.begin(longest - before)
            with _experts_as_for_decoding(model):
                for count in range(before, longest):
                    token = _next(logits_processor, ids[:, :count], logits, sample=bool(generation_config.do_sample))
                    told = _on_host(token)
                    ids[:, count], on_host[:, count] = token[:, 0], told
                    if count == before:
                        self.streamer.put(told)  # before its step, which may have to be captured
                    ended = bool(stopping_criteria(on_host[:, : count + 1], None).all())
                    if not ended:
                        logits = self.step(token)
                    if count > before:
                        self.streamer.put(told)  # while the device computes
                    if ended:
                        break
        finally:
            self.step.cache.release()
        self.streamer.end()
        return ids[:, : count + 1]

    def _prefill(self, model: PreTrainedModel, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> torch.Tensor:
        """Prefill the tokens that are not in the cache; returns the logits [1, V] of the last one."""
        known, tokens = self.step.cache.get_seq_length(), input_ids.shape[1]
        only_last = {name: value for name, value in model_kwargs.items() if name == "logits_to_keep"}
        logits: torch.Tensor = model(
            input_ids=input_ids[:, known:],
            position_ids=torch.arange(known, tokens, device=input_ids.device)[None],
            **with_cache(model, self.step.cache),
            **only_last,
        ).logits[:, -1]
        return logits


def _with_room(ids: torch.Tensor, length: int, device: torch.device | str) -> torch.Tensor:
    """[1, length] token ids that begin with `ids` [1, N]."""
    longer = torch.zeros(1, length, dtype=ids.dtype, device=device)
    longer[:, : ids.shape[1]] = ids
    return longer


def _next(processors: LogitsProcessorList, ids: torch.Tensor, logits: torch.Tensor, *, sample: bool) -> torch.Tensor:
    """The next token [1, 1] after ids [1, N], by logits [1, V]."""
    scores = processors(ids, logits.to(torch.float32, copy=True))  # type: ignore[arg-type]  # any tensors will do
    return _choose(scores, sample=sample)


def _on_host(token: torch.Tensor) -> torch.Tensor:
    """A token [1, 1] as [1] on the host; raises NotFiniteError for `NO_TOKEN`."""
    told = token[:, 0].cpu()
    if int(told) == NO_TOKEN:
        raise NotFiniteError
    return told


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
