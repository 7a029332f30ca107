"""The memory that a build takes of a GPU, planned before its prefill."""

from sparsekv.formats.device_memory import MemoryPlan, device_memory, model_bytes
from sparsekv.formats.writer import HELD_BYTES
from sparsekv.indexing.indexers.layer_maker import AHEAD
from sparsekv.indexing.plan import Build, BuildPlan

LAYERS_AT_ONCE = AHEAD + 2
"""How many may be in memory while a method is built: those that are read ahead, the one that it is built for, and the
one before that, which may still be in use."""
METHODS_SHARE = 10
"""What methods build for a layer is about a tenth of its keys and values."""
REMEDY = "index fewer tokens, or spread the model over several GPUs with --gpus"


def plan_memory(plan: BuildPlan, sampled: int) -> MemoryPlan:
    """What a build takes from its prefill on, queries at `sampled` positions included.

    The prefill holds the keys and values of all layers. Beside them are one chunk's activations, and then the layers
    that are being indexed, some read ahead and one of them in float32, and what waits to be written of the methods.
    """
    model = plan.loaded.model
    config = model.config.get_text_config()
    layers, tokens, size = config.num_hidden_layers, plan.split().tokens, model.dtype.itemsize
    layer = 2 * config.num_key_value_heads * plan.head_dim * tokens * size
    queries = config.num_attention_heads * plan.head_dim * sampled * size
    # A mixture of experts may call it otherwise; it is a small part of the whole.
    inner = getattr(config, "intermediate_size", 4 * config.hidden_size)
    activations = (6 * config.hidden_size + 3 * inner) * min(plan.chunk_size, tokens) * size
    waiting = min(HELD_BYTES, layer * layers // METHODS_SHARE)
    work = LAYERS_AT_ONCE * layer + layer * 4 // size + waiting + activations
    return MemoryPlan(model_bytes(model), (layer + queries) * layers, work)


def tell_memory(build: Build, sampled: int) -> None:
    """Tell what the build needs of a GPU.

    Raises:
        SparsekvError: the keys and values alone do not fit.
    """
    memory = device_memory(build.plan.loaded.model)
    if memory is None or not build.team.has_all_heads:
        return
    planned = plan_memory(build.plan, sampled)
    planned.check(memory, REMEDY)
    build.tell(f"the build {planned.told(memory)}")
