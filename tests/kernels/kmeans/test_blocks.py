"""Where a growing sequence is cut into blocks: closed blocks of W tokens, and an open one."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsekv.kernels.kmeans.hierarchy import block_offsets, equal_neighbours

block_sizes = st.integers(2, 300)


@given(tokens=st.integers(1, 5000), block=block_sizes)
def test_closed_blocks_have_w_tokens_and_the_open_one_what_is_left(tokens: int, block: int) -> None:
    offsets = block_offsets(tokens, block)
    lengths = [end - start for start, end in pairwise(offsets)]
    assert (offsets[0], offsets[-1]) == (0, tokens)
    assert all(length == block for length in lengths[:-1])
    alpha = block // 2
    assert min(tokens, alpha) <= lengths[-1] < block + alpha


@given(block=block_sizes, steps=st.lists(st.integers(1, 400), min_size=1, max_size=40))
def test_tokens_that_come_in_steps_close_blocks_as_they_would_one_by_one(block: int, steps: list[int]) -> None:
    """The rule itself: when the open block reaches W + alpha, its first W tokens become a closed block."""
    closed, tokens = 0, 0
    for step in steps:
        for _ in range(step):
            tokens += 1
            if tokens - closed * block == block + block // 2:
                closed += 1
        assert block_offsets(tokens, block) == [number * block for number in range(closed + 1)] + [tokens]


@pytest.mark.parametrize(
    ("tokens", "offsets"),
    [
        (1, [0, 1]),
        (2048, [0, 2048]),
        (12_287, [0, 12_287]),
        (12_288, [0, 8192, 12_288]),
        (20_479, [0, 8192, 20_479]),
        (20_480, [0, 8192, 16_384, 20_480]),
    ],
)
def test_cuts_of_blocks_of_8192(tokens: int, offsets: list[int]) -> None:
    assert block_offsets(tokens, 8192) == offsets


@given(tokens=st.integers(1, 5000), block=block_sizes, most=st.integers(1, 2000))
def test_equal_neighbours_are_all_blocks_in_order_as_many_as_fit(tokens: int, block: int, most: int) -> None:
    offsets = block_offsets(tokens, block)
    runs = equal_neighbours(offsets, most)
    assert [pair for run in runs for pair in pairwise(run)] == list(pairwise(offsets))
    for run in runs:
        assert len({end - start for start, end in pairwise(run)}) == 1
        assert len(run) == 2 or run[-1] - run[0] <= most
    for run, after in pairwise(runs):
        assert after[1] - after[0] != run[1] - run[0] or after[1] - run[0] > most
