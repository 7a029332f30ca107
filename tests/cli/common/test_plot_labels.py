"""Labels at the ends of lines keep their order and their distance, within the axes."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from sparsekv.cli.common.plots import LABEL_GAP, spread


@given(st.lists(st.floats(-0.2, 1.2), min_size=1, max_size=60))
def test_labels_keep_their_order_and_distance(heights: list[float]) -> None:
    placed = spread(heights)
    gap = min(LABEL_GAP, 1 / max(1, len(heights) - 1))
    ordered = sorted(placed)
    assert all(after - before >= gap - 1e-9 for before, after in pairwise(ordered))
    assert ordered[0] >= -1e-9
    assert ordered[-1] <= 1 + 1e-9
    for one, two in pairwise(sorted(range(len(heights)), key=lambda number: heights[number])):
        assert placed[one] < placed[two]


def test_labels_with_room_stay_at_their_lines() -> None:
    assert spread([0.9, 0.1, 0.5]) == [0.9, 0.1, 0.5]
