"""Compare lossless decoding with dense attention: equal answers, tokens a second, and drafts accepted.

Usage: lossless.py INDEX [QUESTIONS [TOKENS]]. Each question is about a heading or a name of the document, and is
answered by dense attention, by drafts from the text alone, and by drafts of the index's method, in turn. Times are of
the tokens after the first. Prints a Markdown table.
"""

import random
import re
import sys
from pathlib import Path

import torch

from sparsekv.formats.index.reader import Artifact
from sparsekv.runtime.attention.config import DecodeConfig, Dense
from sparsekv.runtime.decoding.answer import Answer, Sampling, question_ids
from sparsekv.runtime.decoding.choose_config import choose_config
from sparsekv.runtime.decoding.engine import Engine, Request
from sparsekv.runtime.decoding.load import load_and_open
from sparsekv.runtime.decoding.lossless import DraftingEngine
from sparsekv.runtime.decoding.open import OpenIndex

WORD = re.compile(r"[A-Za-z_]{6,}")
FORMS = ("What is {}?", "Explain {} in two sentences.", "How is {} used?", "List what the text says about {}.")


def questions(index: OpenIndex, number: int) -> list[torch.Tensor]:
    """Return the token ids of questions about words of the document, the same in each run."""
    text = str(index.tokenizer.decode(index.input_ids, skip_special_tokens=True))
    drawn = random.Random(0)
    words = sorted({found.group() for found in WORD.finditer(text)})
    return [
        question_ids(index, FORMS[place % len(FORMS)].format(word))
        for place, word in enumerate(drawn.choices(words, k=number))
    ]


def answer(engine: Engine, asked: torch.Tensor, tokens: int) -> Answer:
    ((_, found),) = engine.answers([Request(asked, Sampling(tokens))])
    return found


def main() -> None:
    number, tokens = (int(given) for given in (sys.argv[2:] + ["100", "100"][len(sys.argv) - 2 :])[:2])
    artifact = Artifact(Path(sys.argv[1]))
    index = load_and_open(artifact, device="auto", dtype="auto")
    configs = {"text alone": DecodeConfig(Dense(), question=Dense(), lossless=True)}
    config = choose_config(artifact, lossless=True)
    configs |= {f"text and {config.attention.name}": config}
    engines: dict[str, Engine] = {"dense": Engine(index, index.dense_cache())}
    engines |= {name: DraftingEngine(index, index.cache(one), one) for name, one in configs.items()}
    seconds, steps, equal = dict.fromkeys(engines, 0.0), dict.fromkeys(engines, 0), dict.fromkeys(engines, 0)
    for place, asked in enumerate(questions(index, number)):
        found = {name: answer(engine, asked, tokens) for name, engine in engines.items()}
        for name, one in found.items():
            equal[name] += one.ids == found["dense"].ids
            if place and one.tokens_per_second:  # the first question compiles
                seconds[name] += (one.generated_tokens - 1) / one.tokens_per_second
                steps[name] += one.generated_tokens - 1
    print("| drafts | equal answers | tokens/s | times dense | accepted |\n|---|---:|---:|---:|---|")
    dense = steps["dense"] / seconds["dense"]
    for name, engine in engines.items():
        rate = steps[name] / seconds[name]
        told = engine.told if isinstance(engine, DraftingEngine) else ""
        print(f"| {name} | {equal[name]} of {number} | {rate:.1f} | {rate / dense:.2f} | {told} |")


if __name__ == "__main__":
    main()
