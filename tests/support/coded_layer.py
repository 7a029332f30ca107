"""A small layer with codes of its keys, by default on the device that kernels are tested on."""

from dataclasses import replace

import torch

from sparsekv.formats.index.schema import Split
from sparsekv.indexing.indexers.interface import LayerInput
from sparsekv.indexing.methods.codes import CodesIndexer
from sparsekv.runtime.selection.interface import MiddleContext

from .kernel_runs import DEVICE
from .random_tensors import normal
from .small_layer import SINKS, SmallLayer, small_layer


def coded_layer(
    middle: int, dtype: torch.dtype = torch.float32, device: torch.device = DEVICE, *, seed: int = 3
) -> tuple[SmallLayer, MiddleContext]:
    """Return a layer, and its middle with 4-byte codes and with keys of `dtype`."""
    layer = small_layer(seed, middle=middle)
    keys, values = layer.context.keys, layer.context.load_values()
    indexer = CodesIndexer(levels=(0.02,), iterations=3, code_bytes=4)
    queries = normal(17, layer.queries.shape[0] * layer.queries.shape[1], 24, keys.shape[2])
    given = LayerInput(keys, values, layer.context.facts, Split(sinks=SINKS, middle=middle, tail=16), queries)
    tensors = indexer.build_layer(given)
    tensors["token_order"] = tensors["token_order"] - SINKS
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    return layer, replace(layer.context, tensors=tensors, load_keys=lambda: keys.to(device, dtype))
