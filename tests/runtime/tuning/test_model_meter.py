"""Perplexity of the document's own tail after sinks and a choice of the middle, against transformers' own losses."""

import pytest
import torch
from support.small_index import plain_logits
from torch.nn.functional import cross_entropy

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.perplexity import losses
from sparsekv.runtime.selection.interface import MethodSpec, methods
from sparsekv.runtime.tuning.goals import ModelMeter, PerplexityGoal
from sparsekv.runtime.tuning.tuning import tune


def _ratio(index: OpenIndex, form: MethodSpec, share: float, *, calibration: bool) -> tuple[float, float]:
    """Perplexity over that of dense attention, and KV fraction."""
    shares = dict.fromkeys(index.artifact.manifest.indexed_layers, share)
    meter = ModelMeter(index, calibration=calibration)
    meter.measure([(form, shares)], lambda done, of: None)
    point = meter.mean(form, shares)
    return point.perplexity, point.kv_fraction


def _plain(name: str) -> MethodSpec:
    return MethodSpec(name, "", methods()[name](), residual=False)


def _dense_losses(index: OpenIndex) -> torch.Tensor:
    """Return the losses of the tail's tokens, by a plain forward pass over the whole prompt."""
    tail = index.split.tail
    logits = plain_logits(index.model, index.input_ids)[-tail - 1 : -1]
    return cross_entropy(logits.double(), index.input_ids[-tail:], reduction="none")


def _windowed_losses(index: OpenIndex) -> torch.Tensor:
    """Return the losses of the tail's tokens, by a pass over sinks and tail at their positions. The first loss is
    dense's."""
    split, positions = index.split, torch.arange(index.split.tokens)
    kept = torch.cat([positions[: split.sinks], positions[-split.tail :]])
    index.model.set_attn_implementation("eager")
    with torch.inference_mode():
        ids = index.input_ids[kept][None]
        # With a mask, for positions that jump are taken for the start of another sequence without one.
        options = {"position_ids": kept[None], "attention_mask": torch.ones_like(ids), "use_cache": False}
        logits = index.model(input_ids=ids, **options).logits[0]
    after_first = cross_entropy(logits[split.sinks : -1].double(), ids[0, split.sinks + 1 :], reduction="none")
    return torch.cat([_dense_losses(index)[:1], after_first])


def test_losses_may_begin_within_the_stored_prompt(family_index: OpenIndex) -> None:
    after = family_index.split.tokens - family_index.split.tail
    measured = losses(family_index, family_index.dense_cache(after), family_index.input_ids[after:], after)
    assert measured.tolist() == pytest.approx(_dense_losses(family_index).tolist(), rel=1e-4)


@pytest.mark.parametrize("calibration", [True, False])
def test_everything_chosen_is_dense_attention(family_index: OpenIndex, calibration: bool) -> None:
    ratio, kv_fraction = _ratio(family_index, _plain("oracle"), 1.0, calibration=calibration)
    assert (ratio, kv_fraction) == pytest.approx((1.0, 1.0), rel=1e-4)


@pytest.mark.parametrize("calibration", [True, False])
def test_without_the_middle_the_tail_sees_sinks_and_itself(index: OpenIndex, calibration: bool) -> None:
    """The second half sees the first as it was fed, after sinks alone."""
    half = index.split.tail // 2
    counted = slice(0, half) if calibration else slice(half, None)
    gaps = (_windowed_losses(index) - _dense_losses(index))[counted]
    expected = float(gaps.mean().exp())
    assert expected != pytest.approx(1.0, abs=1e-3)
    assert _ratio(index, _plain("window"), 0.1, calibration=calibration)[0] == pytest.approx(expected, rel=1e-4)


def test_a_perplexity_is_held_on_both_halves(index: OpenIndex) -> None:
    goal = PerplexityGoal(1.0001, open_model=lambda: index)
    found, _ = tune(index.artifact, goal, ["quest", "squeezed"])
    assert {one.form.name for one in found} == {"quest", "squeezed"}
    for one in found:
        assert one.layer_budgets is None
        assert 0 < one.recall <= 1
        assert one.error > 0
        assert not one.holds or one.calibration <= goal.value
        assert not one.holds or one.held_out <= goal.value + goal.tolerance
    quest = next(one for one in found if one.form.name == "quest")
    halves = [_ratio(index, quest.form, quest.budget, calibration=first) for first in (True, False)]
    assert [ratio for ratio, _ in halves] == pytest.approx([quest.calibration, quest.held_out])
    assert halves[1][1] == pytest.approx(quest.kv_fraction)


@pytest.mark.parametrize("value", [0.9, 1.0, float("nan"), float("inf")])
def test_a_perplexity_below_dense_attentions_is_no_goal(index: OpenIndex, value: float) -> None:
    with pytest.raises(UsageError, match=r"--target-perplexity .*: give a ratio above 1"):
        PerplexityGoal(value, open_model=lambda: index)
