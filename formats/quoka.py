"""QuoKA's parameters, shared by the prefill of a document, the prefill of a question, and the manifest."""

from dataclasses import dataclass, field

from sparsekv.formats.errors import UsageError

CHOICES = {
    "quoka_subset": ("far", "random", "all"),
    "quoka_similarity": ("cosine", "dot"),
    "quoka_across": ("max", "mean"),
}
"""The paper's choice first, then its ablations."""


@dataclass(frozen=True)
class QuokaOptions:
    """Which queries choose a chunk's keys, how keys are ranked, and how the scores of several queries are combined."""

    prefill_queries: int = field(default=16, metadata={"help": "Queries of a chunk that choose for all of it."})
    quoka_subset: str = field(
        default="far", metadata={"help": f"Which queries these are: {', '.join(CHOICES['quoka_subset'])}."}
    )
    quoka_similarity: str = field(
        default="cosine", metadata={"help": f"What keys are ranked by: {', '.join(CHOICES['quoka_similarity'])}."}
    )
    quoka_across: str = field(
        default="max",
        metadata={"help": f"How scores of several queries are joined: {', '.join(CHOICES['quoka_across'])}."},
    )

    def __post_init__(self) -> None:
        check_prefill_queries(self.prefill_queries)
        for name, known in CHOICES.items():
            if (value := getattr(self, name)) not in known:
                raise UsageError(f"--{name.replace('_', '-')} {value}: choose one of {', '.join(known)}")


def check_prefill_queries(count: int) -> None:
    """Raise UsageError if there would be no query to choose keys by."""
    if count < 1:
        raise UsageError(f"--prefill-queries {count}: give at least 1")
