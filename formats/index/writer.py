"""Write an index.

If the build is interrupted, an earlier index in the folder stays valid. If there was none, the folder has no manifest,
and is not taken for an index.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Self

import torch

from sparsekv.formats.checksums import hash_json
from sparsekv.formats.errors import SparsekvError, WaysOut
from sparsekv.formats.index.build_folder import BuildFolder
from sparsekv.formats.index.folder import Folder, JoinedFile, SharedFile, UnfinishedFile
from sparsekv.formats.index.growing_file import (
    ALL_HEADS,
    GrowingFile,
    GrowingPart,
    HeadPart,
    HeldTensors,
    RemoteSum,
    write_tensors,
)
from sparsekv.formats.index.kept_prefill import (
    NOTE,
    QUERIES,
    KeptPrefill,
    PrefillKeeper,
    PrefillNote,
    file_number,
    read_queries,
    read_rows,
)
from sparsekv.formats.index.reader import CPU, WholeFile
from sparsekv.formats.index.schema import FileRecord, Manifest

THREADS = min(16, os.cpu_count() or 1)
# Maximum number of checksums computed at a time. It is large, because one thread takes most of a second for the file
# of a layer of a long document.
SUMS = min(64, os.cpu_count() or 1)
HELD_BYTES = 6 << 30  # maximum bytes of tensors that wait to be written and have no other use


class ArtifactWriter(BuildFolder):
    """Writes and reuses the files of one build of an index.

    The writer holds the tensors of files that wait to be written. It writes as many files at a time as the machine has
    cores, at most 16. Tensors on a GPU stay there and are copied through 16 MiB of host memory per file.
    """

    def __init__(self, folder: Path, *, force: bool = False, ways_out: WaysOut | None = None):
        super().__init__(folder, force=force, ways_out=ways_out)
        self._made: dict[str, Future[FileRecord]] = {}
        self._held, self._new = HeldTensors(HELD_BYTES), set[str]()
        self._threads = ThreadPoolExecutor(THREADS)
        # Checksums are computed in their own threads, so that a small file does not wait for the checksum of gigabytes.
        # Waiting for another process's checksum has threads of its own, so that it does not block local checksums.
        self._summing, self._awaiting = ThreadPoolExecutor(SUMS), ThreadPoolExecutor(THREADS)
        self._receiving = ThreadPoolExecutor(1)  # one thread: checksums arrive in the order of `end_rows`
        self._begun: dict[str, UnfinishedFile] = {}
        self._growing: dict[str, GrowingFile] = {}
        self._ended: dict[str, WholeFile] = {}
        """Files whose rows are all written, but which still have a temporary name."""
        self._continued: dict[str, tuple[UnfinishedFile, int]] = {}
        """Files of an interrupted prefill, each with the number of leading rows that the prefill has written to it."""
        self._keeper: PrefillKeeper | None = None
        self._is_refused = False  # the prefill's rows are of no use to a later build

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            for threads in (self._receiving, self._awaiting, self._summing, self._threads):
                threads.shutdown()
            if error is None:
                self._check_made()
        finally:
            try:
                self._leave_rows()
            finally:
                self._leave()

    @property
    def files(self) -> dict[str, FileRecord]:
        """Records of this build's files, written or reused, in the order of the calls. Waits until all are on disk.

        Raises:
            ArtifactError: a file could not be written.
        """
        return {name: made.result() for name, made in self._made.items()}

    def record(self, name: str) -> FileRecord:
        """Return the record of a file of this build. Waits until it is on disk, and raises the errors of `files`."""
        return self._made[name].result()

    def reuse(self, name: str, recipe: str, sources: Sequence[str] = ()) -> bool:
        """Reuse an intact file with this recipe, as `reuse_all` does; return whether it was reused.

        Args:
            recipe: the hash of everything that determines the file's content, except the files in `sources`.
            sources: files of this build from which the file is made. If one of them is new, the file is not reused.
        """
        return self._new.isdisjoint(sources) and self.reuse_all({name: self._whole_recipe(recipe, sources)})

    def reuse_all(self, recipes: Mapping[str, str]) -> bool:
        """Reuse files of an earlier build if all of them are intact and have these recipes; return whether they were.

        With `force`, only files that this build has written are reused.

        Args:
            recipes: the recipe of each file (the hash of everything that determines its content), by logical name.
        """
        whole = {name: record for name, recipe in recipes.items() if (record := self._found(name, recipe))}
        for name, record in whole.items() if len(whole) == len(recipes) else ():
            self._made[name] = Future()
            self._made[name].set_result(record)
            self._journal.reuse(name, record)
        return len(whole) == len(recipes)

    def _found(self, name: str, recipe: str) -> FileRecord | None:
        """Return the record of an intact file with this recipe; None if there is none.

        The file is of this or an earlier build; with `force`, of this build only.
        """
        if name in self._made:
            self._made[name].result()
        return None if self.force and name not in self._made else self._earlier(name, recipe)

    def write(
        self,
        name: str,
        tensors: Mapping[str, torch.Tensor],
        recipe: str,
        sources: Sequence[str] = (),
        *,
        wait: bool = True,
    ) -> None:
        """Write a logical file in a thread, and record it in the journal once it is on disk.

        The tensors are held until then and must not change. Rows that `write_rows` has written are not written again.

        Args:
            recipe: the hash of everything that determines the content, except the files in `sources`.
            sources: files of this build from which this file is made. Their checksums become part of its recipe.
            wait: wait until the tensors fit into the limit of 6 GiB (see `HeldTensors`). False for tensors that stay in
                memory anyway.

        Raises:
            ArtifactError: an earlier file could not be written.
        """
        self._wait_for_earlier(name)
        self._held.add(name, tensors, wait=wait)
        self._new.add(name)
        self._made[name] = self._threads.submit(self._store, name, tensors, recipe, sources, None)

    def share_rows(self, name: str, recipe: str) -> SharedFile:
        """Create a file to which other processes write the rows of their heads; return the handle that opens it.

        `write_rows` writes the rows of this process's heads, and `end_rows` completes the file.

        Raises:
            ArtifactError: the file cannot be written.
        """
        with self._writing():
            self._begun[name] = self._begin(name, recipe)
            return self._begun[name].shared

    def unshare_rows(self) -> None:
        """Remove shared and growing files that still have a temporary name. No process may write to them any more."""
        for files in (self._begun, self._growing):
            while files:
                files.popitem()[1].discard()

    def take_kept(
        self, note: PrefillNote, files: Mapping[str, Mapping[str, torch.Tensor]], recipe: str, device: torch.device
    ) -> KeptPrefill | None:
        """Read the complete chunks of an interrupted prefill. `write_rows` then adds the next chunks to the same files.

        Returns None if a chunk is damaged, cannot be read or has other shapes; all chunks are then removed.

        Args:
            note: the journal's note on the prefill.
            files: tensors with the shapes [H, N, D] (heads, tokens, channels) and dtypes of the complete files, by
                logical name.
            recipe: the hash of everything that determines these files' content.
            device: the device to which keys and values are read.
        """
        rows, opened, tokens = {}, list[UnfinishedFile](), note.ends[-1]
        try:
            for name, like in files.items():
                opened.append(self._folder.continued(self._free_path(name, recipe), note.number))
                own = read_rows(opened[-1], like, note, note.rows.get(name, ""))
                if own is None:
                    break
                rows[name] = own["keys"].to(device), own["values"].to(device)
            opened.append(self._folder.continued(QUERIES, note.number))
            queries = read_queries(opened[-1], note) if len(rows) == len(files) else None
        except OSError:
            queries = None
        if queries is None:
            for file in opened:
                file.discard()
            self.forget_prefill()
            return None
        self._continued = {name: (file, tokens) for name, file in zip(files, opened, strict=False)}
        self._keeper = self._keep(note.recipe, opened[-1], note)
        return KeptPrefill(tokens, rows, queries)

    def keep_prefill(self, recipe: str) -> None:
        """Keep the complete chunks of the next prefill on disk, in case this build is interrupted.

        Does nothing if `take_kept` has returned chunks: further chunks are then kept with these.

        Args:
            recipe: the hash of all settings and tokens that determine the rows and queries.

        Raises:
            ArtifactError: the file of queries cannot be written.
        """
        if self._keeper is None:
            with self._writing():
                file = self._folder.begin(self._journal.name(QUERIES), file_number(recipe))
            self._keeper = self._keep(recipe, file)

    def chunk_done(self, end: int, queries: Mapping[str, torch.Tensor]) -> None:
        """Let a thread record a chunk in the journal once its rows are on disk. Does nothing without `keep_prefill`.

        Args:
            end: number of prompt tokens up to the chunk's end; `write_rows` was called with the chunk's rows.
            queries: the chunk's queries, which must not change afterwards.

        Raises:
            ArtifactError: an earlier chunk could not be written.
        """
        if self._keeper is not None:
            with self._writing():
                self._keeper.chunk_done(end, self._growing, queries)

    @contextmanager
    def refusable(self) -> Iterator[None]:
        """Within the context, a SparsekvError refuses the prefill's rows: the writer then removes the kept chunks."""
        try:
            yield
        except SparsekvError:
            self._is_refused = True
            raise

    def write_rows(
        self, name: str, tensors: Mapping[str, torch.Tensor], recipe: str, end: int, part: HeadPart = ALL_HEADS
    ) -> None:
        """Let a thread write the rows of the first `end` tokens, while the prefill still computes the others.

        The tensors have the shape [H, N, D] (heads, tokens, channels). Rows of earlier calls are not written again.
        `write` completes the file, and must get the same tensors. If `share_rows` has created the file, the tensors
        have this process's heads only, and `end_rows` completes the file instead.

        Raises:
            ArtifactError: the file cannot be written.
        """
        with self._writing():
            if name in self._continued:
                file, first = self._continued[name]
                self._growing[name] = GrowingFile(file, tensors, part, end=first, summed=True)
                del self._continued[name]
            elif name not in self._growing:
                if name not in self._begun:
                    self._begun[name] = self._begin(name, recipe)
                self._growing[name] = GrowingFile(self._begun[name], tensors, part, summed=self._keeper is not None)
                del self._begun[name]
            self._growing[name].put(end, self._threads)

    def rows_written(self, name: str, seconds: float) -> bool:
        """Wait at most `seconds` until this process's rows of a shared file are written; return whether they are.

        Raises:
            ArtifactError: the rows could not be written.
        """
        with self._writing():
            return self._growing[name].wait(seconds)

    def end_rows(self, name: str, recipe: str, remote_sum: RemoteSum | None = None) -> None:
        """Let a thread complete a file that `share_rows` created. The other processes must have written their rows.

        The tensors are not held in memory. `read` reads them from the file, even before the file has its checksum and
        its final name.

        Args:
            remote_sum: returns the checksum if another process computes it; called in the order of the `end_rows`
                calls.

        Raises:
            ArtifactError: an earlier file could not be written, or this file cannot be read.
        """
        assert name in self._growing
        self._wait_for_earlier(name)
        with self._writing():
            self._growing[name].wait()
            self._ended[name] = WholeFile(self._growing[name].descriptor, f"{name} of {self.folder}")
        self._new.add(name)
        received = remote_sum and self._receiving.submit(remote_sum).result
        threads = self._awaiting if received else self._summing
        self._made[name] = threads.submit(self._store, name, {}, recipe, (), received)

    def is_new(self, name: str) -> bool:
        """Whether this build writes a file instead of reusing it."""
        return name in self._new

    def is_of_base(self, name: str) -> bool:
        """Whether this build has taken a file unchanged from the base, the finished index in the folder.

        Waits until the file is on disk.
        """
        return self.base is not None and self.base.files.get(name) == self.record(name)

    def find(self, name: str) -> SharedFile:
        """Return a handle with which another process opens a file of this build. Waits until the file is on disk.

        Raises:
            ArtifactError: the file could not be written, or is gone.
        """
        path = self._made[name].result().path
        with self._writing():
            descriptor = self._folder.open(path)
        try:
            return SharedFile.of(path, descriptor)
        finally:
            os.close(descriptor)

    def read(self, name: str, device: torch.device = CPU) -> dict[str, torch.Tensor]:
        """Return the tensors of a file of this build on a device, from memory while they are held, else from disk."""
        held = self._held.get(name)
        if held is not None:
            return {key: tensor.to(device) for key, tensor in held.items()}
        if ended := self._ended.get(name):
            return ended.read(device)
        return self._read(name, self._made[name].result(), device)

    def finish(self, manifest: Manifest) -> Manifest:
        """Seal the index: write the manifest, with all files of this build, over an earlier one."""
        return self._seal(manifest.model_copy(update={"files": self.files}))

    def _whole_recipe(self, recipe: str, sources: Sequence[str]) -> str:
        """Return a file's recipe extended by the checksums of `sources`, the files from which the file is made.

        Waits until these files are on disk.
        """
        return hash_json([recipe, {name: self._made[name].result().sha256 for name in sources}]) if sources else recipe

    def _begin(self, name: str, recipe: str) -> UnfinishedFile:
        number = file_number(self._keeper.recipe) if self._keeper else None
        return self._folder.begin(self._journal.name(self._free_path(name, recipe)), number)

    def _keep(self, recipe: str, file: UnfinishedFile, found: PrefillNote | None = None) -> PrefillKeeper:
        return PrefillKeeper(recipe, file, partial(self.note, NOTE), found)

    def _remove_strays(self, manifest: Manifest) -> None:
        """Wait until all chunks of the prefill are recorded, then remove the journal and files not in the manifest."""
        if self._keeper is not None:
            self._keeper.close()
        super()._remove_strays(manifest)

    def _leave_rows(self) -> None:
        """Remove unfinished files, unless a later build can use them.

        It can use the files of a prefill that has complete chunks on disk and is not refused.
        """
        try:
            if self._keeper is not None:
                self._keeper.close()
            if self._is_refused:
                with suppress(OSError):  # on a full disk the next build finds no chunks to its note
                    self._folder.remove([], leftovers_of=self._journal.paths)
                    self._journal.forget(NOTE)
        finally:
            if self._keeper is not None and self._keeper.tokens and not self._is_refused:
                for growing in self._growing.values():
                    growing.leave()
                for file, _ in self._continued.values():
                    file.leave()
                self._growing.clear()
            self.unshare_rows()

    def _wait_for_earlier(self, name: str) -> None:
        """Wait for an earlier write of the same name. Raises ArtifactError if a write of any file has failed so far."""
        self._check_made()
        if name in self._made:
            self._made[name].result()

    def _check_made(self) -> None:
        for made in self._made.values():
            if made.done():
                made.result()

    def _store(
        self,
        name: str,
        tensors: Mapping[str, torch.Tensor],
        recipe: str,
        sources: Sequence[str],
        remote: RemoteSum | None,
    ) -> FileRecord:
        try:
            # This cannot deadlock: threads take files in order, and shared files have their own threads. So the source
            # files for which a thread waits here are already being written.
            recipe = self._whole_recipe(recipe, sources)
            path = self._free_path(name, recipe)
            with self._writing():
                if name in self._growing:
                    record = self._growing.pop(name).finish(path, recipe, remote)
                else:
                    record = write_tensors(self._folder, self._journal.name(path), tensors, recipe)
                self._journal.add(name, record)
            return record
        finally:
            self._held.drop(name)
            self._ended.pop(name, None)


