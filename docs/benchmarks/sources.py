"""Count how often the sources of an answer contain the fact that the answer states.

Usage: sources.py MODEL TEXT [CONTEXTS [LENGTH]]. Contexts are those of `eval --task niah-facts --seed 0`, with ten
questions each. Questions are answered with dense attention, and with codes at their default budget. Only rightly
answered questions are counted. A source contains the fact if its text contains the number that answers the question.
"""

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from sparsekv.formats.documents.continuation import encode_question
from sparsekv.formats.documents.prompt import encode_prompt
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.models.load import LoadedModel, identify, load_model
from sparsekv.indexing.build import build_index
from sparsekv.indexing.methods.codes import CodesIndexer
from sparsekv.indexing.plan import BuildConfig, BuildPlan
from sparsekv.runtime.decoding.answer import Answer, Sampling
from sparsekv.runtime.decoding.choose_config import choose_config
from sparsekv.runtime.decoding.open import open_index
from sparsekv.runtime.decoding.session import Session
from sparsekv.runtime.sources.places import token_texts
from sparsekv.runtime.tasks.interface import Context, Request, choose_task

QUESTIONS, SOURCES, METHODS = 10, 3, ("dense", "codes")
TIMED = 1
"""Number of questions of a context that are also asked without sources, to compare the times."""

Ranks = list[int | None]
"""For each right answer, the index of its first source with the fact, from 0; None: no source has it."""


class Measurement:
    """Ranks of the facts among the sources of right answers, and the seconds of the timed answers, by method."""

    def __init__(self, loaded: LoadedModel):
        self.loaded, self.asked = loaded, 0
        self.ranks: dict[str, Ranks] = {name: [] for name in METHODS}
        self.seconds = {name: [0.0, 0.0] for name in METHODS}

    def contexts(self, text: str, number: int, length: int) -> list[Context]:
        def count(some: str) -> int:
            return len(encode_prompt(self.loaded.tokenizer, some).input_ids)

        return choose_task("niah-facts").make(Request(text, count, length, number, QUESTIONS))

    def add(self, context: Context, folder: Path) -> None:
        """Build an index of a context in `folder`, ask its questions and count their sources."""
        loaded, prompt = self.loaded, encode_prompt(self.loaded.tokenizer, context.text)
        build_index(BuildPlan(loaded, prompt, BuildConfig({"codes": CodesIndexer()})), folder)
        index = open_index(Artifact(folder), loaded.model, loaded.tokenizer, identify(loaded))
        ids = [
            torch.tensor(encode_question(loaded.tokenizer, prompt.border, prompt.chat, one.text, one.prefix))
            for one in context.questions
        ]
        texts = token_texts(loaded.tokenizer, prompt.input_ids.tolist())
        sampling = Sampling(context.questions[0].max_new_tokens)
        index.source_finder.watched(1)  # measures the model's heads, if no earlier run has
        self.asked += len(ids)
        for name in METHODS:
            session = Session.open(index, choose_config(index.artifact, name, {}))
            for number, (question, expected) in enumerate(zip(ids, context.questions, strict=True)):
                answer = self._timed(session, question, sampling, name, timed=0 < number <= TIMED)
                if expected.answers[0] in answer.text:
                    has = ["".join(texts[slice(*one.tokens)]) for one in answer.sources]
                    places = (place for place, text in enumerate(has) if expected.answers[0] in text)
                    self.ranks[name].append(next(places, None))

    def _timed(self, session: Session, question: torch.Tensor, sampling: Sampling, name: str, *, timed: bool) -> Answer:
        """Answer a question with sources, and return the answer.

        If `timed`, answer it without, with, with and without sources, and add up the seconds with and without.
        """
        for sources in (0, SOURCES, SOURCES, 0) if timed else (SOURCES,):
            began = time.perf_counter()
            answer = session.ask(question, sampling, sources=sources)
            self.seconds[name][bool(sources)] += time.perf_counter() - began if timed else 0.0
            if sources:
                found = answer
        return found

    def print(self) -> None:
        print(f"\n{self.asked} questions")
        print("| answers by | right | first | among three | time with sources / without |\n|---|---:|---:|---:|---:|")
        for name, ranks in self.ranks.items():
            without, with_sources = self.seconds[name]
            first, three, right = ranks.count(0), len(ranks) - ranks.count(None), len(ranks)
            shares = f"{first} ({first / max(right, 1):.0%}) | {three} ({three / max(right, 1):.0%})"
            print(f"| {name} | {right} of {self.asked} | {shares} | {with_sources / without:.2f} |", flush=True)


def main() -> None:
    model, text, *numbers = sys.argv[1:]
    number, length = [*map(int, numbers), *(4, 2048)[len(numbers) :]]
    measured = Measurement(load_model(model))
    with TemporaryDirectory() as folder:
        for place, context in enumerate(measured.contexts(Path(text).read_text(encoding="utf-8"), number, length)):
            measured.add(context, Path(folder) / f"{place}.skv")
            measured.print()


if __name__ == "__main__":
    main()
