"""An evaluation prefills a question once, and every variant answers as over a cache of its own."""

import importlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.small_index import INDEXERS, TEXT, small_model
from support.tiny_models import build_tiny
from support.tokenizers_of_families import KINDS, tokenizer_of
from transformers import LlamaConfig

from sparsekv.formats.documents.continuation import BETWEEN
from sparsekv.formats.documents.prompt import render
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.models.load import LoadedModel, identify
from sparsekv.indexing.build import Builder
from sparsekv.indexing.methods.multipole import MultipoleIndexer
from sparsekv.indexing.plan import BuildConfig
from sparsekv.indexing.prefill.prefills import prefills
from sparsekv.runtime.attention.config import DecodeConfig, Dense, Own, QuestionPrefill
from sparsekv.runtime.decoding.answer import Sampling
from sparsekv.runtime.decoding.engine import generate
from sparsekv.runtime.decoding.open import open_index
from sparsekv.runtime.evaluation import engine
from sparsekv.runtime.evaluation.engine import INDICES, Comparison, evaluate
from sparsekv.runtime.evaluation.table import Result
from sparsekv.runtime.selection.interface import Budget, MethodSpec, methods
from sparsekv.runtime.tasks.interface import Context, Question, in_turns

LONGEST = 6
TEXTS = ("What is an expression?", "Why?", "Which statement raises an exception?")
CONTEXT = Context("qa", "1", TEXT[:300], tuple(Question(one, ("x",), "f1", LONGEST) for one in TEXTS))
BUDGETS = (Budget(0.05), Budget(0.2))


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return small_model()


def _comparison(loaded: LoadedModel, names: tuple[str, ...], **changes: Any) -> Comparison:
    built = {name: INDEXERS[name] for name in names if name in INDEXERS}
    return Comparison(
        loaded=loaded,
        identity=identify(loaded),
        methods={name: methods()[name]() for name in names},
        builder=Builder(loaded, BuildConfig(built, sinks=4, tail=16), {"dense": prefills()["dense"]()}),
        **{"budgets": list(BUDGETS), "question": Dense(), "keep": True, **changes},
    )


def _prefilled(comparison: Comparison, context: Context, work: Path) -> tuple[list[Result], list[int]]:
    """Evaluate; return the results, and for each question the number of forward passes over its tokens."""
    passes: Counter[tuple[int, ...]] = Counter()
    hook = comparison.loaded.model.register_forward_pre_hook(
        lambda _, __, given: passes.update([tuple(given["input_ids"].flatten().tolist())]), with_kwargs=True
    )
    try:
        results = list(evaluate(comparison, [context], work, lambda stage, done, of: None))
    finally:
        hook.remove()
    prompt = comparison.prompt(context.text, bare=False)
    ids = [comparison.question_ids(context, one, prompt) for one in context.questions]
    return results, [passes[tuple(one.tolist())] for one in ids]


@pytest.mark.parametrize("turns", [False, True])
def test_every_method_answers_as_if_it_had_prefilled_the_question(
    loaded: LoadedModel, tmp_path: Path, *, turns: bool
) -> None:
    """SnapKV does prefill it, at each budget, because it ranks tokens by the question's queries."""
    names = tuple(methods()) if not turns else ("codes", "quest", "snapkv")
    budgets, context = (list(BUDGETS), in_turns(CONTEXT)) if turns else ([Budget(0.1)], CONTEXT)
    comparison = _comparison(loaded, names, budgets=budgets)
    results, passes = _prefilled(comparison, context, tmp_path)
    assert passes == [1 + len(budgets)] * len(TEXTS)
    (folder,) = (tmp_path / INDICES).glob("*.skv")
    index = open_index(Artifact(folder), loaded.model, loaded.tokenizer, comparison.identity)
    prompt = comparison.prompt(context.text, bare=False)
    for way in comparison.ways():
        config = DecodeConfig(Dense())
        if way.budget is not None:
            spec = MethodSpec(way.method, "", comparison.methods[way.method])
            config = DecodeConfig(spec, way.budget, question=Dense())
        cache = index.cache(config)
        for one in (one for one in results if one.way == way):
            ids = comparison.question_ids(context, one.question, prompt)
            own = generate(index, cache, ids, Sampling(LONGEST))
            assert (one.given.text, one.given.kv_fraction) == (own.text, cache.kv_fraction())


