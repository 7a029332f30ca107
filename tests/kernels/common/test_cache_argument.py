"""A cache is passed by the name that the installed transformers has for it, so that no call warns."""

import warnings

import torch
from support.tiny_models import FAMILIES
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from sparsekv.kernels.common.given_rows import cache_argument, with_cache


class Older(PreTrainedModel):
    def forward(self, input_ids: torch.Tensor, past_key_values: object = None) -> None: ...


class Newer(PreTrainedModel):
    def forward(self, input_ids: torch.Tensor, cache: object = None) -> None: ...


def test_the_name_is_that_of_the_models_forward_pass() -> None:
    cache = DynamicCache()
    assert cache_argument(Older.__new__(Older), cache) == {"past_key_values": cache}
    assert cache_argument(Newer.__new__(Newer), cache) == {"cache": cache}


def test_no_call_warns() -> None:
    model, ids = FAMILIES["llama"](), torch.tensor([[5, 6, 7]])
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        cache = DynamicCache()
        model(input_ids=ids, **with_cache(model, cache))
        assert cache.get_seq_length() == 3
        longer = torch.cat([ids, ids[:, :1]], 1)
        model.generate(
            longer,
            **cache_argument(model, cache),
            generation_config=GenerationConfig(max_new_tokens=2, do_sample=False),
        )
        assert cache.get_seq_length() == 5
