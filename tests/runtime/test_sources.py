"""Sources against the weights of the model's own attention, and the table of retrieval heads."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch
from support.small_index import build_small, reopen, small_plan
from support.source_shares import retrieval_shares
from support.tiny_models import CHAT_TEMPLATE, FAMILIES, build_tiny, tiny_tokenizer
from support.tokenizers_of_families import tokenizer_of
from transformers import LlamaConfig

from sparsekv.formats.documents.document import Document
from sparsekv.formats.documents.prompt import chat_frame, encode_prompt, next_turn
from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.models.load import LoadedModel
from sparsekv.indexing.append import encode_addition, growing_plan
from sparsekv.indexing.build import build_index
from sparsekv.runtime.attention.config import DecodeConfig, Dense
from sparsekv.runtime.decoding.answer import Sampling
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.session import Session
from sparsekv.runtime.sources.finder import LEAST, measure_heads, retrieval_heads
from sparsekv.runtime.sources.places import Places, token_texts

QUESTION = torch.arange(40, 60)
ANSWER = Sampling(6)
TRIMMING = CHAT_TEMPLATE.replace("message['content']", "message['content'] | trim")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenIndex]:
    """A small index, with a cache folder of its own for the model's heads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARSEKV_CACHE", str(tmp_path_factory.mktemp("cache")))
        opened = build_small(tmp_path_factory.mktemp("index") / "small.skv")
        assert opened.source_finder.heads
        yield opened


def test_scores_are_those_of_the_models_own_attention(index: OpenIndex) -> None:
    """A score counts all tokens up to a step's own, the answer's included, and is the mean over the steps."""
    answer = Session.open(index, DecodeConfig(Dense())).ask(QUESTION, ANSWER, sources=5)
    shares = retrieval_shares(index, QUESTION, answer)
    assert len(answer.sources) == 5
    for one in answer.sources:
        assert one.score == pytest.approx(float(shares[slice(*one.tokens)].sum()), rel=1e-4)
    # No passage that was left out, of any 64 tokens, has more than the first source.
    best = max(float(part.sum()) for part in shares[1 : len(index.input_ids)].unfold(0, 64, 1))
    assert answer.sources[0].score >= best / 4


def test_learned_sinks_have_their_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEKV_CACHE", str(tmp_path))
    index = build_small(tmp_path / "sinks.skv", "gpt-oss")
    answer = Session.open(index, DecodeConfig(Dense())).ask(QUESTION, ANSWER, sources=2)
    shares = retrieval_shares(index, QUESTION, answer)
    for one in answer.sources:
        assert one.score == pytest.approx(float(shares[slice(*one.tokens)].sum()), rel=1e-4)


def test_a_conversation_and_a_batch_have_the_sources_of_a_question(index: OpenIndex) -> None:
    session = Session.open(index, DecodeConfig(Dense()))
    alone = session.ask(QUESTION, ANSWER, sources=3)
    together = session.ask_all([QUESTION, QUESTION[:5]], ANSWER, sources=3)
    assert [one.tokens for one in together[0].sources] == [one.tokens for one in alone.sources]
    assert session.ask(QUESTION, ANSWER).sources == []


