"""`generate` by several ranks: what they refuse, and what the first tells the others."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.attention.config import DecodeConfig, Dense, Own
from sparsekv.runtime.selection.capabilities import ChoosesForAllHeads
from sparsekv.runtime.selection.registry import methods

if TYPE_CHECKING:  # torch.distributed is for ranks alone, and transformers takes as long to import as all else
    from sparsekv.formats.ranks.ranks import Ranks
    from sparsekv.runtime.decoding.generate import Answer

T = TypeVar("T")


def refuse_merged_heads(config: DecodeConfig) -> None:
    """Raise UsageError if a method, of the answer or of the question, chooses once for the heads of all ranks."""
    for part in (config.attention, config.question):
        if not isinstance(part, Dense | Own) and _merges_heads(part.method):
            others = sorted(other for other, one in methods().items() if not _merges_heads(one))
            raise UsageError(
                f"{part.name} chooses once for all heads, and each rank has some of them; use one process, or one of "
                f"{', '.join(others)}"
            )


def _merges_heads(method: object) -> bool:
    """Of a method, or of its class."""
    return isinstance(method, ChoosesForAllHeads)


def one_at_a_time(batch_size: str, batch_file: str | None) -> str:
    """The `--batch-size` of ranks: 1, where there is a batch. UsageError for another number."""
    if batch_size not in ("auto", "1"):
        raise UsageError(f"--batch-size {batch_size}: ranks answer one question at a time; leave it out")
    return batch_size if batch_file is None else "1"


def for_all_ranks(ranks: "Ranks | None", read: Callable[[], T]) -> T:
    """What the first rank reads, which alone has the command's standard input."""
    if ranks is None:
        return read()
    return ranks.share(read() if ranks.first else None)


def joined_answers(ranks: "Ranks | None", answers: "Iterable[Answer]") -> "Iterable[Answer]":
    """The answers, with figures over the heads of all ranks."""
    if ranks is None:
        return answers
    from sparsekv.runtime.decoding.share import join_answer

    return (join_answer(ranks, answer) for answer in answers)