class PartWriter:
    """Writes this process's heads to files that the first process creates, names and removes.

    A file can be written between `join` and `end`. Only after `end` may the first process give the file its final name.
    `whole` may be called only after `end`, too.
    """

    def __init__(self, part: HeadPart):
        self._part, self._folder = part, Path()
        self._files: dict[str, JoinedFile] = {}
        self._rows: dict[str, GrowingPart] = {}
        self._ended: dict[str, WholeFile] = {}
        self._threads = ThreadPoolExecutor(THREADS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        self.leave()

    def join(self, folder: Path, files: Mapping[str, SharedFile]) -> bool:
        """Open shared files of an index; return whether all could be opened. On another machine none can be opened."""
        self._folder = folder
        try:
            opened = Folder(folder)
            for name, shared in files.items():
                self._files[name] = opened.join(shared)
        except OSError:
            return False
        return True

    def leave(self) -> None:
        """Close all joined files. No thread may write to these files any more."""
        while self._files:
            self._files.popitem()[1].close()

    def put(self, name: str, tensors: Mapping[str, torch.Tensor], end: int) -> None:
        """Have a thread write the rows before `end` of tensors [H / parts, N, D]; ignored if the file was not joined.

        Raises:
            ArtifactError: earlier rows could not be written.
        """
        if name not in self._files:
            return
        try:
            if name not in self._rows:
                self._rows[name] = GrowingPart(self._files[name], tensors, self._part)
            self._rows[name].put(end, self._threads)
        except OSError as error:
            raise WaysOut().cannot_write(self._folder, error) from None

    def whole(self, name: str) -> WholeFile:
        """Return a read handle of a file to which this process has written all its rows, and which `end` has closed.

        The file is complete once the other processes have written their rows.

        Raises:
            KeyError: this process has not ended a file of this name.
        """
        return self._ended[name]

    def end(self, name: str, seconds: float) -> bool:
        """Stop writing to a file and close it, if this process's rows are written within `seconds`.

        Returns:
            Whether the rows are written; also True if the file was not joined.

        Raises:
            ArtifactError: the rows could not be written.
        """
        if name not in self._files:
            return True
        try:
            if not self._rows[name].wait(seconds):
                return False
            del self._rows[name]
            self._ended[name] = WholeFile(self._files[name].descriptor, f"{name} of {self._folder}")
            self._files.pop(name).close()
        except OSError as error:
            raise WaysOut().cannot_write(self._folder, error) from None
        return True
