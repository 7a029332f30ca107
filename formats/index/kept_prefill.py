"""Keep the complete chunks of an interrupted prefill on disk, so that the next build continues after the last one.

Keys and values are in the index's growing files: files of the context that are written chunk by chunk, and that still
have temporary names. Those queries of each chunk that the build needs are appended to a separate file. A note in the
build's journal records which chunks are on disk, and their checksums.
"""

import hashlib
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from pydantic import PositiveInt, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load

from sparsekv.formats.checksums import hash_bytes
from sparsekv.formats.index.context_rows import Pair
from sparsekv.formats.index.folder import UnfinishedFile
from sparsekv.formats.index.growing_file import GrowingFile, safetensors_bytes, safetensors_header
from sparsekv.formats.index.schema import FileName, Record, Sha256, Size

NOTE = "prefill"
"""Name of the prefill's note in the build's journal."""
QUERIES = "kept/queries.safetensors"
"""Logical name of the file of queries, which always has a temporary name. It is a sequence of safetensors files, one
for each chunk."""
_NUMBER = 8


class PrefillNote(Record):
    """Note in the journal that records which chunks of a prefill are on disk.

    Args:
        recipe: the hash of all settings and tokens that determine the rows and queries.
        ends: for each chunk, the number of prompt tokens up to its end; ascending.
        rows: the chained checksum of each growing file, by logical name: a chunk's hash also covers the chunks before.
        queries: size in bytes of each chunk's part of the file of queries.
        queries_sha256: the checksum of all parts together.
    """

    recipe: Sha256
    ends: list[Size]
    rows: dict[FileName, Sha256]
    queries: list[PositiveInt]
    queries_sha256: Sha256

    @property
    def number(self) -> str:
        """The 8 hex digits in the names of the prefill's temporary files."""
        return file_number(self.recipe)


def file_number(recipe: str) -> str:
    """Return the 8 hex digits in the names of the temporary files of a prefill, the first digits of its recipe."""
    return recipe[:_NUMBER]


def prefill_note(value: object) -> PrefillNote | None:
    """Parse the journal's note on a prefill; None if there is no note, or the note is damaged."""
    try:
        note = PrefillNote.model_validate(value)
    except ValidationError:
        return None
    ascending = note.ends == sorted(set(note.ends)) and bool(note.ends)
    return note if ascending and len(note.queries) == len(note.ends) else None


@dataclass(frozen=True)
class KeptPrefill:
    """The complete chunks of an interrupted prefill, read from disk after their checksums were verified.

    Args:
        tokens: number of leading prompt tokens in these chunks.
        rows: keys and values [Hk, tokens, D] of each unfinished file, by logical name.
        queries: the queries of each chunk, by the names passed to `PrefillKeeper.chunk_done`.
    """

    tokens: int
    rows: dict[str, Pair]
    queries: list[dict[str, torch.Tensor]]


def first_link(header: bytes) -> str:
    """Return the chained checksum of a growing file before its first chunk."""
    return hash_bytes(header)


def next_link(before: str, chunk: str) -> str:
    """Return the chained checksum after a further chunk, whose own checksum is `chunk`."""
    return hash_bytes(f"{before}{chunk}".encode())


def read_rows(
    file: UnfinishedFile, like: Mapping[str, torch.Tensor], note: PrefillNote, sha256: str
) -> dict[str, torch.Tensor] | None:
    """Read the rows of the complete chunks of a growing file, and verify their chained checksum.

    Args:
        like: tensors with the shapes [H, N, D] (heads, prompt tokens, channels) and dtypes of the finished file.
        note: the journal's note on the prefill, which has the chunks' ends.
        sha256: the chained checksum that these rows must have.

    Returns:
        The tensors [H, n, D] of the n tokens in these chunks; None if rows are damaged or the shapes differ.

    Raises:
        OSError: the file cannot be read.
    """
    header, starts = safetensors_header(like)
    if os.pread(file.descriptor, len(header), 0) != header:
        return None
    chain, first = first_link(header), 0
    rows = {
        name: like[name].new_empty(len(like[name]), note.ends[-1], like[name].shape[2], device="cpu") for name in starts
    }
    for end in note.ends:
        digest = hashlib.sha256()
        for name, start in starts.items():
            whole = like[name]
            for head, part in enumerate(rows[name][:, first:end]):
                place = start + (head * whole.shape[1] + first) * whole.shape[2] * whole.itemsize
                bytes_of = part.view(-1).view(torch.uint8).numpy().data
                if not _fill(file.descriptor, bytes_of, place):
                    return None
                digest.update(bytes_of)
        chain, first = next_link(chain, digest.hexdigest()), end
    return rows if chain == sha256 else None


