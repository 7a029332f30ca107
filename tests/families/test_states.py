"""Models whose layers do not all attend: everything that continues their states, against plain transformers."""

import math
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.causal_families import families, has_plan, tiny_config, tiny_model
from support.configs import sparse
from support.engines import answered, count_rows_on_the_device, packed
from support.interrupted import interrupted_builds
from support.plain_talk import QUESTIONS, SAMPLING, plain_answer, plain_talk
from support.reference import assert_close
from support.sealing import change_tensors
from support.small_index import INDEXERS, TEXT, reopen, small_plan, with_changes
from support.tiny_models import tiny_tokenizer
from torch._dynamo.utils import counters

from sparsekv.formats.distributed.group import shares_of
from sparsekv.formats.documents.prompt import encode_prompt
from sparsekv.formats.errors import ArtifactError, UsageError
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import Manifest, state_file
from sparsekv.formats.models.load import LoadedModel
from sparsekv.indexing.append import encode_addition, growing_plan
from sparsekv.indexing.build import build_index
from sparsekv.indexing.capture.canary import preflight
from sparsekv.indexing.convert import convert_index
from sparsekv.indexing.plan import BuildPlan, plan_memory
from sparsekv.indexing.prefill.prefills import QuokaPrefill
from sparsekv.runtime.attention.config import Dense
from sparsekv.runtime.decoding.answer import question_ids
from sparsekv.runtime.decoding.compiled import compile_layers
from sparsekv.runtime.decoding.engine import Request, generate, prefill_question
from sparsekv.runtime.decoding.open import OpenIndex, plan_opening
from sparsekv.runtime.decoding.perplexity import perplexity
from sparsekv.runtime.decoding.session import Conversation, Session
from sparsekv.runtime.methods.codes import Codes
from sparsekv.runtime.methods.multipole import Multipole
from sparsekv.runtime.reporting.questions import question_queries
from sparsekv.runtime.reporting.recall import MeasuredQueries
from sparsekv.runtime.reporting.report import recall_report
from sparsekv.runtime.selection.interface import Budget
from sparsekv.runtime.tracing.trace import TracedIndex
from sparsekv.runtime.tuning.goals import ModelMeter

FAMILIES = [
    name
    for name in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "falcon_h1", "bamba", "lfm2", "granitemoehybrid",
                 "nemotron_h", "olmo_hybrid", "zaya")
    if name in families()
]  # fmt: skip
FEW = ["qwen3_next", "falcon_h1", "lfm2"]
"""A recurrent state beside a convolution's, in other layers than rows and in the same; a convolution's alone."""


