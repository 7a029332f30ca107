"""Print statistics of answers (`generate --stats`), and describe the cost of storing keys and values in int8."""

from typing import TYPE_CHECKING, Any

from sparsekv.cli.common.console import note, shortened, stderr, tell
from sparsekv.cli.common.tables import titled_table
from sparsekv.formats.index.schema import KVStorage, Manifest
from sparsekv.kernels.common.on_cpu import compiling_took

if TYPE_CHECKING:  # the modules import transformers, which recall-report does not need
    from sparsekv.runtime.cache.index_cache import LayerStats
    from sparsekv.runtime.decoding.answer import Answer


def stored_line(manifest: Manifest) -> str | None:
    """Return a line with the error that int8 keys and values cause in dense attention's output.

    If the error was measured on an earlier text, the line also has the number of that text's tokens. None if keys and
    values are stored in the index's dtype.
    """
    storage = manifest.kv_storage
    if storage is None:
        return None
    worst = list(manifest.attending)[storage.worst]
    line = (
        f"Keys and values are stored in {storage.dtype}: dense attention over them has an output error of "
        f"{storage.error:.4f} against the exact ones ({max(storage.errors):.4f} in layer {worst}, its largest)"
    )
    if storage.measured_ids == manifest.prompt.ids_sha256:
        return f"{line}."
    return f"{line}, measured on an earlier text of {storage.measured_tokens:,} tokens."


def counted_dtype(manifest: Manifest) -> str:
    """Return the name of the dtype in which a KV fraction counts keys and values.

    If they are stored in another dtype, its name follows in brackets.
    """
    stored = "" if manifest.kv_storage is None else f" (stored in {manifest.kv_storage.dtype})"
    return f"{manifest.dtype}{stored}"


TOLD_FRACTION = 0.1
"""Example in `windows_line`: a KV fraction of the layers without a window, which it converts to one of all layers."""


def windows_line(manifest: Manifest) -> str | None:
    """Return a line that converts an example KV fraction to all layers; None if no layer has a sliding window.

    A KV fraction is the share of keys and values that a decode step reads. Layers with a sliding window do not count in
    it, because a step reads the same keys and values there with every method.
    """
    windows = [facts.sliding_window for facts in manifest.attending.values() if facts.sliding_window is not None]
    if not windows:
        return None
    full = len(manifest.indexed_layers) * manifest.split.middle
    windowed = sum(min(window, manifest.split.tokens) for window in windows)
    over_all = (TOLD_FRACTION * full + windowed) / (full + windowed)
    return (
        f"The kv fraction is that of the {len(manifest.indexed_layers)} layers that attend to the whole document. The "
        f"other {len(windows)} layers attend to a window, with every method. With these layers counted, a kv fraction "
        f"of {TOLD_FRACTION} is {over_all:.2f}."
    )


def storage_record(storage: KVStorage | None) -> dict[str, Any] | None:
    """Return the record of int8 storage for --json: dtype and errors; None if keys and values are not in int8."""
    if storage is None:
        return None
    return {
        "dtype": storage.dtype,
        "error": storage.error,
        "layers": storage.errors,
        "measured_tokens": storage.measured_tokens,
    }


MORE_THAN_EVERYTHING = "it reads its index beside the selected keys and values; --method dense reads less here"
MORE_TOGETHER = (
    "each query may read parts of the index for itself, and dense attention reads keys and values once for all; a "
    "smaller --budget or fewer queries together read less"
)


def print_stats(answer: "Answer", question: int | None = None, together: int = 1) -> None:
    """Print an answer's times and KV fraction to stderr, and a table of the layers' missed mass if it was measured.

    `question` is the line number of a batch's question, and `together` the maximum number of questions in a step.
    """
    named = "" if question is None else f"question {question}: "
    note(f"{named}{_summary(answer, together)}", quiet=False)
    if seconds := compiling_took():
        told = f"{seconds:.1f} s of these times compiled kernels for this CPU; the next command reads them from disk"
        note(told, quiet=False)
    if answer.kv_fraction is not None and answer.kv_fraction > 1:
        why = MORE_THAN_EVERYTHING if together == 1 else MORE_TOGETHER
        note(f"more than all keys and values: {why}", quiet=False)
    if answer.layers:
        _print_layers(answer.layers)


INDENT = " " * 4
"""White space before the text of a source."""


def print_sources(answer: "Answer", question: int | None = None) -> None:
    """Print an answer's sources to stderr: place, share of the attention, and text of each passage.

    The text is indented, on one line that is cut at the terminal's width. Without sources, a note says so. `question`
    is the line number of a batch's question.
    """
    named = "" if question is None else f"question {question}: "
    for one in answer.sources:
        note(f"{named}source: {one.place}  {one.score:.3f}", quiet=False)
        note(f"{INDENT}{shortened(one.text, stderr().width - len(INDENT))}", quiet=False)
    note(f"{named}no source: the answer attended to no passage", quiet=bool(answer.sources))


def why_cut(answer: "Answer", limit: int) -> str:
    """Return why an answer was cut: by --max-new-tokens, which is `limit`, or at the model's last position.

    Returns an empty text for an answer that was not cut.
    """
    if answer.finish_reason != "length":
        return ""
    return "--max-new-tokens" if answer.generated_tokens >= limit else "the model has no more positions"


def note_cut(answer: "Answer", limit: int, *, quiet: bool) -> None:
    """If an answer was cut, print a note with the reason; `limit` is the value of --max-new-tokens."""
    if why := why_cut(answer, limit):
        cut = answer.generated_tokens
        note(f"the answer was cut after {cut:,} token{'s' * (cut != 1)} ({why})", quiet=quiet)


def _summary(answer: "Answer", together: int) -> str:
    shared = f"its steps, each of up to {together} questions, " if together > 1 else ""
    read = ""
    if answer.generated_tokens > 1:
        read = f", {shared}read {answer.kv_fraction:.1%} of the document's keys and values"
    generated = f"{answer.generated_tokens} token{'s' * (answer.generated_tokens != 1)}"
    return (
        f"{answer.prompt_tokens:,} prompt tokens, first token after {answer.time_to_first_token:.2f} s, "
        f"{generated} at {answer.tokens_per_second:.1f} a second{read}"
    )


def _print_layers(layers: "list[LayerStats]") -> None:
    columns = "layer", "left", "heads given more", "heads given all"
    table = titled_table("attention left to centroids or dropped, by estimate", (), columns, wrap=True)
    for one in layers:
        table.add_row(str(one.layer), f"{one.missed:.1%}", f"{one.raised:.1%}", f"{one.dense:.1%}")
    tell(table)