def read_queries(file: UnfinishedFile, note: PrefillNote) -> list[dict[str, torch.Tensor]] | None:
    """Read the queries of each complete chunk, and verify their checksum; None if the queries are damaged.

    Raises:
        OSError: the file cannot be read.
    """
    if os.fstat(file.descriptor).st_size < sum(note.queries):
        return None
    data = bytearray(sum(note.queries))
    if not _fill(file.descriptor, memoryview(data), 0) or hash_bytes(data) != note.queries_sha256:
        return None
    parts, place = [], 0
    try:
        for size in note.queries:
            parts.append(load(bytes(data[place : place + size])))
            place += size
    except (SafetensorError, ValueError, KeyError):
        return None
    return parts


def _fill(descriptor: int, data: memoryview, place: int) -> bool:
    """Read bytes from the offset `place` on until `data` is full; return False if the file ends first."""
    while data:
        count = os.preadv(descriptor, [data], place)
        if not count:
            return False
        data, place = data[count:], place + count
    return True


class PrefillKeeper:
    """Appends each chunk's queries to a file, and then records in the journal that the chunk is on disk.

    This happens in a separate thread, so that the prefill does not wait for the disk.

    Args:
        recipe: the hash of all settings and tokens that determine the rows and queries.
        file: the file of queries.
        store: called with a note, which it stores in the journal.
        found: the note of the interrupted build that this build continues; None: the prefill begins anew.
    """

    def __init__(
        self, recipe: str, file: UnfinishedFile, store: Callable[[object], None], found: PrefillNote | None = None
    ):
        self.recipe, self._file, self._store = recipe, file, store
        self._ends = [*found.ends] if found else []
        self._links = {**found.rows} if found else {}
        self._sizes = [*found.queries] if found else []
        self._digest, self._threads = hashlib.sha256(), ThreadPoolExecutor(1)
        self._last: Future[None] | None = None
        if found:
            self._digest.update(os.pread(file.descriptor, sum(found.queries), 0))

    @property
    def tokens(self) -> int:
        """Number of leading prompt tokens whose chunks are on disk."""
        return self._ends[-1] if self._ends else 0

    def chunk_done(self, end: int, files: Mapping[str, GrowingFile], queries: Mapping[str, torch.Tensor]) -> None:
        """Record a chunk in the journal as soon as other threads have written its rows. Returns at once.

        Args:
            end: number of prompt tokens up to the chunk's end.
            files: the growing files by logical name; their `put` was called with the chunk's rows.
            queries: the chunk's queries, which must not change afterwards.

        Raises:
            OSError, or another error of `store`: the previous chunk could not be recorded. Raised only if that failure
                is known by now.
        """
        if self._last is not None and self._last.done():
            self._last.result()
        made = {name: tensor.contiguous() for name, tensor in queries.items()}
        device = next((tensor.device for tensor in made.values()), torch.device("cpu"))
        ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        written = {name: (first_link(file.header), file.last_put) for name, file in files.items()}
        self._last = self._threads.submit(self._note, end, written, made, ready)

    def close(self) -> None:
        """Wait until all chunks are recorded. Then leave the file of queries to the next build.

        If no chunk is recorded, the file is removed instead.
        """
        self._threads.shutdown()
        if self.tokens:
            self._file.leave()
        else:
            self._file.discard()

    def _note(
        self,
        end: int,
        written: Mapping[str, tuple[str, "Future[str]"]],
        queries: Mapping[str, torch.Tensor],
        ready: torch.cuda.Event | None,
    ) -> None:
        place = start = sum(self._sizes)
        for piece in safetensors_bytes(queries, ready):
            self._file.write(piece, place)
            self._digest.update(piece)
            place += len(piece)
        links = {
            name: next_link(self._links.get(name, first), chunk.result()) for name, (first, chunk) in written.items()
        }
        self._links = links
        self._ends.append(end)
        self._sizes.append(place - start)
        self._store(
            PrefillNote(
                recipe=self.recipe,
                ends=self._ends,
                rows=self._links,
                queries=self._sizes,
                queries_sha256=self._digest.hexdigest(),
            ).model_dump()
        )
