"""Whatever comes when, and goes: every request ends, with the right answer or the beginning of it."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.served import ALL, OWN, Served, check, ids, question

from sparsekv.runtime.serving.scheduler import Scheduler
from sparsekv.runtime.serving.stream import Stream
from sparsekv.runtime.serving.submission import Piece, QueueFullError


@dataclass(frozen=True)
class Event:
    """A request; `leaves` is the number of pieces after which its reader goes, None: it stays. `before` is the number
    of pieces that are read of earlier streams before it comes."""

    index: str
    question: int
    longest: int
    own: bool
    leaves: int | None
    timeout: float | None
    before: int


EVENTS = st.builds(
    Event,
    index=st.sampled_from("ab"),
    question=st.integers(0, 5),
    longest=st.sampled_from([1, 3, 8]),
    own=st.sampled_from([False, False, True]),
    leaves=st.sampled_from([None, None, None, 0, 1, 2]),
    timeout=st.sampled_from([None, None, None, 1e-3, 0.02]),
    before=st.integers(0, 3),
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    events=st.lists(EVENTS, min_size=1, max_size=10),
    slots=st.integers(1, 4),
    queue=st.integers(1, 10),
    lanes=st.integers(1, 4),
    kept=st.sampled_from([0, 1 << 17, 1 << 24]),
)
def test_every_request_ends(served: Served, events: list[Event], slots: int, queue: int, lanes: int, kept: int) -> None:
    scheduler = Scheduler(served.indices, slots=slots, queue=queue, lanes=lanes, kept_bytes=kept)
    asked = list[tuple[Event, Stream, Iterator[Piece], list[Piece]]]()
    for event in events:
        for _, _, reader, pieces in asked[-event.before :] if event.before else []:
            _read(reader, pieces, 1)
        try:
            config = OWN if event.own else ALL
            told = {"config": config, "timeout": event.timeout}
            stream = served.ask(scheduler, event.index, question(event.question), event.longest, **told)  # type: ignore[arg-type]
        except QueueFullError:
            continue
        asked.append((event, stream, iter(stream), []))
    for event, stream, reader, pieces in asked:
        if event.leaves is not None:
            _read(reader, pieces, event.leaves)
            stream.cancel()
    until = time.monotonic() + 60
    for event, _, reader, pieces in asked:
        while not pieces or pieces[-1].finish is None:
            assert time.monotonic() < until
            _read(reader, pieces, 1)
        answer = served.alone(event.index, question(event.question), event.longest, OWN if event.own else ALL)
        if pieces[-1].finish in ("stop", "length"):
            check(pieces, answer)
        else:
            found = ids(pieces)
            assert answer.ids[: len(found)] == found
    assert scheduler.measures().running == 0
    scheduler.close(0)


def _read(reader: Iterator[Piece], pieces: list[Piece], number: int) -> None:
    """Read some more pieces."""
    for _ in range(number):
        if not pieces or pieces[-1].finish is None:
            pieces.append(next(reader))
