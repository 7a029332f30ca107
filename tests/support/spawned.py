"""Processes of a test that need one another."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

IMPORTS = [
    "sparsekv.formats.models.load",
    "sparsekv.kernels.distributed.sum_triton",
    "transformers.models.llama.modeling_llama",
]
"""Made once for all processes, by one that they are forked from: with the environment that it finds, and no threads."""


def run_together(does: Callable[..., None], given: Sequence[tuple[Any, ...]], seconds: float) -> None:
    """Call a function in a process for each of some arguments, all at once; fail unless all end well by then."""
    assert exit_codes(does, given, seconds) == [0] * len(given)


def exit_codes(does: Callable[..., None], given: Sequence[tuple[Any, ...]], seconds: float) -> list[int | None]:
    """How such processes end: by their exit codes, a signal as a negative one, None where one still runs."""
    server = torch.multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(IMPORTS)
    processes = [server.Process(target=does, args=one, daemon=True) for one in given]
    for one in processes:
        one.start()
    for one in processes:
        one.join(seconds)
    codes = [one.exitcode for one in processes]
    for one in processes:
        one.kill()  # where one has failed the others wait for it
    return codes
