"""`build-index --ray`: workers that die cost no index, and what cannot be built is told."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from support.command import EXECUTABLE, fails, run_here

from sparsekv.formats.index.reader import Artifact

OPTIONS = ("--model", "model", "--method", "squeezed", "--tail", "32", "-q")
BY_RAY = ("--ray", "local", "--workers", "2", "-o", "by-ray")


def _documents(place: Path, count: int) -> list[str]:
    """So many short texts, each of another length."""
    names = [f"text{number:02}.txt" for number in range(count)]
    for number, name in enumerate(names):
        (place / name).write_text(f"Document {number} says {number * number}. " * (15 + number))
    return names


def _workers(of: int, doing: str = "do") -> Iterator[psutil.Process]:
    """Processes that index a document for a command right now, or that load the model."""
    for one in psutil.Process(of).children(recursive=True):
        try:
            if one.cmdline()[:1] == [f"ray::IndexWorker.{doing}"]:
                yield one
        except psutil.Error:
            continue


def _reads(worker: psutil.Process, document: Path) -> bool:
    try:
        return any(
            os.path.samefile(f"/proc/{worker.pid}/fd/{one}", document) for one in os.listdir(f"/proc/{worker.pid}/fd")
        )
    except OSError:
        return False


def _start(names: list[str]) -> "subprocess.Popen[str]":
    command = [str(EXECUTABLE), "build-index", *names, *OPTIONS, *BY_RAY]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def threads_of_a_worker() -> Iterator[None]:
    """Builds in this process have half of the machine's threads, as each of two workers has.

    With another number sums are rounded otherwise, and so are activations where one thread's part of them ends.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    yield
    torch.set_num_threads(threads)


def _assert_as_one_by_one(place: Path, names: list[str]) -> None:
    """Every index verifies, and has the files that a build without workers gives."""
    assert run_here("build-index", *names, *OPTIONS, "-o", "alone").code == 0
    for name in names:
        built, alone = (Artifact(place / folder / name.replace(".txt", ".skv")) for folder in ("by-ray", "alone"))
        assert len(list(built.verify())) == len(built.manifest.files)
        sums = [{name: one.sha256 for name, one in index.manifest.files.items()} for index in (built, alone)]
        assert sums[0] == sums[1]


@pytest.mark.slow
@pytest.mark.usefixtures("threads_of_a_worker")
def test_workers_that_are_killed_cost_no_index(place: Path) -> None:
    names, chance = _documents(place, 40), random.Random(0)
    running, killed = _start(names), 0
    while running.poll() is None:
        time.sleep(chance.uniform(0.1, 0.8))
        for worker in _workers(running.pid) if killed < 5 else ():
            worker.kill()
            killed += 1
            break
    stdout, stderr = running.communicate()
    assert (running.returncode, stderr, killed) == (0, "", 5)
    assert sorted(stdout.splitlines()) == [f"by-ray/{name.replace('.txt', '.skv')}" for name in names]
    _assert_as_one_by_one(place, names)


@pytest.mark.slow
@pytest.mark.usefixtures("threads_of_a_worker")
def test_a_document_that_kills_its_workers_is_set_aside_and_the_others_are_built(place: Path) -> None:
    names = _documents(place, 4)
    os.mkfifo(place / "poison.txt")  # whoever reads it waits for a writer, and is found by that
    running = _start([*names, "poison.txt"])
    while running.poll() is None:
        for worker in _workers(running.pid):
            if _reads(worker, place / "poison.txt"):
                worker.kill()
        time.sleep(0.05)
    stdout, stderr = running.communicate()
    assert running.returncode == 1
    assert (
        stderr.splitlines()[0]
        == "poison.txt: 3 workers died while they worked on it; it is set aside: run it by itself"
    )
    assert "1 of 5 documents was not indexed" in stderr.splitlines()[1]
    assert len(stdout.splitlines()) == 4
    _assert_as_one_by_one(place, names)


