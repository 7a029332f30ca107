"""Tests of the rule by which a text is a later version of an index's document."""

import pytest
import torch

from sparsekv.indexing.existing_index import LEAST_IN_COMMON, RUN, is_cut, share_that_stays


def _words(tokens: int, seed: int) -> torch.Tensor:
    return torch.randint(49_152, (tokens,), generator=torch.Generator().manual_seed(seed))


TEXT, OTHER, LICENCE = _words(6000, 0), _words(6000, 1), _words(256, 2)
LATER = {
    "a word in the first line": torch.cat([TEXT[:3], OTHER[:1], TEXT[4:]]),
    "a new beginning": torch.cat([OTHER[:500], TEXT]),
    "a paragraph of the middle": torch.cat([TEXT[:2000], OTHER[:300], TEXT[2300:]]),
    "a word in every fifty": torch.where(torch.arange(6000) % 50 == 0, OTHER, TEXT),
    "appended text": torch.cat([TEXT, OTHER]),
}


@pytest.mark.parametrize("after", LATER.values(), ids=LATER)
def test_an_edited_text_is_the_same_document(after: torch.Tensor) -> None:
    assert share_that_stays(TEXT, after) > LEAST_IN_COMMON


def test_another_text_under_the_same_licence_is_another_document() -> None:
    before, after = torch.cat([LICENCE, TEXT]), torch.cat([LICENCE, OTHER[:2000]])
    assert share_that_stays(before, after) == pytest.approx((256 - RUN + 1) / (6256 - RUN + 1))


@pytest.mark.parametrize("tokens", [RUN + 1, 600, 5999])
def test_a_text_that_was_cut_is_the_same_document(tokens: int) -> None:
    assert is_cut(TEXT, TEXT[:tokens])
    assert is_cut(TEXT, torch.cat([TEXT[: tokens - RUN], OTHER[:RUN]]))  # a tokenizer may split its last words anew


def test_a_part_of_the_middle_is_another_document() -> None:
    chapter = TEXT[2000:3500]
    assert not is_cut(TEXT, chapter)
    assert share_that_stays(TEXT, chapter) < LEAST_IN_COMMON


def test_a_note_behind_the_same_frame_does_not_replace_a_long_text() -> None:
    before, after = torch.cat([LICENCE, TEXT]), torch.cat([LICENCE, OTHER[:100]])
    assert not is_cut(before, after)
    assert share_that_stays(before, after) < 0.05


def test_a_text_of_less_than_a_passage_tells_nothing() -> None:
    assert share_that_stays(TEXT[: RUN - 1], TEXT) == 1
