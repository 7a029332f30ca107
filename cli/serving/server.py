"""The HTTP server over opened indices: its address, the signals that end it, and timeouts of connections."""

import asyncio
import errno
import os
import resource
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import Any

import h11
import uvicorn
from transformers import PreTrainedModel
from uvicorn.protocols.http.h11_impl import H11Protocol

from sparsekv.cli.answering.faster import take_faster_for_numbers
from sparsekv.cli.answering.options import SamplingOptions, refuse_with_auto
from sparsekv.cli.common.compiling import compile_or_note
from sparsekv.cli.common.console import note, say
from sparsekv.cli.common.loading import load_for
from sparsekv.cli.common.method_options import note_budgets
from sparsekv.cli.common.open_artifact import open_artifact
from sparsekv.cli.common.process import refuse_little_room
from sparsekv.cli.common.streams import flush_streams, outlive_reader
from sparsekv.cli.serving.app import Api, Limits
from sparsekv.cli.serving.limits import LOOPBACK, read_keys, refuse_no_origin
from sparsekv.cli.serving.options import ServeOptions
from sparsekv.cli.serving.shelf import (
    Served,
    Shelf,
    config_of,
    folders_by_name,
    indices_in,
    note_broken,
    refuse_clashes,
    refuse_no_folder,
    state_of,
)
from sparsekv.formats.device import choose_device, device_memory
from sparsekv.formats.errors import IdentityError, SparsekvError, UsageError, check_choice, reason_of
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.models.load import LoadedModel, identify
from sparsekv.runtime.attention.config import DecodeConfig, Dense
from sparsekv.runtime.decoding.choose_config import choose_config, idle_budget
from sparsekv.runtime.decoding.compiled import MODES, WORTH_JOINING
from sparsekv.runtime.decoding.open import OpenIndex, open_index
from sparsekv.runtime.decoding.threads import exclusive
from sparsekv.runtime.serving.scheduler import Scheduler

HEAD_SECONDS = 30.0
"""Seconds within which an idle connection must send the head of its next request. Otherwise it is closed."""
LAST_SECONDS = 5
"""Seconds that clients have, after the last answer has ended, to read the rest of the responses."""
UNREAD = 1 << 16
"""Size in bytes of a socket's send buffer. The kernel allocates twice this size."""
NO_MORE = "no new requests; accepted requests are completed; another signal ends them"
FILES = 65_536
"""Wanted limit of open files. Each connection is an open file."""


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address and does not listen yet.

    Raises:
        UsageError: there is no such address on this machine.
        SparsekvError: the port is taken, or may not be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError):
        raise UsageError(f"--host {host}: there is no such address; give 127.0.0.1, or one of this machine's") from None
    listening = socket.socket(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
    except OSError as error:
        listening.close()
        told = f"cannot listen on {host} port {port}: {reason_of(error)}"
        if error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(
                f"--host {host} is not an address of this machine; give 127.0.0.1, or one of this machine's addresses"
            ) from None
        raise SparsekvError(f"{told}; give another --port (0: any that is free) or --host") from None
    return listening


def address_of(listening: socket.socket, host: str) -> str:
    """Return the URL of a bound socket. `host` is the value of `--host`."""
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{listening.getsockname()[1]}"


class _Connection(H11Protocol):
    """A connection that is closed if the head of a request does not come in time, or if its client reads nothing.

    Args:
        unread: seconds after which the connection is closed if the client does not read the sent data.
        arguments: arguments of the base class.
    """

    def __init__(self, *, unread: float, **arguments: Any):
        super().__init__(**arguments)
        self.unread = unread

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Otherwise the kernel would buffer megabytes of unread data.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD)
        self.head_timer: asyncio.TimerHandle | None = None
        self.read_timer: asyncio.TimerHandle | None = None
        self._time_head()

    def pause_writing(self) -> None:
        """Start the timer of unread data. This method is called when the buffers are full."""
        super().pause_writing()
        self.read_timer = self.loop.call_later(self.unread, self.transport.abort)

    def resume_writing(self) -> None:
        _stop(self.read_timer)
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        _stop(self.head_timer)
        _stop(self.read_timer)
        super().connection_lost(exc)

    def _time_head(self) -> None:
        """Start the head timer if the connection waits for a request; stop the timer if a head has come."""
        if self.conn.their_state is not h11.IDLE:
            _stop(self.head_timer)
            self.head_timer = None
        elif self.head_timer is None:
            self.head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)


def _stop(timer: asyncio.TimerHandle | None) -> None:
    """Stop a timer, if there is one."""
    if timer is not None:
        timer.cancel()


