"""What makes a text a later version of an index's document."""

import pytest
import torch

from sparsekv.indexing.same_document import LEAST_IN_COMMON, RUN, share_in_common


def _words(tokens: int, seed: int) -> torch.Tensor:
    return torch.randint(49_152, (tokens,), generator=torch.Generator().manual_seed(seed))


TEXT, OTHER, LICENCE = _words(6000, 0), _words(6000, 1), _words(256, 2)
LATER = {
    "a word in the first line": torch.cat([TEXT[:3], OTHER[:1], TEXT[4:]]),
    "a new beginning": torch.cat([OTHER[:500], TEXT]),
    "a paragraph of the middle": torch.cat([TEXT[:2000], OTHER[:300], TEXT[2300:]]),
    "a word in every fifty": torch.where(torch.arange(6000) % 50 == 0, OTHER, TEXT),
    "appended text": torch.cat([TEXT, OTHER]),
    "the first tokens alone": TEXT[:600],
}


@pytest.mark.parametrize("after", LATER.values(), ids=LATER)
def test_an_edited_text_is_the_same_document(after: torch.Tensor) -> None:
    assert share_in_common(TEXT, after) > LEAST_IN_COMMON


def test_another_text_under_the_same_licence_is_another_document() -> None:
    before, after = torch.cat([LICENCE, TEXT]), torch.cat([LICENCE, OTHER[:2000]])
    assert share_in_common(before, after) == pytest.approx((256 - RUN + 1) / (2256 - RUN + 1))


def test_a_text_of_less_than_a_passage_tells_nothing() -> None:
    assert share_in_common(TEXT, TEXT[: RUN - 1]) == 1
