"""How a model is split over ranks: by transformers' own plan for it."""

from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.tensor_parallel import get_kv_heads_per_rank

from sparsekv.formats.errors import UsageError


def shares_of(config: PreTrainedConfig, name: str, size: int) -> DistributedConfig:
    """How transformers is to split a model over `size` ranks.

    By its tensor-parallel plan; a model that has one for its experts alone keeps the rest whole on each rank.

    Args:
        name: what error messages call the model.

    Raises:
        UsageError: transformers has no plan for it, or its heads or experts cannot be shared out evenly, which
            transformers itself would find in the middle of a forward pass.
    """
    text: Any = config.get_text_config()
    plan, experts = text.base_model_tp_plan or {}, text.base_model_ep_plan or {}
    if plan:
        heads = text.num_key_value_heads
        if get_kv_heads_per_rank(plan, heads, size) is None:
            raise UsageError(
                f"model '{name}' has {heads} KV heads, which {size} ranks cannot share evenly; start {_divisors(heads)}"
            )
        return DistributedConfig(tp_size=size)
    if not experts:
        raise UsageError(f"transformers has no plan to split model '{name}' ({config.model_type}); use one GPU")
    if text.num_experts % size:
        raise UsageError(
            f"model '{name}' has {text.num_experts} experts, which {size} ranks cannot share evenly; start "
            f"{_divisors(text.num_experts)}"
        )
    return DistributedConfig(tp_size=size, ep_size=size)


def _divisors(number: int) -> str:
    found = [str(one) for one in range(2, number + 1) if number % one == 0]
    return " or ".join(found) if found else "one process"


def splits_heads(model: PreTrainedModel, size: int) -> bool:
    """Whether each of `size` ranks attends with KV heads of its own; False: all of them attend with all heads."""
    # Asked for as many heads as ranks, transformers answers with one where its plan splits keys, and else with all.
    return bool(get_kv_heads_per_rank(model.tp_plan or {}, size, size) == 1)
