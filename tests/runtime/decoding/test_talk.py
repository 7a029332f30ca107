"""A talk: each question sees the document and all turns before it, whatever the setting is and was."""

from dataclasses import replace
from itertools import count

import pytest
import torch
from support.engines import count_rows_on_the_device
from support.plain_talk import QUESTIONS, SAMPLING, plain_answer, plain_talk
from support.tiny_models import END

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.attention.config import DecodeConfig, Dense, QuestionPrefill
from sparsekv.runtime.attention.sparse_layer import SparseLayer
from sparsekv.runtime.decoding.answer import Sampling
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.session import Conversation, Place, Turn, add_turn
from sparsekv.runtime.methods.codes import Codes
from sparsekv.runtime.methods.multipole import Multipole
from sparsekv.runtime.methods.oracle import Oracle
from sparsekv.runtime.methods.quest import Quest
from sparsekv.runtime.methods.snapkv import SnapKV
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.methods.tidaldecode import TidalDecode
from sparsekv.runtime.selection.interface import Budget, Method, MethodSpec

METHODS: dict[str, Method] = {
    "squeezed": Squeezed(),
    "codes": Codes(),
    "multipole": Multipole(stream=True, buffer=16),
    "snapkv": SnapKV(),
    "tidaldecode": TidalDecode(),
}


def setting(name: str, budget: float = 1.0) -> DecodeConfig:
    return DecodeConfig(MethodSpec(name, "", METHODS[name], False), Budget(budget))


@pytest.fixture(scope="module")
def plain(full_index: OpenIndex) -> list[list[int]]:
    """The plain model's answers to `QUESTIONS`."""
    return list(plain_talk(full_index))


@pytest.fixture(scope="session")
def plain_of_family(family_index: OpenIndex) -> list[list[int]]:
    """The plain model's answers to `QUESTIONS`, of each family in turn."""
    return list(plain_talk(family_index))


def test_a_talk_that_reads_everything_is_the_plain_models(
    family_index: OpenIndex, plain_of_family: list[list[int]]
) -> None:
    """Longer than the window of layers that have one."""
    talk = Conversation(family_index, setting("squeezed"))
    answers = [talk.ask(question, SAMPLING).ids for question in QUESTIONS]
    assert answers == plain_of_family


def test_a_step_before_the_talk_changes_nothing(full_index: OpenIndex, plain: list[list[int]]) -> None:
    talk = Conversation(full_index, setting("squeezed"))
    talk.warm_up()
    assert [talk.ask(question, SAMPLING).ids for question in QUESTIONS] == plain


