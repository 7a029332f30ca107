"""Capture: what is kept is what the model attends to, for every family and however the prompt is cut up."""

import pytest
import torch
from support.random_tensors import normal
from support.reference import assert_close, reference_attention
from support.small_index import attention_outputs, plain_logits, recorded_attention
from support.tiny_models import FAMILIES, VOCABULARY, WINDOW
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from sparsekv.indexing.capture.capture import Capture, CapturedLayer, capture
from sparsekv.kernels.attention.attention import causal_mask

TOKENS, TAIL = 150, 20
IDS = torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(0))
every_family = pytest.mark.parametrize("family", FAMILIES)


def _taken(model: PreTrainedModel, captured: Capture) -> list[CapturedLayer]:
    return [captured.take(layer) for layer in range(model.config.num_hidden_layers)]


def _assert_same(actual: list[CapturedLayer], expected: list[CapturedLayer]) -> None:
    for layer, other in zip(actual, expected, strict=True):
        for name in ("keys", "values", "tail"):
            assert_close(getattr(layer, name), getattr(other, name), 1e-4)
        assert (layer.sink_logits is None) == (other.sink_logits is None)


@every_family
def test_chunk_size_changes_nothing_and_the_probe_is_the_plain_models(family: str) -> None:
    model = FAMILIES[family]()
    whole = capture(model, IDS, tail=TAIL, chunk_size=TOKENS)
    layers = _taken(model, whole)
    last = plain_logits(model, IDS)[-1]
    assert_close(whole.logits, last, 1e-4)
    for chunk_size in (7, 64):
        captured = capture(model, IDS, tail=TAIL, chunk_size=chunk_size)
        assert_close(captured.logits, last, 1e-4)
        _assert_same(_taken(model, captured), layers)


@every_family
def test_attention_from_the_captured_rows_is_the_models_own(family: str) -> None:
    model = FAMILIES[family]()
    captured = capture(model, IDS, tail=TAIL, chunk_size=64)
    outputs = attention_outputs(model, IDS)
    for layer, rows in enumerate(_taken(model, captured)):
        facts, Hk = captured.facts(layer), rows.keys.shape[0]
        output = reference_attention(
            rows.tail.unflatten(0, (Hk, -1)),
            rows.keys,
            rows.values,
            facts.softmax_scale,
            mask=causal_mask(TAIL, TOKENS, facts.sliding_window, rows.keys.device),
            softcap=facts.softcap,
            sink_logits=None if rows.sink_logits is None else rows.sink_logits.view(Hk, -1),
        )
        assert_close(outputs[layer][-TAIL:], output.flatten(0, 1).transpose(0, 1).flatten(1), 1e-5)


@pytest.mark.thinned
@every_family
@pytest.mark.parametrize("known", [1, 64, TOKENS - TAIL])
def test_reusing_a_prefix_equals_capturing_anew(family: str, known: int) -> None:
    model = FAMILIES[family]()
    anew = capture(model, IDS, tail=TAIL)
    expected = _taken(model, anew)
    other_end = torch.cat([IDS[:known], (IDS[known:] + 1) % VOCABULARY])
    earlier = _taken(model, capture(model, other_end, tail=TAIL))
    reused = capture(
        model,
        IDS,
        tail=TAIL,
        chunk_size=33,
        prefix_tokens=known,
        prefix=lambda layer: (earlier[layer].keys, earlier[layer].values),
    )
    assert_close(reused.logits, anew.logits, 1e-4)
    _assert_same(_taken(model, reused), expected)


FULL, SLIDING = None, WINDOW
EXPECTED: dict[str, tuple[float, float | None, list[int | None], bool]] = {
    "llama": (16**-0.5, None, [FULL] * 3, False),
    "qwen2": (16**-0.5, None, [FULL, FULL, SLIDING, SLIDING], False),
    "qwen3": (32**-0.5, None, [FULL] * 3, False),
    "mistral": (16**-0.5, None, [SLIDING] * 3, False),
    "smollm3": (16**-0.5, None, [FULL] * 4, False),
    "phi3": (16**-0.5, None, [FULL] * 3, False),
    "gemma2": (9**-0.5, 3.0, [SLIDING, FULL] * 2, False),
    "gemma3": (9**-0.5, None, [SLIDING, FULL] * 2, False),
    "gpt-oss": (16**-0.5, None, [SLIDING, FULL] * 2, True),
}


@every_family
def test_facts_of_each_layer_are_those_of_its_config(family: str) -> None:
    model = FAMILIES[family]()
    captured = capture(model, IDS[:40], tail=4)
    scale, softcap, windows, sinks = EXPECTED[family]
    facts = [captured.facts(layer) for layer in range(model.config.num_hidden_layers)]
    assert [layer.sliding_window for layer in facts] == windows
    assert [layer.softmax_scale for layer in facts] == pytest.approx([scale] * len(facts))
    assert {layer.softcap for layer in facts} == {softcap}
    assert {layer.attention_sinks for layer in facts} == {sinks}


@pytest.mark.parametrize("tail", [1, 63, 64, TOKENS])
def test_tail_holds_the_last_queries_wherever_chunks_end(tail: int) -> None:
    model = FAMILIES["llama"]()
    every = capture(model, IDS, tail=TOKENS, chunk_size=TOKENS)
    some = capture(model, IDS, tail=tail, chunk_size=16)
    for all_rows, rows in zip(_taken(model, every), _taken(model, some), strict=True):
        assert rows.tail.shape[1] == tail
        assert_close(rows.tail, all_rows.tail[:, -tail:], 1e-4)


def test_a_prompt_whose_rope_depends_on_its_length_is_never_cut_up() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = FAMILIES["llama"]()
    config = model.config.to_dict() | {"rope_parameters": rope, "max_position_embeddings": 64}
    stretched = LlamaForCausalLM(LlamaConfig(**config)).eval()
    stretched.load_state_dict(model.state_dict())
    whole = _taken(stretched, capture(stretched, IDS, tail=TAIL, chunk_size=TOKENS))
    strangers = normal(0, 2, TOKENS, 16)
    captured = capture(
        stretched, IDS, tail=TAIL, chunk_size=16, prefix_tokens=32, prefix=lambda layer: (strangers, strangers)
    )
    assert_close(captured.logits, plain_logits(stretched, IDS)[-1], 1e-4)
    _assert_same(_taken(stretched, captured), whole)


def test_progress_tells_tokens_done_and_only_new_ones_are_run() -> None:
    model = FAMILIES["llama"]()
    done: list[int] = []
    rows = _taken(model, capture(model, IDS, tail=TAIL))
    with recorded_attention(model) as outputs:
        capture(
            model,
            IDS,
            tail=TAIL,
            chunk_size=40,
            prefix_tokens=50,
            prefix=lambda layer: (rows[layer].keys, rows[layer].values),
            progress=done.append,
        )
    assert done == [90, 130, 150]
    assert [len(rows) for rows in outputs[0]] == [40, 40, 20]


def test_the_models_attention_is_as_it_was_after_a_capture() -> None:
    model = FAMILIES["llama"]()
    model.set_attn_implementation("eager")
    capture(model, IDS, tail=TAIL)
    assert model.config._attn_implementation == "eager"
