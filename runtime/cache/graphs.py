"""CUDA graphs: testing whether a step can be captured, capturing it, and the captured decode step of a model."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

Step = Callable[[], torch.Tensor]


def waits(run: Step, device: torch.device) -> bool:
    """Whether a step synchronises with the GPU; runs it once to find out."""
    torch.cuda.synchronize(device)
    try:
        torch.cuda.set_sync_debug_mode("error")
        run()
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def captured(
    run: Step, device: torch.device, warm_up: Step | None = None
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor] | None:
    """A CUDA graph of a step, and its output tensor; None if the step cannot be captured.

    Args:
        warm_up: run once before the capture; None: the step itself.
    """
    side, here = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        (warm_up or run)()
    here.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        # thread_local, because a prefetch thread may synchronise during the capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            output = run()
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return None
    return graph, output


@dataclass(frozen=True)
class ModelGraph:
    """A captured decode step of a model: its output logits [batch, V], its inputs tokens [batch, 1] and position
    [1, 1], and the cache's `buffers()` at the time of capture."""

    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor
    tokens: torch.Tensor
    position: torch.Tensor
    buffers: tuple[int, ...]
