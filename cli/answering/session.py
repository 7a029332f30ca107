"""Save a conversation as an index, so that another call can continue it."""

from pathlib import Path

import torch

from sparsekv.cli.common.console import note, progress
from sparsekv.formats.documents.turns import next_turn
from sparsekv.formats.errors import UsageError
from sparsekv.formats.models.load import LoadedModel
from sparsekv.formats.reader import Artifact
from sparsekv.indexing.append import Addition, growing_plan, refuse_other_dtype, stored_indexers
from sparsekv.indexing.build import build_index
from sparsekv.indexing.copied_index import copied_index
from sparsekv.runtime.decoding.open import OpenIndex


def refuse_unsavable(artifact: Artifact, folder: Path, dtype: str) -> None:
    """Check, before the answer is generated, that the session can be saved.

    Raises:
        UsageError: the name exists already or its folder does not, or the answer's rows would be of another dtype.
        ArtifactError: this version cannot build the index's methods.
    """
    if folder.exists():
        raise UsageError(f"--save-to {folder} exists already; give another name")
    if not folder.absolute().parent.is_dir():
        raise UsageError(f"--save-to {folder}: its folder does not exist; make it first")
    refuse_other_dtype(artifact.manifest, dtype)
    stored_indexers(artifact.manifest)


def save_session(
    opened: OpenIndex,
    folder: Path,
    question: torch.Tensor,
    answer: list[int],
    *,
    raw: bool,
    special_tokens: bool,
    quiet: bool,
) -> None:
    """Write a new index over the stored prompt, the question's token ids [Q] and the answer's [A].

    Args:
        raw: the question had no chat template around it.
        special_tokens: special tokens in the question kept their meaning.

    Raises:
        ArtifactError: it cannot be written, or the index that it extends is damaged.
    """
    identity, chat = opened.artifact.manifest.model, opened.artifact.manifest.prompt.chat
    ids = torch.cat([question, torch.tensor(answer)])
    if chat is not None and not raw:
        chat = next_turn(opened.tokenizer, chat, str(opened.tokenizer.decode(answer[-1:])))
    loaded = LoadedModel(opened.model, opened.tokenizer, identity.id, identity.revision)
    addition = Addition(ids, str(opened.tokenizer.decode(ids)), chat, special_tokens)
    plan = growing_plan(opened.artifact, loaded, addition)
    with copied_index(opened.artifact, folder) as copy, progress(quiet=quiet) as show:
        build_index(plan, copy, show)
    note(f"saved {folder}", quiet=quiet)