@pytest.mark.parametrize("kind", KINDS)
def test_turns_have_the_tokens_of_the_chat_template(kind: str) -> None:
    """Some templates put a space before an earlier answer, and some remove white space around it."""
    tokenizer, document = tokenizer_of(kind), TEXT[:400].strip()
    loaded = LoadedModel(build_tiny(LlamaConfig, vocab_size=2048)(), tokenizer, "tiny", None)
    first, second, last = (
        Question(text, answers, "f1", LONGEST)
        for text, answers in (("Why?", ("Yes. It is so. ",)), ("And then?", ("No",)), ("Since when?", ("1",)))
    )
    comparison = _comparison(loaded, ("quest",))
    prompt = comparison.prompt(document, bare=False)
    found = comparison.question_ids(CONTEXT, replace(last, earlier=(first, second)), prompt)
    texts = f"{document}{BETWEEN}Why?", "Yes. It is so. ", "And then?", "No", "Since when?"
    roles = "user", "assistant", "user", "assistant", "user"
    whole = render(tokenizer, [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)])
    assert prompt.input_ids.tolist() + found.tolist() == tokenizer(whole, add_special_tokens=False).input_ids


def test_a_beginning_of_the_answer_is_a_part_of_earlier_answers() -> None:
    """Expected answers follow it after a space."""
    tokenizer = tokenizer_of("llama-2")
    loaded = LoadedModel(build_tiny(LlamaConfig, vocab_size=2048)(), tokenizer, "tiny", None)
    question = Question("Why?", ("Yes",), "f1", LONGEST, prefix="Answer:")
    comparison = _comparison(loaded, ("quest",))
    prompt = comparison.prompt("A text.", bare=False)
    found = comparison.question_ids(CONTEXT, replace(question, earlier=(question,)), prompt)
    assert tokenizer.decode(found).endswith("[/INST] Answer: Yes </s><s> [INST] Why? [/INST]Answer:")


def test_methods_are_dense_in_the_first_layers_on_request(loaded: LoadedModel, tmp_path: Path) -> None:
    """tidaldecode has dense layers of its own. The runs share a folder, and none takes over answers of another."""
    names, layers = ("keydiff", "tidaldecode"), loaded.model.config.num_hidden_layers
    context = replace(CONTEXT, questions=CONTEXT.questions[:1])

    def read(count: int) -> dict[str, float]:
        comparison = _comparison(loaded, names, budgets=[Budget(0.05)], dense_layers=count)
        results, _ = _prefilled(comparison, context, tmp_path)
        return {one.way.method: one.given.kv_fraction or 0.0 for one in results}

    none, first, every = read(0), read(1), read(layers)
    assert none["tidaldecode"] == first["tidaldecode"] == every["tidaldecode"]
    assert first["keydiff"] == pytest.approx((1 + (layers - 1) * none["keydiff"]) / layers)
    assert every["keydiff"] == 1.0
    assert read(0) == none


