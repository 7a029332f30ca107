"""Times by which dense attention or a method is taken: which kept ones count, and what has none."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.configs import sparse
from support.small_index import build_small

from sparsekv.formats.index.reader import Artifact
from sparsekv.indexing.methods.multipole import MultipoleIndexer
from sparsekv.runtime.attention.config import DecodeConfig, Dense
from sparsekv.runtime.benchmark import faster_attention
from sparsekv.runtime.benchmark.faster_attention import Choice, choose_faster, choose_for_numbers, crowding
from sparsekv.runtime.benchmark.sources import asked, asked_by_many, layer_of
from sparsekv.runtime.decoding.threads import usage
from sparsekv.runtime.methods.magicpig import MagicPIG
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.methods.window import Window
from sparsekv.runtime.selection.interface import Budget

CPU = torch.device("cpu")
SQUEEZED = sparse("squeezed", Squeezed(), Budget(0.2))


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return build_small(tmp_path_factory.mktemp("faster") / "small.skv").artifact


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of kept times, in a cache of its own. Other load does not matter."""
    monkeypatch.setenv("SPARSEKV_CACHE", str(tmp_path))
    monkeypatch.setattr(faster_attention, "STEADY", math.inf)
    return tmp_path / "step-times"


def chosen(artifact: Artifact, config: DecodeConfig = SQUEEZED, questions: int = 1) -> Choice:
    return choose_faster(artifact, config, questions, CPU, torch.float32)


def test_times_that_are_damaged_or_of_something_else_are_measured_again(artifact: Artifact, kept: Path) -> None:
    chosen(artifact, questions=2)
    (other,) = kept.iterdir()
    foreign = other.read_text()
    other.unlink()
    chosen(artifact)
    (file,) = kept.iterdir()
    whole = json.loads(file.read_text())
    wrong = [json.dumps(whole | change) for change in ({"dense_ms": float("nan")}, {"day": "today"}, {"day": None})]
    for text in (foreign, "[" * 100_000, json.dumps({"of": whole["of"]}), *wrong):
        file.write_text(text)
        choice = chosen(artifact)
        assert choice.measured == "measured now and kept"
        again, times = json.loads(file.read_text()), choice.times
        assert again == whole | {"day": again["day"], "dense_ms": times.dense, "method_ms": times.method}
        assert times.dense > 0


def test_kept_times_are_told_with_their_day(artifact: Artifact, kept: Path) -> None:
    assert chosen(artifact).told.endswith("; measured now and kept)")
    (file,) = kept.iterdir()
    assert chosen(artifact).told.endswith(f"; measured on {json.loads(file.read_text())['day']})")


def test_times_of_a_busy_machine_are_used_and_not_kept(
    artifact: Artifact, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faster_attention, "STEADY", 1.0)  # no two rounds take the same time
    choice = chosen(artifact)
    assert choice.told.endswith("; measured now on a busy machine, so the times are not kept)")
    assert choice.config.attention.name == ("squeezed" if choice.times.prefers_method else "dense")
    assert not kept.exists()


def test_cores_that_others_use_are_a_sign_of_load() -> None:
    now = usage()
    assert now is not None
    for busy, signs in ((0, (0.0, 1.01)), (len(os.sched_getaffinity(0)), (9.0, math.inf))):
        found = crowding(replace(now, moment=now.moment - 100, busy=now.busy - 100 * busy))
        assert signs[0] < found < signs[1]


def test_other_budgets_parameters_dtypes_and_questions_have_other_times(artifact: Artifact, kept: Path) -> None:
    for config in (SQUEEZED, sparse("squeezed", Squeezed(), Budget(40)), sparse("magicpig", MagicPIG(), Budget(0.2))):
        chosen(artifact, config)
        chosen(artifact, config)
    chosen(artifact, questions=3)
    choose_faster(artifact, SQUEEZED, 1, CPU, torch.bfloat16)
    assert len([*kept.iterdir()]) == 5


