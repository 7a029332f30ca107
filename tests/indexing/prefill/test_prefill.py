"""Sparse prefills: with everything chosen they are dense, with less each chunk has its budget, and no trace of more."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.prefill_perplexity import prefill_perplexity
from support.random_tensors import normal
from support.reference import assert_close, attention_probabilities, reference_attention
from support.small_index import TEXT, build_small, plain_logits, reopen, small_plan, with_changes
from support.tiny_models import FAMILIES, VOCABULARY

from sparsekv.formats.errors import ArtifactError, UsageError
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import LayerFacts
from sparsekv.indexing.append import encode_addition, growing_plan
from sparsekv.indexing.build import build_index
from sparsekv.indexing.capture.capture import Capture, capture
from sparsekv.indexing.prefill.prefills import (
    DensePrefill,
    KeyDiffPrefill,
    Prefill,
    QuokaPrefill,
    SampleAttentionPrefill,
    SparsePrefill,
    choose_prefill,
    prefill_name,
    prefills,
)
from sparsekv.kernels.attention.attention import causal_mask
from sparsekv.kernels.common.hook import AttentionCall

SPARSE: dict[str, type[SparsePrefill]] = {
    "quoka": QuokaPrefill,
    "sampleattention": SampleAttentionPrefill,
    "keydiff": KeyDiffPrefill,
}
IDS = torch.randint(VOCABULARY, (150,), generator=torch.Generator().manual_seed(0))
every_sparse = pytest.mark.parametrize("name", SPARSE)
FACTS = LayerFacts(softmax_scale=0.3, softcap=None, sliding_window=None, attention_sinks=False)


def _call(seed: int, before: int, chunk: int, *, Hk: int = 2, G: int = 3, **changes: object) -> AttentionCall:
    tensors = {
        "query": normal(seed, Hk * G, chunk, 8),
        "keys": normal(seed + 1, Hk, before + chunk, 8),
        "values": normal(seed + 2, Hk, before + chunk, 8),
    }
    how = {"layer": 0, "softmax_scale": 0.3, "softcap": None, "window": None, "sink_logits": None}
    return AttentionCall(**{**how, **tensors, **changes})  # type: ignore[arg-type]


def _masked_attention(call: AttentionCall, chosen: torch.Tensor) -> torch.Tensor:
    """Attention in float64 of a chunk to itself and to chosen tokens before it, chosen [Hk, T] bool."""
    (Hk, tokens, _), queries = call.keys.shape, call.query.shape[1]
    allowed = chosen.clone()
    allowed[:, tokens - queries :] = True
    mask = causal_mask(queries, tokens, call.window, chosen.device) & allowed[:, None, None]
    sinks = None if call.sink_logits is None else call.sink_logits.view(Hk, -1)
    return reference_attention(
        call.query.unflatten(0, (Hk, -1)),
        call.keys,
        call.values,
        call.softmax_scale,
        mask=mask,
        softcap=call.softcap,
        sink_logits=sinks,
    ).flatten(0, 1)


def test_every_way_is_registered_under_its_name() -> None:
    assert {name: SPARSE.get(name, DensePrefill) for name in prefills()} == prefills()
    assert [prefill_name(way()) for way in prefills().values()] == list(prefills())
    with pytest.raises(UsageError, match="--prefill none: choose one of dense, keydiff, quoka, sampleattention"):
        choose_prefill("none")


@every_sparse
@settings(max_examples=20)
@given(
    seed=st.integers(0, 10**6),
    before=st.integers(0, 60),
    chunk=st.integers(1, 20),
    budget=st.integers(1, 70),
    sinks=st.integers(0, 5),
    recent=st.sampled_from([0.0, 0.3, 1.0]),
    softcap=st.sampled_from([None, 2.0]),
    learned=st.booleans(),
)
def test_a_chunk_attends_to_itself_the_sinks_and_the_best_tokens_before_it(
    name: str,
    seed: int,
    before: int,
    chunk: int,
    budget: int,
    sinks: int,
    recent: float,
    softcap: float | None,
    learned: bool,
) -> None:
    call = _call(seed, before, chunk, softcap=softcap, sink_logits=normal(seed + 3, 6) if learned else None)
    prefill = SPARSE[name](prefill_budget=budget, prefill_recent=recent)
    facts = FACTS.model_copy(update={"softcap": softcap})
    scores = prefill.scores(call.query.unflatten(0, (2, -1)), call.keys[:, :before], facts).clone()
    if (last := int(recent * budget)) < before:
        scores[:, before - last :] = torch.inf
    scores[:, : min(sinks, budget - last)] = torch.inf
    chosen = torch.zeros(2, before + chunk, dtype=torch.bool)
    chosen.scatter_(1, scores.topk(min(budget, before), -1).indices, True)
    assert_close(prefill.attend(call, sinks), _masked_attention(call, chosen), 1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefill_budget": 0}, "--prefill-budget 0: give at least 1"),
        ({"prefill_recent": 1.5}, "--prefill-recent 1.5: give a share from 0 to 1"),
        ({"prefill_queries": 0}, "--prefill-queries 0: give at least 1"),
    ],
    ids=str,
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SampleAttentionPrefill(**options)


@every_sparse
def test_a_layer_with_a_window_attends_to_all_of_it(name: str) -> None:
    call = _call(0, 50, 9, window=30)
    everything = torch.ones(2, 59, dtype=torch.bool)
    assert_close(SPARSE[name](prefill_budget=4).attend(call, 2), _masked_attention(call, everything), 1e-5)


def test_quoka_scores_only_the_queries_that_it_keeps() -> None:
    """All but one query of the chunk look where the mean does; with one query kept, the odd one chooses."""
    query = torch.zeros(1, 1, 8, 4)
    query[..., 0] = 1
    query[:, :, 5] = torch.tensor([0.0, 0, 0, 1])
    keys = torch.eye(4)[None]
    scores = QuokaPrefill(prefill_queries=1).scores(query, keys, FACTS)
    assert scores.argmax(-1).tolist() == [3]
    assert QuokaPrefill(prefill_queries=1, quoka_across="mean", quoka_subset="all").scores(query, keys, FACTS).argmax(
        -1
    ).tolist() == [0]


def test_sampled_queries_choose_what_they_attend_to() -> None:
    call = _call(1, 40, 12)
    grouped = call.query.unflatten(0, (2, -1))
    scores = SampleAttentionPrefill(prefill_queries=3).scores(grouped, call.keys[:, :40], FACTS)
    expected = attention_probabilities(grouped[:, :, [3, 7, 11]], call.keys[:, :40], 0.3).mean((1, 2))
    assert_close(scores, expected, 1e-5)


def _captured(family: str, prefill: Prefill, chunk_size: int = 32) -> Capture:
    return capture(FAMILIES[family](), IDS, tail=20, chunk_size=chunk_size, prefill=prefill, sinks=3)


@pytest.mark.thinned
@pytest.mark.parametrize("family", FAMILIES)
@every_sparse
def test_with_a_budget_of_everything_a_capture_is_dense(family: str, name: str) -> None:
    sparse, dense = _captured(family, SPARSE[name](prefill_budget=150)), _captured(family, DensePrefill())
    assert_close(sparse.logits, dense.logits, 1e-4)
    for layer in range(2):
        one, other = sparse.take(layer), dense.take(layer)
        for part in ("keys", "values", "tail"):
            assert_close(getattr(one, part), getattr(other, part), 1e-4)


def test_with_less_a_capture_is_another() -> None:
    sparse, dense = _captured("llama", QuokaPrefill(prefill_budget=8)), _captured("llama", DensePrefill())
    sparse.take(0), dense.take(0)
    assert not torch.allclose(sparse.take(1).keys, dense.take(1).keys, atol=1e-3)


@every_sparse
def test_an_index_says_how_it_was_prefilled_and_its_probe_holds(tmp_path: Path, name: str) -> None:
    """The probe is recomputed over the stored context when an index is opened, densely."""
    prefill = SPARSE[name](prefill_budget=24)
    index = build_small(tmp_path / "sparse.skv", prefill=prefill, chunk_size=32)
    record = index.artifact.manifest.prefill
    assert (record.kind, record.chunk_size, record.parameters) == (name, 32, asdict(prefill))
    assert not record.exact
    assert str(record).startswith(f"{name} (chunks of 32, prefill_budget 24")


def test_an_edited_document_keeps_whole_chunks_and_equals_one_built_at_once(tmp_path: Path) -> None:
    how = {"prefill": QuokaPrefill(prefill_budget=24), "chunk_size": 48, "tokens": 900}
    build_small(tmp_path / "edited.skv", **how)
    edited = TEXT[:700] + "!" + TEXT[701:]
    plan = small_plan(text=edited, **how)
    done: list[int] = []
    build_index(plan, tmp_path / "edited.skv", lambda stage, at, of: done.append(at) if stage == "prefill" else None)
    build_index(plan, tmp_path / "whole.skv")
    # 512 leading tokens have a hash of their own; the chunk that they end in begins at 480.
    assert done[:2] == [480, 480 + 48]
    both = [Artifact(tmp_path / name).context(1) for name in ("edited.skv", "whole.skv")]
    for one, other in zip(*both, strict=True):
        assert_close(one, other, 1e-5)


@pytest.mark.parametrize("change", [{"prefill_budget": 25}, {"quoka_across": "mean"}], ids=str)
def test_another_prefill_starts_over(tmp_path: Path, change: dict[str, object]) -> None:
    build_small(tmp_path / "one.skv", prefill=QuokaPrefill(prefill_budget=24), chunk_size=48)
    other = QuokaPrefill(**{"prefill_budget": 24, **change})  # type: ignore[arg-type]
    done: list[int] = []
    build_index(
        small_plan(prefill=other, chunk_size=48),
        tmp_path / "one.skv",
        lambda stage, at, of: done.append(at) if stage == "prefill" else None,
    )
    assert done[:2] == [0, 48]


def test_a_dense_prefill_is_replaced_by_force_alone(tmp_path: Path) -> None:
    """The dense prefill is the result of a long exact computation."""
    build_small(tmp_path / "dense.skv")
    sparse = small_plan(prefill=QuokaPrefill(prefill_budget=24), chunk_size=48)
    with pytest.raises(ArtifactError) as refused:
        build_index(sparse, tmp_path / "dense.skv")
    assert str(refused.value) == (
        f"{tmp_path / 'dense.skv'} was prefilled densely, and this build would replace that by a quoka prefill, "
        "which is not exact; choose another "
        "folder with --output, or give --force to replace it"
    )
    assert not build_index(with_changes(sparse, force=True), tmp_path / "dense.skv").prefill.exact
    assert build_index(small_plan(), tmp_path / "dense.skv").prefill.exact


def test_what_is_appended_is_prefilled_as_the_rest_was(tmp_path: Path) -> None:
    how = {"prefill": QuokaPrefill(prefill_budget=24), "chunk_size": 48, "tokens": 700}
    index = build_small(tmp_path / "grown.skv", **how)
    loaded = small_plan(**how).loaded
    addition = encode_addition(loaded.tokenizer, TEXT[700:1000], index.artifact.manifest.prompt.chat)
    with pytest.raises(
        UsageError, match=r"--chunk-size 64: .* was prefilled by quoka in chunks of 48, .* leave the option out"
    ):
        growing_plan(index.artifact, loaded, addition, chunk_size=64)
    plan = growing_plan(index.artifact, loaded, addition, chunk_size=48)
    build_index(plan, tmp_path / "grown.skv")
    grown = reopen(plan, tmp_path / "grown.skv").artifact
    assert grown.manifest.prefill == index.artifact.manifest.prefill
    whole = capture(
        loaded.model, plan.prompt.input_ids, tail=16, chunk_size=48, prefill=QuokaPrefill(prefill_budget=24), sinks=4
    )
    assert_close(grown.context(1)[0], whole.take(1).keys, 1e-5)


def test_perplexity_is_that_of_the_plain_models_logits_on_the_last_tokens() -> None:
    model = FAMILIES["llama"]()
    logits = plain_logits(model, IDS).double()
    for last, chunk_size in ((1, 32), (40, 32), (149, 7), (149, 1000)):
        losses = torch.nn.functional.cross_entropy(logits[-last - 1 : -1], IDS[-last:])
        found = prefill_perplexity(model, IDS, DensePrefill(), last=last, chunk_size=chunk_size)
        assert abs(found / float(losses.exp()) - 1) < 1e-4
    sparse = prefill_perplexity(model, IDS, KeyDiffPrefill(prefill_budget=4), last=40, chunk_size=16, sinks=1)
    assert abs(sparse / found - 1) > 1e-4


def test_a_text_too_short_to_predict_is_refused() -> None:
    with pytest.raises(UsageError, match="the text has 150 tokens: its last 150 cannot be predicted"):
        prefill_perplexity(FAMILIES["llama"](), IDS, DensePrefill(), last=150)


def test_a_model_that_must_be_run_at_once_refuses_a_sparse_prefill() -> None:
    loaded = small_plan().loaded
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    loaded.model.config.rope_parameters = rope
    with pytest.raises(UsageError, match="--prefill quoka: the RoPE of tiny-llama depends on the prompt's length"):
        small_plan(loaded=loaded, prefill=QuokaPrefill())
