"""Families that leave windows to the mask answer as plain transformers does; those with other masks are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configs import sparse
from support.engines import answered, packed
from support.reference import assert_close
from support.small_index import plain_logits_after, random_ids, reopen, small_plan, stepped_logits
from support.tiny_models import WINDOW, build_tiny, tiny_tokenizer
from transformers import (
    AfmoeConfig,
    Cohere2Config,
    DogeConfig,
    Gemma3TextConfig,
    LlamaConfig,
    PhimoeConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
)

from sparsekv.formats.errors import SparsekvError
from sparsekv.formats.index.schema import MANIFEST
from sparsekv.formats.models.load import LoadedModel
from sparsekv.indexing.build import build_index
from sparsekv.indexing.plan import BuildPlan
from sparsekv.kernels.attention.attention import causal_attention
from sparsekv.kernels.common.hook import AttentionCall, route_attention
from sparsekv.runtime.decoding.answer import Sampling
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.selection.interface import Budget

EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
YARN = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 40, "rope_theta": 10000.0}
MIXED: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
WINDOWED: dict[str, tuple[Callable[[], PreTrainedModel], list[int | None]]] = {
    "qwen2-moe": (
        build_tiny(
            Qwen2MoeConfig,
            use_sliding_window=True,
            sliding_window=WINDOW,
            max_window_layers=4,
            num_hidden_layers=4,
            num_experts=4,
            shared_expert_intermediate_size=32,
            **EXPERTS,
        ),
        [WINDOW, None, WINDOW, None],
    ),
    # its gate wants an output that can be viewed in another shape
    "afmoe": (
        build_tiny(
            AfmoeConfig,
            sliding_window=WINDOW,
            head_dim=16,
            num_experts=4,
            num_dense_layers=2,
            num_shared_experts=1,
            **EXPERTS,
            **MIXED,
        ),
        [WINDOW, None, WINDOW, None],
    ),
    "cohere2": (build_tiny(Cohere2Config, sliding_window=WINDOW, **MIXED), [WINDOW, None, WINDOW, None]),
    "phimoe": (build_tiny(PhimoeConfig, sliding_window=4096, num_local_experts=4, **EXPERTS), [None] * 3),
}
"""A model, and the windows of its layers."""


def plan_of(model: PreTrainedModel, **changes: Any) -> BuildPlan:
    return small_plan(loaded=LoadedModel(model, tiny_tokenizer(), "tiny-model", None), **changes)


@pytest.mark.parametrize("family", WINDOWED)
def test_answers_are_plain_transformers(family: str, tmp_path: Path) -> None:
    make, windows = WINDOWED[family]
    plan, tokens = plan_of(make()), random_ids(WINDOW + 24)
    build_index(plan, tmp_path / "a.skv")
    index = reopen(plan, tmp_path / "a.skv")
    assert [facts.sliding_window for facts in index.artifact.manifest.layers] == windows
    caches = [index.dense_cache(), index.cache(sparse("squeezed", Squeezed(), Budget(1.0)))]
    found = [stepped_logits(index, cache, tokens, WINDOW + 8) for cache in caches]
    plain = plain_logits_after(index, tokens)
    for logits in found:
        assert_close(logits, plain.double(), 1e-4)
        assert torch.equal(logits.argmax(-1), plain.argmax(-1))


@torch.inference_mode()
def test_a_batch_answers_as_plain_transformers(tmp_path: Path) -> None:
    plan = plan_of(WINDOWED["qwen2-moe"][0]())
    build_index(plan, tmp_path / "a.skv")
    index = reopen(plan, tmp_path / "a.skv")
    questions = [random_ids(length, seed=length) for length in (5, 40, 71)]
    answers = answered(packed(index, index.dense_cache(), 2), questions, Sampling(max_new_tokens=12))
    for number, question in enumerate(questions):
        answer = torch.tensor(answers[number].ids)
        plain = plain_logits_after(index, torch.cat([question, answer]))
        assert torch.equal(plain[len(question) - 1 : -1].argmax(-1), answer)


@torch.inference_mode()
def test_questions_together_are_longer_than_a_window_of_all_positions(tmp_path: Path) -> None:
    """Each sequence is within the model's positions, and within the window; the pass that they share is not."""
    plan = plan_of(
        build_tiny(Gemma3TextConfig, head_dim=16, sliding_window=350, max_position_embeddings=340, **MIXED)()
    )
    build_index(plan, tmp_path / "a.skv")
    index = reopen(plan, tmp_path / "a.skv")
    questions = [random_ids(length, seed=length) for length in (19, 20, 21)]
    answers = answered(packed(index, index.dense_cache(), 3), questions, Sampling(max_new_tokens=4))
    for number, question in enumerate(questions):
        answer = torch.tensor(answers[number].ids)
        plain = plain_logits_after(index, torch.cat([question, answer]))
        assert torch.equal(plain[len(question) - 1 : -1].argmax(-1), answer)


