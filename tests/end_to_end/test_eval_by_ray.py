"""`eval --ray`: what a cluster answers is what one process would have, whatever becomes of its workers."""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.command import EXECUTABLE, fails, run_here
from support.python_help import DOCUMENT
from support.tiny_models import save_tiny

TASKS = ("--task", "niah-multikey", "--task", "perplexity", "--length", "500", "--contexts", "3", "--questions", "2")
WAYS = ("--method", "multipole", "--budget", "5%", "--max-new-tokens", "6", "--sinks", "4", "--tail", "16")
BY_RAY = ("--ray", "local", "--workers", "2")


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Over a small text in the current folder, with a tiny model that has to be found from any folder."""
    save_tiny(tmp_path / "model")
    (tmp_path / "doc.txt").write_text(DOCUMENT[:40_000], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return ("eval", "doc.txt", "--model", "model", *TASKS, *WAYS, "--json", "-q")


def _rows(stdout: str) -> list[dict[str, Any]]:
    """But for the seconds, which no two runs share."""
    return [{name: value for name, value in row.items() if name != "seconds"} for row in json.loads(stdout)["rows"]]


def _answering(process: psutil.Process) -> list[psutil.Process]:
    found = []
    for one in process.children(recursive=True):
        try:
            found += [one] if one.cmdline()[:1] == ["ray::AnswerWorker.do"] else []
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
def test_a_cluster_answers_as_one_process_does_though_a_worker_is_killed(command: tuple[str, ...]) -> None:
    alone = run_here(*command, "--work", "alone")
    assert alone.code == 0, alone.stderr
    running = subprocess.Popen(
        [str(EXECUTABLE), *command, "--work", "by-ray", *BY_RAY],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    killed = 0
    while running.poll() is None:
        for worker in _answering(psutil.Process(running.pid))[: 1 - killed]:
            worker.kill()
            killed += 1
        time.sleep(0.05)
    stdout, stderr = running.communicate()
    assert (running.returncode, stderr, killed) == (0, "", 1)
    for found, expected in zip(_rows(stdout), _rows(alone.stdout), strict=True):
        # A worker's number of threads, and with it the order of sums, is another.
        near = {name: pytest.approx(one, rel=1e-4) if isinstance(one, float) else one for name, one in expected.items()}
        assert found == near
    lines = [json.loads(line) for line in Path("by-ray/answers.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(lines) == len({line["key"] for line in lines}) == 2 * (3 * 2 + 3)
    assert not list(Path("by-ray/parts").iterdir())
    again = run_here(*command, "--work", "by-ray", *BY_RAY)  # without a cluster: nothing is left to be asked
    assert again.stdout == stdout


def test_workers_are_a_clusters(command: tuple[str, ...]) -> None:
    fails(2, *command, "--workers", "2", says=("--workers 2 has no effect without --ray; leave --workers out",))
    fails(2, *command, "--ray", "127.0.0.1:1", says=("--ray 127.0.0.1:1: no cluster answers",))
