"""Operations on an index, in any order, give what a build from nothing gives of the same text and options."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference import assert_close
from support.small_index import INDEXERS, TEXT, small_plan, with_changes
from support.tiny_models import build_tiny, tiny_tokenizer
from transformers import Gemma2Config

from sparsekv.formats.documents.prompt import FixedPrompt, encode_prompt
from sparsekv.formats.errors import ArtifactError
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import Manifest, layer_file
from sparsekv.indexing.append import adding_plan, encode_addition, growing_plan
from sparsekv.indexing.build import build_index
from sparsekv.indexing.capture.team import LayerWork
from sparsekv.indexing.plan import BuildPlan
from sparsekv.indexing.prefill.prefills import DensePrefill, KeyDiffPrefill, Prefill, QuokaPrefill

PREFILLS: dict[str, Prefill] = {
    "dense": DensePrefill(),
    "quoka": QuokaPrefill(prefill_budget=24),
    "keydiff": KeyDiffPrefill(prefill_budget=40),
}
METHODS = ("multipole", "squeezed", "codes")
GROWS = ("multipole", "codes")
"""Methods whose tensors an append continues, so that a build from nothing makes other ones."""
DENSE, IN_8_BITS = 1e-4, 0.1
"""Largest relative error of rows: of other chunks of a dense prefill; of what rows in 8 bits lose, as in its tests."""


class _Killed(BaseException):
    """Raised in the place of an interruption."""


@cache
def _model() -> BuildPlan:
    return small_plan(tokens=300)


def _prompt(text: str) -> FixedPrompt:
    return encode_prompt(tiny_tokenizer(), text, raw=True)


def _plan(how: dict[str, Any], text: str, methods: tuple[str, ...]) -> BuildPlan:
    built = {name: INDEXERS[name] for name in methods}
    options = {**how, "prefill": PREFILLS[how["prefill"]]}
    return with_changes(_model(), prompt=_prompt(text), methods=built, **options)


def _again(manifest: Manifest, artifact: Artifact) -> BuildPlan:
    """The plan of a build from nothing of what an index says that it is."""
    prefill = PREFILLS[manifest.prefill.kind]
    return with_changes(
        _model(),
        prompt=FixedPrompt(artifact.input_ids(), manifest.prompt.text_sha256, None),
        methods={name: INDEXERS[name] for name in manifest.methods},
        sinks=manifest.split.sinks,
        tail=manifest.split.tail,
        chunk_size=manifest.prefill.chunk_size,
        prefill=prefill,
        kv_dtype=None if manifest.kv_storage is None else manifest.kv_storage.dtype,
    )


def _assert_as_from_nothing(folder: Path, anew: Path, *, grown: bool) -> None:
    """All tensors are those of a build from nothing: to the last bit after a sparse prefill, whose choices would not be
    the same for others; and every method's are those that it makes of the rows that are stored."""
    artifact = Artifact(folder)
    manifest = artifact.manifest
    straight = build_index(_again(manifest, artifact), anew)
    other = Artifact(anew)
    assert (manifest.split, manifest.layers, manifest.prefill) == (straight.split, straight.layers, straight.prefill)
    assert manifest.prompt.ids_sha256 == straight.prompt.ids_sha256
    assert manifest.files.keys() == straight.files.keys()
    exact = not manifest.prefill.exact
    if exact:
        sums = [{name: file.sha256 for name, file in one.files.items()} for one in (manifest, straight)]
        assert sums[0] == sums[1]
        assert (manifest.probe, manifest.methods) == (straight.probe, straight.methods)
        return
    tolerance = DENSE if manifest.kv_storage is None else IN_8_BITS
    for layer in range(len(manifest.layers)):
        for found, expected in zip(artifact.context(layer), other.context(layer), strict=True):
            assert_close(found, expected, tolerance)
        assert_close(artifact.queries(layer)["tail"], other.queries(layer)["tail"], tolerance)
        if (name := layer_file("samples", layer)) in manifest.files:
            assert torch.equal(artifact.tensors(name)["positions"], other.tensors(name)["positions"])
            assert_close(artifact.tensors(name)["queries"], other.tensors(name)["queries"], tolerance)
    for name in manifest.methods:
        if not (grown and name in GROWS):
            _assert_made_of_what_is_stored(artifact, name)


def _assert_made_of_what_is_stored(artifact: Artifact, name: str) -> None:
    manifest = artifact.manifest
    work = LayerWork(
        name, INDEXERS[name], manifest.split, manifest.dtype, manifest.layers, manifest.kv_storage is not None
    )
    for layer in manifest.indexed_layers:
        made = work.build(layer, work.input(layer, artifact.tensors))
        stored = artifact.tensors(layer_file(name, layer))
        assert made.keys() == stored.keys()
        assert all(torch.equal(made[key], stored[key]) for key in made), (name, layer)


def _kill_after(steps: int) -> Callable[[str, int, int], None]:
    def progress(stage: str, done: int, of: int) -> None:
        nonlocal steps
        steps -= 1
        if steps < 0:
            raise _Killed

    return progress


