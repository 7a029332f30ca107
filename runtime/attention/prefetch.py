"""Prefetching: the search for the next step's rows runs during this step's attention (CSAttention, section 3.4).

Each step attends to rows found with the previous step's query: new tokens are exact anyway, and neighbouring steps
mostly choose the same rows. On a GPU the search and the transfer of the chosen rows run on a stream of their own.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from functools import cache
from typing import TypeAlias

import torch

from sparsekv.runtime.attention.executors import Fetched
from sparsekv.runtime.selection.queries import Queries

Search = Callable[[Queries], Fetched]
Pending: TypeAlias = "Future[Fetched]"


@cache
def _worker() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="sparsekv-search")


def wait_for_searches() -> None:
    """Wait until the searches of all layers that have begun are done."""
    _worker().submit(lambda: None).result()  # of one thread, which takes one after another


class Prefetcher:
    """One layer's searches, each run one step before its result is used.

    Args:
        search: finds and fetches rows for one decode step's queries.
    """

    def __init__(self, search: Search):
        self.search = search
        self.pending: Pending | None = None
        self.stream: torch.cuda.Stream | None = None

    def next(self, queries: Queries) -> Fetched:
        """Rows found with the previous step's query (in the first step, with this one's); starts the next search."""
        pending, self.pending = self.pending, None  # one that failed is told once
        found = self.search(queries) if pending is None else self._arrived(pending)
        self.pending = _worker().submit(self._run, queries, self._mark(queries.query.device))
        return found

    def forget(self) -> None:
        """Wait for the pending search and discard its result: the index is about to change."""
        pending, self.pending = self.pending, None
        if pending is not None:
            wait([pending])

    def _mark(self, device: torch.device) -> torch.cuda.Event | None:
        if device.type != "cuda":
            return None
        self.stream = self.stream or torch.cuda.Stream(device)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event

    @torch.inference_mode()
    def _run(self, queries: Queries, ready: torch.cuda.Event | None) -> Fetched:
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            if self.stream is None or ready is None:
                return self.search(queries)
            self.stream.wait_event(ready)
            found = self.search(queries)
            # The queries are freed on return and their memory reused, so this stream must have finished reading them.
            self.stream.synchronize()
            return found

    def _arrived(self, pending: Pending) -> Fetched:
        found = pending.result()
        for tensor in tensors_in(found):
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return found


def tensors_in(found: object) -> Iterator[torch.Tensor]:
    """Every tensor in a dataclass's fields, nested dataclasses and tuples included."""
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, tuple):
        for one in found:
            yield from tensors_in(one)
    elif is_dataclass(found):
        for field in fields(found):
            yield from tensors_in(getattr(found, field.name))
