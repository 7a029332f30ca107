"""The mixture that steps are timed on: uneven, in runs, peaked, with a sink; and the same for the same seed."""

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.reference import attention_probabilities

from sparsekv.indexing.indexers.interface import LayerInput
from sparsekv.indexing.methods.squeezed import SqueezedIndexer
from sparsekv.runtime.benchmark.layer import LayerData, Shape, mixture

SHAPE = Shape(context=4096, heads=6, kv_heads=2, head_dim=32)


def made(seed: int = 0, *, batch: int = 1, dtype: torch.dtype = torch.float32, sampled: int = 0) -> LayerData:
    return mixture(SHAPE, batch, seed, torch.device("cpu"), dtype, sampled)


def attention(data: LayerData) -> torch.Tensor:
    """[Hk, G, N] float64: what the step's query gives to each token."""
    query = data.query.unflatten(0, (len(data.keys), -1))
    return attention_probabilities(query, data.keys, data.facts.softmax_scale)[:, :, 0]


@settings(max_examples=15)
@given(seed=st.integers(0, 2**31 - 1), context=st.integers(512, 6000), group=st.integers(1, 4))
@example(seed=788679399, context=600, group=3)  # the first token's key, before it is the sink's, is among the best
def test_a_few_tokens_hold_most_of_the_attention_and_the_first_a_good_part(seed: int, context: int, group: int) -> None:
    data = mixture(Shape(context, 2 * group, 2, 32), 1, seed, torch.device("cpu"), torch.float32)
    assert all(bool(rows.isfinite().all()) for rows in (data.keys, data.values, data.query, data.tail))
    probability = attention(data)
    beside = probability[..., 1:] / probability[..., 1:].sum(-1, keepdim=True)
    mass = beside.topk(round(0.05 * context), -1).values.sum(-1)
    assert float(mass.min()) >= 0.64
    assert float(mass.max()) <= 0.91
    assert 0.25 <= float(probability[..., 0].mean()) <= 0.75


def test_clusters_are_of_uneven_sizes() -> None:
    data = made()
    inside = data.keys[:, data.middle], data.values[:, data.middle]
    tensors = SqueezedIndexer(levels=(0.05,)).build_layer(LayerInput(*inside, data.facts, data.split))
    counts = tensors["level0.counts"].double().flatten()
    assert float(counts.quantile(0.99)) > 3 * float(counts.median())
    assert float(counts.max()) > 5 * float(counts.mean())


def test_neighbours_share_topics() -> None:
    keys = torch.nn.functional.normalize(made().keys[:, 1:].double(), dim=-1)
    shuffled = keys[:, torch.randperm(keys.shape[1], generator=torch.Generator().manual_seed(0))]
    near, far = ((rows[:, 1:] * rows[:, :-1]).sum(-1).mean() for rows in (keys, shuffled))
    assert near > 0.4
    assert far < 0.1


def test_questions_over_a_context_attend_to_the_same_tokens_in_part() -> None:
    data = mixture(SHAPE, 1, 0, torch.device("cpu"), torch.float32, questions=16)
    query = data.query.unflatten(0, (2, -1))
    probability = attention_probabilities(query, data.keys, data.facts.softmax_scale).mean(1)
    best = probability.topk(205, -1).indices  # 5%
    together = [len(torch.unique(head)) / 4096 for head in best.flatten(1)]
    assert all(0.08 < share < 0.45 for share in together)
    mass = probability[..., 1:].topk(205, -1).values.sum(-1) / probability[..., 1:].sum(-1)
    # Drawn for the first question, to which the others are alike.
    assert float(mass[..., 0].min()) >= 0.64
    assert 0.6 < float(mass.mean()) < 0.9
    assert not torch.equal(data.query[:, 0], data.query[:, 1])


def test_contexts_of_a_batch_differ_and_seeds_repeat() -> None:
    both, again, other = made(batch=2), made(batch=2), made(seed=1)
    assert torch.equal(both.keys, again.keys)
    assert torch.equal(both.query, again.query)
    assert not torch.equal(both.keys[:2], both.keys[2:])
    for name in ("keys", "values", "query", "tail"):
        rows = getattr(both, name)
        assert torch.equal(rows[len(rows) // 2 :], getattr(other, name))


def test_indexers_get_as_many_queries_as_they_want_at_rising_positions_of_the_middle() -> None:
    data = made(sampled=100, dtype=torch.bfloat16)
    assert data.sampled.shape == (6, 34, 32)
    assert data.sampled.dtype == torch.bfloat16
    assert bool((data.positions.diff() > 0).all())
    assert data.positions[0] >= data.middle.start
    assert data.positions[-1] < data.middle.stop
