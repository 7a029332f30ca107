"""A layer's input is the same wherever a file's tensors lie."""

from collections.abc import Mapping

import torch
from support.random_tensors import normal

from sparsekv.formats.index.schema import LayerFacts, Split
from sparsekv.indexing.capture.team import ALIGNMENT, LayerWork
from sparsekv.indexing.methods.codes import CodesIndexer

SPLIT = Split(sinks=10, middle=97, tail=128)
FACTS = LayerFacts(softmax_scale=0.125, softcap=None, sliding_window=None, attention_sinks=False)


def shifted(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """The same tensor so many bytes behind an aligned place, as it may lie in a mapped file."""
    memory = torch.empty(tensor.nbytes + ALIGNMENT, dtype=torch.uint8)
    place = memory[by : by + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return place.copy_(tensor)


def test_methods_of_mapped_rows_are_those_of_rows_in_memory() -> None:
    rows = {"keys": normal(1, 4, SPLIT.tokens, 64), "values": normal(2, 4, SPLIT.tokens, 64)}
    sample = {"queries": normal(3, 12, 97, 64), "positions": torch.arange(97) + SPLIT.sinks}
    work = LayerWork("codes", CodesIndexer(), SPLIT, "float32", {0: FACTS}, False)

    def built(by: int) -> dict[str, torch.Tensor]:
        def read(name: str) -> Mapping[str, torch.Tensor]:
            tensors = {"context": rows, "samples": sample, "queries": {}}[name.partition("/")[0]]
            return {name: shifted(tensor, by) for name, tensor in tensors.items()}

        return dict(work.build(0, work.input(0, read)))

    expected = built(0)
    for by in (8, 24, 48):
        found = built(by)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
