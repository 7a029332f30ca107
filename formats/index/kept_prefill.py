"""Keep the whole chunks of a prefill in a build's folder, so that an interrupted build goes on from the last of them.

Keys and values are in the growing files of the index, which stay under their temporary names. The queries that a build
needs of each chunk are appended to a file of their own. A note in the journal says which chunks are on disk, and has
their checksums.
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
"""Name of the note in the journal."""
QUERIES = "kept/queries.safetensors"
"""Logical name of the file of queries, which never gets its own name: one safetensors file after another."""
_NUMBER = 8


class PrefillNote(Record):
    """Says which chunks of a prefill are on disk.

    Args:
        recipe: the hash of everything that determines the rows and queries.
        ends: ascending numbers of tokens after which a chunk ends.
        rows: the chained checksum of each growing file, by logical name.
        queries: bytes of each chunk's part of the file of queries.
        queries_sha256: the checksum of these parts.
    """

    recipe: Sha256
    ends: list[Size]
    rows: dict[FileName, Sha256]
    queries: list[PositiveInt]
    queries_sha256: Sha256

    @property
    def number(self) -> str:
        """The number of the temporary files."""
        return file_number(self.recipe)


def file_number(recipe: str) -> str:
    """Return the number of the temporary files of a prefill."""
    return recipe[:_NUMBER]


def prefill_note(value: object) -> PrefillNote | None:
    """Parse a note of the journal; None if there is none, or it is damaged."""
    try:
        note = PrefillNote.model_validate(value)
    except ValidationError:
        return None
    ascending = note.ends == sorted(set(note.ends)) and bool(note.ends)
    return note if ascending and len(note.queries) == len(note.ends) else None


@dataclass(frozen=True)
class KeptPrefill:
    """The whole chunks of an interrupted prefill, checked, in memory.

    Args:
        tokens: the number of leading tokens that they have.
        rows: keys and values [Hk, tokens, D] of the files that are not complete, by logical name.
        queries: the queries of each chunk, by the names that `PrefillKeeper.chunk_done` was given.
    """

    tokens: int
    rows: dict[str, Pair]
    queries: list[dict[str, torch.Tensor]]


def first_link(header: bytes) -> str:
    """Return the chained checksum of a growing file before its first chunk."""
    return hash_bytes(header)


def next_link(before: str, chunk: str) -> str:
    """Return the chained checksum after a chunk with a checksum."""
    return hash_bytes(f"{before}{chunk}".encode())


def read_rows(
    file: UnfinishedFile, like: Mapping[str, torch.Tensor], note: PrefillNote, sha256: str
) -> dict[str, torch.Tensor] | None:
    """Read the rows of the whole chunks of a growing file, and check them while they are read.

    Args:
        like: tensors [H, N, D] with the shapes and dtypes that the complete file has.
        sha256: the chained checksum that the note has of the file.

    Returns:
        The tensors [H, n, D] of the n tokens of the whole chunks; None if they are damaged or of another shape.

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
    """Read the queries of the whole chunks, and check them; None if they are damaged. Raises OSError."""
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
    """Read bytes at an offset until `data` is full; return False if the file ends before."""
    while data:
        count = os.preadv(descriptor, [data], place)
        if not count:
            return False
        data, place = data[count:], place + count
    return True


class PrefillKeeper:
    """Appends each chunk's queries to their file, and then notes in the journal that the chunk is on disk.

    A thread of its own does that, so that the prefill waits for nothing.

    Args:
        recipe: the hash of everything that determines the rows and queries.
        file: the file of queries.
        store: stores the note in the journal.
        found: the note of an interrupted build that this one continues.
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
            self._digest.update(_beginning(file, sum(found.queries)))

    @property
    def tokens(self) -> int:
        """The number of tokens whose chunks are on disk."""
        return self._ends[-1] if self._ends else 0

    def chunk_done(self, end: int, files: Mapping[str, GrowingFile], queries: Mapping[str, torch.Tensor]) -> None:
        """Note a chunk once a thread has written its rows.

        Args:
            end: the number of tokens after the chunk.
            files: the growing files by logical name, to which `put` has given the chunk's rows.
            queries: the chunk's queries, which must not change.

        Raises:
            OSError: an earlier chunk could not be noted.
        """
        if self._last is not None and self._last.done():
            self._last.result()
        made = {name: tensor.contiguous() for name, tensor in queries.items()}
        device = next((tensor.device for tensor in made.values()), torch.device("cpu"))
        ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        written = {name: (first_link(file.header), file.last_put) for name, file in files.items()}
        self._last = self._threads.submit(self._note, end, written, made, ready)

    def close(self) -> None:
        """Wait until all chunks are noted, and leave the file for the next build, or remove it if it has no chunk."""
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


def _beginning(file: UnfinishedFile, size: int) -> bytes:
    return os.pread(file.descriptor, size, 0)
