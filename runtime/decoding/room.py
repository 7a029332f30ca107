"""The memory that an opened index takes of a GPU, checked before its rows are read."""

from torch import nn

from sparsekv.formats.device_memory import MemoryPlan, device_memory, model_bytes
from sparsekv.formats.int8_rows import row_bytes
from sparsekv.formats.reader import Artifact

REMEDY = (
    "spread the model over several GPUs with --gpus, or ask with `generate` or `chat` by a sparse method and "
    "--placement host"
)


def plan_opening(artifact: Artifact, model: nn.Module) -> MemoryPlan:
    """What a model and an index's keys and values take, in the model's dtype or in 8 bits; of a layer with a sliding
    window those in it, in the model's dtype."""
    size, tokens, rows = next(model.parameters()).itemsize, artifact.manifest.split.tokens, 0
    for layer, facts in enumerate(artifact.manifest.layers):
        heads, channels = artifact.heads_and_channels(layer)
        in_8_bits = artifact.manifest.kv_storage is not None and facts.sliding_window is None
        row = row_bytes(channels) if in_8_bits else channels * size
        rows += 2 * heads * row * min(tokens, facts.sliding_window or tokens)
    return MemoryPlan(model_bytes(model), rows)


def check_room(artifact: Artifact, model: nn.Module) -> None:
    """Raise SparsekvError where an index's keys and values do not fit beside the model on its GPU."""
    memory = device_memory(model)
    if memory is not None:
        plan_opening(artifact, model).check(memory, REMEDY)