def _others_slow(names: list[str], fast: list[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in names]


EACH, ANY = _others_slow(FAMILIES, ["qwen3_next"]), _others_slow(FEW, ["qwen3_next"])
METHODS = {"codes": INDEXERS["codes"], "multipole": INDEXERS["multipole"]}
ALL = Budget(1.0)
CODES = sparse("codes", Codes(), ALL)
EXACT = 1e-4


@cache
def _loaded(family: str) -> LoadedModel:
    return LoadedModel(tiny_model(tiny_config(family)), tiny_tokenizer(), f"tiny-{family}", None)


def _plan(family: str, text: str = TEXT[:300], **changes: object) -> BuildPlan:
    plan = small_plan(loaded=_loaded(family), methods={"codes": INDEXERS["codes"]})
    return with_changes(plan, prompt=encode_prompt(tiny_tokenizer(), text), **changes)


@pytest.fixture(scope="module")
def index(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OpenIndex:
    folder = tmp_path_factory.mktemp("states") / "a.skv"
    plan = _plan(request.param, methods=METHODS)
    build_index(plan, folder)
    return reopen(plan, folder)


def _grow(folder: Path, loaded: LoadedModel, text: str) -> Manifest:
    artifact = Artifact(folder)
    addition = encode_addition(loaded.tokenizer, text, artifact.manifest.prompt.chat, artifact.manifest.prompt.border)
    return build_index(growing_plan(artifact, loaded, addition), folder)


def _check_like(index: OpenIndex, other: OpenIndex) -> None:
    """Two indices of one prompt have the same rows and states, beside rounding."""
    one, two = index.artifact, other.artifact
    assert torch.equal(index.input_ids, other.input_ids)
    assert one.manifest.attending.keys() == two.manifest.attending.keys()
    for layer in one.manifest.attending:
        for actual, expected in zip(one.context(layer), two.context(layer), strict=True):
            assert_close(actual, expected, EXACT)
        assert_close(one.queries(layer)["tail"], two.queries(layer)["tail"], EXACT)
    for tokens in {*one.manifest.states} & {*two.manifest.states}:
        states = one.state(tokens)
        assert states.keys() == two.state(tokens).keys()
        for name, expected in two.state(tokens).items():
            assert_close(states[name], expected, EXACT)
    assert index.split.tokens in one.manifest.states


def _asked(index: OpenIndex) -> list[torch.Tensor]:
    return [question_ids(index, text) for text in ("Why?", "What is an assertion, and what raises one?", "Who?")]


def _plain(index: OpenIndex, asked: list[torch.Tensor]) -> list[list[int]]:
    return [plain_answer(index, torch.cat([index.input_ids, one])) for one in asked]


@pytest.mark.parametrize("index", EACH, indirect=True)
def test_answers_one_by_one_again_together_and_in_a_talk_are_the_plain_models(index: OpenIndex) -> None:
    """Each begins with the state at the document's end, also after others over the same cache."""
    asked = _asked(index)
    expected = _plain(index, asked)
    for over in (index.dense_cache(), index.cache(CODES)):
        assert [generate(index, over, one, SAMPLING).ids for one in (*asked, asked[0])] == [*expected, expected[0]]
        found = answered(packed(index, over, 2), asked, SAMPLING)
        assert [found[number].ids for number in range(3)] == expected
        assert generate(index, over, asked[1], SAMPLING).ids == expected[1]
    talk = Conversation(index, CODES)
    assert [talk.ask(question, SAMPLING).ids for question in QUESTIONS] == list(plain_talk(index))


@pytest.mark.parametrize("index", ANY, indirect=True)
def test_answers_from_a_prefilled_question_begin_with_the_state_after_it(index: OpenIndex) -> None:
    """In every cache, in any order, one by one and together."""
    asked = _asked(index)
    expected = _plain(index, asked)
    prefilled = [prefill_question(index, index.dense_cache(), one) for one in asked]
    requests = [Request(one, SAMPLING, prefilled=kept) for one, kept in zip(asked, prefilled, strict=True)]
    for over in (index.dense_cache(), index.cache(replace(CODES, question=Dense()))):
        for number in (0, 2, 1, 0):
            answer = generate(index, over, asked[number], SAMPLING, prefilled=prefilled[number])
            assert answer.ids == expected[number]
        found = dict(packed(index, over, 2).answers(requests))
        assert [found[number].ids for number in range(3)] == expected


@pytest.mark.parametrize("index", ANY, indirect=True)
def test_a_talk_goes_on_after_a_cancelled_question_another_setting_and_forgetting(index: OpenIndex) -> None:
    expected = list(plain_talk(index))
    talk = Conversation(index, CODES)
    assert talk.ask(QUESTIONS[0], SAMPLING).ids == expected[0]

    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        talk.ask("What else is there?", SAMPLING, on_text=interrupt)
    assert talk.ask(QUESTIONS[1], SAMPLING).ids == expected[1]
    talk.switch(sparse("multipole", Multipole(stream=True, buffer=16), ALL))
    assert talk.ask(QUESTIONS[2], SAMPLING).ids == expected[2]
    talk.forget()
    assert talk.ask(QUESTIONS[0], SAMPLING).ids == expected[0]


@pytest.mark.parametrize("index", ANY, indirect=True)
def test_steps_as_a_gpu_takes_them(index: OpenIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    count_rows_on_the_device(monkeypatch)
    asked = _asked(index)
    cache = index.cache(CODES)
    assert [generate(index, cache, one, SAMPLING).ids for one in asked] == _plain(index, asked)


@pytest.mark.parametrize("index", ANY, indirect=True)
def test_layers_are_compiled_for_steps_of_several_sequences(index: OpenIndex) -> None:
    """In these steps each sequence is a row of the model's batch."""
    asked, compiled = _asked(index), replace(index, model=deepcopy(index.model))
    torch._dynamo.reset()
    counters.clear()
    engine = packed(compiled, compiled.dense_cache(), 3)
    compile_layers(compiled.model, backend="aot_eager", shape=engine.cache.step_shape)
    try:
        engine.warm_up()
        assert counters["stats"]["unique_graphs"] > 0
        assert [answered(engine, asked, SAMPLING)[number].ids for number in range(3)] == _plain(index, asked)
    finally:
        torch.compiler.set_stance("default")
        torch._dynamo.reset()


@pytest.mark.parametrize("index", ANY, indirect=True)
def test_a_step_overwrites_its_states_in_place(index: OpenIndex) -> None:
    """A captured step refers to their addresses."""
    cache = index.dense_cache()
    before, states = cache.buffers()[-1], {name: tensor.clone() for name, tensor in cache.live_states().items()}
    generate(index, cache, _asked(index)[0], SAMPLING)
    assert cache.buffers()[-1] == before
    assert any(not torch.equal(tensor, states[name]) for name, tensor in cache.live_states().items())
    cache.rewind()
    assert all(torch.equal(tensor, states[name]) for name, tensor in cache.live_states().items())
    engine = packed(index, cache, 2)
    first = {name: tensor.data_ptr() for name, tensor in engine.cache.live_states().items()}
    answered(engine, _asked(index), SAMPLING)
    assert {name: tensor.data_ptr() for name, tensor in engine.cache.live_states().items()} == first


@pytest.mark.parametrize("family", EACH)
def test_an_append_goes_on_from_the_old_tail_and_gives_what_one_build_gives(family: str, tmp_path: Path) -> None:
    more = TEXT[300:420]
    plan, whole = _plan(family), _plan(family, f"{TEXT[:300]}\n\n{more}")
    first = build_index(plan, tmp_path / "a.skv")
    lengths = list[int]()
    handle = plan.loaded.model.register_forward_pre_hook(
        lambda module, given, named: lengths.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    grown = _grow(tmp_path / "a.skv", plan.loaded, more)
    handle.remove()
    build_index(whole, tmp_path / "b.skv")
    index = reopen(plan, tmp_path / "a.skv")
    _check_like(index, reopen(whole, tmp_path / "b.skv"))
    assert grown.parent_uuid == first.uuid
    assert max(lengths) < first.split.tokens
    asked = _asked(index)
    assert [generate(index, index.cache(CODES), one, SAMPLING).ids for one in asked] == _plain(index, asked)


@pytest.mark.parametrize("family", ANY)
def test_an_edit_begins_anew_or_at_the_last_checkpoint_before_it(family: str, tmp_path: Path) -> None:
    for checkpoints, length, states in ((None, 300, 3), (1, 700, 5)):
        text, edited = TEXT[:length], f"{TEXT[: length - 100]}And more.{TEXT[length - 100 : length]}"
        folder, ends = tmp_path / f"{checkpoints}.skv", list[int]()
        first = build_index(_plan(family, text, checkpoints=checkpoints), folder)
        assert len(first.states) == states
        plan = _plan(family, edited, checkpoints=checkpoints)
        build_index(plan, folder, lambda stage, done, of, ends=ends: ends.append(done) if stage == "prefill" else None)
        assert ends[0] == (0 if checkpoints is None else 512)  # tokens that are not prefilled
        assert ends[1] <= 128 if checkpoints is None else ends[1] > 512
        build_index(plan, tmp_path / f"{checkpoints}-new.skv")
        index = reopen(plan, folder)
        _check_like(index, reopen(plan, tmp_path / f"{checkpoints}-new.skv"))
        asked = _asked(index)[:1]
        assert [generate(index, index.cache(CODES), one, SAMPLING).ids for one in asked] == _plain(index, asked)


def test_checkpoints_stay_as_far_apart_after_an_append(tmp_path: Path) -> None:
    plan = _plan("lfm2", TEXT[:600], checkpoints=1)
    first = build_index(plan, tmp_path / "a.skv")
    kept = {tokens: first.files[state_file(tokens)] for tokens in (256, 512)}
    grown = _grow(tmp_path / "a.skv", plan.loaded, TEXT[600:1000])
    assert {tokens: grown.files[state_file(tokens)] for tokens in kept} == kept
    assert {768, 1024} & {*grown.states} == {tokens for tokens in (768, 1024) if tokens < grown.split.tokens}
    needed = {grown.split.tokens, grown.split.tokens - 1, grown.split.tokens - grown.split.tail}
    assert {tokens for tokens in grown.states if tokens % 256} == needed


@pytest.mark.parametrize(("tail", "states"), [(44, (512, 768)), (300, (256, 512, 768))])
def test_a_checkpoint_that_every_index_needs_counts_after_an_append(
    tail: int, states: tuple[int, ...], tmp_path: Path
) -> None:
    """The tail begins at a checkpoint: the only one, or one of two."""
    plan = _plan("lfm2", TEXT[: 250 + tail], checkpoints=1)  # the template has 6 tokens
    first = build_index(with_changes(plan, tail=tail), tmp_path / "a.skv")
    assert first.split.tokens - tail == 256
    grown = _grow(tmp_path / "a.skv", plan.loaded, TEXT[600:1150])
    assert {*states} <= {*grown.states}


@pytest.mark.slow
@pytest.mark.parametrize("family", FEW)
def test_a_killed_build_is_resumed_to_the_same_index(family: str, tmp_path: Path) -> None:
    plan = _plan(family)
    build_index(plan, tmp_path / "whole.skv")
    whole = reopen(plan, tmp_path / "whole.skv")
    root = tmp_path / "killed"
    root.mkdir()
    for number, folder in enumerate(interrupted_builds(root, lambda folder: build_index(plan, folder))):
        if number % 7 == 3:
            build_index(plan, folder)
            _check_like(reopen(plan, folder), whole)


@pytest.mark.parametrize("family", ANY)
def test_states_stay_exact_where_rows_are_in_int8(family: str, tmp_path: Path) -> None:
    exact = _plan(family)
    build_index(exact, tmp_path / "exact.skv")
    build_index(with_changes(exact, kv_dtype="int8"), tmp_path / "a.skv")
    convert_index(Artifact(tmp_path / "exact.skv"), "int8", tmp_path / "b.skv", torch.device("cpu"), lambda *_: None)
    stored = Artifact(tmp_path / "exact.skv")
    for name in ("a.skv", "b.skv"):
        index = reopen(exact, tmp_path / name)
        again = build_index(with_changes(exact, kv_dtype="int8"), tmp_path / name)
        assert again.uuid == index.artifact.manifest.uuid
        for tokens in stored.manifest.states:
            for tensor, expected in stored.state(tokens).items():
                assert torch.equal(index.artifact.state(tokens)[tensor], expected)
        asked = _asked(index)
        generate(index, index.cache(CODES), asked[0], SAMPLING)


@pytest.mark.parametrize("family", ANY)
def test_an_append_and_an_edit_over_int8_rows_are_near_a_new_build(family: str, tmp_path: Path) -> None:
    """Appended tokens attend to rounded rows, so their states are rounded too; those before them are exact."""
    text, more = TEXT[:600], TEXT[600:700]
    plan = _plan(family, text, kv_dtype="int8", checkpoints=1)
    build_index(plan, tmp_path / "a.skv")
    _grow(tmp_path / "a.skv", plan.loaded, more)
    whole = _plan(family, f"{text}\n\n{more}", kv_dtype="int8", checkpoints=1)
    build_index(whole, tmp_path / "b.skv")
    edited = with_changes(plan, prompt=encode_prompt(tiny_tokenizer(), f"{TEXT[:580]}other{TEXT[580:600]}"))
    build_index(plan, tmp_path / "c.skv")
    build_index(edited, tmp_path / "c.skv")
    build_index(edited, tmp_path / "d.skv")
    for one, other in (("a", "b"), ("c", "d")):
        index, new = reopen(plan, tmp_path / f"{one}.skv"), reopen(plan, tmp_path / f"{other}.skv")
        assert torch.equal(index.input_ids, new.input_ids)
        assert index.artifact.manifest.states[:2] == new.artifact.manifest.states[:2] == [256, 512]
        for tokens in (256, 512, index.split.tokens):
            for name, expected in new.artifact.state(tokens).items():
                apart = (index.artifact.state(tokens)[name] - expected).norm() / expected.norm()
                assert float(apart) <= (0.2 if tokens > 512 else EXACT), (one, tokens, name)


def test_a_build_again_over_int8_rows_has_the_probe_of_its_own_states(tmp_path: Path) -> None:
    plan = _plan("falcon_h1", TEXT[:600], kv_dtype="int8")
    build_index(plan, tmp_path / "a.skv")
    build_index(with_changes(plan, sinks=5), tmp_path / "a.skv")
    reopen(plan, tmp_path / "a.skv")


def test_a_wrong_state_of_a_converted_index_is_told(tmp_path: Path) -> None:
    plan = _plan("falcon_h1")
    manifest = build_index(plan, tmp_path / "exact.skv")
    convert_index(Artifact(tmp_path / "exact.skv"), "int8", tmp_path / "b.skv", torch.device("cpu"), lambda *_: None)
    last = state_file(manifest.split.tokens)
    change_tensors(tmp_path / "b.skv", last, lambda tensors: {name: 2 * one for name, one in tensors.items()})
    with pytest.raises(ArtifactError, match=r"differs by .*; int8 storage changes it too much, or it is damaged; "):
        reopen(plan, tmp_path / "b.skv")


def test_an_exact_build_takes_no_state_that_followed_rows_in_int8(tmp_path: Path) -> None:
    folder, whole = tmp_path / "a.skv", _plan("falcon_h1", f"{TEXT[:300]}\n\n{TEXT[300:400]}")
    plan = _plan("falcon_h1", kv_dtype="int8")
    build_index(plan, folder)
    _grow(folder, plan.loaded, TEXT[300:400])
    build_index(with_changes(whole, kv_dtype="int8"), folder)
    build_index(whole, folder)
    build_index(whole, tmp_path / "b.skv")
    _check_like(reopen(whole, folder), reopen(whole, tmp_path / "b.skv"))


@pytest.mark.parametrize("family", ANY)
def test_memory_is_planned_for_states(family: str, tmp_path: Path) -> None:
    plan = _plan(family)
    manifest = build_index(plan, tmp_path / "a.skv")
    state = preflight(plan.loaded.model, plan.prompt.input_ids, family)
    stored = Artifact(tmp_path / "a.skv").state(manifest.split.tokens)
    assert state == sum(tensor.nbytes for tensor in stored.values())
    assert plan_memory(plan, 0, state).states >= 2 * state
    opening = plan_opening(Artifact(tmp_path / "a.skv"), plan.loaded.model)
    assert 2 * state <= opening.states <= 2 * state + 20_000


@pytest.mark.parametrize("index", ANY, indirect=True)
def test_reports_are_of_the_layers_that_attend(index: OpenIndex) -> None:
    artifact = index.artifact
    for queries in (MeasuredQueries(artifact), question_queries(index, ["Why?", "What is an assertion?"])):
        report = recall_report(artifact, ["codes"], [ALL], queries)
        assert {row.layer for row in report.rows} == {*artifact.manifest.indexed_layers}
        assert all(row.output_error < 1e-3 for row in report.rows)
    asked = _asked(index)[0]
    answer, document = TracedIndex(index, CODES).trace(asked, SAMPLING.max_new_tokens, truth=True)
    assert answer.ids == _plain(index, [asked])[0]
    assert document["layers"] == artifact.manifest.indexed_layers
    with pytest.raises(UsageError, match="--without: the model has layers with a state"):
        TracedIndex(index, CODES).hide(["assertion"])
    with pytest.raises(UsageError, match="--target-perplexity"):
        ModelMeter(index, calibration=True)
    assert math.isfinite(perplexity(index, index.cache(CODES), asked))


def test_what_a_build_cannot_carry_states_through_is_refused_before_it_begins(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--prefill quoka.*has layers with a state"):
        _plan("lfm2", prefill=QuokaPrefill(prefill_budget=24))
    for family in ("lfm2", "falcon_h1", "bamba", "zaya"):
        if family not in families() or has_plan(family):
            continue
        with pytest.raises(
            UsageError, match=f"transformers has no plan to split model 'tiny' \\({family}\\); use one GPU"
        ):
            shares_of(tiny_config(family), "tiny", 2)
    with pytest.raises(UsageError, match="every layer of tiny-llama attends"):
        small_plan(checkpoints=2)
    with pytest.raises(UsageError, match="--checkpoints 0: give at least 1"):
        _plan("lfm2", checkpoints=0)


def test_a_plan_of_transformers_that_splits_states_is_refused() -> None:
    config = tiny_config("qwen3_next")
    shares_of(config, "tiny", 2)
    config.base_model_tp_plan = config.base_model_tp_plan | {"layers.*.linear_attn.in_proj_qkvz": "colwise"}
    with pytest.raises(UsageError, match=r"plan to split model 'tiny' \(qwen3_next\) also splits the states"):
        shares_of(config, "tiny", 2)


@pytest.mark.parametrize("index", ANY, indirect=True)
def test_sources_are_of_the_layers_that_attend(index: OpenIndex) -> None:
    """The same for a question alone and for one of a batch, whose sequences are rows of the model's batch."""
    session, question = Session.open(index, CODES), question_ids(index, "What is this about?")
    alone = session.ask(question, SAMPLING, sources=2).sources
    together = session.ask_all([question, question[:9]], SAMPLING, sources=2)[0].sources
    assert {one.layer for one in index.source_finder.heads} <= set(index.artifact.manifest.indexed_layers)
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert [one.score for one in together] == pytest.approx([one.score for one in alone], rel=1e-3)
