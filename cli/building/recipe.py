"""Index documents for `build-index`: its options, the folder of each index, and the build of one document. A build
runs in one process or on several ranks, or adds methods to an existing index."""

import codecs
import os
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sparsekv.cli.building.pace import PaceMeter
from sparsekv.cli.common.console import note, note_plain, waiting
from sparsekv.cli.common.loading import load, load_for
from sparsekv.cli.common.process import pressed
from sparsekv.cli.common.stats import stored_line
from sparsekv.formats.checksums import hash_file, hash_json
from sparsekv.formats.device import peak_told
from sparsekv.formats.documents.document import UTF_8, Document, decode_text, marked_encoding, open_document, read_bytes
from sparsekv.formats.documents.document_hints import tune_hint
from sparsekv.formats.documents.extracted import told_blank_pages
from sparsekv.formats.documents.file_order import KnownFile, count_changes, in_order
from sparsekv.formats.documents.files import NAMED, Choice, SourceTexts, read_folder, read_several
from sparsekv.formats.documents.prompt import FixedPrompt, chat_frame, departure, encode_prompt
from sparsekv.formats.errors import (
    ENDING,
    TEXT_ENDINGS,
    ArtifactError,
    SparsekvError,
    UsageError,
    command,
    has_extension,
    with_ending,
)
from sparsekv.formats.index.build_folder import check_output
from sparsekv.formats.index.manifest import read_manifest
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import BY_PATH, CHANGED_LAST, MANIFEST, FileHistory, FileOrder, Manifest, Weights
from sparsekv.formats.models.find import EMBEDDED
from sparsekv.formats.models.load import LoadedModel, load_description, tokenizer_identity
from sparsekv.formats.models.rope import positions_of
from sparsekv.indexing.append import adding_plan, refuse_other_dtype
from sparsekv.indexing.build import build_index
from sparsekv.indexing.capture.team import Alone, Team
from sparsekv.indexing.existing_index import first_difference
from sparsekv.indexing.plan import PREFILL, BuildConfig, BuildPlan, Progress, check_positions, choose_chunk_size

if TYPE_CHECKING:  # only ranks need torch.distributed
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from sparsekv.formats.distributed.group import Ranks


_LONGEST_NAME = 255  # bytes; the limit of file systems for one file name
_LONGEST_LIST = 2**26  # bytes of a --from-file list; longer input is taken for a device that never ends


LONG = 1 << 15
"""Minimum number of characters of a text that is tokenised before the weights are loaded.

A text that is too long for the model is then refused early. In return, config and tokenizer are loaded twice, which
takes about half a second.
"""


@dataclass(frozen=True)
class Target:
    """A document as the user named it, and the folder of its index.

    Args:
        joined: with --as-one, the names of the files, folders and globs that form the document; otherwise empty.
    """

    document: str
    folder: Path
    joined: tuple[str, ...] = ()


def choose_targets(
    documents: Sequence[str], from_file: str | None, output: Path | None, *, as_one: bool = False
) -> list[Target]:
    """Choose the folder of the index for each document. A document that is named twice is taken once.

    Args:
        from_file: a file with the names of more documents, one per line; `-` for standard input.
        output: the folder of the index; if several documents may be named, the folder that contains their indices.
        as_one: all named files, folders and globs are one document.

    Raises:
        UsageError: no document is named, or no listed document exists. A document ends in .skv and does not exist.
            Standard input is named beside other documents or in a list. A document gives its index no name, or too long
            a name. Two documents would get the same index folder. Or `output` cannot hold several indices.
        SparsekvError: `from_file` cannot be read.
    """
    listed = [] if from_file is None else _names(from_file)
    named = _once([*documents, *listed])
    if not named:
        what = "name a text file, or - for standard input"
        if from_file is not None:
            listed_in = "standard input" if from_file == "-" else from_file
            what = f"{listed_in} has no names; put one per line there"
        raise UsageError(f"no document to index: {what}")
    if as_one:
        return [_joined(named, output)]
    if from_file == "-" and "-" in named:
        raise UsageError("standard input has the list of documents, so it cannot be a document as well; name a file")
    if "-" in listed:
        alone = command("build-index", "-", "--output", "NAME.skv")
        raise UsageError(f"{from_file} names standard input (-), which a list cannot contain; index it alone: {alone}")
    if listed and not any(os.path.exists(one) for one in listed):
        raise UsageError(
            f"no line of {from_file} names an existing file; if it is the document itself, give it without --from-file"
        )
    for one in named:
        if one.endswith(ENDING) and not os.path.exists(one):
            raise UsageError(
                f"no such file: {one}; if this is the name of the index to build, give it with -o: -o "
                f"{shlex.quote(one)}"
            )
    if len(named) == 1 and from_file is None:
        return [Target(named[0], output or folder_of(named[0]))]
    if "-" in named:
        raise UsageError("a document from standard input has no name: index it alone, with --output NAME.skv")
    _check_holds_several(output, {Path(one).suffix for one in named if has_extension(Path(one))})
    return _apart([Target(one, folder_of(one, output)) for one in named])


