"""Lossless answers are dense attention's, whatever was drafted."""

import random
from collections.abc import Callable
from functools import cache
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import torch
from support.configs import LOSSLESS, lossless, sparse
from support.engines import capture_on_a_cpu, count_rows_on_the_device
from support.small_index import INDEXERS, build_small
from support.tiny_models import DIFFERENT

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.attention.config import DecodeConfig, Dense, Own
from sparsekv.runtime.attention.guard import Guard
from sparsekv.runtime.decoding.answer import Answer, Sampling, question_ids
from sparsekv.runtime.decoding.engine import Engine, Request, TokenLogprobs
from sparsekv.runtime.decoding.lossless import (
    BY_METHOD,
    FROM_TEXT,
    HOPELESS,
    REPEATED,
    Drafter,
    DraftingEngine,
    Pace,
    SortedRuns,
)
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.methods.codes import Codes
from sparsekv.runtime.methods.csattention import CSAttention
from sparsekv.runtime.methods.h2o import H2O
from sparsekv.runtime.selection.interface import Budget, MethodSpec

QUESTIONS = ("What is an expression?", "x", "Which statement is it that raises an exception, and when?")
CONFIGS = LOSSLESS | {"h2o": lossless("h2o", H2O())}


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], OpenIndex]:
    methods = {name: INDEXERS[name] for name in ("codes", "multipole", "h2o")}
    folder = tmp_path_factory.mktemp("lossless")
    return cache(lambda family: build_small(folder / f"{family}.skv", family, methods=methods))


@pytest.fixture(scope="module")
def of_dense(opened: Callable[[str], OpenIndex]) -> Callable[[str, Sampling], list[Answer]]:
    """Dense attention's answers, which are given once."""

    def given(family: str, sampling: Sampling) -> list[Answer]:
        index = opened(family)
        return _answers(Engine(index, index.dense_cache()), index, sampling)

    return cache(given)


def _answers(engine: Engine, index: OpenIndex, sampling: Sampling) -> list[Answer]:
    asked = [Request(question_ids(index, question), sampling) for question in QUESTIONS]
    return [answer for _, answer in engine.answers(asked)]


def _lossless(index: OpenIndex, config: DecodeConfig) -> DraftingEngine:
    return DraftingEngine(index, index.cache(config), config)


