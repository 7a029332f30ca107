"""The memory that an opened index takes of a GPU, checked before its rows are read."""

from torch import nn

from sparsekv.formats.device_memory import MemoryPlan, device_memory, model_bytes
from sparsekv.formats.reader import Artifact

REMEDY = (
    "spread the model over several GPUs with --gpus, or ask with `generate` or `chat` by a sparse method and "
    "--placement host"
)


def plan_opening(artifact: Artifact, model: nn.Module) -> MemoryPlan:
    """What a model and an index's keys and values take, in the model's dtype whatever they are stored in; of a layer
    with a sliding window those in it."""
    size, tokens, rows = next(model.parameters()).itemsize, artifact.manifest.split.tokens, 0
    for layer, facts in enumerate(artifact.manifest.layers):
        heads, channels = artifact.heads_and_channels(layer)
        rows += 2 * heads * channels * min(tokens, facts.sliding_window or tokens) * size
    return MemoryPlan(model_bytes(model), rows)


def check_room(artifact: Artifact, model: nn.Module) -> None:
    """Raise SparsekvError where an index's keys and values do not fit beside the model on its GPU."""
    memory = device_memory(model)
    if memory is not None:
        plan_opening(artifact, model).check(memory, REMEDY)
