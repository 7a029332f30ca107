"""The canary: a model whose own attention differs from ours is refused by the build, however it differs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.bent_models import BENDS, bent_llama
from support.reference import assert_close
from support.short_part import short_part
from support.small_index import build_small, plain_logits, reopen, small_plan, with_changes, without_window
from support.tiny_models import COMMON, FAMILIES, POSITIONS
from transformers import LlamaConfig, LlamaForCausalLM

from sparsekv.formats.errors import SparsekvError
from sparsekv.formats.index.manifest import PROBE_TOLERANCE, STORING_TOLERANCE, difference, read_manifest
from sparsekv.formats.index.schema import MANIFEST, KVDtype
from sparsekv.indexing.build import build_index
from sparsekv.indexing.capture.canary import CanaryRun, canary_positions, check_int8_state, judge_canary

RENAMED = "tiny-llama"


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("how", BENDS)
def test_a_model_with_a_mask_of_its_own_ends_the_build(tmp_path: Path, how: str, kv_dtype: KVDtype | None) -> None:
    plan = small_plan(kv_dtype=kv_dtype)
    plan = with_changes(plan, loaded=replace(plan.loaded, model=bent_llama(how)))
    with pytest.raises(SparsekvError, match=r"tiny-llama cannot be indexed: .* a mask .*; choose another model"):
        build_index(plan, tmp_path / "bent.skv")
    assert not (tmp_path / "bent.skv" / MANIFEST).exists()


def test_other_logits_than_the_models_own_are_refused() -> None:
    own = torch.randn(8, 300, generator=torch.Generator().manual_seed(0))
    right, last, bent = (
        CanaryRun(at, own, own + of) for at, of in ((99, 1e-6), (199, 1e-6), (199, 0.05 * own.roll(1, -1)))
    )
    assert [token.position for token in judge_canary([right, last], torch.float32, RENAMED)[0]] == [99]
    with pytest.raises(SparsekvError, match=r"attends with a mask or a bias .* at token 199 .*%.*another model"):
        judge_canary([right, bent], torch.float32, RENAMED)


@pytest.mark.thinned
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_canary_is_the_plain_models(tmp_path: Path, family: str, implementation: str) -> None:
    plan = small_plan(family)
    model = plan.loaded.model
    if implementation == "sdpa" and model.config._attn_implementation != "sdpa":
        implementation = "eager"  # a family with learned sinks, or a soft cap
    model.set_attn_implementation(implementation)
    manifest = build_index(plan, tmp_path / "doc.skv")
    assert model.config._attn_implementation == implementation
    plain = plain_logits(without_window(family), plan.prompt.input_ids)
    tokens = len(plan.prompt.input_ids)
    assert [token.position for token in manifest.canary] == [tokens * quarter // 4 - 1 for quarter in (1, 2, 3)]
    for token in manifest.canary:
        assert_close(torch.tensor(token.logits), plain[token.position][token.token_ids], 1e-4)
        assert difference(token, plain[token.position]) < PROBE_TOLERANCE[torch.float32]
    assert_close(torch.tensor(manifest.probe.logits), plain[-1].topk(32).values, 1e-4)


@pytest.mark.parametrize("family", short_part(FAMILIES, every=2))
def test_an_index_in_8_bits_opens_with_the_model_that_built_it(tmp_path: Path, family: str) -> None:
    """Its probe is over the rounded rows, so that no rounding is left to allow for."""
    index = build_small(tmp_path / "doc.skv", family, kv_dtype="int8")
    storage = index.artifact.manifest.kv_storage
    assert storage is not None
    assert not storage.exact_probe


def test_an_index_in_8_bits_of_a_sharp_model_opens(tmp_path: Path) -> None:
    """Rounding its rows moves the last token's logits by 0.10 of the largest, twice what a conversion is allowed."""
    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(**(COMMON | {"initializer_range": 0.45}))).eval()
    plan = small_plan(kv_dtype="int8")
    plan = with_changes(plan, loaded=replace(plan.loaded, model=model))
    manifest = build_index(plan, tmp_path / "sharp.skv")
    reopen(plan, tmp_path / "sharp.skv")
    assert difference(manifest.probe, plain_logits(model, plan.prompt.input_ids)[-1]) > STORING_TOLERANCE["int8"]


def test_an_equal_build_has_an_equal_canary(tmp_path: Path) -> None:
    one, other = (build_index(small_plan(), tmp_path / f"{name}.skv") for name in ("one", "other"))
    assert (one.canary, one.probe) == (other.canary, other.probe)
    assert read_manifest(tmp_path / "one.skv").canary == one.canary


def test_frequencies_that_depend_on_the_length_leave_the_last_token_alone() -> None:
    dynamic = FAMILIES["llama"]()
    assert canary_positions(dynamic, 400) == [99, 199, 299, 399]
    assert canary_positions(dynamic, 1) == [0]
    dynamic.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert canary_positions(dynamic, POSITIONS) == [POSITIONS - 1]


def test_one_token_that_differs_decides_nothing_and_most_of_them_do() -> None:
    own = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
    ours = own.clone()
    ours[:3] += 1
    middle, probe = judge_canary([CanaryRun(7, own, ours)], torch.float32, RENAMED)
    assert not middle
    assert probe.logits[0] == own[-1].max()
    ours[:5] += 1
    with pytest.raises(SparsekvError, match="at token 7"):
        judge_canary([CanaryRun(7, own, ours)], torch.float32, RENAMED)


def test_logits_that_are_not_finite_are_refused() -> None:
    own = torch.zeros(2, 50)
    own[0, 3] = torch.nan
    with pytest.raises(SparsekvError, match="not finite"):
        judge_canary([CanaryRun(1, own, own)], torch.float32, RENAMED)


@pytest.mark.parametrize("factor", [1.1, 1.3])
def test_a_build_in_int8_whose_state_no_opening_would_accept_is_refused(factor: float) -> None:
    """A real model's states are far from the limit: 20% of the median layer's state."""
    model = small_plan().loaded.model
    stored = {f"{layer}": torch.randn(1, 3, 5, generator=torch.Generator().manual_seed(layer)) for layer in range(3)}
    run = CanaryRun(99, torch.zeros(1, 9), torch.zeros(1, 9), {name: factor * one for name, one in stored.items()})
    if factor < 1.2:
        check_int8_state(run, stored, model, RENAMED)
        return
    with pytest.raises(SparsekvError, match=r"int8 storage changes the states .* 30\.0% .*; leave --kv-dtype int8 out"):
        check_int8_state(run, stored, model, RENAMED)
