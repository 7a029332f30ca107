"""Layers whose indices ranks make in turn: the first rank's are every `size`-th from the first one on, and so on.

Whole layers, not each rank's heads of every layer: what is random is drawn for all heads together, and a level has as
many clusters as the head with the fewest allows. So the tensors are those that one process makes.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing

import torch

from sparsekv.formats.ranks.ranks import Ranks
from sparsekv.indexing.indexers.layer_maker import Tensors, make_layers_from
from sparsekv.indexing.indexers.layer_work import LayerWork

Read = Callable[[str], Tensors]


def give_memory_back(device: torch.device) -> None:
    """Give the system what torch keeps of a GPU's memory without using it.

    What was freed, such as this rank's captured rows, torch keeps for the streams that used it. The threads that read
    layers have streams of their own, for which it would get new memory.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()


def take_turns(ranks: Ranks, work: LayerWork, layers: Sequence[int], read: Read) -> Generator[Tensors, None, None]:
    """The first rank's side: yields what a method makes of each layer, in order.

    Memory: as of `make_layers_from`, and a layer's tensors of one other rank.
    """
    with closing(_own(ranks, work, layers, read)) as own:
        for tensors in own:
            yield tensors
            yield from map(dict, ranks.take())


def give_turns(ranks: Ranks, work: LayerWork, layers: Sequence[int], read: Read) -> None:
    """Another rank's side: makes the layers of its turns, and sends each. Memory: as of `make_layers_from`."""
    turns = range(0, len(layers), ranks.size)
    with closing(_own(ranks, work, layers, read)) as own:
        for _ in turns:
            ranks.give(next(own, None))  # None: the last turn is of fewer layers than there are ranks


def _own(ranks: Ranks, work: LayerWork, layers: Sequence[int], read: Read) -> Generator[Tensors, None, None]:
    device: torch.device = ranks.device
    return make_layers_from(work, layers[ranks.number :: ranks.size], read, device)
