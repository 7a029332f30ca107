"""Open the indices and run the server over them."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from sparsekv.cli.answering.options import SamplingOptions
from sparsekv.cli.common.console import note, say
from sparsekv.cli.common.index_option import open_artifact
from sparsekv.cli.common.loading import load_for
from sparsekv.cli.common.method_options import note_small_budgets
from sparsekv.cli.common.process import refuse_little_room
from sparsekv.cli.common.streams import flush_streams, outlive_reader
from sparsekv.cli.serving.app import Api, Limits
from sparsekv.cli.serving.catalog import config_of
from sparsekv.cli.serving.limits import LOOPBACK, read_keys, refuse_no_origin
from sparsekv.cli.serving.options import ServeOptions
from sparsekv.cli.serving.server import Server, address_of, allow_many_connections, bind
from sparsekv.cli.serving.shelf import (
    Served,
    Shelf,
    folders_by_name,
    indices_in,
    note_broken,
    refuse_clashes,
    refuse_no_folder,
    state_of,
)
from sparsekv.formats.device import device_memory
from sparsekv.formats.errors import IdentityError, UsageError
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.models.load import LoadedModel, identify
from sparsekv.runtime.attention.config import DecodeConfig
from sparsekv.runtime.decoding.choose_config import choose_config
from sparsekv.runtime.decoding.open import OpenIndex, open_index
from sparsekv.runtime.decoding.threads import exclusive
from sparsekv.runtime.serving.scheduler import Scheduler


def run(options: ServeOptions) -> None:
    """Serve until a signal ends the server.

    Raises:
        UsageError: an option has no usable value, or two indices have the same name.
        SparsekvError: the errors of opening an index and of `bind`.
    """
    refuse_little_room()
    outlive_reader()  # a client that disconnects must not end the server
    allow_many_connections()
    folders = folders_by_name(_named(options))
    if options.indices_from is not None:
        refuse_clashes(folders, options.indices_from)
        note_broken(options.indices_from)
    states = {name: state_of(folder) for name, folder in folders.items()}
    artifacts = {name: open_artifact(folder, called="INDEX") for name, folder in folders.items()}
    configs = {name: _config(options, artifact) for name, artifact in artifacts.items()}
    sampling = SamplingOptions(max_new_tokens=options.max_new_tokens, temperature=options.temperature).make()
    listening = bind(options.host, options.port)
    limits = _limits(options)
    first, *others = artifacts
    opened = _first(options, artifacts[first], configs[first])
    beside = partial(_beside, options, opened.loaded, folders[first])
    note_small_budgets([config.budget for config in configs.values()], quiet=options.quiet)

    def open_later(name: str, folder: Path) -> Served:
        artifact = open_artifact(folder)
        return Served(name, beside(artifact), _config(options, artifact), options.budget)

    # One thread, because encoding changes a tokenizer's settings, so two threads must not encode at once.
    executor, memory = ThreadPoolExecutor(1, "encoder"), _memory(options, opened)
    scheduler = Scheduler({}, slots=options.slots, queue=options.max_queue, memory=memory)
    shelf = Shelf(scheduler, open_later, executor, options.indices_from, memory)
    shelf.put(Served(first, opened, configs[first], options.budget), folders[first], states[first])
    for name in others:
        index = beside(artifacts.pop(name))
        shelf.put(Served(name, index, configs[name], options.budget), folders[name], states[name])
    if opened.kept is None:  # if the first index is kept, `sparsekv start` has prepared its cache and kernels
        for served in shelf.opened():
            scheduler.warm_up(served.name, config_of(served))
    del opened, artifacts  # references would keep the memory of closed indices
    ready = partial(_tell, options, shelf, f"{address_of(listening, options.host)}/v1")
    server = Server(
        Api(scheduler, shelf, sampling, limits), options.drain, options.unread_timeout, ready, quiet=options.quiet
    )
    server.run([listening])
    if server.interrupted:
        signal.raise_signal(signal.SIGINT)
    note("ended", quiet=options.quiet)


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


def _config(options: ServeOptions, artifact: Artifact) -> DecodeConfig:
    """Return the config of requests that set no method, budget or prefill."""
    return choose_config(
        artifact, options.method, budget=options.budget, prefill=options.prefill, placement=options.placement
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
        note(told, quiet=options.quiet)
    say(address)
    flush_streams()
