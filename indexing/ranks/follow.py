"""A rank of a build that is not the first: it runs its share of the model whenever the first does."""

from sparsekv.formats.models.identify import identify
from sparsekv.formats.models.load import LoadedModel
from sparsekv.formats.ranks.ranks import Ranks
from sparsekv.indexing.capture.capture import Capture, capture
from sparsekv.indexing.capture.rotation import measure_rotations
from sparsekv.indexing.ranks.joined_layer import join_layer
from sparsekv.indexing.ranks.requests import CheckNumbers, MeasureRotations, Request, RunPrompt, SendLayer


def follow(ranks: Ranks, loaded: LoadedModel) -> None:
    """Do what the first rank asks until its build needs the model no more.

    Memory: this rank's share of the model and its own heads' cache of N rows; a layer's rows go once they are sent.
    """
    identify(loaded)  # a build begins with it, and weights that are shared out are gathered for it
    own: Capture | None = None
    while True:
        request: Request = ranks.share(None)
        match request:
            case RunPrompt():
                own = capture(loaded.model, request.input_ids, **request.options)
            case CheckNumbers():
                assert own is not None
                ranks.collect(own.not_finite())
            case MeasureRotations():
                measure_rotations(loaded.model, request.input_ids)
            case SendLayer():
                assert own is not None
                join_layer(ranks, own.take(request.layer))
            case _:
                return
