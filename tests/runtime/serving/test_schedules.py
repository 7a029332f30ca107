"""Whatever comes when, and goes: every request ends, with the right answer or the beginning of it."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.served import ALL, OWN, Served, check, ids, question

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.serving.scheduler import Scheduler
from sparsekv.runtime.serving.stream import Piece, QueueFullError, Stream


@dataclass(frozen=True)
class Event:
    """A request; `leaves` is the number of pieces after which its reader goes, None: it stays. `before` is the number
    of pieces that are read of earlier streams before it comes. `change` is what happens to its index before that: it is
    replaced by the other, closed and opened again, or closed for good."""

    index: str
    question: int
    longest: int
    own: bool
    leaves: int | None
    timeout: float | None
    before: int
    change: Literal["replaced", "reopened", "closed"] | None


EVENTS = st.builds(
    Event,
    index=st.sampled_from("ab"),
    question=st.integers(0, 5),
    longest=st.sampled_from([1, 3, 8]),
    own=st.sampled_from([False, False, True]),
    leaves=st.sampled_from([None, None, None, 0, 1, 2]),
    timeout=st.sampled_from([None, None, None, 1e-3, 0.02]),
    before=st.integers(0, 3),
    change=st.sampled_from([None, None, None, "replaced", "reopened", "closed"]),
)


@dataclass
class Asked:
    """A request that was accepted, with the index that answers it and what has been read."""

    event: Event
    index: str
    stream: Stream
    reader: Iterator[Piece]
    pieces: list[Piece] = field(default_factory=list)

    def read(self, number: int) -> None:
        """Read some more pieces."""
        for _ in range(number):
            if not self.pieces or self.pieces[-1].finish is None:
                self.pieces.append(next(self.reader))


@settings(max_examples=14, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    events=st.lists(EVENTS, min_size=1, max_size=10),
    slots=st.integers(1, 4),
    queue=st.integers(1, 10),
    lanes=st.integers(1, 4),
    memory=st.sampled_from([None, 0, 1 << 18]),
    kept=st.sampled_from([0, 1 << 17, 1 << 24]),
    drain=st.sampled_from([None, 0.0, 60.0]),
)
def test_every_request_ends(served: Served, events: list[Event], drain: float | None, kept: int, **room: Any) -> None:
    """Indices come, go and are replaced meanwhile; `drain` closes the scheduler before the answers are read."""
    scheduler = Scheduler(served.indices, kept_bytes=kept, **room)
    asked, holds = list[Asked](), {"a": "a", "b": "b"}
    for event in events:
        for one in asked[-event.before :] if event.before else []:
            one.read(1)
        _change(scheduler, served, holds, event)
        config = OWN if event.own else ALL
        told: dict[str, Any] = {"config": config, "timeout": event.timeout}
        try:
            stream = served.ask(scheduler, event.index, question(event.question), event.longest, **told)
        except QueueFullError:
            continue
        except UsageError:
            assert event.index not in holds
            continue
        asked.append(Asked(event, holds[event.index], stream, iter(stream)))
    for one in asked:
        if one.event.leaves is not None:
            one.read(one.event.leaves)
            one.stream.cancel()
    if drain is not None:
        scheduler.close(drain)
    until = time.monotonic() + 60
    for one in asked:
        while not one.pieces or one.pieces[-1].finish is None:
            assert time.monotonic() < until
            one.read(1)
        event, config = one.event, OWN if one.event.own else ALL
        answer = served.alone(one.index, question(event.question), event.longest, config)
        if one.pieces[-1].finish in ("stop", "length"):
            check(one.pieces, answer)
        else:
            assert drain == 0.0 or event.leaves is not None or event.timeout is not None
            found = ids(one.pieces)
            assert answer.ids[: len(found)] == found
    assert scheduler.measures().running == 0
    scheduler.close(0)


def _change(scheduler: Scheduler, served: Served, holds: dict[str, str], event: Event) -> None:
    """Change the index of a request; `holds` are the indices that are served by name."""
    name = event.index
    if event.change in ("reopened", "closed"):
        scheduler.remove(name)
        holds.pop(name, None)
    if event.change in ("reopened", "replaced"):
        holds[name] = {"a": "b", "b": "a"}[holds.get(name, name)] if event.change == "replaced" else name
        # A new object, as of an index that is opened again.
        scheduler.add(name, replace(served.indices[holds[name]]))