def _joined(names: list[str], output: Path | None) -> Target:
    if output is None and (len(names) > 1 or not os.path.exists(names[0])):
        raise UsageError("an index of several files has no name of its own: name the index with --output NAME.skv")
    return Target(names[0], output or folder_of(names[0]), tuple(names))


def folder_of(document: str, parent: Path | None = None) -> Path:
    """Return the folder of a document's index.

    Its name is the document's name with .skv instead of the extension; for a folder, .skv is appended to the name. The
    index is in `parent` if given, and otherwise next to the document.

    Raises:
        UsageError: the document is standard input or has no file name, or the added .skv makes the name too long.
    """
    if document == "-":
        raise UsageError("a document from standard input has no name: name the index with --output NAME.skv")
    path, folder = Path(document), os.path.isdir(document)
    if folder and path.name in ("", ".."):
        path = Path(os.path.abspath(document))
    if not path.name:
        raise UsageError(f"{document} has no name: name the index with --output NAME.skv")
    beside = path.with_name(f"{path.name}{ENDING}") if folder else with_ending(path)
    # If the document's own name is too long, opening the document reports that.
    if len(os.fsencode(Path(document).name)) <= _LONGEST_NAME < len(os.fsencode(beside.name)):
        raise UsageError(f"{document}: the name is too long to add .skv to it; name the index with --output NAME.skv")
    return beside if parent is None else parent / beside.name


def _names(from_file: str) -> list[str]:
    data = read_bytes(from_file, limit=_LONGEST_LIST, option="--from-file")
    if marked_encoding(data) == UTF_8:
        # File names may contain bytes that are not UTF-8.
        names = os.fsdecode(data.removeprefix(codecs.BOM_UTF8))
    else:
        names = decode_text(data, f"--from-file {from_file}")
    lines = (line.removesuffix("\r") for line in names.split("\n"))
    return [_as_written(line) for line in lines if line.strip()]


def _as_written(line: str) -> str:
    """Return the file name in a line.

    Blanks around the name are removed if a file has the name without the blanks, and no file has the name with them.
    """
    return line.strip() if not os.path.lexists(line) and os.path.lexists(line.strip()) else line


def _once(names: Sequence[str]) -> list[str]:
    """Return the names without repetitions. `a.txt` and `./a.txt` are the same path; the first spelling is kept."""
    paths: dict[str, str] = {}
    for one in names:
        paths.setdefault(_place(one), one)
    return list(paths.values())


def _place(name: str) -> str:
    """Return a path that is equal for all spellings of a name: its folder with links resolved, and its last part.

    `-` and a name with a zero byte, which no file can have, are returned unchanged.
    """
    folder, base = os.path.split(name)
    return name if name == "-" or "\0" in name else os.path.join(os.path.realpath(folder), base)