def _draft_anything(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Take any source in any step, and texts that never stood before beside those that did."""
    drawn, found = random.Random(seed), Drafter.from_text

    def from_text(drafter: Drafter, tokens: list[int]) -> list[int]:
        invented = [drawn.randrange(200) for _ in range(drawn.randrange(6))]
        return drawn.choice([[], found(drafter, tokens), found(drafter, tokens)[:2] + invented, invented])

    def source(drafter: Drafter, draft: list[int]) -> str | int:
        by_method = (*BY_METHOD, 1) if drafter.by_method else ()
        return drawn.choice([0, *by_method, *([FROM_TEXT] if draft else [])])

    monkeypatch.setattr(Drafter, "from_text", from_text)
    monkeypatch.setattr(Drafter, "source", source)


@pytest.mark.parametrize(
    ("family", "name", "temperature", "on_the_device", "in_place"),
    [
        *product(["llama"], CONFIGS, [0.0], [True], [False, True]),
        *product(["llama"], ["dense", "codes"], [0.8], [False], [False, True]),
        *product(DIFFERENT[1:], ["dense", "codes"], [0.0], [False], [False, True]),
    ],
)
def test_answers_are_dense_attentions(
    opened: Callable[[str], OpenIndex],
    of_dense: Callable[[str, Sampling], list[Answer]],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    name: str,
    temperature: float,
    on_the_device: bool,
    in_place: bool,
) -> None:
    """Also if passes of dense attention read and write all rows in place, as on a GPU."""
    index, sampling = opened(family), Sampling(max_new_tokens=24, temperature=temperature, seed=3)
    dense = of_dense(family, sampling)
    _draft_anything(monkeypatch, seed=len(name))
    if on_the_device:
        count_rows_on_the_device(monkeypatch)
    if in_place:
        monkeypatch.setattr("sparsekv.runtime.decoding.lossless.verifies_in_place", lambda cache: True)
    engine = _lossless(index, CONFIGS[name])
    found = _answers(engine, index, sampling)
    assert [one.ids for one in found] == [one.ids for one in dense]
    assert [(one.text, one.finish_reason) for one in found] == [(one.text, one.finish_reason) for one in dense]
    assert all(one.kv_fraction == 1 for one in found)
    drafter = engine.drafter
    assert drafter.accepted < drafter.drafted
    assert drafter.accepted > 0 or name != "codes" or temperature  # others draft little that a random model takes
    assert drafter.steps + drafter.accepted == sum(len(one.ids) - 1 for one in dense)


@pytest.mark.parametrize(("family", "name"), [("llama", "dense"), ("llama", "codes"), ("gemma2", "codes")])
def test_replayed_passes_read_the_rows_of_now_and_captures_are_no_measure(
    opened: Callable[[str], OpenIndex], monkeypatch: pytest.MonkeyPatch, family: str, name: str
) -> None:
    """Question after question, each of which needs longer buffers than the one before."""
    index, lengths = opened(family), (20, 70, 150)
    asked = [
        Request(question_ids(index, question), Sampling(max_new_tokens=length))
        for question, length in zip(QUESTIONS, lengths, strict=True)
    ]
    dense = [answer.ids for _, answer in Engine(index, index.dense_cache()).answers(asked)]
    capture_on_a_cpu(monkeypatch)
    monkeypatch.setattr("sparsekv.runtime.decoding.lossless.verifies_in_place", lambda cache: True)
    _draft_anything(monkeypatch, seed=len(name))
    plain, measured, captures, engine = Pace.add, list[bool](), list[int](), _lossless(index, CONFIGS[name])

    def total() -> int:
        assert engine.verification is not None
        return engine.step.captures + engine.verification.step.captures

    def add(pace: Pace, seconds: float | None, tokens: int, step: int) -> None:
        measured.append(seconds is not None)
        captures.append(total())
        plain(pace, seconds, tokens, step)

    monkeypatch.setattr(Pace, "add", add)
    assert [answer.ids for _, answer in engine.answers(asked)] == dense
    assert len(set(captures)) > 4
    captured = [after > before for before, after in pairwise(captures)]
    assert not any(one and other for one, other in zip(measured[1:], captured, strict=True))
    assert sum(measured) > len(measured) // 2


@pytest.mark.parametrize("name", CONFIGS)
def test_measured_paces_choose_among_all_sources(
    opened: Callable[[str], OpenIndex], of_dense: Callable[[str, Sampling], list[Answer]], name: str
) -> None:
    index, sampling = opened("llama"), Sampling(max_new_tokens=100)
    dense = of_dense("llama", sampling)
    engine = _lossless(index, CONFIGS[name])
    assert [one.ids for one in _answers(engine, index, sampling)] == [one.ids for one in dense]
    used = {source for source, pace in engine.drafter.paces.items() if pace.last}
    assert used >= {FROM_TEXT, 0} | (set(BY_METHOD[:1]) if name != "dense" else set())
    assert "drafted tokens accepted" in engine.told


def test_tokens_are_told_as_they_are_taken_and_an_answer_ends_within_a_draft(
    opened: Callable[[str], OpenIndex], monkeypatch: pytest.MonkeyPatch
) -> None:
    index, ids = opened("llama"), question_ids(opened("llama"), QUESTIONS[0])
    ((_, whole),) = Engine(index, index.dense_cache()).answers([Request(ids, Sampling(max_new_tokens=30))])
    end = next(token for place, token in enumerate(whole.ids) if place > 8 and token not in whole.ids[:place])
    wanted = whole.ids[: whole.ids.index(end) + 1]
    monkeypatch.setattr(Drafter, "from_text", lambda drafter, tokens: whole.ids[len(tokens) - len(ids) :][:16])
    monkeypatch.setattr(Drafter, "source", lambda drafter, draft: FROM_TEXT if draft else 0)
    tokens, logprobs, pieces = list[int](), list[float](), list[str]()

    def take(token: int, found: TokenLogprobs | None) -> None:
        assert found is not None
        tokens.append(token)
        logprobs.append(found.logprob)

    def answer(engine: Engine) -> Answer:
        tokens.clear(), logprobs.clear(), pieces.clear()
        engine.ends = {end}
        request = Request(ids, Sampling(max_new_tokens=30), pieces.append, on_token=take, logprobs=2)
        ((_, found),) = engine.answers([request])
        return found

    expected = answer(Engine(index, index.dense_cache()))
    before = list(logprobs)
    found = answer(_lossless(index, CONFIGS["dense"]))
    assert found.ids == expected.ids == tokens == wanted
    assert logprobs == pytest.approx(before, abs=1e-4)
    assert "".join(pieces) == expected.text


def test_a_draft_is_what_followed_the_newest_tokens_last() -> None:
    drafter = Drafter(np.array([1, 2, 3, 4, 5, 6, 1, 2, 9]), by_method=False, length=3)
    assert drafter.from_text([7, 2, 3]) == [4, 5, 6]
    assert drafter.from_text([8, 1, 2]) == [9]
    assert drafter.from_text([1, 2, 3]) == [4, 5, 6]
    assert drafter.from_text([1, 2, 7, 7, 1, 2]) == [7, 7, 1]
    assert drafter.from_text([2]) == drafter.from_text([8, 8]) == []


@pytest.mark.parametrize("number", REPEATED)
def test_sorted_runs_find_the_last_occurrence(number: int) -> None:
    """The last occurrence that has a token after it counts. Some texts are shorter than a run, some ids as large as any
    vocabulary's."""
    drawn = np.random.default_rng(number)
    for scale in (1, 1_999_999):
        for length in (*range(12), 300):
            text = scale * drawn.integers(0, 4, length)
            runs = SortedRuns(text, number)
            for wanted in scale * drawn.integers(0, 5, (30, number)):
                found = [at + number for at in range(length - number) if (text[at : at + number] == wanted).all()]
                assert runs.after(wanted) == (found[-1] if found else None)


def test_the_fastest_source_is_taken_and_the_others_are_tried_again() -> None:
    drafter = Drafter(np.zeros(0, dtype=np.int64), by_method=True)
    taken = list[str | int]()
    for _ in range(1000):
        source = drafter.source([])
        taken.append(source)
        if source:
            drafter.decoding.add(0.2 * int(source), int(source), drafter.steps + 1)
        drafter.count(source, int(source), int(source) // 2, {0: 1.0, 2: 0.6, 4: 2.0, 8: 9.0}[int(source)])
    assert taken.count(2) > 900
    assert all(taken.count(one) >= 3 for one in (0, 4, 8))
    assert Pace().per_token == 0


def test_a_method_that_is_no_faster_than_dense_attention_drafts_nothing() -> None:
    """For some time: the next time it may be faster."""
    drafter = Drafter(np.zeros(0, dtype=np.int64), by_method=True)
    taken = list[str | int]()
    for _ in range(2 * HOPELESS):
        source = drafter.source([])
        taken.append(source)
        if source:
            drafter.decoding.add(1.1 * int(source), int(source), drafter.steps + 1)
        drafter.count(source, int(source), int(source), 1.0 + 1.1 * int(source))
    tried = [step for step, source in enumerate(taken) if source]
    assert len(tried) <= 4
    assert tried[-1] >= HOPELESS


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"question": Own()}, "--prefill"),
        ({"ahead": True}, "--ahead"),
        ({"gauge": True}, "--gauge"),
        ({"guard": Guard(0.1)}, "--guard"),
        ({"attention": MethodSpec("csattention", "", CSAttention(step=4))}, "--step"),
        ({"attention": MethodSpec("csattention", "", CSAttention(stream=True))}, "--stream"),
    ],
)
def test_what_would_change_a_dense_answer_is_refused(changes: dict[str, object], named: str) -> None:
    usual: dict[str, object] = {"attention": MethodSpec("codes", "", Codes()), "question": Dense()}
    with pytest.raises(UsageError, match=f"--lossless gives the answer of dense attention .* be used with {named}"):
        DecodeConfig(**(usual | changes), lossless=True)  # type: ignore[arg-type]


def test_a_method_that_keeps_state_of_its_steps_is_refused(opened: Callable[[str], OpenIndex]) -> None:
    """Whatever the package that it is of calls its options."""
    index, config = opened("llama"), CONFIGS["codes"]
    gauged = sparse("codes", Codes(), Budget(0.1), question=Dense(), gauge=True)
    with pytest.raises(UsageError, match="codes keeps state of steps that dense attention may reject"):
        DraftingEngine(index, index.cache(gauged), config)


def test_a_model_that_cannot_take_a_token_back_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = build_small(tmp_path / "doc.skv")
    config, dense = CONFIGS["dense"], index.cache(CONFIGS["dense"])
    manifest = index.artifact.manifest
    rope = manifest.rope.model_copy(update={"parameters": {"rope_type": "dynamic", "factor": 2.0}})
    monkeypatch.setattr(index.artifact, "manifest", manifest.model_copy(update={"rope": rope}))
    with pytest.raises(UsageError, match="RoPE depends on a sequence's length"):
        DraftingEngine(index, dense, config)
    monkeypatch.setattr(type(dense), "live_states", lambda cache: {"state": torch.zeros(1)})
    with pytest.raises(UsageError, match="layers with a state"):
        DraftingEngine(index, dense, config)
