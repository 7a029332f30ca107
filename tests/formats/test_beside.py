"""Work beside the main thread: it is done, and a program that ends meanwhile neither waits for it nor aborts in it."""

import subprocess
import sys
import threading

from sparsekv.formats.device import run_beside

ENDING = """
import sys, time
from sparsekv.formats.device import run_beside
import torch

def steps():
    for number in range(10**6):
        torch.ones(1000).sum()  # in torch when the program ends, most of the time
        yield
        if number == 100:
            print("begun", flush=True)
    print("all of it")

run_beside(steps(), "steps")
time.sleep(0.5)
"""


def test_all_steps_are_done() -> None:
    done = list[int]()

    def steps():  # type: ignore[no-untyped-def]
        for number in range(5):
            done.append(number)
            yield

    run_beside(steps(), "five")
    for thread in threading.enumerate():
        if thread.name == "five":
            thread.join()
    assert done == [0, 1, 2, 3, 4]


def test_a_program_ends_without_them() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "begun\n", "")