def _check_holds_several(output: Path | None, extensions: Collection[str]) -> None:
    """Raise UsageError if `output` cannot contain several indices.

    It cannot if it is a file or an index, or if its name ends in .skv. Nor can it if it does not exist and its name
    ends like a document's (`extensions`) or another text's: then a file was meant.
    """
    if output is None or (output.is_dir() and output.suffix != ENDING and not os.path.exists(output / MANIFEST)):
        return
    texts = {*extensions, *(Path(ending).suffix for ending in TEXT_ENDINGS)} - {""}
    if output.suffix in {ENDING, *texts} or output.exists():
        folder = output.with_suffix("")
        instead = "such as -o indices" if folder.exists() else f"such as -o {shlex.quote(str(folder))}"
        that = "it is an index, but " if (output / MANIFEST).exists() else ""
        raise UsageError(
            f"--output {output}: {that}each document gets an index of its own; name the folder for these "
            f"indices, {instead}"
        )


def _apart(targets: list[Target]) -> list[Target]:
    """Return the targets unchanged. Raises UsageError if two documents would have the same index folder."""
    taken: dict[str, str] = {}
    for one in targets:
        if (other := taken.setdefault(os.path.realpath(one.folder), one.document)) != one.document:
            raise UsageError(
                f"{other} and {one.document} would both be indexed in {one.folder}; build one of them alone, with "
                "--output NAME.skv"
            )
    return targets


