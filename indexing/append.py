"""Extend an index by appended tokens or more methods, in place or on a copy that is renamed once it is complete."""

import contextlib
import errno
import math
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from transformers import PreTrainedTokenizerBase

from sparsekv.formats.checksums import hash_bytes
from sparsekv.formats.documents.continuation import BETWEEN, encode_more
from sparsekv.formats.documents.plain_text import has_control_tokens
from sparsekv.formats.documents.prompt import FixedPrompt
from sparsekv.formats.errors import REBUILD, ArtifactError, UsageError, reason_of
from sparsekv.formats.index.folder import Folder, mark, sync_path
from sparsekv.formats.index.layout import check_values
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import MANIFEST, AdditionRecord, Border, ChatFrame, Manifest, given_parameters
from sparsekv.formats.index.writer import ArtifactWriter
from sparsekv.formats.models.load import LoadedModel
from sparsekv.formats.models.rope import rope_depends_on_length
from sparsekv.indexing.indexers.interface import Indexer, indexers
from sparsekv.indexing.plan import BuildPlan, Growth, config_of
from sparsekv.indexing.prefill.prefills import Prefill, prefill_name, prefills

OWNER = ".owner"


def cannot_write(folder: Path, error: OSError) -> ArtifactError:
    taken = error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
    remedy = "choose another name" if taken else "choose another name, or make room there"
    return ArtifactError(f"cannot write {folder}: {reason_of(error)}; {remedy}")