def test_heads_are_kept_and_damaged_tables_are_made_again(
    index: OpenIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSEKV_CACHE", str(tmp_path))
    manifest, finder = index.artifact.manifest, index.source_finder
    about = index.model, index.tokenizer, manifest.model, finder.query_heads
    found = retrieval_heads(*about)
    assert found == finder.heads
    assert len(found) == LEAST
    assert sum(one.weight for one in found) == pytest.approx(1)
    (table,) = (tmp_path / "retrieval-heads").iterdir()
    for damage in ("", "{", "[]", "[[0, 99, 0.5]]", "[[99, 0, 0.5]]", "[[0, 0, NaN]]", "[[0]]", "7"):
        table.write_text(damage)
        assert retrieval_heads(*about) == found
    table.write_text("[[0, 1, 1.0]]")
    assert [(one.layer, one.head) for one in retrieval_heads(*about)] == [(0, 1)]


def test_layers_with_a_window_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But they attend as in the model while heads are measured."""
    monkeypatch.setenv("SPARSEKV_CACHE", str(tmp_path))
    index = build_small(tmp_path / "qwen.skv", "qwen2")
    layers = index.artifact.manifest.indexed_layers
    assert len(layers) < len(index.artifact.manifest.layers)
    assert {one.layer for one in measure_heads(index.model, index.tokenizer, layers)} <= set(layers)
    assert Session.open(index, DecodeConfig(Dense())).ask(QUESTION, ANSWER, sources=1).sources


def test_heads_that_attend_to_no_repeated_token_count_alike() -> None:
    """Each token of this model attends to itself alone."""
    model = FAMILIES["llama"]()
    with torch.no_grad():
        for layer in model.model.layers:
            of_keys = layer.self_attn.k_proj.weight.unflatten(0, (-1, layer.self_attn.head_dim))
            groups = model.config.num_attention_heads // len(of_keys)
            layer.self_attn.q_proj.weight.copy_(1e6 * of_keys.repeat_interleave(groups, 0).flatten(0, 1))
    found = measure_heads(model, tiny_tokenizer(), [0, 1])
    assert [one.weight for one in found] == [1 / LEAST] * LEAST


@pytest.mark.parametrize("sources", [-1, 65, True, "3"])
def test_a_number_of_sources_is_checked(index: OpenIndex, sources: int) -> None:
    with pytest.raises(UsageError, match="give a whole number up to 64"):
        Session.open(index, DecodeConfig(Dense())).ask(QUESTION, ANSWER, sources=sources)


def test_a_number_of_sources_may_be_numpys(index: OpenIndex) -> None:
    asker = Session.open(index, DecodeConfig(Dense()))
    assert asker.ask(QUESTION, ANSWER, sources=np.int64(2)).sources == asker.ask(QUESTION, ANSWER, sources=2).sources


def test_white_space_alone_is_no_source(tmp_path: Path) -> None:
    """Blank lines at a text's beginning, to which most attention goes here, take no place in the list either."""
    text = "\n\n\n" + "One is here.\n" * 9
    index = build_small(tmp_path / "blank.skv", prompt=encode_prompt(tiny_tokenizer(None), text))
    shares = torch.zeros(len(index.input_ids), dtype=torch.float64)
    shares[:3], shares[10] = 0.3, 0.01
    (source,) = Places(index.artifact, index.tokenizer).sources(shares, 1)
    assert (source.text, source.lines) == ("One is here.", (4, 4))
    shares[10] = 0
    assert Places(index.artifact, index.tokenizer).sources(shares, 1) == []


@pytest.mark.thinned
@pytest.mark.parametrize("template", [None, CHAT_TEMPLATE, TRIMMING])
@pytest.mark.parametrize("blank", ["", "\n", "\n\n\n", "  \n\t\n"])
def test_lines_are_those_of_the_file_after_blank_lines(template: str | None, blank: str, tmp_path: Path) -> None:
    """The prompt's first token, which may be a line break, is no source, but its lines count."""
    text = blank + "\n".join(f"Sentence {number} is here." for number in range(1, 16)) + "\n"
    index = build_small(tmp_path / "lines.skv", prompt=encode_prompt(tiny_tokenizer(template), text))
    for line in (3, 7, 14):
        assert _place(index, f"Sentence {line} is") == f"lines:{line + blank.count(chr(10))}"


def test_texts_and_lines_are_whole_where_characters_are_bytes(tmp_path: Path) -> None:
    """A tokenizer as Llama 2's decodes no byte of a run of bytes, line breaks among them, unless all of it is text."""
    tokenizer, written = (
        tokenizer_of("gemma"),
        [f"\uac00\ub098\ub2e4\ub77c {number} is here." for number in range(1, 61)],
    )
    loaded = LoadedModel(build_tiny(LlamaConfig, vocab_size=2048)(), tokenizer, "tiny", None)
    prompt = encode_prompt(tokenizer, "\n".join(written))
    index = build_small(tmp_path / "lines.skv", loaded=loaded, prompt=prompt)
    texts, places = token_texts(tokenizer, index.input_ids.tolist()), Places(index.artifact, tokenizer)
    starts = [*accumulate(map(len, texts))]
    for line in (1, 2, 30, 45, 60):
        shares = torch.zeros(len(texts), dtype=torch.float64)
        shares[bisect_right(starts, "".join(texts).index(f" {line} is"))] = 1
        (source,) = places.sources(shares, 1)
        assert (source.text, source.lines) == (written[line - 1], (line, line))


@pytest.mark.parametrize("word", ["Sentence", "\uac00"])
def test_a_source_in_a_pdf_is_on_a_page(word: str, tmp_path: Path) -> None:
    """A token of a line break before a page may be the page's first one, and its first character may be several."""
    pages = (f"{word} 1 is here.", f"{word} 2 is here.")
    document = Document.of("\n\n".join(pages), (0, len(pages[0]) + 2))
    index = build_small(tmp_path / "paper.skv", prompt=encode_prompt(tiny_tokenizer(), document))
    assert _place(index, " 1 is") == "paper p. 1"
    assert _place(index, " 2 is") == "paper p. 2"


def test_text_that_was_added_has_lines_of_its_own(tmp_path: Path) -> None:
    plan, folder = small_plan(), tmp_path / "a.skv"
    build_index(plan, folder)
    tokenizer = plan.loaded.tokenizer
    document = chat_frame(tokenizer)
    assert document is not None
    answered = next_turn(tokenizer, document)
    texts = ("One.\nTwo is here.\n", document), ("\nThree.\nFour is here.", document), ("Five.\nSix is.", answered)
    for text, frame in texts:
        addition = encode_addition(tokenizer, text, frame, plan.prompt.border)
        build_index(growing_plan(Artifact(folder), plan.loaded, addition), folder)
    question = replace(encode_addition(tokenizer, "Seven.\nEight is.", answered, plan.prompt.border), first_line=None)
    build_index(growing_plan(Artifact(folder), plan.loaded, question), folder)
    index = reopen(plan, folder)
    assert _place(index, "Two is") == "a+1:2"
    assert _place(index, "Four is") == "a+2:3"
    assert _place(index, "Six is") == "a+3:2"
    assert _place(index, "Eight is") == "a+4:2"
    assert answered is not None
    text, places = "".join(token_texts(tokenizer, index.input_ids.tolist())), Places(index.artifact, tokenizer)
    frame = len(tokenizer(text[: text.index(f"{answered.between}Five")]).input_ids)
    of_frame = torch.zeros(len(index.input_ids), dtype=torch.float64)
    of_frame[frame : frame + len(tokenizer(answered.between).input_ids)] = 1
    assert places.sources(of_frame, 1) == []


def test_text_that_was_added_behind_a_cut_character_has_its_own_lines(tmp_path: Path) -> None:
    """The bytes of the cut character and the line breaks behind it are one run of bytes, which is no text."""
    tokenizer, folder = tokenizer_of("gemma"), tmp_path / "cut.skv"
    loaded = LoadedModel(build_tiny(LlamaConfig, vocab_size=2048)(), tokenizer, "tiny", None)
    written = " ".join(f"Sentence {number} is here." for number in range(1, 40))
    whole = encode_prompt(tokenizer, f"{written} \uac00\ub098\ub2e4")
    before = len(encode_prompt(tokenizer, f"{written} ").input_ids) - whole.template
    plan = small_plan(
        loaded=loaded, prompt=encode_prompt(tokenizer, f"{written} \uac00\ub098\ub2e4", max_tokens=before + 2)
    )
    assert str(tokenizer.decode(plan.prompt.input_ids)).endswith("\ufffd")
    build_index(plan, folder)
    addition = encode_addition(tokenizer, "One.\nTwo is here.\n", plan.prompt.chat, plan.prompt.border)
    build_index(growing_plan(Artifact(folder), loaded, addition), folder)
    index = reopen(plan, folder)
    texts = token_texts(tokenizer, index.input_ids.tolist())
    shares = torch.zeros(len(texts), dtype=torch.float64)
    shares[bisect_right([*accumulate(map(len, texts))], "".join(texts).index("Two is"))] = 1
    (source,) = Places(index.artifact, tokenizer).sources(shares, 1)
    assert source.place == "cut+1:2"


def _place(index: OpenIndex, text: str) -> str:
    """The source that has all attention at the begin of a text of the prompt, whose tokens are bytes."""
    found = token_texts(index.tokenizer, index.input_ids.tolist())
    shares = torch.zeros(len(found), dtype=torch.float64)
    shares["".join((one or " ")[-1] for one in found).index(text)] = 1
    (source,) = Places(index.artifact, index.tokenizer).sources(shares, 1)
    return source.place
