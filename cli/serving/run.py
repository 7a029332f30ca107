"""Open the indices and run the server over them."""

import signal
from functools import partial

from sparsekv.cli.common.console import note, say
from sparsekv.cli.common.index_option import open_artifact
from sparsekv.cli.common.loading import load_for
from sparsekv.cli.common.method_options import note_small_budgets
from sparsekv.cli.common.process import refuse_little_room
from sparsekv.cli.common.streams import flush_streams, outlive_reader
from sparsekv.cli.serving.app import Api, Limits
from sparsekv.cli.serving.catalog import Catalog, Served, refuse_same_names, served_name
from sparsekv.cli.serving.limits import LOOPBACK, read_keys
from sparsekv.cli.serving.options import ServeOptions
from sparsekv.cli.serving.server import Server, address_of, allow_many_connections, bind
from sparsekv.formats.errors import IdentityError
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.models.load import identify
from sparsekv.runtime.attention.config import DecodeConfig
from sparsekv.runtime.decoding.choose_config import choose_config
from sparsekv.runtime.decoding.open import OpenIndex, open_index
from sparsekv.runtime.decoding.sampling import Sampling
from sparsekv.runtime.serving.scheduler import Scheduler


def run(options: ServeOptions) -> None:
    """Serve until a signal ends the server. Raises what opening an index, or its address, raises."""
    refuse_little_room()
    outlive_reader()  # a client that goes away closes a pipe, too
    allow_many_connections()
    artifacts = [open_artifact(one, called="INDEX") for one in options.indices or ()] or [open_artifact(None)]
    refuse_same_names(artifact.folder for artifact in artifacts)
    configs = [_config(options, artifact) for artifact in artifacts]
    sampling = Sampling(max_new_tokens=options.max_new_tokens, temperature=options.temperature)
    limits = _limits(options)
    listening = bind(options.host, options.port)
    indices = [_first(options, artifacts[0], configs[0])]
    indices += [_beside(indices[0], artifact) for artifact in artifacts[1:]]
    served = {
        (name := served_name(one.artifact.folder)): Served(name, one, config, options.budget)
        for one, config in zip(indices, configs, strict=True)
    }
    note_small_budgets([config.budget for config in configs], quiet=options.quiet)
    opened = {name: one.opened for name, one in served.items()}
    scheduler = Scheduler(opened, slots=options.slots, queue=options.max_queue)
    api = Api(scheduler, Catalog(served), sampling, limits)
    ready = partial(_tell, options, served, f"{address_of(listening, options.host)}/v1")
    server = Server(api, options.drain, ready, quiet=options.quiet)
    server.run([listening])
    if server.interrupted:
        signal.raise_signal(signal.SIGINT)


def _config(options: ServeOptions, artifact: Artifact) -> DecodeConfig:
    """Return the config of requests that name none."""
    return choose_config(
        artifact, options.method, budget=options.budget, prefill=options.prefill, placement=options.placement
    )


def _limits(options: ServeOptions) -> Limits:
    keys = [] if options.api_key_file is None else read_keys(options.api_key_file)
    local = options.host in LOOPBACK
    if not local and not keys:
        told = f"whoever reaches {options.host} can ask, because --api-key-file names no keys"
        note(told, quiet=options.quiet)
    return Limits(keys, LOOPBACK if local else (), options.cors or [], options.timeout, options.max_body)


def _first(options: ServeOptions, artifact: Artifact, config: DecodeConfig) -> OpenIndex:
    """Open the first index, whose model answers for all."""
    named, hold = (options.model, options.device, options.dtype), config.placement == "device"
    return load_for(artifact, *named, quiet=options.quiet, weights=options.weights, hold=hold)


def _beside(first: OpenIndex, artifact: Artifact) -> OpenIndex:
    """Open a further index with the same model. Raises IdentityError if another model built it."""
    loaded = first.loaded
    its = identify(loaded, artifact.manifest)
    try:
        return open_index(artifact, loaded.model, loaded.tokenizer, its, files=loaded.tokenizer_files)
    except IdentityError as error:
        error.add_note(f"{first.artifact.folder} and {artifact.folder} would be served by one model")
        raise


def _tell(options: ServeOptions, served: dict[str, Served], address: str) -> None:
    """Print what is served, and then the address."""
    for name, one in served.items():
        config = one.config
        told = f"{name}: {one.opened.split.tokens:,} tokens; {config.attention.name}, budget {config.budget}"
        note(told, quiet=options.quiet)
    say(address)
    flush_streams()
