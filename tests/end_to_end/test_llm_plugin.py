"""The plugin of `llm`: each index of a folder is a model, whose answers are those of a session over the index.

Its page is docs/integrations/llm-sparsekv/README.md.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import llm
import pytest
from llm.parts import AttachmentPart, TextPart
from llm.parts import Message as Said
from support.small_index import build_small

from sparsekv import Index, Sampling
from sparsekv.runtime.serving.messages import Message, conversation_tokens

PLUGIN = Path(__file__).parents[2] / "docs" / "integrations" / "llm-sparsekv" / "llm_sparsekv.py"
GREEDY = {"method": "quest", "budget": "100%", "max_new_tokens": 5}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> llm.Model:
    spec = importlib.util.spec_from_file_location("llm_sparsekv", PLUGIN)
    assert spec is not None
    assert spec.loader is not None
    plugin = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "llm_sparsekv", plugin)
    spec.loader.exec_module(plugin)
    index = Index(build_small(tmp_path / "manual.skv"))
    (tmp_path / "empty.skv").mkdir()
    monkeypatch.setenv("SPARSEKV_INDICES", str(tmp_path))
    found: list[llm.Model] = []
    plugin.register_models(found.append)
    assert [one.model_id for one in found] == ["sparsekv/manual"]
    found[0].__dict__["index"] = index
    return found[0]


def test_turns_of_a_conversation_are_those_of_a_session(model: llm.Model) -> None:
    talk, asker = model.conversation(), model.index.asker("quest", "100%")  # type: ignore[attr-defined]
    messages: list[Message] = []
    for question in ("How is it installed?", "Who wrote it?"):
        messages.append(Message("user", question))
        expected = asker.ask(conversation_tokens(asker.index, messages), Sampling(5))
        answer = talk.prompt(question, **GREEDY)
        assert answer.text() == expected.text
        assert answer.output_tokens == len(expected.ids)
        messages.append(Message("assistant", answer.text()))


def test_a_history_is_answered_wherever_it_comes_from(model: llm.Model) -> None:
    """`llm -c` loads it from the log, without responses; `reply` and the argument `messages` pass it along."""
    asker, question = model.index.asker("quest", "100%"), "Who wrote it?"  # type: ignore[attr-defined]
    first = model.prompt("How is it installed?", **GREEDY)
    said = [Message("user", "How is it installed?"), Message("assistant", first.text()), Message("user", question)]
    expected = asker.ask(conversation_tokens(asker.index, said), Sampling(5))
    history: list[Any] = [*first.prompt.messages, *first.messages()]
    loaded = model.conversation()
    loaded.loaded_messages = history
    for answer in (
        first.reply(question, options=GREEDY),
        model.prompt(question, messages=history, **GREEDY),
        loaded.prompt(question, **GREEDY),
    ):
        assert answer.text() == expected.text
        assert answer.input_tokens == expected.prompt_tokens


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (Said("user", [TextPart("See:"), AttachmentPart(None)]), "part that is not text"),
        (Said("system", [TextPart("Be brief.")]), "without this system message"),
    ],
)
def test_a_history_that_no_index_can_follow_is_refused(model: llm.Model, message: Said, told: str) -> None:
    with pytest.raises(llm.ModelError, match=told):
        model.prompt("Who wrote it?", messages=[message], **GREEDY).text()


def test_a_system_prompt_of_a_later_turn_is_refused(model: llm.Model) -> None:
    talk = model.conversation()
    talk.prompt("How is it installed?", **GREEDY).text()
    with pytest.raises(llm.ModelError, match="without this system message"):
        talk.prompt("Who wrote it?", system="Be brief.", **GREEDY).text()


def test_a_wrong_option_is_the_plugins_error(model: llm.Model) -> None:
    with pytest.raises(llm.ModelError, match="has no effect at temperature 0"):
        model.prompt("How is it installed?", top_p=0.5).text()


def test_a_wrong_budget_is_the_plugins_error(model: llm.Model) -> None:
    with pytest.raises(llm.ModelError, match="budget 0x is not a budget"):
        model.prompt("How is it installed?", budget="0x").text()


def test_a_list_of_models_imports_no_torch(tmp_path: Path) -> None:
    code = f"import runpy, sys; runpy.run_path({str(PLUGIN)!r}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.strip() == "False"
