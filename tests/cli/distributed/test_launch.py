"""`sparsekv --gpus 2`: one line for an error of any rank, and no index is harmed by a rank that is killed."""

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from support.command import EXECUTABLE, environment, fails, run_here
from support.forked import zygote
from support.started_ranks import BUILD, LONG, both_ranks, rank_number, start_ranks

from sparsekv.formats.distributed.process import FOLDER
from sparsekv.formats.index.reader import Artifact


def _told(*arguments: str, size: int = 2) -> tuple[int, str]:
    """Exit code, and the one line that was told."""
    running = start_ranks(*arguments, size=size)
    stdout, stderr = running.communicate(timeout=300)
    assert stdout == ""
    (line,) = stderr.splitlines()
    return running.returncode, line.removeprefix("sparsekv: error: ")


def test_commands_for_one_process_are_refused(place: Path) -> None:
    fails(2, "--gpus", "2", "inspect", "doc.skv", says=("inspect runs as one process", "build-index and generate"))
    fails(2, "--gpus", "3", "--gpus=4", "inspect", "doc.skv", says=("--gpus is given twice",))
    fails(2, "--gpus", "1000", "generate", "-i", "doc.skv", "Why?", says=("--gpus 1000: this machine has", "cores"))
    fails(2, "--gpus", "1000", "generate", "-i", "doc.skv", "--", "-h", says=("--gpus 1000: this machine has", "cores"))
    fails(2, "--gpus", "0", "generate", says=("--gpus", "greater than or equal to 1", "`sparsekv --help`"))
    fails(2, "generate", "--gpus", "2", says=("--gpus stands before the command: `sparsekv --gpus 2 generate`",))


@pytest.mark.slow
def test_an_error_of_all_ranks_is_told_once(place: Path) -> None:
    code, line = _told("generate", "-i", "doc.skv", "Why?", "--method", "lessismore")
    assert (code, line[:44]) == (2, "lessismore selects one set of tokens for all")
    assert "tidaldecode" in line


def test_a_rank_that_is_not_the_first_tells_an_error_that_none_has_told(place: Path) -> None:
    """Its other output goes nowhere, and whoever fails after it is silent."""
    (place / "meeting").mkdir()
    rank = {FOLDER: str(place / "meeting"), "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    told = [zygote().run("inspect", "doc.skv", folder=place, environment=rank) for _ in range(2)]
    assert [one.code for one in told] == [2, 2]
    assert "inspect runs as one process" in told[0].stderr
    assert [told[0].stdout, told[1].stdout, told[1].stderr] == ["", "", ""]


@pytest.mark.slow
def test_heads_that_ranks_cannot_share_are_refused_with_their_numbers(place: Path) -> None:
    assert _told(*BUILD, size=3) == (
        2,
        f"model '{(place / 'model').resolve()}' has 2 KV heads, which 3 ranks cannot share evenly; give --gpus 2",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("generate", "-i", "doc.skv", "Why?", "--save-to", "s.skv"), "--save-to does not work with several ranks"),
        (("generate", "-i", "doc.skv", "Why?", "--method", "auto"), "--method auto does not work with several ranks"),
        (("build-index", "doc.txt", "none.txt", "--model", "model"), "with --gpus, one document is indexed at a time"),
        (
            ("build-index", "doc.txt", "--model", "model", "--prefill", "keydiff", "--force"),
            "--prefill does not work with several ranks",
        ),
        (("generate", "-i", "doc.skv", "Why?", "--device", "cuda"), "so the ranks run on CPUs; leave --device out"),
    ],
    ids=["save-to", "auto", "documents", "prefill", "device"],
)
def test_what_ranks_cannot_do_is_refused(place: Path, arguments: tuple[str, ...], says: str) -> None:
    code, line = _told(*arguments)
    assert code == 2
    assert says in line


@pytest.mark.slow
def test_compiled_steps_of_ranks_give_the_same_answer(place: Path) -> None:
    ask = ("generate", "-i", "doc.skv", "Why?", "--model", "model", "--max-new-tokens", "12", "--stats", "--compile")
    plain, compiled = (start_ranks(*ask, mode).communicate(timeout=300) for mode in ("off", "on"))
    assert plain[0]
    assert compiled[0] == plain[0]
    assert "compiled in" in compiled[1]


