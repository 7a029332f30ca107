"""Commands whose processes a server forks print and return what they do without it, and end with their shells."""

import json
import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import httpx2
import pexpect
import pytest
from support.command import EXECUTABLE, run_here, sparsekv

from sparsekv.cli.daemon.messages import status

from .conftest import Shell

ASK = ("generate", "-i", "doc.skv", "--max-new-tokens", "6")
LATE = 30.0  # seconds after which something is stuck


@pytest.mark.parametrize(
    ("arguments", "stdin"),
    [
        ((*ASK, "Why?", "--budget", "100%"), ""),
        ((*ASK, "-", "--method", "squeezed"), "Why is that?\n"),
        (("chat", "-i", "doc.skv", "--max-new-tokens", "3"), "One?\nTwo?\n"),
        (("recall-report", "-i", "doc.skv", "--method", "squeezed", "--budget", "5%", "--json", "-q"), ""),
        (("inspect", "-i", "doc.skv"), ""),
        ((*ASK, "Why?", "--budget", "none"), ""),
        (("generate", "-i", "no.skv", "Why?"), ""),
        (("generat",), ""),
    ],
    ids=lambda given: given[0] if isinstance(given, tuple) else "",
)
def test_streams_and_exit_codes_are_those_without_it(shell: Shell, arguments: tuple[str, ...], stdin: str) -> None:
    by_server = shell.run(*arguments, stdin=stdin)
    alone = sparsekv(*arguments, cwd=shell.folder, stdin=stdin)
    assert (by_server.returncode, by_server.stdout) == (alone.returncode, alone.stdout)
    assert by_server.stderr == alone.stderr


def test_the_status_tells_what_is_loaded_and_who_may_use_it(shell: Shell) -> None:
    told = shell.run("start", "--status")
    assert (told.returncode, told.stderr) == (0, "")
    assert "loaded: " in told.stdout
    assert told.stdout.endswith("used by this shell's commands\n")
    other = Shell(shell.folder, shell.environment | {"SOME_LIBRARY": "1"}).run("start", "--status")
    assert other.returncode == 1
    assert other.stdout.endswith("not used by this shell, which differs in its environment (SOME_LIBRARY)\n")


def test_descriptors_folder_and_mask_are_the_shells(shell: Shell) -> None:
    (shell.folder / "deep").mkdir()
    asked = "generate -q -i ../doc.skv --max-new-tokens 2"
    done = shell.script(f"cd deep; umask 077; sparsekv {asked} --prompt-file <(echo Why?) --save-to kept.skv")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == sparsekv(*ASK[:-1], "2", "-q", "Why?", cwd=shell.folder).stdout
    assert (shell.folder / "deep" / "kept.skv" / "manifest.json").stat().st_mode & 0o077 == 0


def test_a_reader_that_leaves_ends_it_silently(shell: Shell) -> None:
    asked = "printf 'One?\\nTwo?\\nThree?\\n' | sparsekv chat -q -i doc.skv --max-new-tokens 2000"
    done = shell.script(f"{asked} | head -c 1 | wc -c >&2; echo ${{PIPESTATUS[1]}}")
    assert (done.stdout, done.stderr) == ("141\n", "1\n")


def test_closed_streams_stay_closed(shell: Shell) -> None:
    done = shell.script("sparsekv inspect -i doc.skv >&-")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "sparsekv: error: standard output is closed; redirect it to a file or to /dev/null\n"


def test_a_terminal_is_the_commands(shell: Shell) -> None:
    """Ctrl-C interrupts, Ctrl-Z stops, and the prompt has readline."""
    talk = ["chat", "-i", "doc.skv", "--max-new-tokens", "2000", "-q"]
    with pexpect.spawn(str(EXECUTABLE), talk, cwd=shell.folder, env=shell.environment, timeout=LATE) as one:
        one.expect_exact("\x1b[?2004h> ")
        one.send("Why?\r")
        one.expect(r"\n\S{3}")
        one.send("\x03")
        one.expect_exact("\x1b[?2004h> ")
        one.send("\x04")
        one.expect(pexpect.EOF)
        one.wait()
        assert one.exitstatus == 0