@dataclass
class _Sequence:
    """An index on which one operation after another is done, and its options and text."""

    folder: Path
    how: dict[str, Any]
    text: str
    methods: tuple[str, ...] = ("multipole",)
    grown: bool = False

    def build(self, killed: int | None = None) -> None:
        """A build of options and text, which gives `--force` where the index would not be replaced without."""
        plan = _plan(self.how, self.text, self.methods)
        try:
            self._run(plan, killed)
        except ArtifactError:
            self._run(with_changes(plan, force=True), killed)
        self.grown = False

    def _run(self, plan: BuildPlan, killed: int | None) -> None:
        if killed is not None:
            try:
                build_index(plan, self.folder, _kill_after(killed))
            except _Killed:
                return
        build_index(plan, self.folder)

    def append(self, text: str, killed: int | None = None) -> None:
        for after in [None] if killed is None else [killed, None]:
            artifact = Artifact(self.folder)
            addition = encode_addition(_model().loaded.tokenizer, text, None)
            try:
                plan = growing_plan(artifact, _model().loaded, addition)
                build_index(plan, self.folder, *([] if after is None else [_kill_after(after)]))
                break
            except _Killed:
                continue
        self.grown = True

    def add(self, name: str) -> None:
        plan = adding_plan(Artifact(self.folder), _model().loaded, {name: INDEXERS[name]})
        build_index(plan, self.folder)


lengths = st.sampled_from([255, 256, 257, 300, 384, 511, 512, 513])
steps = st.none() | st.integers(0, 12)
options = st.fixed_dictionaries(
    {
        "sinks": st.sampled_from([2, 4, 30]),
        "tail": st.sampled_from([8, 16]),
        "chunk_size": st.sampled_from([48, 64, 128]),
        "prefill": st.sampled_from(list(PREFILLS)),
        "kv_dtype": st.sampled_from([None, None, "int8"]),
    }
)
changes = st.one_of(
    st.tuples(st.just("option"), options, st.sampled_from(["sinks", "tail", "chunk_size", "prefill", "kv_dtype"])),
    st.tuples(st.just("length"), lengths),
    st.tuples(st.just("edit"), st.integers(0, 500)),
    st.tuples(st.just("append"), st.integers(1, 150)),
    st.tuples(st.just("add"), st.sampled_from(METHODS)),
)


@settings(max_examples=8)
@given(options, lengths, st.lists(st.tuples(changes, steps), min_size=1, max_size=3))
def test_any_sequence_of_operations_gives_what_a_build_from_nothing_gives(
    how: dict[str, Any], length: int, operations: list[tuple[tuple[Any, ...], int | None]]
) -> None:
    with tempfile.TemporaryDirectory() as place:
        index = _Sequence(Path(place) / "a.skv", how, TEXT[:length])
        index.build()
        for (kind, *given_), killed in operations:
            if kind == "append":
                index.append(TEXT[10_000 : 10_000 + given_[0]], killed)
                continue
            if kind == "add":
                index.add(given_[0])
                continue
            if kind == "option":
                index.how = {**index.how, given_[1]: given_[0][given_[1]]}
            elif kind == "length":
                index.text = TEXT[: given_[0]]
            else:
                index.text = index.text[: given_[0]] + "#" + index.text[given_[0] + 1 :]
            index.build(killed)
            index.build()
        _assert_as_from_nothing(index.folder, Path(place) / "b.skv", grown=index.grown)


@pytest.mark.parametrize("prefill", ["quoka", "keydiff"])
def test_other_sinks_prefill_a_sparse_index_again(prefill: str, tmp_path: Path) -> None:
    how = {"sinks": 2, "tail": 16, "chunk_size": 64, "prefill": prefill, "kv_dtype": None}
    index = _Sequence(tmp_path / "a.skv", how, TEXT[:400])
    index.build()
    index.how = {**how, "sinks": 20}
    index.build()
    _assert_as_from_nothing(index.folder, tmp_path / "b.skv", grown=False)


@pytest.mark.thinned
@pytest.mark.parametrize("tokens", [512, 600])
@pytest.mark.parametrize("append", [True, False], ids=["append", "longer"])
def test_a_longer_sparse_index_has_no_row_of_a_token_that_ran_alone(tokens: int, append: bool, tmp_path: Path) -> None:
    how = {"sinks": 4, "tail": 16, "chunk_size": 128, "prefill": "quoka", "kv_dtype": None}
    index = _Sequence(tmp_path / "a.skv", how, TEXT[:tokens], methods=METHODS)
    index.build()
    if append:
        index.append(TEXT[10_000:10_100])
    else:
        index.text = TEXT[: tokens + 100]
        index.build()
    _assert_as_from_nothing(index.folder, tmp_path / "b.skv", grown=append)


def test_a_config_that_changes_logits_alone_makes_all_tensors_of_methods_again(tmp_path: Path) -> None:
    """The keys of the first layer stay the same, and a build that goes on finds them there."""
    sums, folder = [], tmp_path / "a.skv"

    def stop(stage: str, done: int, of: int) -> None:
        if stage == "write context" and done == of:
            raise _Killed

    for softcap, place in ((3.0, folder), (50.0, folder), (50.0, tmp_path / "b.skv")):
        model = build_tiny(Gemma2Config, layer_types=["full_attention"] * 3, attn_logit_softcapping=softcap)()
        plan = small_plan(methods={"codes": INDEXERS["codes"]})
        plan = with_changes(plan, loaded=replace(plan.loaded, model=model))
        with pytest.raises(_Killed):
            build_index(plan, place, stop)
        build_index(plan, place)
        sums.append({name: file.sha256 for name, file in Artifact(place).manifest.files.items()})
    context, codes = layer_file("context", 0), layer_file("codes", 0)
    assert sums[0][context] == sums[1][context]
    assert sums[0][codes] != sums[1][codes]
    assert sums[1] == sums[2]