@contextmanager
def partial_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder next to `folder` that holds only its lock; rename it to `folder` on success, else remove it.

    Partial folders of the same name whose processes are dead are removed first.

    Raises:
        OSError: the folder cannot be made, or the name is taken.
    """
    _remove_dead(folder)
    unfinished, lock = _own(folder)
    try:
        yield unfinished
        unfinished.rename(folder)
        (folder / OWNER).unlink()
        sync_path(folder.absolute().parent)
    finally:
        with contextlib.suppress(OSError):
            _remove(unfinished)
        lock.release()


def _own(folder: Path) -> tuple[Path, FileLock]:
    while True:
        unfinished = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}.partial")
        unfinished.mkdir(parents=True)
        lock = FileLock(unfinished / OWNER)
        # Until this process has the lock, another process may take the folder for that of a dead process, and remove
        # it. Then try again with a new folder.
        with contextlib.suppress(FileNotFoundError, FileExistsError, Timeout):
            lock.acquire(timeout=0)
            if (unfinished / OWNER).exists():
                return unfinished, lock
            lock.release()


def _remove_dead(folder: Path) -> None:
    name = re.compile(rf"{re.escape(folder.name)}\.[0-9a-f]{{8}}\.partial")
    siblings = list(folder.parent.iterdir()) if folder.parent.is_dir() else []
    for path in siblings:
        if name.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            with contextlib.suppress(OSError, Timeout):
                _remove_if_dead(path)


def _remove_if_dead(unfinished: Path) -> None:
    if (unfinished / OWNER).exists():
        with FileLock(unfinished / OWNER).acquire(timeout=0):
            _remove(unfinished)
    else:
        unfinished.rmdir()  # fails unless empty: the folder's process died before it had the lock


def _remove(unfinished: Path) -> None:
    """Remove a folder, its lock file last: after an interruption the next process still sees that the owner is dead."""
    for path in unfinished.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != OWNER:
            path.unlink()
    shutil.rmtree(unfinished)


LEARNING_AGAIN = 1.25  # methods are built again when the text has grown by this factor, by the factor's square, ...


@dataclass(frozen=True)
class Addition:
    """Token ids [T] to append, and their text.

    Args:
        chat: the text that the model's chat template puts around the longer document and a question; None without a
            chat template.
        special_tokens: whether special tokens in the text kept their meaning.
        plain: special tokens that were read as plain text, with their counts.
        border: the end of the longer prompt's text, on which the first tokens of a question depend.
        first_line: line of the text at which its first token begins; None: unknown.
        control_tokens: whether the text has special tokens, so that its token ids depend on `special_tokens`.
    """

    input_ids: torch.Tensor
    text: str
    chat: ChatFrame | None
    special_tokens: bool = False
    plain: dict[str, int] = field(default_factory=dict)
    border: Border | None = None
    first_line: int | None = None
    control_tokens: bool = False


def encode_addition(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    chat: ChatFrame | None,
    border: Border | None = None,
    *,
    special_tokens: bool = False,
) -> Addition:
    """Tokenise a text that is appended to an index's prompt, and return it with its token ids.

    A blank line precedes the text. If the prompt ends with an answer, the text begins the next message instead.

    Args:
        chat: the text that the chat template puts around the prompt and a question.
        border: the end of the prompt's text, on which the first tokens of the appended text depend.
        special_tokens: whether special tokens in the text keep their meaning; otherwise they are plain text.

    Raises:
        SparsekvError: the special tokens of the text cannot be read as plain text.
    """
    encoded, after, end, line = encode_more(tokenizer, border, chat, text, special_tokens=special_tokens)
    return Addition(
        torch.tensor(encoded.ids),
        f"{BETWEEN}{text}",
        after,
        special_tokens,
        encoded.plain,
        end,
        line,
        has_control_tokens(tokenizer, text),
    )


def stored_indexers(manifest: Manifest) -> dict[str, Indexer]:
    """Make the indexers of an index's methods with their stored parameters.

    If an earlier revision of a method built the index, these indexers may build other tensors from the same parameters.

    Raises:
        ArtifactError: this version cannot build one of the methods.
    """
    known: dict[str, Callable[..., Indexer]] = dict(indexers())
    revisions = {name: indexer.revision for name, indexer in indexers().items()}
    found = {}
    for name, record in manifest.methods.items():
        if name not in known:
            raise ArtifactError(
                f"the index has the method {name}, which is not installed; install its package, or {REBUILD}"
            )
        if revisions[name] < record.revision:
            raise ArtifactError(
                f"method {name} was built by another version of sparsekv ({manifest.writer_version}), whose "
                f"algorithm this version does not have; {REBUILD}"
            )
        try:
            found[name] = known[name](**given_parameters(record.parameters))
        except (TypeError, ValueError, UsageError) as error:
            raise ArtifactError(f"parameters of {name} in the index are not valid: {error}; {REBUILD}") from None
    return found


def addition_record(addition: Addition) -> AdditionRecord:
    """Return the manifest's record of an addition. The record's sha256 depends on the text alone, not on the index."""
    text = addition.text.encode(errors="surrogatepass")
    return AdditionRecord(
        sha256=hash_bytes(text),
        tokens=len(addition.input_ids),
        first_line=addition.first_line,
        special_tokens=addition.special_tokens if addition.control_tokens else None,
    )


def clear_finished(folder: Path) -> None:
    """Remove leftovers of an append that was interrupted after it wrote its manifest; errors are ignored."""
    with suppress(ArtifactError), ArtifactWriter(folder) as writer:
        writer.clear_finished()


def online_methods(manifest: Manifest) -> frozenset[str]:
    """Return the names of the index's methods that can add appended tokens to their existing tensors.

    Methods that an earlier revision of their indexer built are left out. The result is empty if the model's RoPE
    depends on the prompt's length.
    """
    if rope_depends_on_length(manifest.rope.parameters):
        return frozenset()
    current = ((name, one) for name, one in stored_indexers(manifest).items() if one.takes_tokens)
    return frozenset(name for name, one in current if one.revision == manifest.methods[name].revision)


def learning_again(manifest: Manifest, added: int) -> frozenset[str]:
    """Return the names of methods that can append, but are built again from all tokens when `added` tokens are added.

    After a dense prefill these are the methods whose indexer has `learns`: codebooks that were learned from a shorter
    text fit a longer text worse. These methods are built again when the text's length reaches 1.25, 1.56, 1.95, ...
    times its first length. After a sparse prefill these are all methods that can append. The last chunk is then
    prefilled again, which changes rows from which the methods' tensors were built.
    """
    if not manifest.prefill.exact:
        return online_methods(manifest)
    before, after = _growth(manifest, 0), _growth(manifest, added)
    if math.floor(math.log(before, LEARNING_AGAIN)) == math.floor(math.log(after, LEARNING_AGAIN)):
        return frozenset()
    indexers = stored_indexers(manifest)
    return frozenset(name for name in online_methods(manifest) if indexers[name].learns)


def learning_line(manifest: Manifest, added: int) -> str:
    """Return a line that reports the methods that are built again, and why; empty if no method is built again."""
    names, times = ", ".join(sorted(learning_again(manifest, added))), _growth(manifest, added)
    why = f"the text has now {times:.2f} times its first length"
    if not manifest.prefill.exact:
        why = f"{manifest.prefill.kind} prefills the last chunk of {manifest.prefill.chunk_size} tokens again"
    return f"{names}: built anew from all tokens, as {why}" if names else ""


def _growth(manifest: Manifest, added: int) -> float:
    """Return the ratio of the text's length, with `added` tokens, to its length before anything was appended."""
    first = max(1, manifest.split.tokens - sum(one.tokens for one in manifest.additions))
    return (manifest.split.tokens + added) / first


def refuse_other_dtype(manifest: Manifest, dtype: str) -> None:
    """Raise UsageError unless `--dtype` is `auto` or the index's dtype, because all rows of an index have one dtype."""
    if dtype not in ("auto", manifest.dtype):
        raise UsageError(
            f"--dtype {dtype}: the index is in {manifest.dtype}, and added tokens and methods get the same dtype; "
            "leave the option out"
        )


