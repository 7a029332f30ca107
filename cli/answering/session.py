"""Save a conversation as an index, so that another call can continue it."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from sparsekv.cli.common.console import note, progress
from sparsekv.formats.documents.document_hints import tune_hint
from sparsekv.formats.errors import UsageError, command
from sparsekv.formats.index.reader import Artifact
from sparsekv.indexing.append import (
    Addition,
    copied_index,
    growing_plan,
    learning_line,
    refuse_other_dtype,
    stored_indexers,
)
from sparsekv.indexing.build import build_index
from sparsekv.runtime.attention.config import DecodeConfig, Dense, Own, QuestionPrefill
from sparsekv.runtime.decoding.choose_config import attention_of
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.session import Place, Turn, add_turn
from sparsekv.runtime.selection.interface import DENSE
from sparsekv.runtime.selection.registry import changed_options, form_options


def refuse_unsavable(artifact: Artifact, folder: Path, dtype: str, option: str = "--save-to") -> None:
    """Raise an error early if a conversation cannot be saved as an index.

    Args:
        option: the option or command that an error names.

    Raises:
        UsageError: `folder` exists already, its parent folder does not exist, or the answer's keys and values would
            have another dtype than the index.
        ArtifactError: this version cannot build the index's methods.
    """
    if os.path.lexists(folder):
        raise UsageError(f"{option} {folder}: that name exists already; give another")
    if not folder.absolute().parent.is_dir():
        raise UsageError(f"{option} {folder}: the folder to write it in does not exist; create that folder first")
    refuse_other_dtype(artifact.manifest, dtype)
    stored_indexers(artifact.manifest)


def save_session(
    opened: OpenIndex,
    folder: Path,
    turns: Sequence[Turn],
    config: DecodeConfig,
    *,
    raw: bool,
    special_tokens: bool,
    quiet: bool,
) -> None:
    """Write a new index over the stored prompt, followed by the questions and answers.

    Args:
        config: the config of the last answer, whose options the suggested `chat` has.
        raw: whether the questions had no chat template around them.
        special_tokens: whether special tokens in the questions kept their meaning.

    Raises:
        ArtifactError: the new index cannot be written, or the old index is damaged. Also raises the other errors of
            `growing_plan` and `build_index`.
    """
    manifest = opened.artifact.manifest
    place, said = Place.behind(manifest.prompt), list[torch.Tensor]()
    for turn in turns:
        closed, place = add_turn(opened, place, turn, raw=raw)
        said.append(closed.tokens)
    tokens = torch.cat(said)
    text = str(opened.tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
    addition = Addition(tokens, text, place.chat, special_tokens, border=place.border)
    plan = growing_plan(opened.artifact, opened.loaded, addition)
    if learning := learning_line(manifest, len(tokens)):
        note(learning, quiet=quiet)
    if not manifest.prefill.exact:
        kind = manifest.prefill.kind
        told = f"in {folder} questions and answers are prefilled by {kind}, as the document was"
        note(f"{told}; later answers may differ from those that this conversation would have got", quiet=quiet)
    with copied_index(opened.artifact, folder) as copy, progress(quiet=quiet) as show:
        build_index(plan, copy, show, tell=partial(note, quiet=quiet))
    if manifest.defaults is not None:
        again_with = tune_hint(folder, manifest.defaults.target)
        told = "the default that tune found for the old index is not saved in the new one"
        note(f"{told}; find one with {again_with}", quiet=quiet)
    options = ["--raw"] * raw + ["--special-tokens"] * special_tokens + attention_options(opened.artifact, config)
    note(f"saved {folder}; {command('chat', '--index', folder, *options)} goes on with it", quiet=quiet)


def attention_options(artifact: Artifact, config: DecodeConfig) -> list[str]:
    """Return the options of `chat` that choose a config; none for the default that `tune` stored in the index."""
    attention, question, options = config.attention, config.question, list[str]()
    if config.origin:
        return options
    if isinstance(attention, Dense):
        options += ["--method", DENSE]
    else:
        if attention.name != attention_of(artifact, None)[0]:
            options += ["--method", attention.name]
        if config.budget != attention.method.default_budget(artifact.manifest.split.middle):
            options += ["--budget", str(config.budget)]
        options += form_options(attention)
    if isinstance(question, QuestionPrefill):
        options += ["--prefill", question.name, "--prefill-budget", str(question.budget)]
        options += changed_options(question.method)
    elif isinstance(question, Own):
        options += ["--prefill", Own.name]
    return options + (["--placement", config.placement] if config.placement != "device" else [])