def test_a_run_that_is_killed_after_its_last_answer_leaves_no_index_to_the_next_run(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = _comparison(loaded, ("quest",), budgets=[Budget(0.05)], keep=False)

    def kill(folder: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("sparsekv.runtime.evaluation.engine.shutil.rmtree", kill)
        with pytest.raises(KeyboardInterrupt):
            _prefilled(comparison, CONTEXT, tmp_path)
    (index,) = (tmp_path / INDICES).glob("*.skv")
    _, passes = _prefilled(comparison, CONTEXT, tmp_path)
    assert not any(passes), "all answers are known"
    assert not index.exists()


def test_a_residual_has_no_centroids_of_a_method_of_an_earlier_run(loaded: LoadedModel, tmp_path: Path) -> None:
    """The earlier run has kept an index whose other method has the fewest centroids."""
    coarse = MultipoleIndexer(levels=(0.03,), block=80)

    def answers(work: Path) -> list[tuple[str, float | None]]:
        comparison = _comparison(loaded, ("codes", "window"), budgets=[Budget(0.05)], residual=True)
        return [(one.given.text, one.given.kv_fraction) for one in _prefilled(comparison, CONTEXT, work)[0]]

    built = BuildConfig({"codes": INDEXERS["codes"], "multipole": coarse}, sinks=4, tail=16)
    earlier = _comparison(loaded, ("codes", "multipole"), budgets=[Budget(0.05)])
    earlier = replace(earlier, builder=Builder(loaded, built, {"dense": prefills()["dense"]()}))
    _prefilled(earlier, CONTEXT, tmp_path / "kept")
    assert answers(tmp_path / "kept") == answers(tmp_path / "new")


def test_a_batch_prefills_a_question_once_too(loaded: LoadedModel, tmp_path: Path) -> None:
    some = ("codes", "quest")
    results, passes = _prefilled(_comparison(loaded, some, together=2), CONTEXT, tmp_path)
    assert passes == [1] * len(TEXTS)
    alone, _ = _prefilled(_comparison(loaded, some), CONTEXT, tmp_path / "alone")
    dense, of_alone = ([one.given.text for one in each if one.way.budget is None] for each in (results, alone))
    assert dense == of_alone


def test_a_resumed_run_prefills_only_the_questions_that_are_left(loaded: LoadedModel, tmp_path: Path) -> None:
    fewer = replace(CONTEXT, questions=CONTEXT.questions[:2])
    _prefilled(_comparison(loaded, ("quest",)), fewer, tmp_path)
    results, passes = _prefilled(_comparison(loaded, ("quest",)), CONTEXT, tmp_path)
    assert passes == [0, 0, 1]
    assert len(results) == len(TEXTS) * (1 + len(BUDGETS))


def test_answers_are_asked_again_if_other_tokens_end_them(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A corrected `generation_config.json` is none of an index's concern."""
    comparison, answers = _comparison(loaded, ("quest",)), loaded.model.generation_config
    before, _ = _prefilled(comparison, CONTEXT, tmp_path)
    monkeypatch.setattr(answers, "eos_token_id", list(range(loaded.model.config.vocab_size)))
    texts = [one.given.text for one in _prefilled(comparison, CONTEXT, tmp_path)[0]]
    assert texts == [one.given.text for one in _prefilled(comparison, CONTEXT, tmp_path / "anew")[0]]
    assert texts != [one.given.text for one in before]


def test_answers_are_asked_again_after_an_edit_of_the_package_that_prefills_questions(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "asking_package.py"
    file.write_text("from sparsekv.runtime.methods.quest import Quest\nclass Asking(Quest): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    method = importlib.import_module("asking_package").Asking
    monkeypatch.setitem(methods.known, "asking", method)
    asking = QuestionPrefill("asking", method(), Budget(0.1))
    comparison = _comparison(loaded, ("quest",), question=asking)
    for edited in (False, True):
        file.write_text(file.read_text() + "# edited\n" * edited)
        _prefilled(comparison, CONTEXT, tmp_path / "work")
        answers = (tmp_path / "work" / "answers.jsonl").read_text().count("\n")
        assert answers == len(TEXTS) * (1 + len(BUDGETS) * (1 + edited))


def test_losses_are_measured_again_if_logits_are_scaled_otherwise(tmp_path: Path) -> None:
    loaded = small_model("gemma2")
    scored = Context("perplexity", "1", TEXT[:300], (Question("", (TEXT[300:400],), "perplexity", 8),), bare=True)
    losses: list[list[float]] = []
    for cap, work in ((30.0, tmp_path), (0.5, tmp_path), (0.5, tmp_path / "anew")):
        loaded.model.config.final_logit_softcapping = cap
        comparison = _comparison(loaded, (), keep=False)  # a kept index would not open
        losses.append([one.score for one in evaluate(comparison, [scored], work, lambda stage, done, of: None)])
    before, after, anew = losses
    assert after == anew != before


def test_only_as_many_tokens_of_questions_are_kept_as_the_limit_allows(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here as many as the context has. The other questions are prefilled by each variant."""
    monkeypatch.setattr(engine, "MOST_PREFILLED", 0)
    long = replace(CONTEXT.questions[1], text="Why, " * 80)
    context = replace(CONTEXT, questions=(CONTEXT.questions[0], long, CONTEXT.questions[2]))
    comparison = _comparison(loaded, ("quest",))
    variants = len(comparison.ways())
    assert _prefilled(comparison, context, tmp_path)[1] == [1, variants, variants]


def test_questions_that_select_by_themselves_are_prefilled_by_each_variant(loaded: LoadedModel, tmp_path: Path) -> None:
    comparison = _comparison(loaded, ("quest",), question=Own())
    assert _prefilled(comparison, CONTEXT, tmp_path)[1] == [len(comparison.ways())] * len(TEXTS)
