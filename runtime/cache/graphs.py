"""CUDA graphs: whether a step can be captured, and one that has been."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

Step = Callable[[], torch.Tensor]


def waits(run: Step, device: torch.device) -> bool:
    """Whether a step, which runs once for it, waits for the GPU."""
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
    """A graph of a step, and what the graph writes to; None where it cannot be captured.

    Args:
        warm_up: runs once before; None: the step itself does.
    """
    side, here = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        (warm_up or run)()
    here.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        # Another thread may be searching ahead, and wait for what it found.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            output = run()
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return None
    return graph, output


@dataclass(frozen=True)
class ModelGraph:
    """A captured decode step of a model: logits [batch, V] that it writes, tokens [batch, 1] and their position [1, 1]
    that it reads, and which buffers it was captured with."""

    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor
    tokens: torch.Tensor
    position: torch.Tensor
    buffers: tuple[int, ...]
