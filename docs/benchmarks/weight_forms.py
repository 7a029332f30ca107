"""Compare roundings of a model's linear layers, by what they change in the next token's probabilities.

    python docs/benchmarks/weight_forms.py smollm2-135m-instruct help.txt

For each rounding a row is printed: the perplexity of the text's first 6,144 tokens, in pieces of 2,048; the mean KL
divergence of the probabilities from those of the unrounded model; and the share of tokens after which the likeliest
next token is the same. Products are exact float32 products with dequantised weights. The first
two rows compare them with the products of the compiled CPU kernel, which gets 16 tokens at a time, on one piece.

With a number of contexts as third argument, each rounding is also asked 10 questions per context of 2,048 tokens, as by
`eval --raw --length 2048 --seed 3`. An answer is right if each of its tokens is the likeliest after those before it.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import DynamicCache

from sparsekv.formats.models.load import load_model
from sparsekv.kernels.linear.quantised import FEW, quantise_linears, round_to_int8
from sparsekv.runtime.evaluation.inputs import Inputs
from sparsekv.runtime.tasks.interface import Context, choose_task

PIECE, PIECES, SEED = 2048, 3, 3
Rounding = Callable[[str, torch.Tensor], torch.Tensor]
FACTORS = torch.linspace(0.62, 1.0, 20)


def rounded(weight: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Round weights [..., K] to int8 and dequantise them; 127 stands for `largest` [..., 1]."""
    steps = torch.where(largest == 0, 1.0, largest / 127)
    return (weight / steps).round_().clamp_(-127, 127) * steps


def of_channel(weight: torch.Tensor) -> torch.Tensor:
    return round_to_int8(weight).restored(weight.dtype)


def scaled(factor: float) -> Rounding:
    """Round with a scale that is `factor` times that of the output channel's largest magnitude."""
    return lambda name, weight: rounded(weight, weight.abs().amax(-1, keepdim=True) * factor)


