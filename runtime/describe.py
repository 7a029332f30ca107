"""What the methods of an index built, layer by layer, for a person to see."""

from collections.abc import Iterator

from sparsekv.formats.reader import Artifact
from sparsekv.runtime.clusters import Clustering
from sparsekv.runtime.methods import methods
from sparsekv.runtime.open import middle_context


def describe_layers(artifact: Artifact, name: str, biggest: int) -> Iterator[tuple[int, Clustering | None]]:
    """Each indexed layer and how the method called `name` describes it; None where that has no clusters.

    Reads the layer's whole context, one layer at a time.

    Args:
        biggest: how many of the biggest clusters to list.
    """
    split = artifact.manifest.split
    for layer in artifact.manifest.indexed_layers:
        _, values = artifact.context(layer)
        middle = values[:, split.sinks : split.sinks + split.middle]
        yield layer, methods()[name].describe(middle_context(artifact, layer, name), middle, biggest)
