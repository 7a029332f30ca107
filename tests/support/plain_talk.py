"""What the plain model answers to questions that follow one another, over no cache of ours."""

from collections.abc import Iterator

import torch

from sparsekv.runtime.decoding.generate import Sampling
from sparsekv.runtime.decoding.open import OpenIndex

from .tiny_models import END

QUESTIONS = ("What is an assertion?", "And what raises one?", "Which of them came first?")
SAMPLING = Sampling(max_new_tokens=12)


@torch.inference_mode()
def plain_answer(index: OpenIndex, before: torch.Tensor) -> list[int]:
    """Token ids of transformers' own greedy answer after token ids [N], over no cache, ours or its own."""
    # With its own, transformers 5.17 answers otherwise for Gemma 2 on a GPU than on a CPU, and than its own logits say.
    answer = index.model.generate(
        before[None].to(index.model.device), max_new_tokens=SAMPLING.max_new_tokens, do_sample=False, use_cache=False
    )[0, len(before) :]
    return answer.tolist()


def plain_talk(index: OpenIndex) -> Iterator[list[int]]:
    """The plain model's answers to `QUESTIONS`, each after all that came before it, in the chat template's words."""
    said, between = index.input_ids, "\n\n"
    for question in QUESTIONS:
        text = f"{between}{question}<|end|>\n<|start|>assistant\n"
        said = torch.cat([said, torch.tensor(index.tokenizer(text, add_special_tokens=False).input_ids)])
        answer = plain_answer(index, said)
        yield answer
        said = torch.cat([said, torch.tensor(answer)])
        between = f"{'' if answer[-1] == END else '<|end|>'}\n<|start|>user\n"
