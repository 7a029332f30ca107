"""What `sparsekv generate --stats` prints about an answer and about each layer."""

from typing import TYPE_CHECKING

from rich.table import Table

from sparsekv.cli.common.console import note, tell
from sparsekv.kernels.attention.compiled import compiling_took

if TYPE_CHECKING:  # they import transformers, which a report does not need
    from sparsekv.runtime.cache.index_cache import LayerStats
    from sparsekv.runtime.decoding.generate import Answer

MORE_THAN_EVERYTHING = "it reads its index beside every key and value; a smaller --budget reads less"


def print_stats(answer: "Answer", question: int | None = None) -> None:
    """Print times and rows read to stderr, and a table of layers if the method can estimate its missed mass; of one of
    several questions its number too."""
    named = "" if question is None else f"question {question}: "
    note(f"{named}{_summary(answer)}", quiet=False)
    if seconds := compiling_took():
        told = f"{seconds:.1f} s of that compiled kernels for this CPU; the next command reads them from disk"
        note(told, quiet=False)
    if answer.kv_fraction > 1:
        note(f"more than all keys and values: {MORE_THAN_EVERYTHING}", quiet=False)
    if answer.layers:
        _print_layers(answer.layers)


def note_cut(answer: "Answer", most: int, *, quiet: bool) -> None:
    """Note that an answer ended because it may not be longer than `most` tokens, or than the model's positions."""
    if answer.finish_reason == "length":
        cut = answer.generated_tokens
        why = "--max-new-tokens" if cut >= most else "the model has no more positions"
        note(f"the answer was cut after {cut:,} token{'s' * (cut != 1)} ({why})", quiet=quiet)


def _summary(answer: "Answer") -> str:
    read = f", read {answer.kv_fraction:.1%} of the document's keys and values" if answer.generated_tokens > 1 else ""
    generated = f"{answer.generated_tokens} token{'s' * (answer.generated_tokens != 1)}"
    return (
        f"{answer.prompt_tokens:,} prompt tokens, first token after {answer.time_to_first_token:.2f} s, "
        f"{generated} at {answer.tokens_per_second:.1f} a second{read}"
    )


def _print_layers(layers: "list[LayerStats]") -> None:
    table = Table(title="attention left to centroids or dropped, by estimate", title_justify="left", title_style="")
    for name in ("layer", "left", "heads given more", "heads given all"):
        table.add_column(name, justify="right")
    for one in layers:
        table.add_row(str(one.layer), f"{one.missed:.1%}", f"{one.raised:.1%}", f"{one.dense:.1%}")
    tell(table)
