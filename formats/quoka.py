"""QuoKA's parameters, shared by the prefill of a document, the prefill of a question, and the manifest."""

from dataclasses import dataclass, field

from sparsekv.formats.errors import UsageError
from sparsekv.formats.suggestions import choose_one

CHOICES = {
    "quoka_subset": ("far", "random", "all"),
    "quoka_similarity": ("cosine", "dot"),
    "quoka_across": ("max", "mean"),
}
"""The paper's choice first, then its ablations."""


@dataclass(frozen=True)
class QuokaOptions:
    """Which queries choose a chunk's keys, how keys are ranked, and how the scores of several queries are combined."""

    prefill_queries: int = field(
        default=16, metadata={"help": "How many of a chunk's queries rank the tokens that the whole chunk attends to."}
    )
    quoka_subset: str = field(
        default="far",
        metadata={
            "help": "Which of a chunk's queries rank the tokens: those far from (of lowest cosine to) the chunk's mean "
            f"query, random ones, or all: {', '.join(CHOICES['quoka_subset'])}."
        },
    )
    quoka_similarity: str = field(
        default="cosine", metadata={"help": f"Score of a key for a query: {', '.join(CHOICES['quoka_similarity'])}."}
    )
    quoka_across: str = field(
        default="max",
        metadata={
            "help": f"How a key's scores for several queries are combined: {', '.join(CHOICES['quoka_across'])}."
        },
    )

    def __post_init__(self) -> None:
        check_prefill_queries(self.prefill_queries)
        for name, known in CHOICES.items():
            if (value := getattr(self, name)) not in known:
                raise UsageError(f"--{name.replace('_', '-')} {value}: {choose_one(str(value), known)}")


def check_prefill_queries(count: int) -> None:
    """Raise UsageError if there would be no query to choose keys by."""
    if count < 1:
        raise UsageError(f"--prefill-queries {count}: give at least 1")
