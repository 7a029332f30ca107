"""A real server of vLLM over indices of the embedded model: same answers as by its own prefill, and loaded prompts."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread

import pytest
from support.vllm_engine import NAME, Engine, Reply, engine
from support.vllm_library import SHORT, Library

pytestmark = pytest.mark.vllm

BLOCK = 128
STRAIGHT = ("sparsekv.runtime.vllm.connector", "SparseKVConnector")
REFUSED = {
    "yarn.skv": "model config rope_parameters differs",
    "truncated.skv": "is truncated",
    "missing.skv": "no index at missing.skv",
}


@pytest.fixture(scope="module")
def straight(library: Library, embedded_folder: Path) -> Iterator[Engine]:
    """A server that has no document in its blocks yet."""
    indices = ["manual.skv", "short.skv", "int8.skv", *REFUSED]
    with engine(embedded_folder, library.folder, indices, STRAIGHT) as started:
        yield started


def at_once(engine: Engine, prompts: list[list[int]]) -> list[Reply]:
    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(engine.ask, prompts))


def is_trusted(engine: Engine, index: str) -> bool:
    return any(line.startswith(f"index {index} is trusted: ") for line in engine.lines())


@pytest.fixture(scope="module")
def long_reply(library: Library, straight: Engine) -> Reply:
    """The long document's, asked at once with another document, before anything else."""
    long, short = at_once(straight, [library.prompt("manual.skv"), library.prompt("short.skv")])
    assert short.text == library.plain(library.prompt("short.skv"))
    return long


def test_indices_of_another_model_or_damaged_ones_are_refused_in_a_line_each(straight: Engine) -> None:
    refused = [line for line in straight.lines() if "is not used" in line]
    assert len(refused) == len(REFUSED)
    for (name, reason), line in zip(REFUSED.items(), refused, strict=True):
        assert line.startswith(f"index {name} is not used: ")
        assert reason in line


def test_two_documents_at_once_are_loaded_and_compared(library: Library, straight: Engine, long_reply: Reply) -> None:
    """Blocks are whole, and so many that eight tokens of the document stay to be compared."""
    loaded = [(library.tokens(name) - 8) // BLOCK * BLOCK for name in ("manual.skv", "short.skv")]
    assert straight.loaded() == sum(loaded)
    assert long_reply.cached == loaded[0]
    for name in ("manual.skv", "short.skv"):
        assert is_trusted(straight, name)


def test_a_conversation_with_the_document_as_its_message_is_loaded(
    library: Library, straight: Engine, long_reply: Reply
) -> None:
    """As a program that knows nothing of the index would ask."""
    question = "What is this text about?"
    reply = straight.client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": f"{SHORT}\n\n{question}"}],
        max_completion_tokens=12,
        temperature=0,
    )
    assert reply.choices[0].message.content == library.plain(library.prompt("short.skv", question))
    details = reply.usage.prompt_tokens_details
    assert details.cached_tokens >= (library.tokens("short.skv") - 8) // BLOCK * BLOCK


def test_a_document_that_only_begins_like_an_index_gets_what_they_share(
    library: Library, straight: Engine, long_reply: Reply
) -> None:
    prompt = library.prompt("manual.skv")
    edited = prompt[:1000] + prompt[3000:3300] + prompt[-20:]
    reply = straight.ask(edited)
    assert reply.cached == 1000 // BLOCK * BLOCK
    assert reply.text == library.plain(edited)


def test_rows_of_an_int8_index_are_restored(library: Library, straight: Engine) -> None:
    before = straight.loaded()
    straight.ask(library.prompt("int8.skv"))
    assert straight.loaded() - before == (library.tokens("int8.skv") - 8) // BLOCK * BLOCK
    assert is_trusted(straight, "int8.skv")


@pytest.fixture(scope="module")
def alone(library: Library, straight: Engine, long_reply: Reply) -> dict[str, str]:
    """Answers about one document, asked one after another."""
    questions = [f"What does the text say about number {number}?" for number in range(16)]
    return {question: straight.ask(library.prompt("short.skv", question)).text for question in questions}


@pytest.fixture(scope="module")
def restarted(
    library: Library, embedded_folder: Path, straight: Engine, long_reply: Reply, alone: dict[str, str]
) -> Iterator[Engine]:
    """Another server, after the first one was killed within an answer. It takes bent.skv's rows for another layout."""
    asking = Thread(target=straight.ask_in_vain, args=(library.prompt("manual.skv", "Explain everything."),))
    asking.start()
    straight.kill()
    asking.join()
    connector = ("support.bent_connector", "BentConnector")
    with engine(embedded_folder, library.folder, ["bent.skv", "short.skv"], connector) as started:
        yield started


def test_after_a_kill_sixteen_requests_at_once_are_answered_as_each_alone(
    library: Library, restarted: Engine, alone: dict[str, str]
) -> None:
    """The first one is compared, and the others wait and share its blocks."""
    replies = at_once(restarted, [library.prompt("short.skv", question) for question in alone])
    assert [reply.text for reply in replies] == list(alone.values())
    loaded = (library.tokens("short.skv") - 8) // BLOCK * BLOCK
    assert restarted.loaded() >= loaded
    assert all(reply.cached >= loaded for reply in replies)


def test_rows_in_a_wrong_layout_are_never_answered_from(
    library: Library, restarted: Engine, long_reply: Reply, capsys: pytest.CaptureFixture[str]
) -> None:
    """The request that finds them is computed by vLLM itself: its text is that over the loaded document, too."""
    own = restarted.ask(library.prompt("manual.skv"))
    assert own.text == long_reply.text
    lines = [line for line in restarted.lines() if line.startswith("index bent.skv is not used any more: ")]
    assert len(lines) == 1
    assert "this engine attends differently" in lines[0]
    before = restarted.loaded()
    restarted.ask(library.prompt("manual.skv")[: 4 * BLOCK])
    assert restarted.loaded() == before
    with capsys.disabled():
        tokens, sooner = len(library.prompt("manual.skv")), own.first / long_reply.first
        print(
            f"\nfirst token of a prompt of {tokens:,} tokens: {own.first:.2f} s by vLLM's own prefill, "
            f"{long_reply.first:.2f} s with the index: {sooner:.0f} times sooner"
        )
