"""A running build by two ranks: its processes, and the rows that it has written."""

import json
import subprocess
import time
from pathlib import Path

import numpy as np
import psutil

from .command import EXECUTABLE, environment

BUILD = ("build-index", "doc.txt", "--model", "model", "--method", "squeezed", "-o", "new.skv", "-q")
LONG = "".join(f"Line {line} says that {line} times {line} is {line * line}.\n" for line in range(90))


def start_ranks(*arguments: str, size: int = 2) -> "subprocess.Popen[str]":
    """Start `sparsekv --gpus SIZE ARGUMENTS` in the current folder."""
    command = [str(EXECUTABLE), "--gpus", str(size), *arguments]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment(), text=True, **pipes)  # type: ignore[call-overload]


def rank_number(rank: psutil.Process) -> int:
    """Return the number of a rank's process."""
    return int(rank.environ()["RANK"])


def both_ranks(running: "subprocess.Popen[str]") -> dict[int, psutil.Process]:
    """Wait for the processes of two ranks that have just been started; return them by number."""
    while True:
        assert running.poll() is None
        found = psutil.Process(running.pid).children()
        if len(found) == 2 and all("RANK" in one.environ() for one in found):
            return {rank_number(one): one for one in found}
        time.sleep(0.02)


def started(running: "subprocess.Popen[str]", index: Path) -> dict[int, psutil.Process]:
    """Wait until a build has begun to write an index; return its ranks by number."""
    while not index.exists():
        assert running.poll() is None
        time.sleep(0.02)
    return both_ranks(running)


def early_heads(index: Path) -> set[int]:
    """Return the KV heads whose first key rows are in an unfinished file that lacks the last rows of all heads."""
    return {head for path in index.glob("context/*.tmp") for head in _early(path)}


def _early(path: Path) -> set[int]:
    try:
        data = path.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        record = json.loads(data[8:begin])["keys"]
    except (FileNotFoundError, ValueError):  # the file was renamed when complete, or has no header yet
        return set()
    start, end = (begin + place for place in record["data_offsets"])
    shape = (*record["shape"][:2], (end - start) // (record["shape"][0] * record["shape"][1]))
    # The file ends with the last byte that was written. The rest counts as zeros.
    rows = np.frombuffer(data[start:end].ljust(end - start, b"\0"), np.uint8).reshape(shape)
    return set() if rows[:, -1].any() else {head for head, own in enumerate(rows) if own[0].any()}
