"""Input of an evaluation: a text and tasks, or a file of published questions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sparsekv.formats.documents.document import UTF_8, read_document
from sparsekv.formats.documents.document_hints import eval_hint
from sparsekv.formats.errors import UsageError, any_of, with_ending
from sparsekv.formats.index.manifest import read_manifest
from sparsekv.formats.index.schema import MANIFEST
from sparsekv.runtime.tasks.interface import Context, Question, Request, choose_task, in_turns, tasks
from sparsekv.runtime.tasks.metrics import METRICS
from sparsekv.runtime.tasks.published import cut_note, read_pairs, read_published, shorten

if TYPE_CHECKING:  # the module imports transformers, for which --help does not wait
    from sparsekv.runtime.evaluation.engine import Comparison

GENERATED = "generated"
"""Name of the document and of the work folder if all contexts are generated without a text."""
ASKED_BY_USER = ("qa", "prefixqa")
"""Tasks whose questions and expected answers are the user's, of any length."""
DEFAULT_TASKS, PAIRS_TASKS, DEFAULT_LENGTH = ["niah-facts"], ["qa"], 4096


@dataclass(frozen=True)
class Inputs:
    """A text with the tasks to generate from it, or published contexts. `read` checks the inputs without a model.

    `request` is passed to each task, with the model's token counter and with each of `lengths` in turn. With `turns`
    the questions of a context are the turns of a conversation.
    """

    name: str
    tasks: list[str]
    published: list[Context]
    lengths: list[int]
    request: Request
    turns: bool = False

    @classmethod
    def read(
        cls,
        document: str | None,
        tasks: list[str],
        data: str | None,
        data_format: str | None,
        pairs: str | None,
        lengths: list[int],
        depths: list[float],
        contexts: int,
        questions: int | None,
        seed: int,
        encoding: str = UTF_8,
        *,
        turns: bool = False,
    ) -> "Inputs":
        """Read the inputs.

        Raises:
            UsageError: options contradict each other or have no effect; a number is out of range; a task does not exist
                or lacks its text; the document is an index; or a file cannot be read or has another format.
        """
        if document is not None and data is not None:
            raise UsageError("give either a text to make tasks from, or --data FILE with --format")
        if (data is None) != (data_format is None):
            raise UsageError("--data and --format belong together: give both")
        if data is not None and (tasks or depths or pairs):
            raise UsageError("the file of --data has its own tasks: leave out --task, --depth and --pairs")
        if data is not None and len(set(lengths)) > 1:
            told = " ".join(f"--length {length}" for length in lengths)
            raise UsageError(f"{told}: the documents of --data are cut to one length; give one, and run eval for each")
        shares = tuple(depth / 100 for depth in depths)
        request = Request("", len, min(lengths, default=1), contexts, questions, shares, seed)
        chosen = _chosen(tasks, pairs)
        if document is None and data is None:
            _refuse_without_text(chosen)
        effective = {option for task in chosen for option in choose_task(task).options}
        if pairs is not None and "--pairs" not in effective:
            raise UsageError(f"--pairs has no effect without --task {any_of(PAIRS_TASKS)}; leave --pairs out")
        if depths and "--depth" not in effective:
            raise UsageError(f"--depth has no effect on --task {any_of(chosen)}; leave it out")
        _refuse_index(document)
        text = "" if document is None else read_document(document, encoding)
        return cls(
            name=Path(data or document or GENERATED).name,
            tasks=chosen,
            published=[] if data is None or data_format is None else read_published(data, data_format),
            lengths=list(dict.fromkeys(lengths)),
            request=replace(request, text=text, pairs=() if pairs is None else read_pairs(pairs)),
            turns=turns,
        )


def _chosen(tasks: Sequence[str], pairs: str | None) -> list[str]:
    return list(dict.fromkeys(tasks or (PAIRS_TASKS if pairs is not None else DEFAULT_TASKS)))


def unread_options(tasks: Sequence[str], pairs: str | None, given: Mapping[str, object]) -> list[str]:
    """Return a line for each of the given options that none of the tasks reads.

    Args:
        tasks, pairs: values of --task and --pairs.
        given: values of the options that the user set, by option.
    """
    chosen = _chosen(tasks, pairs)
    unread = [option for option in given if all(option in choose_task(task).unread for task in chosen)]
    told = {option: option if given[option] is True else f"{option} {given[option]}" for option in unread}
    return [f"{told[option]} has no effect on --task {any_of(chosen)}" for option in unread]


def _refuse_without_text(names: list[str]) -> None:
    """Raise UsageError if any of the tasks needs a text."""
    needing = [name for name in names if choose_task(name).needs_text]
    if needing:
        others = ", ".join(name for name, task in tasks().items() if not task.needs_text)
        raise UsageError(
            f"--task {', '.join(needing)} needs a text: name a file, or give one of the tasks without a text, "
            f"{others}; or give --data FILE with --format"
        )


def _refuse_index(document: str | None) -> None:
    """Raise UsageError if the document is an index; the message names the text from which the index was built."""
    folder = Path(document or "-")
    if (folder / MANIFEST).is_file():
        raise UsageError(
            f"{folder} is an index; eval takes its text, and builds indices of its own: "
            + eval_hint(folder, read_manifest(folder))
        )