def least_squares(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Round with that of 20 scales of an output channel that has the smallest squared error."""
    largest = weight.abs().amax(-1, keepdim=True)
    best, least = weight, torch.full_like(largest, torch.inf)
    for factor in FACTORS:
        found = rounded(weight, largest * factor)
        error = (found - weight).square().sum(-1, keepdim=True)
        best, least = torch.where(error < least, found, best), torch.minimum(error, least)
    return best


def grouped(size: int) -> Rounding:
    """Round with a scale of each output channel and `size` input channels."""

    def form(name: str, weight: torch.Tensor) -> torch.Tensor:
        groups = pad(weight, (0, -weight.shape[1] % size)).unflatten(1, (-1, size))
        return rounded(groups, groups.abs().amax(-1, keepdim=True)).flatten(1)[:, : weight.shape[1]]

    return form


def but(*layers: str) -> Rounding:
    """Round all layers but those whose name has one of the words."""
    return lambda name, weight: weight if any(one in name for one in layers) else of_channel(weight)


def only(*layers: str) -> Rounding:
    """Round only the layers whose name has one of the words."""
    return lambda name, weight: of_channel(weight) if any(one in name for one in layers) else weight


FORMS: dict[str, Rounding] = {
    "none": lambda name, weight: weight,
    "int8": lambda name, weight: of_channel(weight),
    "int8 but q_proj, k_proj": but("q_proj", "k_proj"),
    "int8 but k_proj": but("k_proj"),
    "int8, groups of 32": grouped(32),
    "int8, least squared error": least_squares,
    "int8, scales 1% larger": scaled(1.01),
    "int8, scales 2% larger": scaled(1.02),
    "int8, scales 1% smaller": scaled(0.99),
    "int8 but lm_head": but("lm_head"),
    "int8 but down_proj": but("down_proj"),
    "int8, groups of 128": grouped(128),
    "int8 of q_proj, k_proj alone": only("q_proj", "k_proj"),
    "int8 of lm_head alone": only("lm_head"),
    "int8 of down_proj alone": only("down_proj"),
}


def compare(found: torch.Tensor, exact: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Sum the loss, the KL divergence and the equal likeliest tokens of a piece's logits [N, V]."""
    sums = torch.zeros(3, dtype=torch.float64)
    sums[0] = torch.nn.functional.cross_entropy(found[:-1], ids[1:], reduction="sum")
    for some, true in zip(found.split(256), exact.split(256), strict=True):
        logs, true_logs = some.log_softmax(-1), true.log_softmax(-1)
        sums[1] += (true_logs.exp() * (true_logs - logs)).sum(-1).double().sum()
        sums[2] += (some.argmax(-1) == true.argmax(-1)).sum()
    return sums


def line(sums: torch.Tensor, pieces: int) -> str:
    loss, divergence, same = (sums / pieces).tolist()
    return f"{torch.tensor(loss / (PIECE - 1)).exp():.3f}  {divergence / PIECE:.5f}  {same / PIECE:.4f}"


def right(model: Any, tokenizer: Any, context: Context) -> list[bool]:
    """Tell for each question of a context whether its answer's tokens are the likeliest."""

    def encode(text: str) -> list[int]:
        return [*tokenizer(text, add_special_tokens=False).input_ids]

    cache, found = DynamicCache(config=model.config), []
    model(torch.tensor([encode(context.text)]), past_key_values=cache, logits_to_keep=1)
    for question in context.questions:
        asked = question.text + question.prefix
        before, ids = len(encode(asked)), encode(f"{asked} {question.answers[0]}")
        logits = model(torch.tensor([ids]), past_key_values=cache).logits[0]
        cache.crop(-len(ids))
        found.append(logits[before - 1 : -1].argmax(-1).tolist() == ids[before:])
    return found


def contexts_of(text: Path, tokenizer: Any, number: int) -> list[Context]:
    """Make the contexts of `eval --raw --length 2048 --questions 10`."""
    inputs = Inputs.read(str(text), [], None, None, None, [PIECE], [], number, 10, SEED)
    request = replace(inputs.request, count=lambda some: len(tokenizer(some, add_special_tokens=False).input_ids))
    return choose_task("niah-facts").make(request)


def by_kernel(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of a piece that the model reads FEW tokens at a time."""
    cache = DynamicCache(config=model.config)
    return torch.cat([model(some[None], past_key_values=cache).logits[0] for some in ids.split(FEW)])


def rows(name: str, text: Path, number: int) -> Iterator[str]:
    """Yield the lines of the table."""
    loaded = load_model(name, device="cpu", dtype="float32")
    model: Any = loaded.model
    tokenizer: Any = loaded.tokenizer
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())  # apart from the embedding
    whole = tokenizer(text.read_text(encoding="utf-8"), add_special_tokens=False, return_tensors="pt").input_ids[0]
    pieces = whole[: PIECE * PIECES].split(PIECE)
    contexts = contexts_of(text, tokenizer, number) if number else []
    layers = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    originals = {name: layer.weight.detach().clone() for name, layer in layers.items()}
    exact = [model(piece[None]).logits[0] for piece in pieces]
    of_kernel: Any = load_model(name, device="cpu", dtype="float32").model
    quantise_linears(of_kernel, 8)
    for told, logits in ("int8", of_kernel(pieces[0][None]).logits[0]), ("kernel", by_kernel(of_kernel, pieces[0])):
        yield f"{told + ', one piece':28}  {line(compare(logits, exact[0], pieces[0]), 1)}"
    before: list[bool] = []
    for form, rounding in FORMS.items():
        for layer, module in layers.items():
            module.weight.data = rounding(layer, originals[layer])
        found = zip(pieces, exact, strict=True)
        sums = torch.stack([compare(model(piece[None]).logits[0], true, piece) for piece, true in found]).sum(0)
        answers = [one for context in contexts for one in right(model, tokenizer, context)]
        before = before or answers
        lost = sum(old and not new for old, new in zip(before, answers, strict=True))
        won = sum(new and not old for old, new in zip(before, answers, strict=True))
        asked = f"  {sum(answers)} of {len(answers)}, -{lost} +{won}" if answers else ""
        yield f"{form:28}  {line(sums, PIECES)}{asked}"


if __name__ == "__main__":
    with torch.inference_mode():
        for row in rows(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0):
            print(row, flush=True)