def test_other_centroids_of_a_residual_have_other_times(kept: Path, tmp_path: Path) -> None:
    config = sparse("window", Window(), Budget(0.2), residual=True)
    for number, levels in enumerate(((0.25,), (0.03,))):
        built = build_small(tmp_path / f"{number}.skv", methods={"multipole": MultipoleIndexer(levels=levels)})
        chosen(built.artifact, config)
        assert chosen(built.artifact, config).measured.startswith("measured on ")
    assert len([*kept.iterdir()]) == 2


def test_a_longer_tail_which_every_step_reads_has_other_times(artifact: Artifact, kept: Path, tmp_path: Path) -> None:
    chosen(artifact)
    longer = build_small(tmp_path / "longer.skv", tail=200).artifact
    assert longer.manifest.split.tokens == artifact.manifest.split.tokens
    assert chosen(longer).measured == "measured now and kept"


def test_times_of_another_compiler_of_kernels_do_not_count(
    artifact: Artifact, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As before and after an installation of numba, which makes a step several times as fast."""
    chosen(artifact)
    monkeypatch.setattr(faster_attention, "COMPILERS", {"cpu": "no such package", "cuda": "triton"})
    chosen(artifact)
    assert len([*kept.iterdir()]) == 2


def test_a_method_that_answers_one_question_at_a_time_is_not_taken_for_several(artifact: Artifact, kept: Path) -> None:
    choice = chosen(artifact, sparse("magicpig", MagicPIG(), Budget(0.2)), 2)
    assert (choice.config.attention.name, choice.times.method) == ("dense", None)
    assert choice.told.endswith("ms a layer; magicpig answers one question at a time; measured now and kept)")
    assert json.loads(next(kept.iterdir()).read_text())["method_ms"] is None


@pytest.mark.parametrize(
    ("dense_ms", "timed", "dense_from"),
    [
        ({16: 9.0, 4: 9.0, 1: 9.0}, [16], None),
        ({16: 1.0, 4: 9.0, 1: 9.0}, [16, 4], 16),
        ({16: 1.0, 4: 1.0, 1: 9.0}, [16, 4, 1], 4),
        ({16: 9.0, 4: 1.0, 1: 1.0}, [16], None),
        ({16: 1.0, 4: 1.0, 1: 1.0}, [16, 4, 1], 1),
    ],
)
def test_steps_of_many_answers_are_dense_where_that_is_faster(
    artifact: Artifact, kept: Path, dense_ms: dict[int, float], timed: list[int], dense_from: int | None
) -> None:
    for questions, milliseconds in dense_ms.items():
        before = set(kept.iterdir()) if kept.exists() else set()
        chosen(artifact, questions=questions)
        (file,) = set(kept.iterdir()) - before
        file.write_text(json.dumps(json.loads(file.read_text()) | {"dense_ms": milliseconds, "method_ms": 5.0}))
    config, choices = choose_for_numbers(artifact, SQUEEZED, 16, CPU, torch.float32)
    assert [choice.questions for choice in choices] == timed
    assert isinstance(config.attention, Dense) == (dense_from == 1)
    assert config.dense_from == (None if dense_from == 1 else dense_from)


def test_a_method_that_cannot_share_steps_answers_alone(artifact: Artifact, kept: Path) -> None:
    config, choices = choose_for_numbers(artifact, sparse("magicpig", MagicPIG(), Budget(0.2)), 16, CPU, torch.float32)
    assert (config.attention.name, config.dense_from, len(choices)) == ("magicpig", None, 1)
    assert choices[0].told.startswith("--method auto: magicpig (16 questions: dense attention ")
    assert " ms a layer; magicpig answers one question at a time; measured now" in choices[0].told


def test_more_questions_than_stored_queries_are_each_their_own(artifact: Artifact) -> None:
    layer = layer_of(artifact, artifact.manifest.indexed_layers[0], CPU, torch.float32)
    many = asked_by_many(layer, layer.questions + 3).query
    assert torch.equal(many[:, : layer.questions], asked(layer, layer.questions).query)
    assert many.shape[1] == layer.questions + 3
    assert len(many[0].unique(dim=0)) == layer.questions + 3
