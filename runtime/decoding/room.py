"""The memory that an opened index takes of a GPU, checked before its rows are read."""

from torch import nn

from sparsekv.formats.device_memory import MemoryPlan, device_memory, model_bytes
from sparsekv.formats.reader import Artifact

REMEDY = (
    "leave them in host memory with --placement host or in the index's files with --placement disk, or spread the "
    "model over several GPUs with --gpus"
)


def plan_opening(artifact: Artifact, model: nn.Module) -> MemoryPlan:
    """What a model and all of an index's keys and values take, in the model's dtype whatever they are stored in."""
    size, tokens = next(model.parameters()).itemsize, artifact.manifest.split.tokens
    shapes = [artifact.heads_and_channels(layer) for layer in range(len(artifact.manifest.layers))]
    return MemoryPlan(model_bytes(model), sum(2 * heads * channels * tokens * size for heads, channels in shapes))


def check_room(artifact: Artifact, model: nn.Module) -> None:
    """Raise SparsekvError where an index's keys and values do not fit beside the model on its GPU."""
    memory = device_memory(model)
    if memory is not None:
        plan_opening(artifact, model).check(memory, REMEDY)
