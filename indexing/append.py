"""More tokens for an index that is there: what its methods can do with them, and the build that takes them in."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from sparsekv.formats.checksums import hash_bytes
from sparsekv.formats.errors import ArtifactError, UsageError
from sparsekv.formats.plain_text import encode_text
from sparsekv.formats.reader import Artifact
from sparsekv.formats.schema import MANIFEST, ChatFrame, Manifest
from sparsekv.indexing.methods import Indexer, indexers
from sparsekv.indexing.models import LoadedModel
from sparsekv.indexing.partial_folder import partial_folder
from sparsekv.indexing.plan import BuildPlan, Growth
from sparsekv.indexing.prefill import Prefill, prefills
from sparsekv.indexing.prompt import FixedPrompt
from sparsekv.indexing.rope import rope_depends_on_length

BETWEEN = "\n\n"  # what stands between the document and text that is added to it


@dataclass(frozen=True)
class Addition:
    """input_ids [T] to add, the text they stand for, and the chat frame of a question that comes after it.

    `special_tokens` says that those of the text kept their meaning, `plain` how often which stand in it as plain text.
    """

    input_ids: torch.Tensor
    text: str
    chat: ChatFrame | None
    special_tokens: bool = False
    plain: dict[str, int] = field(default_factory=dict)


def encode_addition(
    tokenizer: PreTrainedTokenizerBase, text: str, chat: ChatFrame | None, *, special_tokens: bool = False
) -> Addition:
    """A text to be added after a blank line; tokens never join what is before with it.

    Args:
        special_tokens: let those of the text keep their meaning; otherwise they are plain text.

    Raises:
        SparsekvError: the special tokens of the text cannot be read as plain text.
    """
    text = f"{BETWEEN}{text}"
    encoded = encode_text(tokenizer, text, special_tokens=special_tokens)
    return Addition(torch.tensor(encoded.ids), text, chat, special_tokens, encoded.plain)


def stored_indexers(manifest: Manifest) -> dict[str, Indexer]:
    """The methods of an index with the parameters they were built with.

    Raises:
        ArtifactError: this version cannot build one of them as it was.
    """
    known: dict[str, Callable[..., Indexer]] = dict(indexers())
    revisions = {name: indexer.revision for name, indexer in indexers().items()}
    found = {}
    for name, record in manifest.methods.items():
        if revisions.get(name) != record.revision:
            raise ArtifactError(
                f"method {name} was built by another version of sparsekv ({manifest.writer_version}): nothing can be "
                "added to it; build the index again with `sparsekv build-index --force`"
            )
        parameters = {
            key: tuple(value) if isinstance(value, list) else value for key, value in record.parameters.items()
        }
        found[name] = known[name](**parameters)
    return found


def online_methods(manifest: Manifest) -> frozenset[str]:
    """Names of the methods of an index that take new tokens; none where every key changes with the prompt's length."""
    if rope_depends_on_length(manifest.rope["parameters"]):
        return frozenset()
    return frozenset(name for name, indexer in stored_indexers(manifest).items() if indexer.takes_tokens)


def refuse_other_dtype(manifest: Manifest, dtype: str) -> None:
    """Raise UsageError for a dtype, as a command takes it, in which rows could not lie beside those of an index."""
    if dtype not in ("auto", manifest.dtype):
        raise UsageError(f"--dtype {dtype}: the index is in {manifest.dtype} and grows in it; leave the option out")


def growing_plan(artifact: Artifact, loaded: LoadedModel, addition: Addition, *, chunk_size: int = 512) -> BuildPlan:
    """The build that adds tokens to an index: sinks and tail keep their sizes, so the old tail becomes middle.

    Raises:
        ArtifactError: a file of the index is damaged, or from another version.
    """
    for _ in artifact.verify():
        pass
    manifest = artifact.manifest
    text_sha256 = hash_bytes((manifest.prompt.text_sha256 + addition.text).encode())
    return BuildPlan(
        loaded=loaded,
        prompt=FixedPrompt(
            torch.cat([artifact.input_ids(), addition.input_ids]),
            text_sha256,
            addition.chat,
            manifest.prompt.special_tokens or addition.special_tokens,
        ),
        methods=stored_indexers(manifest),
        sinks=manifest.split.sinks,
        tail=manifest.split.tail,
        chunk_size=chunk_size if manifest.prefill.exact else manifest.prefill.chunk_size,
        prefill=_stored_prefill(manifest),
        rope_scaling=manifest.rope["scaling"],
        growth=Growth(manifest.uuid, online_methods(manifest)),
    )


def _stored_prefill(manifest: Manifest) -> Prefill:
    known: dict[str, Callable[..., Prefill]] = dict(prefills())
    return known[manifest.prefill.kind](**manifest.prefill.parameters)


@contextmanager
def copied_index(artifact: Artifact, folder: Path) -> Iterator[Path]:
    """A copy of an index to build upon, which takes the name `folder` at the end, and only if all went well.

    Files of an index are replaced and never changed in place, so the copy shares them with it where the disk can. What
    killed processes left of such copies goes away first.

    Raises:
        ArtifactError: the folder exists or cannot be written.
    """
    try:
        with partial_folder(folder) as unfinished:
            for path in [*(record.path for record in artifact.manifest.files.values()), MANIFEST]:
                target = unfinished / path
                target.parent.mkdir(parents=True, exist_ok=True)
                _link(artifact.folder / path, target)
            yield unfinished
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ArtifactError(f"cannot write {folder}: {reason}; choose another name, or make room there") from None


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
