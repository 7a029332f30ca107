"""A batch decodes as its sequences do one by one, and what is timed is what it is called."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.configs import sparse
from support.random_tensors import normal
from support.reference import assert_close
from support.tiny_models import FAMILIES
from transformers import PreTrainedModel

from sparsekv.runtime.benchmark.end_to_end import DenseFormLayer, TimedSteps, make_queries_alike, packed_cache
from sparsekv.runtime.benchmark.layer import LayerData, Shape, mixture, place_rows, sparse_layer
from sparsekv.runtime.benchmark.layer_timer import dense_forms
from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.cache.stored_layer import DenseLayer, StoredLayer
from sparsekv.runtime.methods.quest import Quest
from sparsekv.runtime.selection.interface import Budget

BATCH, SEQUENCE_TOKENS = 3, 4
SHAPE = Shape(600, heads=4, kv_heads=2, head_dim=32)


def _quest(data: LayerData) -> StoredLayer:
    selector = Quest().prepare(data.context({}))
    return sparse_layer(data, place_rows(data, selector), selector, sparse("quest", Quest(), Budget(0.1)))


MAKERS: dict[str, Callable[[LayerData], StoredLayer]] = {
    "dense": lambda data: DenseLayer(data.keys, data.values),
    "quest": _quest,
    "torch": lambda data: DenseFormLayer(data, next(dense_forms(data))[1]),
}


def _decoded(
    model: PreTrainedModel,
    data: LayerData,
    make: Callable[[LayerData], StoredLayer],
    tokens: torch.Tensor,
    *,
    held: bool,
) -> torch.Tensor:
    """Logits [T, batch, V] of tokens [T, batch, 1], one after another."""
    cache = IndexCache([make(data) for _ in range(model.config.num_hidden_layers)], batch=data.batch)
    steps = TimedSteps(model, cache, data.split.tokens, len(tokens))
    with torch.inference_mode(), steps.routed():
        if held:
            cache.reserve(1, len(tokens), capture=True)
            return torch.stack([steps(one).clone() for one in tokens])
        return torch.stack(
            [model(input_ids=one, past_key_values=cache, use_cache=True).logits[:, -1] for one in tokens]
        )


def _sequence(data: LayerData, number: int) -> LayerData:
    rows, queries = (slice(number * heads, (number + 1) * heads) for heads in (SHAPE.kv_heads, SHAPE.heads))
    parts = {name: getattr(data, name)[queries] for name in ("query", "tail", "sampled")}
    return replace(data, keys=data.keys[rows], values=data.values[rows], batch=1, **parts)


@pytest.mark.parametrize("held", [False, True], ids=["plain", "held"])
@pytest.mark.parametrize("name", MAKERS)
def test_a_batch_is_its_sequences(name: str, held: bool) -> None:
    model = FAMILIES["qwen3"]()
    data = mixture(SHAPE, BATCH, 0, torch.device("cpu"), torch.float32)
    tokens = torch.arange(SEQUENCE_TOKENS * BATCH).view(SEQUENCE_TOKENS, BATCH, 1)
    together = _decoded(model, data, MAKERS[name], tokens, held=held)
    for number in range(BATCH):
        some = tokens[:, number : number + 1]
        alone = _decoded(model, _sequence(data, number), MAKERS[name], some, held=False)
        assert_close(together[:, number : number + 1], alone.double(), 1e-4)


@pytest.mark.parametrize("name", ["dense", "torch"])
def test_questions_over_one_context_are_those_of_a_context_each(name: str) -> None:
    model, questions = FAMILIES["qwen3"](), 3
    data = mixture(SHAPE, 1, 0, torch.device("cpu"), torch.float32, questions=questions)
    layers = [MAKERS[name](data) for _ in range(model.config.num_hidden_layers)]
    steps = TimedSteps(model, packed_cache(layers, questions), SHAPE.context, 1)
    tokens = torch.arange(questions)[:, None]
    with torch.inference_mode(), steps.routed():
        together = steps(tokens)
    alone = [_decoded(model, data, MAKERS[name], one.view(1, 1, 1), held=False)[0] for one in tokens]
    assert_close(together, torch.cat(alone).double(), 1e-4)


def test_torchs_dense_attention_is_ours_for_the_first_token_but_for_its_own_row() -> None:
    """One row more than 600 changes little; a layer that did not attend would change everything."""
    model = FAMILIES["qwen3"]()
    data = mixture(SHAPE, 1, 0, torch.device("cpu"), torch.float32)
    tokens = torch.tensor([[[7]]])
    ours, torchs = (_decoded(model, data, MAKERS[name], tokens, held=False) for name in ("dense", "torch"))
    assert_close(torchs, ours.double(), 0.05)


@torch.no_grad()
def test_queries_with_a_part_in_common() -> None:
    """Queries of unrelated tokens get a common part in every layer. The part's share, squared, is the cosine of two
    queries."""
    model = FAMILIES["qwen3"]()
    assert make_queries_alike(model, 0.9)
    inputs = normal(0, 200, model.config.hidden_size)
    for layer in model.model.layers:
        queries = torch.nn.functional.normalize(layer.self_attn.q_proj(inputs), dim=-1)
        cosines = (queries @ queries.T)[~torch.eye(len(queries), dtype=torch.bool)]
        assert float(cosines.mean()) == pytest.approx(0.81, abs=0.1)
    assert not make_queries_alike(torch.nn.Linear(2, 2), 0.9)  # type: ignore[arg-type]  # nothing is called so in it
