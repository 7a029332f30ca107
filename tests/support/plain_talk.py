"""Answers of the plain model to questions in sequence, without a cache of sparsekv."""

from collections.abc import Iterator

import torch

from sparsekv.runtime.decoding.answer import Sampling
from sparsekv.runtime.decoding.open import OpenIndex

from .tiny_models import END

QUESTIONS = ("What is an assertion?", "And what raises one?", "Which of them came first?")
SAMPLING = Sampling(max_new_tokens=8)


@torch.inference_mode()
def plain_answer(index: OpenIndex, before: torch.Tensor, *, tokens: int = SAMPLING.max_new_tokens) -> list[int]:
    """Return up to `tokens` ids of the model's own greedy answer after token ids [N]; each pass is over all ids before.

    The attention is transformers' eager attention. The default attention of version 5.17 ignores Gemma 2's soft cap.
    """
    model, said = index.model, before[None].to(index.model.device)
    end, own = model.generation_config.eos_token_id, model.config._attn_implementation
    ends = end if isinstance(end, list) else [end]
    model.set_attn_implementation("eager")
    for _ in range(tokens):
        token = model(input_ids=said, use_cache=False).logits[:, -1:].argmax(-1)
        said = torch.cat([said, token], 1)
        if int(token) in ends:
            break
    model.set_attn_implementation(own)
    answer: list[int] = said[0, len(before) :].tolist()
    return answer


def plain_talk(index: OpenIndex) -> Iterator[list[int]]:
    """Yield the plain model's answers to `QUESTIONS`, each after the whole conversation in the chat template's form."""
    said, between = index.input_ids, "\n\n"
    for question in QUESTIONS:
        text = f"{between}{question}<|end|>\n<|start|>assistant\n"
        said = torch.cat([said, torch.tensor(index.tokenizer(text, add_special_tokens=False).input_ids)])
        answer = plain_answer(index, said)
        yield answer
        said = torch.cat([said, torch.tensor(answer)])
        between = f"{'' if answer[-1] == END else '<|end|>'}\n<|start|>user\n"
