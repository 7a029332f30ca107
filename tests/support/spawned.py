"""Processes of one test that communicate with each other."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

IMPORTS = [
    "sparsekv.formats.models.load",
    "sparsekv.kernels.distributed.sum_triton",
    "transformers.models.llama.modeling_llama",
]
"""Modules that are imported once, in a process without threads from which all others are forked."""


def run_together(does: Callable[..., None], given: Sequence[tuple[Any, ...]], seconds: float) -> None:
    """Call a function in one process for each tuple of arguments, all at once; fail unless all end well within
    `seconds`."""
    assert exit_codes(does, given, seconds) == [0] * len(given)


def exit_codes(does: Callable[..., None], given: Sequence[tuple[Any, ...]], seconds: float) -> list[int | None]:
    """Return how the processes of `run_together` end: exit codes, minus a signal's number, or None for one that still
    runs."""
    server = torch.multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(IMPORTS)
    processes = [server.Process(target=does, args=one, daemon=True) for one in given]
    for one in processes:
        one.start()
    for one in processes:
        one.join(seconds)
    codes = [one.exitcode for one in processes]
    for one in processes:
        one.kill()  # if one process has failed, the others wait for it
    return codes