def test_steps_whose_lengths_lie_on_the_device_go_on_too(
    family_index: OpenIndex, plain_of_family: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: each answer's rows are written to slots, each question's behind them."""
    count_rows_on_the_device(monkeypatch)
    talk = Conversation(family_index, setting("squeezed"))
    answers = [talk.ask(question, SAMPLING).ids for question in QUESTIONS]
    assert answers == plain_of_family


@pytest.mark.parametrize("name", METHODS)
def test_a_talk_goes_on_by_every_kind_of_method(full_index: OpenIndex, plain: list[list[int]], name: str) -> None:
    talk = Conversation(full_index, setting(name))
    assert [talk.ask(question, SAMPLING).ids for question in QUESTIONS] == plain


@pytest.mark.parametrize(
    ("before", "name"),
    [
        ("multipole", "codes"),
        ("multipole", "snapkv"),
        ("squeezed", "multipole"),
        *(pytest.param("multipole", name, marks=pytest.mark.slow) for name in ("squeezed", "multipole", "tidaldecode")),
    ],
)
def test_another_setting_sees_the_same_turns(
    full_index: OpenIndex, plain: list[list[int]], before: str, name: str
) -> None:
    """Also where the method before had moved the turns' tokens into its clusters."""
    talk = Conversation(full_index, setting(before))
    answers = [talk.ask(question, SAMPLING).ids for question in QUESTIONS[:2]]
    talk.switch(setting(name))
    answers.append(talk.ask(QUESTIONS[2], SAMPLING).ids)
    assert answers == plain


@pytest.mark.parametrize("name", ["snapkv", "multipole"])
def test_a_dense_prefill_of_questions_changes_nothing_at_a_full_budget(
    full_index: OpenIndex, plain: list[list[int]], name: str
) -> None:
    """Nor with tokens that move into the index: it has them too."""
    talk = Conversation(full_index, replace(setting(name), question=Dense()))
    assert [talk.ask(question, SAMPLING).ids for question in QUESTIONS] == plain


def test_what_moves_into_an_index_and_a_prefill_of_its_own_exclude_each_other(full_index: OpenIndex) -> None:
    """The prefill's method knows the document's tokens alone."""
    prefill = QuestionPrefill("snapkv", METHODS["snapkv"], Budget(1.0), 7)
    refusal = "^--stream cannot be used with --prefill snapkv: .* snapkv cannot select tokens that --stream has"
    with pytest.raises(UsageError, match=refusal):
        Conversation(full_index, replace(setting("multipole"), question=prefill))
    talk = Conversation(full_index, replace(setting("snapkv"), question=prefill))
    with pytest.raises(UsageError, match="--stream"):
        talk.switch(replace(setting("multipole"), question=prefill))


def test_a_talk_is_forgotten_whose_answers_outgrew_their_buffer(full_index: OpenIndex) -> None:
    """The buffer that an answer made is as good as the first one."""
    method = Multipole(stream=True, buffer=96)
    talk = Conversation(full_index, DecodeConfig(MethodSpec("multipole", "", method, False), Budget(0.3)))
    long = Sampling(max_new_tokens=150)
    first = talk.ask(QUESTIONS[0], long).ids
    assert len(first) > 100
    talk.forget()
    assert talk.ask(QUESTIONS[0], long).ids == first


def test_a_question_is_ranked_by_its_own_window(full_index: OpenIndex) -> None:
    """A method that observes questions observes each of a talk, and a setting that is switched to the last one."""
    talk = Conversation(full_index, setting("snapkv", 0.1))
    orders = []
    for question in QUESTIONS[:2]:
        talk.ask(question, SAMPLING)
        orders.append(_order(talk))
    assert not torch.equal(*orders)
    again = Conversation(full_index, setting("snapkv", 0.1))
    again.turns = talk.turns[:1]
    again.switch(setting("snapkv", 0.1))
    assert not torch.equal(_order(again), _order(Conversation(full_index, setting("snapkv", 0.1))))


def _order(talk: Conversation) -> torch.Tensor:
    """The ranking of the middle's tokens in the last layer."""
    layer = talk._cache().stored_layers[-1]
    assert isinstance(layer, SparseLayer)
    order: torch.Tensor = layer.plan.selector.order  # type: ignore[attr-defined]  # snapkv's
    return order.clone()


def test_what_came_of_a_stopped_answer_stays(full_index: OpenIndex, plain: list[list[int]]) -> None:
    talk, pieces, tokens = Conversation(full_index, setting("squeezed")), list[str](), count(1)
    answer = talk.ask(QUESTIONS[0], SAMPLING, pieces.append, stop=lambda: next(tokens) >= 5)
    assert answer.finish_reason == "interrupted"
    assert answer.ids == plain[0][:5]
    assert "".join(pieces) == answer.text
    told = torch.tensor(
        full_index.tokenizer(
            f"<|end|>\n<|start|>user\n{QUESTIONS[1]}<|end|>\n<|start|>assistant\n", add_special_tokens=False
        ).input_ids
    )
    before = torch.cat([full_index.input_ids, talk.turns[0].tokens, told])
    assert talk.ask(QUESTIONS[1], SAMPLING).ids == plain_answer(full_index, before)


@pytest.mark.parametrize(
    "failure", [KeyboardInterrupt, RuntimeError, pytest.param(MemoryError, marks=pytest.mark.slow)]
)
def test_a_failure_leaves_the_talk_as_it_was(
    full_index: OpenIndex, plain: list[list[int]], failure: type[BaseException]
) -> None:
    talk = Conversation(full_index, setting("multipole"))

    def fail(piece: str) -> None:
        raise failure

    assert talk.ask(QUESTIONS[0], SAMPLING).ids == plain[0]
    with pytest.raises(failure):
        talk.ask("Never mind?", SAMPLING, fail)
    assert len(talk.turns) == 1
    assert talk.ask(QUESTIONS[1], SAMPLING).ids == plain[1]


def test_a_setting_that_cannot_be_leaves_the_old_one(full_index: OpenIndex, plain: list[list[int]]) -> None:
    talk = Conversation(full_index, setting("squeezed"))
    talk.ask(QUESTIONS[0], SAMPLING)
    before = talk.config
    with pytest.raises(UsageError, match="--select-layer 9: the index has 3 layers"):
        talk.switch(DecodeConfig(MethodSpec("tidaldecode", "", TidalDecode(select_layer=9), False), Budget(0.1)))
    assert talk.config is before
    assert talk.ask(QUESTIONS[1], SAMPLING).ids == plain[1]


def test_a_forgotten_talk_begins_anew(full_index: OpenIndex) -> None:
    talk = Conversation(full_index, setting("multipole"))
    first = [talk.ask(question, SAMPLING).ids for question in QUESTIONS[:2]]
    talk.forget()
    assert not talk.turns
    assert [talk.ask(question, SAMPLING).ids for question in QUESTIONS[:2]] == first


def test_a_talk_that_is_not_quite_forgotten_is_as_it_was(
    full_index: OpenIndex, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = Conversation(full_index, setting("multipole"))
    answers = [talk.ask(QUESTIONS[0], SAMPLING).ids]
    layers = talk._cache().stored_layers

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(layers[1], "rewind", interrupt)
    with pytest.raises(KeyboardInterrupt):
        talk.forget()
    assert len(talk.turns) == 1
    answers += [talk.ask(question, SAMPLING).ids for question in QUESTIONS[1:3]]
    assert answers == plain


def test_each_answer_counts_what_it_read_itself(full_index: OpenIndex) -> None:
    talk = Conversation(full_index, DecodeConfig(MethodSpec("quest", "", Quest(page_size=8), False), Budget(0.2)))
    first, second = (talk.ask(question, SAMPLING).kv_fraction for question in QUESTIONS[:2])
    assert first == pytest.approx(second)
    talk.switch(DecodeConfig(MethodSpec("oracle", "", Oracle(), False), Budget(1.0)))
    assert talk.ask(QUESTIONS[2], SAMPLING).kv_fraction > first


@pytest.mark.parametrize("raw", [False, True], ids=["chat", "raw"])
def test_questions_have_their_frame_or_none(full_index: OpenIndex, raw: bool) -> None:
    talk = Conversation(full_index, setting("squeezed"), raw=raw)
    for question in QUESTIONS[:2]:
        talk.ask(question, Sampling(max_new_tokens=3))
    asked = [str(full_index.tokenizer.decode(turn.question)) for turn in talk.turns]
    framed = [
        f"\n\n{QUESTIONS[0]}<|end|>\n<|start|>assistant\n",
        f"<|end|>\n<|start|>user\n{QUESTIONS[1]}<|end|>\n<|start|>assistant\n",
    ]
    assert asked == (list(QUESTIONS[:2]) if raw else framed)
    assert torch.equal(talk.before(1), torch.cat([full_index.input_ids, talk.turns[0].tokens]))


@pytest.mark.parametrize(
    ("ending", "closed"),
    [([END], True), ([*b"1 <"], False), ([], False)],
    ids=["ended", "cut off before text like an end", "nothing"],
)
def test_a_turn_ends_once(full_index: OpenIndex, ending: list[int], closed: bool) -> None:
    ids = full_index.tokenizer.convert_tokens_to_ids
    answer = [token if token == END else int(ids("\u0120" if token == 32 else chr(token))) for token in ending]
    before = Place.behind(full_index.artifact.manifest.prompt)
    turn, place = add_turn(full_index, before, Turn(torch.tensor([1]), answer), raw=False)
    assert place.chat is not None
    assert place.chat.between == "<|end|>\n<|start|>user\n"
    assert (turn.closed, turn.said.tolist()) == (closed, answer[:-1] if closed else answer)
    assert turn.tokens.dtype == torch.int64


def test_a_full_model_is_told_from_a_long_question(full_index: OpenIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = Conversation(full_index, setting("squeezed"))
    monkeypatch.setattr(full_index.model.config, "max_position_embeddings", len(full_index.input_ids) + 90)
    with pytest.raises(UsageError, match=r"--rope-scaling`$"):
        talk.ask("?" * 100, SAMPLING)
    talk.ask(QUESTIONS[0], SAMPLING)
    spoken = len(talk.turns[0].tokens)
    with pytest.raises(UsageError, match=f"or forget the conversation so far, which has {spoken} of these tokens"):
        talk.ask("?" * 50, SAMPLING)
    talk.forget()
    talk.ask(QUESTIONS[0], SAMPLING)