def test_ctrl_c_ends_a_command_with_its_line(shell: Shell) -> None:
    asked = ["generate", "Why?", "-i", "doc.skv", "--max-new-tokens", "2000", "-q"]
    with pexpect.spawn(str(EXECUTABLE), asked, cwd=shell.folder, env=shell.environment, timeout=LATE) as one:
        one.expect(r"\S{3}")
        one.send("\x03")
        one.expect_exact("sparsekv: interrupted; the index is as it was\r\n")
        one.expect(pexpect.EOF)
        one.wait()
        assert one.exitstatus == 130


def test_an_http_server_begins_at_once_and_again_after_it_is_killed(shell: Shell) -> None:
    """Its answer is that of `generate`; whoever kills the shell's process ends it."""
    expected = json.loads(shell.run(*ASK, "Why?", "--budget", "100%", "--json", "-q").stdout)["text"]
    body = {"model": "doc@100%", "messages": [{"role": "user", "content": "Why?"}], "max_tokens": 6}
    for _ in range(2):
        command = [EXECUTABLE, "serve", "doc.skv", "--port", "0", "-q"]
        with subprocess.Popen(command, cwd=shell.folder, env=shell.environment, stdout=subprocess.PIPE) as one:
            assert one.stdout is not None
            try:
                url = one.stdout.readline().decode().strip()
                answer = httpx2.post(f"{url}/chat/completions", json=body, timeout=LATE).json()
                assert answer["choices"][0]["message"]["content"] == expected
                assert "libtorch" not in Path(f"/proc/{one.pid}/maps").read_text()  # it only waits for a fork
            finally:
                one.kill()
            ends = time.monotonic() + LATE
            while _answers(url):
                assert time.monotonic() < ends
                time.sleep(0.02)


def _answers(url: str) -> bool:
    try:
        httpx2.get(f"{url.removesuffix('/v1')}/health", timeout=LATE)
    except httpx2.TransportError:
        return False
    return True


@pytest.mark.slow
def test_a_shell_stops_and_resumes_it(shell: Shell) -> None:
    bash = pexpect.spawn(
        "bash", ["--norc", "-i"], cwd=shell.folder, env=shell.environment | {"PS1": "$ "}, timeout=LATE
    )
    with bash as one:
        one.expect_exact("$ ")
        one.sendline(f"{EXECUTABLE} chat -q -i doc.skv --max-new-tokens 2")
        one.expect_exact("\x1b[?2004h> ")
        one.send("\x1a")
        one.expect("Stopped")
        one.sendline("fg")
        one.expect_exact("chat -q")
        one.send("\x04")
        one.expect_exact("$ ")
        one.sendline("echo ended $?")
        one.expect("ended 0")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
def test_it_ends_with_the_shells_process(shell: Shell, number: int) -> None:
    """Its standard output has no writer any more."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` ignores it, and what is started inherits that
    chat = shell.begin("chat", "-q", "-i", "doc.skv", "--max-new-tokens", "1")
    signal.signal(signal.SIGHUP, before)
    assert chat.stdin is not None
    assert chat.stdout is not None
    chat.stdin.write("Why?\n")
    chat.stdin.flush()
    chat.stdout.readline()
    chat.send_signal(number)
    assert chat.wait(LATE) == -number
    assert chat.stdout.read() == ""
    chat.communicate()


@pytest.mark.slow
def test_many_shells_at_once(shell: Shell) -> None:
    before = _commands(shell)
    questions = [f"What is {number}?" for number in range(6)]
    begun = [shell.begin(*ASK, "-q", question) for question in questions]
    answers = [one.communicate()[0] for one in begun]
    assert answers == [sparsekv(*ASK, "-q", question, cwd=shell.folder).stdout for question in questions]
    assert _commands(shell) == before + len(questions)


def _commands(shell: Shell) -> int:
    return int(shell.run("start", "--status").stdout.partition(" command")[0].rpartition(" ")[2])


def test_the_status_counts_commands_and_not_itself(shell: Shell) -> None:
    before = _commands(shell)
    assert _commands(shell) == before
    assert shell.run("inspect", "--help").returncode == 0
    assert _commands(shell) == before + 1


def test_only_commands_that_it_runs_keep_it_alive(shell: Shell) -> None:
    def ends() -> float:
        found = status(shell.environment["SPARSEKV_SERVER"])
        assert found is not None
        return float(found["ends"])

    before = ends()
    other = Shell(shell.folder, shell.environment | {"SOME_LIBRARY": "1"})
    assert other.run("inspect", "--help").returncode == 0
    assert ends() == before
    assert shell.run("inspect", "--help").returncode == 0
    assert ends() > before


def test_a_changed_index_is_opened_anew(shell: Shell, built: Path) -> None:
    asked = ("generate", "-q", "--max-new-tokens", "6", "Why?", "--budget", "100%", "-i")
    Path(shell.folder, "other.txt").write_text("Another document says nothing of numbers. " * 30)
    model = str(built / "model")
    other = ("build-index", str(shell.folder / "other.txt"), "--model", model, "--method", "multipole", "-q")
    assert run_here(*other, "-o", str(shell.folder / "changing.skv")).code == 0
    expected = sparsekv(*asked, "changing.skv", cwd=shell.folder).stdout
    (shell.folder / "doc.skv").rename(shell.folder / "away.skv")
    (shell.folder / "changing.skv").rename(shell.folder / "doc.skv")
    try:
        assert shell.run(*asked, "doc.skv").stdout == expected != ""
        anew = f"loaded: {shell.folder}/doc.skv with its model; changed since, so commands open it anew\n"
        assert anew in shell.run("start", "--status").stdout
    finally:
        (shell.folder / "doc.skv").rename(shell.folder / "changing.skv")
        (shell.folder / "away.skv").rename(shell.folder / "doc.skv")


def test_a_command_whose_server_is_killed_says_so(shell: Shell) -> None:
    """The watcher is killed: the process between the shell's and the command."""
    chat = shell.begin("chat", "-q", "-i", "doc.skv", "--max-new-tokens", "1")
    assert chat.stdin is not None
    assert chat.stdout is not None
    chat.stdin.write("Why?\n")
    chat.stdin.flush()
    chat.stdout.readline()
    for watcher in _children(shell.server()):
        with suppress(ProcessLookupError):  # the one that has answered `start --status`
            os.kill(watcher, signal.SIGKILL)
    _, stderr = chat.communicate()
    assert chat.returncode == 1
    assert stderr == "sparsekv: error: the server ended before the command did; run the command again\n"


