"""Variable tracking (RULER): finds all variables with a given value in chains of assignments hidden in a text."""

import random

from sparsekv.runtime.evaluation.haystack import fill, insert, rotated, sentences
from sparsekv.runtime.evaluation.tasks import Context, Question, Request, Task, tasks
from sparsekv.runtime.evaluation.words import variables

INTRODUCTION = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
ASK = "Question: Find all variables that are assigned the value {value} in the text above."
BEGIN = (
    "Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the "
    "value {value}, they are:"
)
HOPS = 4
MAX_NEW_TOKENS = 30


class VariableTracking(Task):
    """One chain of four hops for each question; a chain's assignments are hidden in order."""

    def make(self, request: Request) -> list[Context]:
        units = sentences(request.text)
        return [self._context(request, number, units) for number in range(request.contexts)]

    def _context(self, request: Request, number: int, units: list[str]) -> Context:
        drawn = random.Random(f"{request.seed} vt {request.length} {number}")
        chains = request.asked()
        names = variables((HOPS + 1) * chains, drawn)
        values = drawn.sample(range(10_000, 100_000), chains)
        needles = []
        for chain, value in enumerate(values):
            names_here = names[chain * (HOPS + 1) : (chain + 1) * (HOPS + 1)]
            sources = [str(value), *(f"VAR {name}" for name in names_here)]
            depths = sorted(drawn.random() for _ in names_here)
            needles += [
                (depth, f"VAR {name} = {source}.")
                for depth, name, source in zip(depths, names_here, sources, strict=False)
            ]

        def render(some: list[str]) -> str:
            return INTRODUCTION + " ".join(insert(some, needles))

        text = render(fill(rotated(units, drawn), render, request.count, request.length, "vt"))
        questions = [
            Question(
                text=ASK.format(value=value),
                prefix=BEGIN.format(value=value, count=HOPS + 1),
                answers=tuple(names[chain * (HOPS + 1) : (chain + 1) * (HOPS + 1)]),
                metric="match-all",
                max_new_tokens=MAX_NEW_TOKENS,
            )
            for chain, value in enumerate(values)
        ]
        return Context("vt", f"{request.length} tokens, {number}", text, tuple(questions), request.length)


tasks.add("vt", VariableTracking())
