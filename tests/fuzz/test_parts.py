"""The fuzzer's own parts: its draws for a GPU, the refusals and the sampled tokens that it accepts."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fuzz.case import Case, Palette, draw
from fuzz.checks import check
from fuzz.deeds import DEEDS
from fuzz.drawing import expect_drawn, left_by
from fuzz.mutations import FAULTS, ROOT, Fault
from fuzz.oracles import ROUNDING, Wrong, plain
from fuzz.refusals import is_due
from fuzz.rounding import Rounding
from fuzz.world import World
from sparsekv.runtime.decoding.answer import Sampling
from sparsekv.runtime.decoding.answer import draw as draw_tokens


def test_palette_has_few_shapes_and_options() -> None:
    palette = Palette(5)
    cases = [draw(seed, palette) for seed in range(300)]
    assert {(case.group, case.head_dim) for case in cases} == palette.shapes
    options: dict[str, set[object]] = {}
    for case in cases:
        options.setdefault(case.method, set()).add(case.options)
    assert max(map(len, options.values())) <= palette.OPTIONS
    assert len({case.tokens for case in cases}) > 50
    assert {case.deed for case in cases} <= DEEDS.keys()


def test_runs_have_palettes_of_their_own() -> None:
    assert len({frozenset(Palette(number).shapes) for number in range(20)}) > 10
    assert draw(3, Palette(5)) == draw(3, Palette(5)) != draw(3, Palette(6))


def test_refusal_whose_numbers_agree_is_due() -> None:
    case, told = (
        Case(positions=264),
        "document and question have {} tokens, and the model has 264 positions; ask a shorter",
    )
    assert is_due(case, told.format(264))
    assert is_due(case, f"sparsekv: error: {told.format('1,264')} question")
    assert not is_due(case, told.format(263))
    assert not is_due(replace(case, positions=265), told.format(270))
    assert not is_due(Case(), told.format(264))
    assert not is_due(case, f"internal error: {told.format(264)}")
    assert not is_due(case, "no positions are known")


def test_refusal_is_due_where_the_case_makes_it_so() -> None:
    told = "--residual needs clusters with value centroids, and the index has none; add them"
    assert is_due(Case(residual=True), told)
    assert not is_due(Case(), told)
    assert not is_due(Case(residual=True), f"{told}\nTraceback")


def drawn(sampling: Sampling, logits: torch.Tensor) -> list[int]:
    """Draw a token from each row of logits [A, V], one after another, with the random numbers of an answer."""
    random = torch.Generator(logits.device).manual_seed(sampling.seed)
    return [draw_tokens(row[None].clone(), sampling, [random])[0] for row in logits]


def test_draws_are_foreseen() -> None:
    logits = 3 * torch.randn(12, 300, generator=torch.Generator().manual_seed(1))
    for changes in ({}, {"top_k": 5}, {"top_p": 0.7}, {"top_k": 40, "top_p": 0.9, "temperature": 0.3}):
        sampling = replace(Sampling(12, 1.0, seed=7), **changes)
        expect_drawn(sampling, logits, drawn(sampling, logits), logits.device, "")


def test_wrong_draw_is_found() -> None:
    logits = 3 * torch.randn(40, 300, generator=torch.Generator().manual_seed(1))
    sampling = Sampling(40, 1.0, top_p=0.8, seed=7)
    for other in (replace(sampling, seed=8), replace(sampling, temperature=1.5), replace(sampling, top_p=0.3)):
        try:
            expect_drawn(sampling, logits, drawn(other, logits), logits.device, "")
        except Wrong:
            continue
        raise AssertionError(f"{other} passes for {sampling}")


def test_cuts_leave_what_transformers_leaves() -> None:
    logits = torch.tensor([4.0, 3.0, 2.0, 1.0, 0.0])
    assert left_by(Sampling(1, 1.0, top_k=2), logits).isfinite().tolist() == [True, True, False, False, False]
    assert left_by(Sampling(1, 1.0, top_p=0.64), logits).isfinite().tolist() == [True, True, False, False, False]
    assert left_by(Sampling(1, 1.0, top_p=0.63), logits).isfinite().tolist() == [True, False, False, False, False]


@pytest.mark.parametrize("deed", [name for name in DEEDS if name != "compiled"])  # compiling a model takes long
def test_each_deed_runs_on_the_simplest_case(deed: str) -> None:
    check(Case(deed=deed))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_faults_patch_fits_the_code(fault: Fault) -> None:
    fault.patch.check(ROOT)


LOUD = Case(family="granite", layers=4, head_dim=128, weights=3, loud=50.0, raw=True)


@pytest.mark.parametrize("case", [Case(layers=3), LOUD], ids=["quiet", "loud"])
def test_rounding_explains_float32_and_no_wrong_row(case: Case, tmp_path: Path) -> None:
    world = World(case, tmp_path, "cpu")
    ids = world.prompt().input_ids
    rows, rounding = plain(world, ids)[1], Rounding(world, ids)
    world.model = deepcopy(world.model).double()
    exact = plain(world, ids)[1]
    world.model = world.checkpoint
    rounding.expect_rows(rows, exact, ROUNDING, "", "")
    keys, values = rows[2]
    late = keys.clone()
    late[:, 60] = keys[:, 61]
    for wrong in ((keys, 1.01 * values), (late, values)):
        with pytest.raises(Wrong, match="of layer 2"):
            rounding.expect_rows(rows | {2: wrong}, exact, ROUNDING, "", "")