@dataclass(frozen=True)
class BuildRecipe:
    """Options of `build-index` that apply to every document: build settings, model, and options of reading the text."""

    config: BuildConfig
    model: str | None
    device: str
    dtype: str
    max_tokens: int | None
    raw: bool
    special_tokens: bool
    quiet: bool
    encoding: str = UTF_8
    weights: Weights | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    order: FileOrder | None = None

    def load(self) -> LoadedModel:
        """Load the model that prefills the documents. Raises the errors of `cli.common.loading.load`."""
        scaling = self.config.rope_scaling
        return load(self.model, self.device, self.dtype, scaling, quiet=self.quiet, weights=self.weights)

    def index(
        self,
        target: Target,
        loaded: Callable[[], LoadedModel],
        show: Progress,
        team: Callable[[LoadedModel], Team] = lambda loaded: Alone(),
    ) -> None:
        """Build a document's index, or resume or update it.

        Args:
            loaded: returns the model; called only after the document and its index folder are checked.
            team: returns the processes that run the model.

        Raises:
            SparsekvError: the document, the folder or an option cannot be used.
        """
        with self._document(target) as text:
            check_output(target.folder)
            history = None
            if isinstance(text, SourceTexts):
                text, history = self._ordered(text, target.folder)
            early = self._early_prompt(text, target.folder) if self._may_be_long(text) else None
            model, before = loaded(), _finished(target.folder)
            prompt = early or self._prompt(model.tokenizer, text, target.folder)
            whole = "" if prompt.cut else text.text if isinstance(text, SourceTexts) else text.whole()
            differs = "" if prompt.cut else departure(model.tokenizer, prompt, whole)
            blank = told_blank_pages(_paged_texts(target.document, text))
        plan = BuildPlan(model, prompt, self.config, file_history=_of_table(history, prompt))
        if isinstance(text, SourceTexts) and early is None:
            self._tell_files(text, prompt, model.model.config)
        plan.split()  # a document that is too short is refused before notes say what is indexed
        for told in filter(None, (differs, blank)):
            note(told, quiet=self.quiet)
        note_plain("the document", prompt.plain, quiet=self.quiet)
        if prompt.cut:
            note(
                f"the document is longer than --max-tokens: its first {self.max_tokens:,} tokens are indexed"
                f"{cut_told(prompt)}",
                quiet=self.quiet,
            )
        tell = partial(note, quiet=self.quiet)
        with _told_of_old_index(target.folder, before):
            manifest = build_index(plan, target.folder, self._telling(plan, show), team(model), tell)
        built = before is None or before.uuid != manifest.uuid
        if built and (peak := peak_told(model.model)) is not None:
            tell(f"the build {peak}")
        tell_built(target.folder, before, manifest, quiet=self.quiet)

    def text_state(self, target: Target) -> str:
        """Return a hash of the content of a document's files; if they cannot be read, the error message."""
        try:
            if not target.joined and not os.path.isdir(target.document):
                return hash_file(Path(target.document))
            with self._document(target) as text:
                assert isinstance(text, SourceTexts)
                return hash_json([[file.path, file.sha256] for file in text.files])
        except (OSError, SparsekvError) as error:
            return str(error)

    @contextmanager
    def _document(self, target: Target) -> Iterator[Document | SourceTexts]:
        """Open the document of a target, or read its files."""
        if not target.joined and not os.path.isdir(target.document):
            with open_document(target.document, whole=self.max_tokens is None, encoding=self.encoding) as text:
                yield text
            return
        choice = Choice(self.include, self.exclude, self.encoding)
        one = len(target.joined) < 2 and os.path.isdir(target.document)
        with waiting("reading files", quiet=self.quiet):
            sources = read_folder(Path(target.document), choice) if one else read_several(target.joined, choice)
        yield sources

    def _ordered(self, sources: SourceTexts, folder: Path) -> tuple[SourceTexts, FileHistory]:
        """Order the files of a document, and return them with the order and the number of changes of each file.

        The order is the one of `--order`, or else of the index in the folder. Changes are counted on from this index.
        With --force the folder counts as empty. A note names files of that index that the document now lacks.

        Raises:
            UsageError: with `--max-tokens`, the order changed-last would cut off the files that change most.
        """
        before = None if self.config.force else _finished(folder)
        history = (before and before.file_history) or FileHistory()
        table = (before and before.prompt.files) or ()
        known = [KnownFile(file.path, file.sha256, history.changes.get(file.path, 0)) for file in table]
        order = self.order or history.order
        if order == CHANGED_LAST and self.max_tokens is not None:
            given = "" if self.order else f", which {folder} was built with,"
            raise UsageError(
                f"--order {CHANGED_LAST}{given} puts changed files at the end, which --max-tokens cuts off; give "
                f"another order, such as --order {BY_PATH}"
            )
        if gone := sources.told_gone({file.path: file.sha256 for file in table}):
            note(f"{folder} had files that are not in its document now: {gone}", quiet=self.quiet)
        ordered = in_order(sources, order, known)
        return ordered, FileHistory(order=order, changes=count_changes(ordered.files, known))

    def _prompt(self, tokenizer: "PreTrainedTokenizerBase", text: Document | SourceTexts, folder: Path) -> FixedPrompt:
        return encode_prompt(
            tokenizer,
            text,
            raw=self.raw,
            before=self._kept_head(tokenizer, _finished(folder), folder),
            max_tokens=self.max_tokens,
            special_tokens=self.special_tokens,
        )

    def _may_be_long(self, text: Document | SourceTexts) -> bool:
        """Whether to tokenise a document before the weights are loaded.

        True for a document of several files, because the note about its files is then printed early. Also true for an
        uncut text of at least `LONG` characters, because it may have too many tokens for the model.
        """
        return isinstance(text, SourceTexts) or (self.max_tokens is None and len(text.whole()) >= LONG)

    def _early_prompt(self, text: Document | SourceTexts, folder: Path) -> FixedPrompt | None:
        """Tokenise a document before the model's weights are loaded. Print a note about a document of several files.

        Returns None if the model's config or tokenizer cannot be loaded, such as before the model is downloaded.

        Raises:
            SparsekvError: the document has more tokens than the model has positions, or cannot be tokenised.
        """
        name = self.model or EMBEDDED
        try:
            config, tokenizer = load_description(name, self.config.rope_scaling, partial(note, quiet=self.quiet))
        except SparsekvError:  # `load` downloads a missing model, and raises any other error again
            return None
        with waiting("tokenising the document", quiet=self.quiet):
            prompt = self._prompt(tokenizer, text, folder)
        if isinstance(text, SourceTexts):
            self._tell_files(text, prompt, config)
        check_positions(prompt, config, name)
        return prompt

    def _tell_files(self, sources: SourceTexts, prompt: FixedPrompt, config: "PreTrainedConfig") -> None:
        held, there = len(prompt.files or ()), len(sources.files)
        files = f"{there:,} file{'s' * (there != 1)}" if held == there else f"{held:,} of {there:,} files"
        left_out = f"; {sources.told()}" if sources.left_out else ""
        tokens, positions = len(prompt.input_ids), positions_of(config)
        template = f"; with the chat template {tokens:,}" if prompt.template else ""
        holds = "" if positions is None else f" of {positions:,} that the model holds"
        note(f"{files}, {tokens - prompt.template:,} tokens{template}{holds}{left_out}", quiet=self.quiet)
        for told in filter(None, (sources.told_unmatched(), sources.told_detected())):
            note(told, quiet=self.quiet)

    def _kept_head(self, tokenizer: "PreTrainedTokenizerBase", before: Manifest | None, folder: Path) -> str | None:
        """Return the chat template's text before the document in the existing index, if a build must keep this text.

        The text is kept, with a note, if the template of the same tokenizer now gives another text, such as one with
        another date. With the new text, the whole document would be prefilled again. Returns None otherwise, and with
        --raw or --force.
        """
        if before is None or before.prompt.chat is None or self.raw or self.config.force:
            return None
        head, chat = before.prompt.chat.before, chat_frame(tokenizer)
        if chat is None or chat.before == head or before.tokenizer != tokenizer_identity(tokenizer):
            return None
        has, gives = first_difference(head, chat.before)
        note(
            f"{folder} keeps the chat template's text before the document from its build: {has!r}, where the template "
            f"now gives {gives!r}; --force takes the new text and prefills all tokens again",
            quiet=self.quiet,
        )
        return head

    def _telling(self, plan: BuildPlan, show: Progress) -> Progress:
        """Wrap `show` so that its first call notes how many tokens are indexed, and how long their prefill takes. The
        note is not printed earlier, because there may be nothing to build."""
        told, pace = False, PaceMeter(plan)

        def told_first(stage: str, done: int, of: int) -> None:
            nonlocal told
            if not told:
                takes = pace.told(done, of) if stage == PREFILL else ""
                note(
                    f"indexing {plan.split().tokens:,} tokens with {plan.loaded.name}{'; ' * bool(takes)}{takes}",
                    quiet=self.quiet,
                )
            told = True
            if stage == PREFILL:
                pace.show(done, of)
            show(stage, done, of)

        return told_first


