"""Bodies of answers: tokens in log-probabilities, with tokenizers of all kinds, and the share that steps read."""

import pytest
from support.tokenizers_of_families import KINDS, tokenizer_of
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from sparsekv.cli.serving.forms import About, TextForm
from sparsekv.cli.serving.responses import Completion, TextLogprobs
from sparsekv.runtime.attention.config import DecodeConfig, Dense
from sparsekv.runtime.decoding.engine import TokenLogprobs
from sparsekv.runtime.serving.stream import Piece, Usage

TEXT = "A list of Gr\u00f6\u00dfen, \u4e2d\u6587.\n\nAnother list"


def told(tokenizer: PreTrainedTokenizerBase, *pieces: list[TokenLogprobs]) -> list[TextLogprobs]:
    """The log-probabilities of each event of a completion's stream."""
    form = TextForm(About("doc", DecodeConfig(Dense()), tokenizer, 1, with_usage=False, with_logprobs=True))
    events = [event for piece in pieces for event in form.event(0, Piece("", logprobs=tuple(piece)))]
    found = [event.choices[0].logprobs for event in events if isinstance(event, Completion)]
    return [one for one in found if one is not None]


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_where_its_text_is(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer(TEXT, add_special_tokens=False).input_ids
    text = tokenizer.decode(ids, skip_special_tokens=True)
    answer = [TokenLogprobs(token, -1.0, ()) for token in ids]
    (whole,) = told(tokenizer, answer)
    # The text of the first token may begin with a space, which the tokenizer drops at the start of an answer.
    _, *later = zip(ids, whole.tokens, whole.text_offset, strict=True)
    shown = [one for one in later if "\ufffd" not in one[1] and one[0] not in tokenizer.all_special_ids]
    assert len(shown) > 8
    for _, token, place in shown:
        assert text[place:].startswith(token)
    parts = told(tokenizer, *([one] for one in answer))
    assert [part.tokens for part in parts] == [[token] for token in whole.tokens]
    assert [part.text_offset for part in parts] == [[place] for place in whole.text_offset]


@pytest.mark.parametrize("parts", [1, 2])
def test_an_invalid_byte_after_characters_moves_the_text_that_follows(parts: int) -> None:
    """Byte fallback then decodes each byte of the run to U+FFFD."""
    tokenizer = tokenizer_of("llama-2")
    run = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in ("\u05e9" * 3).encode() + b"\xff"]
    ids = [*run, *tokenizer("list", add_special_tokens=False).input_ids]
    text = tokenizer.decode(ids)
    answer = [TokenLogprobs(token, -1.0, ()) for token in ids]
    found = told(tokenizer, *([answer] if parts == 1 else [answer[:3], answer[3:]]))
    places = [place for part in found for place in part.text_offset]
    assert text[places[len(run)] :] == " list"


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("cut", [b"\xff", b"\xd7", b"\xe4\xb8", b"\xf0\x9f\x98", b"\xff\xff\xff\xff\xff"])
def test_a_token_behind_a_character_that_stays_incomplete_is_where_its_text_is(cut: bytes, parts: int) -> None:
    tokenizer = tokenizer_of("llama-3")
    letters = bytes_to_unicode()
    run = [tokenizer.convert_tokens_to_ids(letters[byte]) for byte in cut]
    ids = [*tokenizer("A", add_special_tokens=False).input_ids, *run, *tokenizer(TEXT).input_ids]
    text, first = tokenizer.decode(ids, skip_special_tokens=True), 1 + len(run)
    answer = [TokenLogprobs(token, -1.0, ()) for token in ids]
    found = told(tokenizer, *([answer] if parts == 1 else [[one] for one in answer]))
    places = [place for part in found for place in part.text_offset]
    assert text[places[first] :] == TEXT


@pytest.mark.parametrize("kind", ["llama-2", "llama-3"])
def test_no_alternative_takes_the_name_of_another(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    top = tuple((token, -0.1 * token) for token in range(len(tokenizer)))
    ((found,),) = (one.top_logprobs for one in told(tokenizer, [TokenLogprobs(0, 0.0, top)]))
    assert list(found.values()) == [logprob for _, logprob in top]


def test_the_share_that_is_read_is_that_of_a_mean_step() -> None:
    """A long answer has more steps than a short one, and an answer of one token has none."""
    about = About("doc", DecodeConfig(Dense()), tokenizer_of("llama-3"), 3, with_usage=True, with_logprobs=False)
    each = [Usage(9, 9, tokens, share) for tokens, share in ((1, None), (5, 0.1), (7, 0.3))]
    assert about.details(each).kv_fraction == pytest.approx((4 * 0.1 + 6 * 0.3) / 10)
    assert about.details(each[:1]).kv_fraction is None