@pytest.mark.slow
@pytest.mark.usefixtures("threads_of_a_worker")
def test_an_interrupted_cluster_leaves_every_index_whole_or_resumable(place: Path) -> None:
    names = _documents(place, 12)
    running = _start(names)
    while not list(_workers(running.pid)):
        assert running.poll() is None
    running.send_signal(signal.SIGINT)
    _, stderr = running.communicate()
    assert running.returncode == 130
    assert "the same command goes on from there" in stderr
    assert run_here("build-index", *names, *OPTIONS, "-o", "by-ray").code == 0
    _assert_as_one_by_one(place, names)


@pytest.mark.slow
def test_workers_that_die_while_they_load_end_the_call(place: Path) -> None:
    running = _start(_documents(place, 3))
    while running.poll() is None:
        for worker in _workers(running.pid, "load"):
            worker.kill()
        time.sleep(0.05)
    stdout, stderr = running.communicate()
    assert (running.returncode, stdout) == (1, "")
    assert "workers die while they load the model" in stderr
    assert "give fewer --workers" in stderr


@pytest.mark.slow
def test_a_worker_that_cannot_be_replaced_leaves_its_documents_to_the_others(place: Path) -> None:
    names, killed = _documents(place, 12), False
    running = _start(names)
    while running.poll() is None:
        working = list(_workers(running.pid))
        both = working[:1] if len(working) == 2 else []
        doomed = list(_workers(running.pid, "load")) if killed else both
        for worker in doomed:
            worker.kill()
            killed = True
        time.sleep(0.05)
    stdout, stderr = running.communicate()
    assert (running.returncode, stderr, killed) == (0, "", True)
    assert len(stdout.splitlines()) == len(names)


@pytest.mark.slow
def test_more_workers_than_there_is_room_for_end_with_the_last_document(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one waits for the only core, which the first one has until the end."""
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "init", partial(ray.init, num_cpus=1))
    names = _documents(place, 3)
    outcome = run_here("build-index", *names, *OPTIONS, *BY_RAY)
    assert (outcome.code, len(outcome.stdout.splitlines())) == (0, 3), outcome.stderr


@pytest.mark.slow
def test_a_model_that_no_worker_can_load_is_told_once(place: Path) -> None:
    (place / "broken").mkdir()
    names = _documents(place, 2)
    fails(1, "build-index", *names, "--model", "broken", *BY_RAY, "-q", says=("broken",))


def test_an_address_without_a_cluster_is_refused(place: Path) -> None:
    fails(
        2, "build-index", "doc.txt", *OPTIONS, "--ray", "127.0.0.1:1", says=("--ray 127.0.0.1:1: no cluster answers",)
    )


@pytest.mark.parametrize("address", ["", "foo", "host:abc", "a b:1", "host:1/x"])
def test_what_is_no_address_is_refused_before_anything_is_made(place: Path, address: str) -> None:
    before = sorted(place.iterdir())
    for command in (("build-index", "doc.txt", *OPTIONS), ("eval", "doc.txt")):
        fails(2, *command, "--ray", address, says=(f"--ray {address}: give local, auto or HOST:PORT",))
    assert sorted(place.iterdir()) == before


def test_what_means_nothing_with_a_cluster_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails(
        2,
        "build-index",
        "doc.txt",
        *OPTIONS,
        "--workers",
        "2",
        says=("--workers 2 has no effect without --ray; leave --workers out",),
    )
    output = ("-o", "new.skv", "--ray", "local")
    fails(
        2,
        "build-index",
        "-",
        *OPTIONS,
        *output,
        says=("--ray: workers cannot read this command's standard input; name a file",),
    )
    monkeypatch.setitem(sys.modules, "ray", None)
    fails(
        2, "build-index", "doc.txt", *OPTIONS, "--ray", "local", says=("--ray needs Ray: pip install 'sparsekv[ray]'",)
    )