def work_folder(document: str | None, data: str | None, given: Path | None) -> Path:
    """Return the evaluation's work folder: `given`, or else the input's file name with the ending .eval.

    Without an input file the name is GENERATED. Raises UsageError if `given` is None and the input has no file name.
    """
    if given is None and document == "-":
        raise UsageError("a text from standard input has no name: name a folder with --work")
    name = Path(data or document or GENERATED).name
    if given is None and not name:
        raise UsageError(f"{data or document} is a folder; name a text file in it")
    return given or with_ending(Path(name), ".eval")


def read_contexts(inputs: Inputs, comparison: "Comparison") -> list[Context]:
    """Generate the contexts of all tasks at all lengths, or return the first published contexts of each task.

    Published contexts that are too long are shortened. Without `lengths`, contexts are generated at DEFAULT_LENGTH.

    Raises:
        UsageError: the answer to a published question would be cut out; or turns are requested, and no context has two
            questions, or questions have no expected answers. Also raises the errors of `Task.make` and `question_ids`.
    """
    if inputs.published:
        kept = _first_of_each_task(inputs.published, inputs.request.contexts)
        found = [_fit(_asked(context, inputs), inputs, comparison) for context in kept]
    else:
        found = [
            _asked(context, inputs)
            for task in inputs.tasks
            for length in inputs.lengths or [DEFAULT_LENGTH]
            for context in choose_task(task).make(replace(inputs.request, count=comparison.count, length=length))
        ]
    if inputs.turns and all(len(context.questions) == 1 for context in found):
        raise UsageError("--turns has no effect on contexts with one question; leave it out, or ask more questions")
    return found


def _asked(context: Context, inputs: Inputs) -> Context:
    """Limit a context to the requested number of questions, and make them turns if turns are requested.

    Raises:
        UsageError: turns are requested, and the questions have no expected answers.
    """
    context = replace(context, questions=context.questions[: inputs.request.questions])
    if inputs.turns and any(METRICS[question.metric].of_dense for question in context.questions):
        raise UsageError(f"--turns needs expected answers, and {context.task} has none; leave one of them out")
    return in_turns(context) if inputs.turns else context


def cut_notes(inputs: Inputs, comparison: "Comparison", contexts: Sequence[Context]) -> list[str]:
    """Return lines about the contexts that are not the whole input text.

    There is a line for each context that has the user's own questions, or one line about all published contexts.
    """
    request = replace(inputs.request, count=comparison.count)
    whole = {context.text for context in inputs.published}
    cut = [context.text for context in contexts if whole and context.text not in whole]
    if cut:
        lacking = f"{len(cut)} of {len(contexts)} documents of {inputs.name} lack their middle, and perhaps an answer"
        tokens = max(map(request.count, cut))
        return [f"{lacking}: they are cut to {tokens:,} tokens; a larger --length or a model with more positions helps"]
    asked = [context for context in contexts if request.pairs and "--pairs" in choose_task(context.task).options]
    return [line for context in asked if (line := cut_note(context, request, inputs.name))]


def answer_notes(comparison: "Comparison", contexts: Sequence[Context]) -> list[str]:
    """Return a line about expected answers to the user's questions that exceed the default length of an answer, if any.

    F1 then scores the beginning of an answer against all of an expected answer.
    """
    asked = [one for context in contexts if context.task in ASKED_BY_USER for one in context.questions]
    tokens = [min(len(comparison.loaded.tokenizer.tokenize(text)) for text in one.answers) for one in asked]
    over = [size for size, one in zip(tokens, asked, strict=True) if size > one.max_new_tokens]
    if not over or comparison.max_new_tokens is not None:
        return []
    has = "1 expected answer has" if len(over) == 1 else f"{len(over):,} expected answers have"
    longer = f"{has} more than {asked[0].max_new_tokens} tokens, after which a model's answer is cut"
    return [f"{longer}; --max-new-tokens {max(over)} cuts none"]


def _first_of_each_task(published: Sequence[Context], contexts: int) -> list[Context]:
    taken: dict[str, list[Context]] = {}
    for context in published:
        taken.setdefault(context.task, []).append(context)
    return [context for some in taken.values() for context in some[:contexts]]


def _fit(context: Context, inputs: Inputs, comparison: "Comparison") -> Context:
    """Cut out a context's middle if the context exceeds the requested length or does not fit the model.

    Raises:
        UsageError: the cut would remove the answer to a question. Also raises the errors of `question_ids`.
    """
    room = comparison.room(context)
    limit = min([*inputs.lengths, *([] if room is None else [room])], default=None)
    if limit is None:
        return context
    short = replace(context, text=shorten(context.text, comparison.count, limit))
    if any(_is_cut_out(question, context, short) for question in context.questions):
        needed = comparison.count(context.text)
        raise UsageError(
            f"--data, {context.name}: its {needed:,} tokens are cut to {limit:,}, which removes the answer to "
            f"its question; give --length {needed}, with a model that has this many positions"
        )
    return short


def _is_cut_out(question: Question, context: Context, short: Context) -> bool:
    """Whether `short`, a context without its middle, lacks a part of the needle or answer at its known position.

    Returns False if no single position is known.
    """
    if question.depth is None or short.text == context.text:
        return False
    first, half = round(question.depth * len(context.text)), len(short.text) // 2
    last = first + (len(question.needle) or max(map(len, question.answers)))
    return last > half and first < len(context.text) - half