def tell_built(folder: Path, before: Manifest | None, manifest: Manifest, *, quiet: bool) -> None:
    """Print notes after a build.

    If the index was already up to date, the only note says so. Otherwise a note states the error of int8 storage, if
    keys and values are in int8. Another note follows if the earlier index had a default of `tune` and the new one lacks
    it.

    Args:
        before: manifest of the earlier index; None if there was none.
    """
    if before is not None and manifest.uuid == before.uuid:
        note(f"{folder} is up to date: nothing to build", quiet=quiet)
        return
    if (stored := stored_line(manifest)) is not None:
        note(stored, quiet=quiet)
    if before is not None and before.defaults is not None and manifest.defaults is None:
        again = tune_hint(folder, before.defaults.target)
        told = "the default that tune found was for the earlier index and is no longer used"
        note(f"{told}; run {again} again", quiet=quiet)


def cut_told(prompt: FixedPrompt) -> str:
    """Return the end of a note, which names the file in which a document is cut, and the files after the cut.

    The text is empty for a document of one text.
    """
    told = [f"{file.path} is cut" for file in prompt.files or () if file.cut]
    if behind := prompt.files_behind:
        told.append(f"not in the index: {', '.join(behind[:NAMED])}{', ...' * (len(behind) > NAMED)}")
    return "".join(f"; {part}" for part in told)


def _paged_texts(name: str, text: Document | SourceTexts) -> list[tuple[str, str, Sequence[int]]]:
    """Return path, text and pages of each file of a document whose text has pages. `name` is the document's name."""
    if isinstance(text, SourceTexts):
        return [(file.path, file.text, file.pages) for file in text.files if file.pages]
    return [(name, text.whole(), text.pages)] if text.pages else []


def _of_table(history: FileHistory | None, prompt: FixedPrompt) -> FileHistory | None:
    """Return a history with only those files of a prompt's table that have ever changed; None without a history."""
    if history is None:
        return None
    counts = {file.path: history.changes[file.path] for file in prompt.files or ()}
    return history.model_copy(update={"changes": {path: count for path, count in counts.items() if count}})


