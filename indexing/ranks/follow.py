"""A rank of a build that is not the first: it runs its share of the model whenever the first does."""

from functools import partial

import torch

from sparsekv.formats.growing_file import HeadPart
from sparsekv.formats.models.identify import identify
from sparsekv.formats.models.load import LoadedModel
from sparsekv.formats.part_writer import PartWriter
from sparsekv.formats.ranks.ranks import Ranks
from sparsekv.formats.schema import layer_file
from sparsekv.indexing.capture.capture import Capture, capture
from sparsekv.indexing.capture.rotation import measure_rotations
from sparsekv.indexing.ranks.joined_layer import join_layer, join_queries
from sparsekv.indexing.ranks.requests import (
    CheckNumbers,
    EndLayer,
    MeasureRotations,
    Request,
    RunPrompt,
    SendLayer,
    ShareFiles,
)


def follow(ranks: Ranks, loaded: LoadedModel) -> None:
    """Do what the first rank asks until its build needs the model no more.

    Memory: this rank's share of the model and its own heads' cache of N rows; a layer's rows go once they are written
    or sent. Writing takes 16 MiB of page-locked memory for each thread, as of the first rank's.

    Raises:
        ArtifactError: its rows could not be written.
    """
    identify(loaded)  # a build begins with it, and weights that are shared out are gathered for it
    own: Capture | None = None
    with PartWriter(HeadPart(ranks.number, ranks.size)) as writer:
        while True:
            request: Request = ranks.share(None)
            match request:
                case ShareFiles():
                    if not all(ranks.collect(writer.join(request.folder, request.files))):
                        writer.leave()
                case RunPrompt():
                    own = _captured(loaded, request, writer)
                case CheckNumbers():
                    assert own is not None
                    ranks.collect(own.not_finite())
                case MeasureRotations():
                    measure_rotations(loaded.model, request.input_ids)
                case SendLayer():
                    assert own is not None
                    join_layer(ranks, own.take(request.layer))
                case EndLayer():
                    assert own is not None
                    ranks.wait_for_all(partial(writer.end, layer_file("context", request.layer)))
                    join_queries(ranks, own.take_queries(request.layer))
                case _:
                    return


def _captured(loaded: LoadedModel, request: RunPrompt, writer: PartWriter) -> Capture:
    """The capture of a prompt, of which the rows are written as they come to be."""

    def rows_done(layer: int, keys: torch.Tensor, values: torch.Tensor, end: int) -> None:
        writer.put(layer_file("context", layer), {"keys": keys, "values": values}, end)

    return capture(loaded.model, request.input_ids, **request.options, rows_done=rows_done)
