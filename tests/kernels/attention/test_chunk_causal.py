"""A chunk's dense attention on a CPU, in two parts, against one softmax over all in float64."""

import pytest
import torch
from support.pairs import every_pair
from support.reference import assert_close, random_attention, reference_attention

from sparsekv.kernels.attention.attention import causal_attention, causal_mask, chunk_causal, takes_chunk

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@every_pair(
    {
        "dtype, tolerance": TOLERANCES.items(),
        "D": [64, 96, 128, 256],
        "G": [1, 3, 8],
        "Q, T": [(1, 1), (1, 60), (7, 7), (7, 60), (300, 301), (300, 900)],
    }
)
def test_it_is_one_softmax(Q: int, T: int, G: int, D: int, dtype: torch.dtype, tolerance: float) -> None:
    query, keys, values = random_attention(G=G, Q=Q, T=T, D=D, dtype=dtype)
    expected = reference_attention(query, keys, values, D**-0.5, mask=causal_mask(Q, T, None, query.device))
    output = chunk_causal(query.flatten(0, 1), keys, values, D**-0.5)
    assert output.dtype == dtype
    assert_close(output, expected.flatten(0, 1), tolerance)


def test_rows_may_lie_as_a_model_and_its_cache_leave_them() -> None:
    query, keys, values = random_attention(Hk=2, G=3, Q=5, T=40)
    expected = chunk_causal(query.flatten(0, 1), keys, values, 0.1)
    of_tokens = query.flatten(0, 1).transpose(0, 1).contiguous().transpose(0, 1)
    room = (torch.cat([rows, torch.full_like(rows, torch.nan)], 1)[:, :40] for rows in (keys, values))
    assert torch.equal(chunk_causal(of_tokens, *room, 0.1), expected)


@pytest.mark.parametrize("before", [1e4, -1e4])
def test_one_part_may_have_all_the_weight(before: float) -> None:
    query, keys, values = random_attention(Hk=1, G=2, Q=3, T=9, D=64)
    query, keys = query.abs(), keys.abs()
    keys[:, :6] *= before
    expected = reference_attention(query, keys, values, 1.0, mask=causal_mask(3, 9, None, query.device))
    assert_close(chunk_causal(query.flatten(0, 1), keys, values, 1.0), expected.flatten(0, 1), 1e-5)


@pytest.mark.parametrize("turned", ["query", "keys", "values"])
def test_rows_whose_channels_lie_apart_are_left_to_torch(turned: str) -> None:
    query, keys, values = random_attention(Hk=2, G=3, Q=5, T=40)
    given = {"query": query.flatten(0, 1), "keys": keys, "values": values}
    expected = causal_attention(*given.values(), 0.1)
    given[turned] = given[turned].transpose(1, 2).contiguous().transpose(1, 2)
    assert not takes_chunk(*given.values())
    assert_close(causal_attention(*given.values(), 0.1), expected, 1e-6)


def test_what_it_does_not_compute_is_left_to_torch() -> None:
    query, keys, values = (rows.double() for rows in random_attention(Q=3, T=9))
    expected = reference_attention(query, keys, values, 0.1, mask=causal_mask(3, 9, None, query.device)).flatten(0, 1)
    assert_close(causal_attention(query.flatten(0, 1), keys, values, 0.1), expected, 1e-12)
    wide = torch.cat([values, values], -1).float()
    output = causal_attention(query.flatten(0, 1).float(), keys.float(), wide, 0.1)
    assert_close(output[..., : values.shape[2]], expected, 1e-6)