class Server(uvicorn.Server):
    """A server that completes running answers before it ends.

    On SIGTERM or Ctrl-C the server refuses new requests for answers. It ends when the running answers have ended, or
    after `drain` seconds. A second signal ends the running answers, each with an error. A third signal ends the server
    at once.

    Args:
        unread: seconds after which a connection is closed if its client does not read the sent data.
        ready: called when the server listens.
    """

    def __init__(self, api: Api, drain: float, unread: float, ready: Callable[[], None], *, quiet: bool):
        config = uvicorn.Config(
            api.app(),
            http=partial(_Connection, unread=unread),  # type: ignore[arg-type]  # it is only called
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            log_level="critical",  # the app prints its errors itself
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=LAST_SECONDS,
        )
        super().__init__(config)
        self.api, self.drain, self.ready, self.quiet = api, drain, ready, quiet
        self._by_keyboard, self._all_completed = False, True
        self._closing: list[Thread] = []

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended answers that were not complete."""
        return self._by_keyboard and not self._all_completed

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        super().run(sockets)
        if self.force_exit:
            self._all_completed = False
        else:
            for one in self._closing:
                one.join()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._by_keyboard |= sig == signal.SIGINT
        if len(self._closing) > 1:
            self.force_exit = self.should_exit = True
            return
        told = "answers are ended" if self.api.draining else NO_MORE
        seconds = 0.0 if self.api.draining else self.drain
        self.api.draining = True
        self._closing.append(Thread(target=self._close, args=(told, seconds), daemon=True))
        self._closing[-1].start()

    def _close(self, told: str, seconds: float) -> None:
        note(told, quiet=self.quiet)
        if not self.api.scheduler.close(seconds):
            self._all_completed = False
        self.should_exit = True


def allow_many_connections() -> None:
    """Raise the limit of open files to `FILES`, or to the hard limit if that is lower. A higher limit stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def run(options: ServeOptions) -> None:
    """Serve until a signal ends the server.

    Raises:
        UsageError: an option has no usable value, or two indices have the same name.
        SparsekvError: the errors of opening an index and of `bind`.
    """
    refuse_little_room()
    check_choice("--compile", options.compiled, MODES)
    outlive_reader()  # a client that disconnects must not end the server
    allow_many_connections()
    folders = folders_by_name(_named(options))
    if options.indices_from is not None:
        refuse_clashes(folders, options.indices_from)
        note_broken(options.indices_from)
    states = {name: state_of(folder) for name, folder in folders.items()}
    artifacts = {name: open_artifact(folder, called="INDEX") for name, folder in folders.items()}
    first, *others = artifacts
    dtype = artifacts[first].manifest.dtype if options.dtype == "auto" else options.dtype  # of all indices
    by_method = {name: _by_method(options, artifact) for name, artifact in artifacts.items()}
    configs = {name: _by_time(options, artifact, by_method[name], dtype) for name, artifact in artifacts.items()}
    sampling = SamplingOptions(max_new_tokens=options.max_new_tokens, temperature=options.temperature).make()
    listening = bind(options.host, options.port)
    limits = _limits(options)
    opened = _first(options, artifacts[first], configs[first])
    beside = partial(_beside, options, opened.loaded, folders[first])
    note_budgets([config.budget for config in configs.values()], quiet=options.quiet)
    if options.budget is not None and (told := idle_budget(configs[first].attention, f"--budget {options.budget}")):
        note(told, quiet=options.quiet)

    def open_later(name: str, folder: Path) -> Served:
        artifact = open_artifact(folder)
        index, by_method = beside(artifact), _by_method(options, artifact)
        config = _by_time(options, artifact, by_method, dtype, exclusive(index.model))
        return Served(name, index, config, by_method, options.budget)

    # One thread, because encoding changes a tokenizer's settings, so two threads must not encode at once.
    executor, memory = ThreadPoolExecutor(1, "encoder"), _memory(options, opened)
    scheduler = Scheduler({}, slots=options.slots, queue=options.max_queue, memory=memory)
    shelf = Shelf(scheduler, open_later, executor, options.indices_from, memory)
    shelf.put(Served(first, opened, configs[first], by_method[first], options.budget), folders[first], states[first])
    for name in others:
        index = beside(artifacts.pop(name))
        shelf.put(Served(name, index, configs[name], by_method[name], options.budget), folders[name], states[name])
    if opened.kept is None:  # if the first index is kept, `sparsekv start` has prepared its cache and kernels
        _warm_up(options, scheduler, shelf, opened.model)
    del opened, artifacts  # references would keep the memory of closed indices
    ready = partial(_tell, options, shelf, f"{address_of(listening, options.host)}/v1")
    server = Server(
        Api(scheduler, shelf, sampling, limits), options.drain, options.unread_timeout, ready, quiet=options.quiet
    )
    server.run([listening])
    if server.interrupted:
        signal.raise_signal(signal.SIGINT)
    note("ended", quiet=options.quiet)


