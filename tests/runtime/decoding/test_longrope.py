"""A longrope's switch outside of Phi-3: answers stay on their document's side of it, in talks and batches too."""

from pathlib import Path

import pytest
from support.configs import sparse
from support.engines import answered, packed
from support.reference import assert_close
from support.small_index import plain_logits_after, random_ids, reopen, small_plan, stepped_logits
from support.tiny_models import POSITIONS, build_tiny, tiny_tokenizer
from transformers import LlamaConfig

from sparsekv.formats.errors import UsageError
from sparsekv.formats.models.load import LoadedModel
from sparsekv.indexing.build import build_index
from sparsekv.runtime.attention.config import DecodeConfig, Dense
from sparsekv.runtime.decoding.answer import Sampling, answer_room, question_ids
from sparsekv.runtime.decoding.engine import generate
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.session import Conversation
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.selection.interface import Budget

TOKENS = 300
DENSE = DecodeConfig(Dense())


def built(folder: Path, switch: int) -> OpenIndex:
    """An index of 300 tokens, of a model whose frequencies are others in sequences of more than `switch` tokens."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": switch,
        "short_factor": [1.0] * 8,
        "long_factor": [3.0] * 8,
    }
    model = build_tiny(LlamaConfig, rope_parameters=rope)()
    plan = small_plan(loaded=LoadedModel(model, tiny_tokenizer(), "tiny-longrope", None), tokens=TOKENS)
    build_index(plan, folder)
    return reopen(plan, folder)


@pytest.mark.parametrize("switch", [TOKENS - 50, TOKENS + 60], ids=["long", "short"])
def test_answers_on_either_side_are_plain_transformers(switch: int, tmp_path: Path) -> None:
    index, tokens = built(tmp_path / "a.skv", switch), random_ids(50)
    assert answer_room(index, TOKENS + 10) == (POSITIONS if switch < TOKENS else switch) - TOKENS - 10
    for cache in (index.dense_cache(), index.cache(sparse("squeezed", Squeezed(), Budget(1.0)))):
        assert_close(stepped_logits(index, cache, tokens, 30), plain_logits_after(index, tokens).double(), 1e-4)


def test_an_answer_ends_at_the_switch_and_a_question_beyond_it_is_refused(tmp_path: Path) -> None:
    index = built(tmp_path / "a.skv", TOKENS + 90)
    question = question_ids(index, "Who?")
    room = 90 - len(question)
    cache, sampling = index.cache(sparse("squeezed", Squeezed(), Budget(1.0))), Sampling(max_new_tokens=200)
    assert generate(index, cache, question, sampling).generated_tokens <= room
    told = (
        f"this model's RoPE changes beyond {TOKENS + 90}, so that the index's keys are wrong there; ask a shorter "
        "question, or index a document"
    )
    with pytest.raises(UsageError, match=told):
        generate(index, cache, random_ids(90), sampling)
    engine = packed(index, index.dense_cache(), 2)
    with pytest.raises(UsageError, match=told):
        answered(engine, [question, random_ids(90)], sampling)
    talk = Conversation(index, DENSE)
    with pytest.raises(UsageError, match=told):
        talk.ask("Who? " * 30, sampling)
    assert not talk.turns
