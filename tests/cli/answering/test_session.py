"""A saved talk: its next answer is the chat's where tokens attended to everything, and its rows are one build's."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.small_index import build_small, small_plan, with_changes

from sparsekv.cli.answering.session import save_session
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.models.load import identify
from sparsekv.indexing.build import build_index
from sparsekv.indexing.prefill.prefills import DensePrefill, KeyDiffPrefill, Prefill, QuokaPrefill
from sparsekv.runtime.attention.config import DecodeConfig, Dense
from sparsekv.runtime.decoding.answer import Sampling
from sparsekv.runtime.decoding.open import OpenIndex, open_index
from sparsekv.runtime.decoding.session import Conversation
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.selection.interface import Budget, MethodSpec

EVERYTHING = DecodeConfig(MethodSpec("squeezed", "", Squeezed(), False), Budget(1.0), question=Dense())
SAMPLING = Sampling(max_new_tokens=12)
BLOCK = {"tokens": 250, "chunk_size": 64}
"""With the template's six tokens a whole block of 256, whose last token is in no chunk: it was prefilled by itself."""


def saved(folder: Path, prefill: Prefill) -> tuple[Conversation, OpenIndex]:
    """A talk of two questions over an index, and the index that it was saved to."""
    index = build_small(folder / "doc.skv", prefill=prefill, **BLOCK)
    assert index.split.tokens == 256
    talk = Conversation(index, EVERYTHING)
    for question in ("Why?", "And then?"):
        talk.ask(question, SAMPLING)
    save_session(index, folder / "talk.skv", talk.turns, talk.config, raw=False, special_tokens=False, quiet=True)
    loaded = index.loaded
    return talk, open_index(Artifact(folder / "talk.skv"), loaded.model, loaded.tokenizer, identify(loaded))


@pytest.mark.parametrize(
    "prefill",
    [DensePrefill(), QuokaPrefill(prefill_budget=999), KeyDiffPrefill(prefill_budget=999)],
    ids=["dense", "quoka of everything", "keydiff of everything"],
)
def test_the_next_answer_is_the_talks(prefill: Prefill, tmp_path: Path) -> None:
    talk, index = saved(tmp_path, prefill)
    assert torch.equal(index.input_ids, talk.before(2))
    assert Conversation(index, EVERYTHING).ask("What next?", SAMPLING).ids == talk.ask("What next?", SAMPLING).ids


@pytest.mark.parametrize(
    "prefill", [QuokaPrefill(prefill_budget=24), KeyDiffPrefill(prefill_budget=24)], ids=["quoka", "keydiff"]
)
def test_over_a_sparse_prefill_its_rows_are_those_of_one_build(prefill: Prefill, tmp_path: Path) -> None:
    """Prefilled sparsely like the document's, which the talk's own rows in the chat were not."""
    talk, index = saved(tmp_path, prefill)
    plan = small_plan(prefill=prefill, **BLOCK)
    once = build_index(with_changes(plan, prompt=replace(plan.prompt, input_ids=talk.before(2))), tmp_path / "once.skv")
    manifest = index.artifact.manifest
    assert manifest.prefill == once.prefill
    assert {name: file.sha256 for name, file in manifest.files.items()} == {
        name: file.sha256 for name, file in once.files.items()
    }