def _warm_up(options: ServeOptions, scheduler: Scheduler, shelf: Shelf, model: PreTrainedModel) -> None:
    """Take the first steps over the opened indices, so that kernels are ready; compile steps of one answer alone."""

    def warm_up() -> None:
        for served in shelf.opened():
            scheduler.warm_up(served.name, config_of(served))

    if not compile_or_note(options.compiled, model, warm_up, WORTH_JOINING, quiet=options.quiet):
        warm_up()


def _named(options: ServeOptions) -> list[Path]:
    """Return the folders of the indices to open at the start.

    These are the indices that the command line names, else the first in `--indices-from`, else the only index in the
    current folder. Raises UsageError if there is no such index, or if `--indices-from` is an index itself.
    """
    if options.indices_from is not None:
        refuse_no_folder(options.indices_from)
    if options.indices:
        return options.indices
    if options.indices_from is None:
        return [open_artifact(None, called="INDEX").folder]
    found = next(indices_in(options.indices_from), None)
    if found is None:
        raise UsageError(f"--indices-from {options.indices_from} has no index; name another folder")
    return [found]


def _by_method(options: ServeOptions, artifact: Artifact) -> DecodeConfig:
    """Return the config that the options name; with `auto`, the config to compare with dense attention.

    Raises UsageError for an option that cannot be combined with `auto`, and the errors of `choose_config`.
    """
    if options.by_time:
        refuse_with_auto(placement=options.placement, prefill=options.prefill)
    return choose_config(
        artifact,
        None if options.by_time else options.method,
        budget=options.budget,
        prefill=options.prefill,
        placement=options.placement,
    )


def _by_time(
    options: ServeOptions,
    artifact: Artifact,
    config: DecodeConfig,
    dtype: str,
    alone: AbstractContextManager[object] | None = None,
) -> DecodeConfig:
    """Return the config of requests that set no method, budget or prefill: the config of `_by_method`, or a faster one.

    `dtype` is that of the served model, which may differ from the index's. `alone` is a context in which nothing else
    uses the device; None: nothing else uses it anyway. Raises the errors of `take_faster_for_numbers`.
    """
    by_default = options.attends_by_default and choose_device(options.device).type == "cuda"
    if isinstance(config.attention, Dense) or not (options.by_time or by_default):
        return config
    return take_faster_for_numbers(
        artifact, config, options.slots, options.device, dtype, alone=alone, quiet=options.quiet
    )


def _limits(options: ServeOptions) -> Limits:
    keys = [] if options.api_key_file is None else read_keys(options.api_key_file)
    for origin in options.cors or []:
        refuse_no_origin(origin)
    local = options.host in LOOPBACK
    if not local and not keys:
        told = f"whoever reaches {options.host} can ask, because --api-key-file names no keys"
        note(told, quiet=options.quiet)
    return Limits(keys, LOOPBACK if local else (), options.cors or [], options.timeout, options.max_body)


def _first(options: ServeOptions, artifact: Artifact, config: DecodeConfig) -> OpenIndex:
    """Open the first index. Its model is the model of all served indices."""
    named, hold = (options.model, options.device, options.dtype), config.placement == "device"
    return load_for(artifact, *named, quiet=options.quiet, weights=options.weights, hold=hold)


def _memory(options: ServeOptions, first: OpenIndex) -> int:
    """Return the bytes that the documents' keys and values may take: the value of --memory, or half of the free memory.

    With placement `device` on a GPU it is the GPU's memory, otherwise the machine's.
    """
    if options.memory is not None:
        return int(options.memory * 2**30)
    gpu = device_memory(first.model)
    machine = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return (machine if gpu is None or options.placement != "device" else gpu.left) // 2


def _beside(options: ServeOptions, loaded: LoadedModel, first: Path, artifact: Artifact) -> OpenIndex:
    """Open another index with the model of the first index. Print a note if the index was built in another dtype.

    Raises IdentityError if another model built the index.
    """
    its = identify(loaded, artifact.manifest)
    try:
        with exclusive(loaded.model):
            opened = open_index(artifact, loaded.model, loaded.tokenizer, its, files=loaded.tokenizer_files)
    except IdentityError as error:
        error.add_note(f"{first} and {artifact.folder} would be served by one model")
        raise
    built_in, served_in = artifact.manifest.dtype, str(opened.dtype).removeprefix("torch.")
    if options.dtype == "auto" and built_in != served_in:
        told = f"{artifact.folder} was built in {built_in} and is served in {served_in}, as {first} is"
        note(f"{told}; --dtype chooses the dtype of all", quiet=options.quiet)
    return opened


def _tell(options: ServeOptions, shelf: Shelf, address: str) -> None:
    """Print the open indices and the server's address."""
    for one in shelf.opened():
        config = one.config
        told = f"{one.name}: {one.opened.split.tokens:,} tokens; {config.attention.name}, budget {config.budget}"
        if config.dense_from is not None:
            told += f"; dense attention from {config.dense_from} answers at once on"
        note(told, quiet=options.quiet)
    say(address)
    flush_streams()
