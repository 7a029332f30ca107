"""Pipes in the place of files, and standard files that are closed, full or nobody's."""

import os

import pytest
from support.sandbox import INDEX, Sandbox
from support.short_part import short_part

FULL, CLOSED, NOTHING = "/dev/full", None, "/dev/null"


def _commands(sandbox: Sandbox) -> dict[str, tuple[object, ...]]:
    model = ("--model", sandbox.model)
    return {
        "generate": (*sandbox.asking(),),
        "generate-stats": (*sandbox.asking("--stats"),),
        "question": ("generate", "-", "-i", INDEX, *model, "--max-new-tokens", "2"),
        "batch": ("generate", "--batch-file", "-", "-i", INDEX, *model, "--max-new-tokens", "2"),
        "build": ("build-index", "-", "-o", "new.skv", *model, "--method", "squeezed"),
        "append": ("append", "more.txt", "-i", INDEX, *model, "--rebuild"),
        "inspect": ("inspect", "-i", INDEX, *model),
        "recall-report": ("recall-report", "-i", INDEX),
        "help": ("--help",),
        "version": ("--version",),
        "models": ("models", "list"),
        "wrong": ("inspect", "-i", "none.skv"),
    }


@pytest.mark.parametrize("name", short_part(("question", "batch", "build", "generate", "inspect"), every=3))
def test_standard_input_is_closed(sandbox: Sandbox, name: str) -> None:
    sandbox.run(*_commands(sandbox)[name], stdin=CLOSED).assert_harmless()


@pytest.mark.parametrize(
    "name", short_part(("generate", "append", "inspect", "recall-report", "help", "version", "models"), every=3)
)
def test_standard_output_is_full(sandbox: Sandbox, name: str) -> None:
    run = sandbox.run(*_commands(sandbox)[name], stdout=FULL)
    run.assert_harmless()
    assert run.code == 1, run


@pytest.mark.parametrize("name", short_part(("inspect", "generate", "recall-report", "version", "wrong"), every=4))
@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_standard_output_or_error_is_closed(sandbox: Sandbox, name: str, closed: str) -> None:
    """A command whose standard output or error is closed ends with a documented exit code and without a traceback."""
    run = sandbox.run(*_commands(sandbox)[name], **{closed: CLOSED})
    assert not run.late
    assert run.code in (0, 1, 2), run
    assert "Traceback" not in run.stderr, run


@pytest.mark.parametrize("name", short_part(("wrong", "generate", "generate-stats", "append"), every=4))
def test_standard_error_is_full(sandbox: Sandbox, name: str) -> None:
    run = sandbox.run(*_commands(sandbox)[name], stderr=FULL)
    assert not run.late
    assert run.code in (0, 1, 2), run


PIPES = [
    pytest.param(arguments, id=" ".join(arguments))
    for arguments in (
        ("generate", "Why?", "-i", INDEX, "--model", "MODEL", "--save-to", "pipe"),
        ("build-index", "pipe", "-o", "new.skv", "--model", "MODEL"),  # of which each reader waits for some seconds
        ("append", "pipe", "-i", INDEX, "--model", "MODEL", "--rebuild"),
        ("generate", "--prompt-file", "pipe", "-i", INDEX, "--model", "MODEL"),
        ("generate", "--batch-file", "pipe", "-i", INDEX, "--model", "MODEL"),
        ("recall-report", "--queries", "pipe", "-i", INDEX, "--model", "MODEL"),
        ("inspect", "-i", "pipe"),
        ("generate", "Why?", "-i", INDEX, "--model", "pipe"),
        ("build-index", "doc.txt", "-o", "pipe", "--model", "MODEL"),
    )
]


@pytest.mark.parametrize("arguments", short_part(PIPES, every=9))
def test_a_named_pipe_that_nobody_writes_to(sandbox: Sandbox, arguments: tuple[str, ...]) -> None:
    os.mkfifo(sandbox.home / "pipe")
    model = str(sandbox.model)
    run = sandbox.run(*(model if argument == "MODEL" else argument for argument in arguments))
    run.assert_harmless()
    assert run.code != 0, run
