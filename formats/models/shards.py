"""How a model is split over ranks: by transformers' own plan for it."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from sparsekv.formats.errors import UsageError

_KEYS = ("k_proj", "qkv_proj", "query_key_value")  # projections whose output holds keys, alone or with others


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
        if _splits_keys(plan) and heads % size:
            raise UsageError(
                f"model '{name}' has {heads} KV heads, which {size} ranks cannot share evenly; {_divisors(heads)}"
            )
        return DistributedConfig(tp_size=size)
    if not experts:
        raise UsageError(f"transformers has no plan to split model '{name}' ({config.model_type}); use one GPU")
    if text.num_experts % size:
        raise UsageError(
            f"model '{name}' has {text.num_experts} experts, which {size} ranks cannot share evenly; "
            f"{_divisors(text.num_experts)}"
        )
    new = any(one.name == "ep_size" for one in fields(DistributedConfig))
    experts_alone: dict[str, Any] = {"ep_size": size} if new else {"enable_expert_parallel": True}  # transformers 5.17
    return DistributedConfig(tp_size=size, **experts_alone)


def _divisors(number: int) -> str:
    """What to do where so many heads or experts do not divide."""
    found = [f"--gpus {one}" for one in range(2, number + 1) if number % one == 0]
    return f"give {' or '.join(found)}" if found else "use one GPU"


def splits_heads(model: PreTrainedModel) -> bool:
    """Whether each rank attends with KV heads of its own; False: all of them attend with all heads."""
    return _splits_keys(model.tp_plan or {})


def _splits_keys(plan: Mapping[str, str]) -> bool:
    """Whether a plan leaves each rank with its share of the keys; with another style it gathers what it has split."""
    return any(name.rsplit(".", 1)[-1] in _KEYS and style == "colwise" for name, style in plan.items())