@contextmanager
def _told_of_old_index(folder: Path, before: Manifest | None) -> Iterator[None]:
    """Within the context, if Ctrl-C is pressed, add to its message that the earlier index still answers.

    Nothing is added if there was no earlier index `before`, or if the folder no longer has that index.
    """
    try:
        yield
    except BaseException:
        interruption = pressed()
        if interruption is not None and before is not None:
            with suppress(ArtifactError):
                if Artifact(folder).manifest.uuid == before.uuid:
                    interruption.until_then = "answers are those of the old index"
        raise


def _finished(folder: Path) -> Manifest | None:
    """Return the manifest of the index in a folder, or None if there is no finished index that can be read."""
    try:
        return read_manifest(folder)
    except ArtifactError:
        return None


def index_by_ranks(ranks: "Ranks", recipe: BuildRecipe, target: Target, show: Progress) -> None:
    """Build a document's index on several ranks, or resume or update it. All ranks call this function together.

    Raises:
        SparsekvError: the ranks cannot share the model; or the errors of `BuildRecipe.index`.
    """
    of_model = recipe.model, str(ranks.device), recipe.dtype, recipe.config.rope_scaling
    loads = partial(load, *of_model, quiet=recipe.quiet, weights=recipe.weights)
    if not ranks.first:
        from sparsekv.indexing.distributed.requests import follow

        return follow(ranks, loads(ranks=ranks))

    from sparsekv.formats.distributed.group import splits_heads
    from sparsekv.indexing.distributed.requests import Leader

    def leader(loaded: LoadedModel) -> Leader:
        return Leader(ranks, split=splits_heads(loaded.model))

    config = recipe.config
    chunk_size = choose_chunk_size(config.chunk_size, ranks.device, config.prefill, ranks.size)
    chunked = replace(recipe, config=replace(config, chunk_size=chunk_size))
    chunked.index(target, lambda: loads(ranks=ranks), show, leader)


FIXED = (
    *("output", "max_tokens", "sinks", "tail", "prefill", "rope_scaling", "raw", "special_tokens", "force"),
    "checkpoints",
    *("kv_dtype", "weights", "ray", "workers", "from_file", "encoding", "as_one", "include", "exclude", "order"),
)
"""Options of a new index, which are refused when methods are added to an index."""


def index_among(documents: Sequence[str], *, ranks: bool) -> Path | None:
    """Return the index that the user named instead of a document, or None.

    Raises:
        UsageError: an index is named together with other documents, or while several ranks run the command.
    """
    folder = next((Path(one) for one in documents if (Path(one) / MANIFEST).is_file()), None)
    if folder is not None and (len(documents) > 1 or ranks):
        by_ranks = f"leave --gpus out, or name the index's document, with --output {shlex.quote(str(folder))}"
        what = by_ranks if ranks else "name it alone"
        raise UsageError(f"{folder} is an index, and adding methods to it is a build of its own; {what}")
    return folder


def add_methods(folder: Path, recipe: BuildRecipe, given: Iterable[str], show: Progress) -> None:
    """Build the methods of a recipe into an existing index.

    Args:
        given: the options of `FIXED` that are on the command line.

    Raises:
        UsageError: `given` is not empty.
        SparsekvError: the index or its model cannot be used.
    """
    for option in given:
        named = option.replace("_", "-")
        raise UsageError(
            f"--{named}: {folder} is an index, to which only methods are added; its text, keys and values stay as they "
            "are; leave the option out"
        )
    artifact = Artifact(folder, mending=True)
    before = artifact.manifest
    refuse_other_dtype(before, recipe.dtype)
    opened = load_for(artifact, recipe.model, recipe.device, recipe.dtype, quiet=recipe.quiet)
    plan = adding_plan(artifact, opened.loaded, recipe.config.methods, chunk_size=recipe.config.chunk_size)
    manifest = build_index(plan, folder, show, tell=partial(note, quiet=recipe.quiet))
    changed = {name for name, made in manifest.methods.items() if before.methods.get(name) != made}
    for told, names in (("added", changed - before.methods.keys()), ("built anew", changed & before.methods.keys())):
        if names:
            note(f"{told}: {', '.join(sorted(names))}", quiet=recipe.quiet)
    tell_built(folder, before, manifest, quiet=recipe.quiet)
