"""Run a rank of a distributed build other than the first: the rank carries out the first rank's requests."""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch

from sparsekv.formats.distributed.group import Ranks
from sparsekv.formats.index.folder import Folder
from sparsekv.formats.index.growing_file import HeadPart
from sparsekv.formats.index.identity import fingerprint_weights
from sparsekv.formats.index.reader import WholeFile, find_whole
from sparsekv.formats.index.schema import layer_file
from sparsekv.formats.index.writer import PartWriter
from sparsekv.formats.models.load import LoadedModel
from sparsekv.indexing.capture.canary import preflight, run_canary
from sparsekv.indexing.capture.capture import Capture, capture, rows_as_stored
from sparsekv.indexing.capture.rotation import measure_rotations
from sparsekv.indexing.capture.team import MeasureRotations, RunCanary, RunPrompt, TryModel
from sparsekv.indexing.distributed.requests import (
    CheckNumbers,
    EndLayer,
    MakeLayers,
    Request,
    SendLayer,
    SentSums,
    ShareFiles,
    give_memory_back,
    give_turns,
    join_layer,
    join_queries,
)
from sparsekv.indexing.indexers.interface import Tensors


def follow(ranks: Ranks, loaded: LoadedModel) -> None:
    """Carry out the first rank's requests until the first rank's build no longer needs this rank.

    During the prefill, this rank allocates its share of the model, and N rows of its own heads in each layer. A layer's
    rows are freed when they are written or sent, and all remaining rows before methods are built. Then it allocates the
    memory of `make_layers_from`, for layers with all heads, as the first rank does. In page-locked memory of the host,
    each writing thread allocates 16 MiB, and reading allocates 256 MiB.

    Raises:
        ArtifactError: this rank's rows could not be written, or files could not be read.
        SparsekvError: the model attends in a way that an index does not support.
        UsageError: a method cannot be built for this model.
    """
    # The first rank begins its build with a fingerprint of all weights. This rank computes it, too, because all ranks
    # must gather sharded weights together.
    fingerprint_weights(loaded.model.state_dict().items())
    with ExitStack() as stack:
        writer = stack.enter_context(PartWriter(HeadPart(ranks.number, ranks.size)))
        follower = _Follower(ranks, loaded, writer, stack)
        while follower.does(ranks.share(None)):
            pass


@dataclass
class _Follower:
    """State of a rank between two requests.

    `own` is the capture of the rank's last prefill. `sums` computes the checksums of files that all ranks have written,
    and sends them to the first rank.
    """

    ranks: Ranks
    loaded: LoadedModel
    writer: PartWriter
    stack: ExitStack
    own: Capture | None = None
    sums: SentSums | None = None

    def does(self, request: Request) -> bool:
        """Carry out a request. Returns False if the request ends this rank's work."""
        match request:
            case ShareFiles():
                self._share_files(request)
            case TryModel():
                preflight(self.loaded.model, request.input_ids, self.loaded.name)
            case RunPrompt():
                self.own = self._captured(request)
            case CheckNumbers():
                self.ranks.collect(self._capture.not_finite())
            case RunCanary():
                own = partial(rows_as_stored, self._capture.rows, kv_dtype=request.kv_dtype)
                run_canary(self.loaded.model, request.input_ids, own, self._capture.states)
            case MeasureRotations():
                measure_rotations(self.loaded.model, request.input_ids)
            case SendLayer():
                join_layer(self.ranks, self._capture.take(request.layer))
            case EndLayer():
                self._end_layer(request)
            case MakeLayers():
                self._make_layers(request)
            case _:
                return False
        return True

    def _share_files(self, request: ShareFiles) -> None:
        if all(self.ranks.collect(self.writer.join(request.folder, request.files))):
            self.sums = self.stack.enter_context(SentSums(self.ranks.open_channel()))
        else:
            self.writer.leave()

    @property
    def _capture(self) -> Capture:
        assert self.own is not None
        return self.own

    def _captured(self, request: RunPrompt) -> Capture:
        """Capture a prompt. If the ranks share files, the captured rows are written to them during the prefill."""

        def rows_done(layer: int, keys: torch.Tensor, values: torch.Tensor, end: int) -> None:
            self.writer.put(layer_file("context", layer), {"keys": keys, "values": values}, end)

        return capture(self.loaded.model, request.input_ids, **request.options, rows_done=rows_done)

    def _end_layer(self, request: EndLayer) -> None:
        name = layer_file("context", request.layer)
        self.ranks.wait_for_all(partial(self.writer.end, name))
        if request.summed_by == self.ranks.number:
            assert self.sums is not None
            self.sums.make(request.layer, self.writer.whole(name))
        join_queries(self.ranks, self._capture.take_queries(request.layer))

    def _make_layers(self, request: MakeLayers) -> None:
        self.own = None  # frees the captured rows: no later request needs them
        give_memory_back(self.ranks.device)
        found = self._opened(request)
        if not all(self.ranks.collect(found is not None)) or found is None:
            return

        def read(name: str) -> Tensors:
            return (found.get(name) or self.writer.whole(name)).read(self.ranks.device)

        give_turns(self.ranks, request.work, request.layers, read)

    def _opened(self, request: MakeLayers) -> dict[str, WholeFile] | None:
        """Open the request's files, by name; None if a file does not exist here, as on another machine."""
        try:
            folder = Folder(request.folder)
            return {name: find_whole(folder, shared) for name, shared in request.found.items()}
        except OSError:
            return None