@torch.inference_mode()
def test_answers_end_where_a_window_of_all_original_positions_does(tmp_path: Path) -> None:
    """YaRN gives the model four times its original positions; beyond the window, keys would have to be hidden."""
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 340}
    window = {"use_sliding_window": True, "sliding_window": 345, "max_position_embeddings": 340}
    plan = plan_of(build_tiny(Qwen2Config, rope_parameters=rope, **window, **MIXED)())
    build_index(plan, tmp_path / "a.skv")
    index = reopen(plan, tmp_path / "a.skv")
    questions = [random_ids(length, seed=length) for length in (5, 7)]
    answers = answered(packed(index, index.dense_cache(), 2), questions, Sampling(max_new_tokens=60))
    for number, question in enumerate(questions):
        answer = torch.tensor(answers[number].ids)
        assert len(index.input_ids) + len(question) + len(answer) == 345
        plain = plain_logits_after(index, torch.cat([question, answer]))
        assert torch.equal(plain[len(question) - 1 : -1].argmax(-1), answer)


@torch.inference_mode()
def test_a_window_of_every_layer_reaches_the_attention() -> None:
    model, ids = (
        build_tiny(PhimoeConfig, sliding_window=WINDOW, num_local_experts=4, **EXPERTS)(),
        random_ids(100)[None],
    )

    def dense(call: AttentionCall) -> torch.Tensor:
        assert call.window == WINDOW
        return causal_attention(
            call.query, call.keys, call.values, call.softmax_scale, call.softcap, call.window, call.sink_logits
        )

    with route_attention(model, dense):
        logits = model(ids).logits
    assert_close(logits, model(ids).logits.double(), 1e-4)


class OwnMask(torch.nn.Module):
    """A layer of a model that makes its mask itself."""

    def __init__(self, layer: torch.nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: torch.Tensor, attention_mask: object = None, **more: Any) -> torch.Tensor:
        tokens = hidden_states.shape[1]
        mask = torch.zeros(1, 1, tokens, tokens)
        output: torch.Tensor = self.layer(hidden_states, attention_mask=mask, **more)
        return output


class NoMask(OwnMask):
    """A layer of a model that makes none."""

    def forward(self, hidden_states: torch.Tensor, attention_mask: object = None, **more: Any) -> torch.Tensor:
        output: torch.Tensor = self.layer(hidden_states, attention_mask=None, **more)
        return output


class Biased(OwnMask):
    """A layer that gives its attention something that transformers' own would look at."""

    def forward(self, hidden_states: torch.Tensor, **more: Any) -> torch.Tensor:
        output: torch.Tensor = self.layer(hidden_states, position_bias=torch.ones(1), **more)
        return output


class Scaled(OwnMask):
    """The same, by a name that nobody knows."""

    def forward(self, hidden_states: torch.Tensor, **more: Any) -> torch.Tensor:
        output: torch.Tensor = self.layer(hidden_states, logit_bend=2.0, **more)
        return output


def with_layer(kind: type[OwnMask]) -> Callable[[], PreTrainedModel]:
    def make() -> PreTrainedModel:
        model = build_tiny(LlamaConfig)()
        layers: Any = model.get_submodule("model.layers")
        layers[1] = kind(layers[1])
        return model

    return make


def not_causal() -> PreTrainedModel:
    model = build_tiny(LlamaConfig)()
    attention: Any = model.get_submodule("model.layers.1.self_attn")
    attention.is_causal = False
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (build_tiny(DogeConfig, sliding_window=None), "has a mask that the model itself makes or changes"),
        (build_tiny(DogeConfig, sliding_window=WINDOW), "has a mask that the model itself makes or changes"),
        (
            build_tiny(Gemma3TextConfig, head_dim=16, sliding_window=WINDOW, use_bidirectional_attention=True, **MIXED),
            "lets tokens attend to later tokens",
        ),
        (with_layer(OwnMask), "has a mask that the model itself makes or changes"),
        (with_layer(NoMask), "has a layer without a mask"),
        (with_layer(Biased), "adds a bias by position to its logits"),
        (with_layer(Scaled), "depends on its argument `logit_bend`"),
        (not_causal, "lets tokens attend to later tokens"),
    ],
    ids=[
        "doge",
        "doge with a window",
        "gemma3 both ways",
        "own mask",
        "no mask",
        "bias",
        "unknown",
        "not causal",
    ],
)
def test_other_attention_is_refused_before_the_prefill(
    make: Callable[[], PreTrainedModel], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(SparsekvError) as error:
        build_index(plan_of(make(), methods={}), tmp_path / "a.skv")
    assert str(error.value) == (
        f"tiny-model cannot be indexed: the model's attention {reason}, which an index cannot reproduce; choose "
        "another model"
    )
    assert not (tmp_path / "a.skv" / MANIFEST).exists()
