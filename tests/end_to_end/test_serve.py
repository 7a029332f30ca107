"""The server over a real document with the real model: its answers are those of `generate` and `chat`, and the page
docs/how-to/serve.md shows what works."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from support.command import sparsekv
from support.doc_pages import ROOT, blocks
from support.serving import Server, serving, user

from sparsekv.formats.index.reader import Artifact

PAGE = ROOT / "docs" / "how-to" / "serve.md"
QUESTIONS = ("What is this text about?", "Say that in one sentence.")
TOKENS = 12
ALL = ("--budget", "100%", "--max-new-tokens", str(TOKENS), "--device", "cpu", "-q")


@pytest.fixture(scope="module")
def place(index: Artifact, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the index under the name that the page gives it."""
    folder = tmp_path_factory.mktemp("served")
    shutil.copytree(index.folder, folder / "manual.skv")
    return folder


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[Server]:
    with serving(place, "manual.skv", "--device", "cpu") as one:
        yield one


@pytest.mark.slow
def test_a_conversation_is_that_of_chat(server: Server, place: Path) -> None:
    client, messages, answers = server.openai(), list[dict[str, str]](), list[str]()
    for question in QUESTIONS:
        messages.append(user(question))
        asked = {"model": "manual@100%", "messages": messages, "max_tokens": TOKENS}
        told = client.chat.completions.create(**asked)  # type: ignore[call-overload]
        answers.append(told.choices[0].message.content)
        messages.append({"role": "assistant", "content": answers[-1]})
        streamed = client.chat.completions.create(**asked | {"messages": messages[:-1]}, stream=True)  # type: ignore[call-overload]
        assert "".join(one.choices[0].delta.content or "" for one in streamed) == answers[-1]
    talk = sparsekv("chat", "-i", "manual.skv", *ALL, cwd=place, stdin="\n".join(QUESTIONS))
    assert talk.returncode == 0, talk.stderr
    assert talk.stdout.split() == " ".join(answers).split()
    one = sparsekv("generate", "-i", "manual.skv", *ALL, QUESTIONS[0], cwd=place)
    assert one.stdout.strip() == answers[0].strip()


def test_only_the_system_message_before_the_document_is_accepted(server: Server, index: Artifact) -> None:
    """The accepted system message is the one that the model's template puts there."""
    chat, client = index.manifest.prompt.chat, server.openai()
    assert chat is not None
    own = chat.before.partition("system\n")[2].partition("<|im_end|>")[0]
    assert own.startswith("You are")

    def answer(*messages: dict[str, str]) -> str:
        told = client.chat.completions.create(model="manual", messages=messages, max_tokens=4)  # type: ignore[arg-type]
        return str(told.choices[0].message.content)

    asked, other = user(QUESTIONS[0]), "You are a pirate."
    for role in ("system", "developer"):
        assert answer({"role": role, "content": own}, asked) == answer(asked)
        with pytest.raises(openai.BadRequestError, match="put its text into the question") as refused:
            answer({"role": role, "content": other}, asked)
        assert refused.value.param == "messages"
    assert answer(user(f"{other} {QUESTIONS[0]}"))


def test_what_the_page_shows_works(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    shown = [block for block in blocks(PAGE) if block.marker is not None and block.marker[0] == "tested"]
    assert {block.info for block in shown} == {"sh", "python"}
    for block in shown:
        text = block.text.replace("http://127.0.0.1:8000/v1", server.url)
        assert text != block.text
        if block.info == "sh":
            done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True)
            assert done.stdout.rstrip().endswith("data: [DONE]")
        else:
            exec(compile(text, str(block), "exec"), {})
    said = capfd.readouterr().out
    assert "tokens were not prefilled" in said