def growing_plan(
    artifact: Artifact, loaded: LoadedModel, addition: Addition, *, chunk_size: int | None = None
) -> BuildPlan:
    """Return the plan of a build that appends tokens to an index.

    Sinks and tail keep their sizes, so the old tail becomes part of the middle (the indexed tokens).

    Args:
        chunk_size: tokens per forward pass; None for the index's chunk size after a sparse prefill, else for the
            device's default.

    Raises:
        ArtifactError: a file of the index is damaged, or this version cannot continue its prefill or a method.
        UsageError: the prefill was sparse, and the given `chunk_size` is not the index's; or an error of `BuildPlan`.
    """
    for _ in artifact.verify():
        pass
    manifest = artifact.manifest
    for name in manifest.files:
        folder = name.partition("/")[0]
        if folder == "samples" or folder in manifest.methods:
            check_values(artifact.tensors(name), manifest.split, f"{name} of {artifact.folder}")
    text_sha256 = hash_bytes((manifest.prompt.text_sha256 + addition.text).encode())
    online = online_methods(manifest) - learning_again(manifest, len(addition.input_ids))
    return BuildPlan(
        loaded=loaded,
        prompt=FixedPrompt(
            torch.cat([artifact.input_ids(), addition.input_ids]),
            text_sha256,
            addition.chat,
            manifest.prompt.special_tokens or addition.special_tokens,
            cut=manifest.prompt.max_tokens,
            border=addition.border,
            files=manifest.prompt.files,
            files_behind=manifest.prompt.files_behind,
            pages=manifest.prompt.pages,
            first_line=manifest.prompt.first_line,
        ),
        config=config_of(
            manifest, stored_indexers(manifest), stored_prefill(manifest), chunk_size_after(artifact, chunk_size)
        ),
        growth=Growth(online, addition_record(addition)),
        file_history=manifest.file_history,
        base=manifest.uuid,
    )


def chunk_size_after(artifact: Artifact, requested: int | None) -> int | None:
    """Return the chunk size for the prefill of tokens that follow an index.

    If the index's prefill was dense, the result is `requested`, which may be None. Otherwise it is the index's chunk
    size.

    Raises:
        UsageError: the prefill was sparse, and `requested` is not the index's chunk size.
    """
    manifest = artifact.manifest
    prefill, stored = stored_prefill(manifest), manifest.prefill.chunk_size
    if prefill.exact:
        return requested
    if requested not in (None, stored):
        raise UsageError(
            f"--chunk-size {requested}: {artifact.folder} was prefilled by {prefill_name(prefill)} in chunks of "
            f"{stored}, and appended tokens must be prefilled in the same way; leave the option out"
        )
    return stored


def stored_prefill(manifest: Manifest) -> Prefill:
    """Return the prefill that a manifest records. Raises ArtifactError if this version cannot repeat that prefill."""
    known: dict[str, Callable[..., Prefill]] = dict(prefills())
    try:
        return known[manifest.prefill.kind](**manifest.prefill.parameters)
    except (KeyError, TypeError, ValueError, UsageError) as error:
        raise ArtifactError(f"the prefill of the index cannot be repeated: {error}; {REBUILD}") from None


PIECE = 16 << 20


@contextmanager
def copied_index(artifact: Artifact, folder: Path) -> Iterator[Path]:
    """Yield a copy of an index as it was when opened; rename the copy to `folder` on success, else remove it.

    The files are hard links where the file system allows it: files of an index are replaced, never changed in place.
    Copies that killed processes left behind are removed first.

    Raises:
        ArtifactError: the folder exists or cannot be written.
    """
    try:
        with partial_folder(folder) as unfinished:
            copy = Folder(unfinished)
            mark(copy)
            for name, record in artifact.manifest.files.items():
                _copy(artifact.descriptor(name), copy, record.path)
            copy.write(MANIFEST, [artifact.manifest_data])
            yield unfinished
    except OSError as error:
        raise cannot_write(folder, error) from None


def _copy(descriptor: int, folder: Folder, path: str) -> None:
    try:
        folder.link(descriptor, path)
    except OSError:
        folder.write(path, _pieces(descriptor))


def _pieces(descriptor: int) -> Iterator[bytes]:
    place = 0
    while piece := os.pread(descriptor, PIECE, place):
        yield piece
        place += len(piece)


def adding_plan(
    artifact: Artifact, loaded: LoadedModel, methods: dict[str, Indexer], *, chunk_size: int | None = None
) -> BuildPlan:
    """Return the plan of a build that adds methods to an index and leaves everything else unchanged.

    Args:
        chunk_size: tokens per forward pass if queries have to be computed again; None for the index's chunk size after
            a sparse prefill, else for the device's default.

    Raises:
        ArtifactError: another version prefilled the index in a way that this version does not know.
        UsageError: the prefill was sparse, and the given `chunk_size` is not the index's; or an error of `BuildPlan`.
    """
    manifest = artifact.manifest
    prompt = manifest.prompt
    return BuildPlan(
        loaded=loaded,
        prompt=FixedPrompt(
            artifact.input_ids(),
            prompt.text_sha256,
            prompt.chat,
            prompt.special_tokens,
            cut=prompt.max_tokens,
            border=prompt.border,
            files=prompt.files,
            files_behind=prompt.files_behind,
            pages=prompt.pages,
            first_line=prompt.first_line,
        ),
        config=config_of(manifest, methods, stored_prefill(manifest), chunk_size_after(artifact, chunk_size)),
        file_history=manifest.file_history,
        base=manifest.uuid,
    )
