"""Indexers for `sparsekv bench`, which builds indices of layers that were never a document's."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from sparsekv.formats.schema import MethodRecord
from sparsekv.indexing.indexers.interface import BuiltLayer, Indexer, LayerInput
from sparsekv.indexing.indexers.registry import indexers
from sparsekv.runtime.benchmark.indexed_layers import LayerIndexer
from sparsekv.runtime.benchmark.layer import LayerData
from sparsekv.runtime.selection.configure import configure

ITERATIONS = 3  # of k-means: more make better clusters, and a step takes as long


@dataclass(frozen=True)
class MixtureIndexer(LayerIndexer):
    """Gives an indexer a mixture's layer as it gets a document's."""

    parameters: Indexer

    def queries_wanted(self) -> int:
        return self.parameters.queries_wanted()

    def build(self, data: LayerData) -> dict[str, torch.Tensor]:
        layer = LayerInput(
            keys=data.keys[:, data.middle],
            values=data.values[:, data.middle],
            facts=data.facts,
            split=data.split,
            queries=data.sampled,
            positions=data.positions,
            sink_keys=data.keys[:, : data.split.sinks],
        )
        return self.parameters.build_layer(layer)

    def record(self, tensors: dict[str, torch.Tensor], data: LayerData) -> MethodRecord:
        built = BuiltLayer(tensors, data.tail, data.facts)
        return MethodRecord(
            revision=self.parameters.revision,
            parameters=asdict(self.parameters),
            seed=self.parameters.seed,
            calibration=self.parameters.calibrate(lambda: iter([built])),
            built_from={},
        )


def mixture_indexers(
    names: Sequence[str], parameters: Mapping[str, Any], seed: int, head_dim: int
) -> dict[str, LayerIndexer]:
    """What builds the indices of those of the named methods that have one, as a person set it.

    Raises:
        UsageError: one cannot be built so, or not for heads of so many channels.
    """
    given = {name: value for name, value in parameters.items() if value is not None}
    wanted = {name: known for name, known in indexers().items() if name in names}
    configured = {
        name: configure(one, {"iterations": ITERATIONS, "seed": seed} | given) for name, one in wanted.items()
    }
    for one in configured.values():
        one.check_channels(head_dim)
    return {name: MixtureIndexer(one) for name, one in configured.items()}