@pytest.mark.slow
def test_an_error_of_the_first_rank_alone_ends_all(place: Path) -> None:
    """Only the first reads the document."""
    code, line = _told("build-index", "nothere.txt", "--model", "model")
    assert (code, line) == (2, "no such file: nothere.txt")


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_is_killed_ends_all_and_the_same_command_finishes(place: Path, number: int) -> None:
    (place / "doc.txt").write_text(LONG)
    running = start_ranks(*BUILD, "--chunk-size", "16")
    while not (place / "new.skv").exists():
        assert running.poll() is None
        time.sleep(0.02)
    ranks = {rank_number(one): one for one in psutil.Process(running.pid).children()}
    ranks[number].kill()
    stdout, stderr = running.communicate(timeout=60)
    assert (running.returncode, stdout) == (1, "")
    assert stderr == (
        f"sparsekv: error: rank {number} of 2 was killed (SIGKILL), and the other ranks were stopped; run the same "
        "command again\n"
    )
    assert not any(one.is_running() for one in ranks.values())
    again = start_ranks(*BUILD)
    stdout, stderr = again.communicate(timeout=300)
    assert (again.returncode, stdout, stderr) == (0, "new.skv\n", "")
    index = Artifact(place / "new.skv")
    assert len(list(index.verify())) == len(index.manifest.files)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_is_killed_before_they_meet_ends_the_other(place: Path, number: int) -> None:
    """It would wait for half an hour."""
    running = start_ranks(*BUILD)
    both_ranks(running)[number].kill()
    stdout, stderr = running.communicate(timeout=60)
    assert (running.returncode, stdout) == (1, "")
    assert stderr.startswith(
        f"sparsekv: error: rank {number} of 2 was killed (SIGKILL), and the other ranks were stopped"
    )


@pytest.mark.slow
def test_ranks_end_with_the_process_that_started_them(place: Path) -> None:
    running = start_ranks(*BUILD, "--chunk-size", "16")
    while len(ranks := psutil.Process(running.pid).children()) < 2 or not (place / "new.skv").exists():
        assert running.poll() is None
        time.sleep(0.02)
    os.kill(running.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(ranks, 30)
    assert not alive


@pytest.mark.slow
def test_sigterm_ends_all_at_once(place: Path) -> None:
    running = start_ranks(*BUILD, "--chunk-size", "16")
    while not (place / "new.skv").exists():
        assert running.poll() is None
        time.sleep(0.02)
    ranks = psutil.Process(running.pid).children()
    running.terminate()
    stdout, stderr = running.communicate(timeout=60)
    assert (running.returncode, stdout, stderr) == (128 + signal.SIGTERM, "", "")
    assert not any(one.is_running() for one in ranks)


@pytest.mark.slow
def test_torchrun_starts_ranks_too(place: Path) -> None:
    ask = ["generate", "-i", "doc.skv", "Why?", "--method", "squeezed", "--max-new-tokens", "8", "-q"]
    launch = [str(EXECUTABLE.with_name("torchrun")), "--nproc-per-node", "2", "-m", "sparsekv.cli"]
    done = subprocess.run([*launch, *ask], env=environment(), capture_output=True, check=True)
    assert done.stdout.decode() == run_here(*ask).stdout


@pytest.mark.slow
@pytest.mark.parametrize("ranks_too", [True, False], ids=["of a terminal", "by kill"])
def test_ctrl_c_is_told_once(place: Path, ranks_too: bool) -> None:
    running = start_ranks(*BUILD, "--chunk-size", "2")
    while not (place / "new.skv").exists():
        assert running.poll() is None
        time.sleep(0.02)
    for one in [*(psutil.Process(running.pid).children() if ranks_too else ()), psutil.Process(running.pid)]:
        one.send_signal(signal.SIGINT)
    stdout, stderr = running.communicate(timeout=60)
    assert (running.returncode, stdout) == (130, "")
    (line,) = stderr.splitlines()
    assert "the same command goes on from there" in line


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_ends_all_without_a_word(place: Path) -> None:
    ask = f"{EXECUTABLE} --gpus 2 generate -i doc.skv Why? --method squeezed --max-new-tokens 400 -q"
    script = f"{ask} | head -c 1 > seen; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], env=environment(), capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"{128 + signal.SIGPIPE}\n", "")