def _children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_a_killed_server_is_not_missed_and_replaced(shell: Shell) -> None:
    os.kill(shell.server(), signal.SIGKILL)
    assert (shell.folder / "socket").is_socket()
    alone = shell.run("inspect", "--help")
    assert (alone.returncode, alone.stderr) == (0, "")
    assert shell.run("start", "--status").stdout == "no server is running; `sparsekv start` starts one\n"
    assert shell.run("start", "doc.skv", "-q").returncode == 0
    assert shell.run("start", "--status").returncode == 0


@pytest.mark.slow
def test_a_new_server_that_fails_leaves_none_and_says_so(shell: Shell) -> None:
    shutil.copytree(shell.folder / "doc.skv", shell.folder / "damaged.skv")
    for rows in (shell.folder / "damaged.skv" / "context").iterdir():
        content = rows.read_bytes()
        rows.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))
    failed = shell.run("start", "damaged.skv")
    assert (failed.returncode, "the probe" in failed.stderr) == (1, True), failed.stderr
    assert "the server that ran before has ended too; commands run without a server" in failed.stderr
    assert shell.run("start", "--status").returncode == 1
    again = shell.run("start", "damaged.skv")
    assert "that ran before" not in again.stderr
    assert shell.run("start", "doc.skv", "-q").returncode == 0


@pytest.mark.slow
def test_its_status_does_not_keep_it_alive(shell: Shell) -> None:
    assert shell.run("start", "--idle", "0.02", "-q").returncode == 0
    deadline = time.monotonic() + LATE
    while status(shell.environment["SPARSEKV_SERVER"]) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not (shell.folder / "socket").exists()
    assert shell.run("start", "doc.skv", "-q").returncode == 0


def test_wrong_arguments_leave_the_running_server(shell: Shell) -> None:
    server = shell.server()
    refused = shell.run("start", "doc.skv", "nope.skv")
    assert (refused.returncode, "nope.skv" in refused.stderr) == (2, True), refused.stderr
    assert "leave nope.skv or --status out" in shell.run("start", "--status", "nope.skv").stderr
    assert shell.server() == server


def test_new_packages_end_it(shell: Shell) -> None:
    server = os.pidfd_open(shell.server())
    (shell.folder / "plugins" / "another.py").touch()
    assert "plugins has changed" in shell.run("start", "--status").stdout
    assert shell.run("serve", "--help").returncode == 0
    deadline = time.monotonic() + LATE
    while (shell.folder / "socket").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not (shell.folder / "socket").exists()
    os.close(server)
