"""The sample of positions whose queries are stored, for methods that build from queries, and its reuse between builds.

A token's priority is a pseudo-random number that depends on its position alone; the sample is the tokens of lowest
priority. So chunk sizes do not change it, and when a document grows, the new sample is part of the old one plus new
tokens.
"""

from collections.abc import Callable

import numpy as np
import torch

from sparsekv.formats.checksums import hash_json
from sparsekv.formats.context_rows import Pair
from sparsekv.formats.schema import Manifest, Split, layer_file
from sparsekv.formats.writer import ArtifactWriter
from sparsekv.indexing.capture.capture import PrefixQueries
from sparsekv.indexing.capture.single_tokens import queries_of_tokens
from sparsekv.indexing.plan import BuildJob, BuildPlan

SEED = 0


def sample_positions(split: Split, count: int) -> torch.Tensor:
    """Positions [P] int64, rising, of the `count` middle tokens of lowest priority, or of all if there are fewer."""
    end = split.sinks + split.middle
    # The raw stream of a bit generator is the same in every version of numpy, and a longer one has the same beginning.
    priorities = np.random.Philox(SEED).random_raw(end)[split.sinks :]
    lowest = np.sort(np.argsort(priorities, kind="stable")[:count]) + split.sinks
    return torch.from_numpy(lowest)


def sample_size(plan: BuildPlan) -> int:
    """How many positions the plan's methods need queries of; a position gives the G queries of a group."""
    rows = max((indexer.queries_wanted() for indexer in plan.methods.values()), default=0)
    config = plan.loaded.model.config.get_text_config()
    group = config.num_attention_heads // config.num_key_value_heads
    return min(-(-rows // int(group)), plan.split().middle)


def wanted_positions(job: BuildJob) -> torch.Tensor:
    """Positions [P] whose queries the plan's methods need; may be empty."""
    return sample_positions(job.split, sample_size(job.plan))


def sample_recipe(context_recipe: str, positions: torch.Tensor) -> str:
    """The recipe of a layer's file of samples."""
    return hash_json([context_recipe, "samples", positions.tolist()])


def reuse_samples(job: BuildJob, layers: list[int], positions: torch.Tensor, recipe: str) -> bool:
    """Reuse the sample files of some layers; returns whether all that are needed were there."""
    names = [layer_file("samples", layer) for layer in layers] if len(positions) else []
    found = [job.writer.reuse(name, recipe) for name in names]
    return all(found)


def write_sample(
    writer: ArtifactWriter, layer: int, queries: torch.Tensor, positions: torch.Tensor, recipe: str
) -> None:
    """Write the queries [Hq, P, D] of one layer at positions [P], unless the file can be reused."""
    name = layer_file("samples", layer)
    if not writer.reuse(name, recipe):
        writer.write(name, {"queries": queries, "positions": positions.int()}, recipe, wait=False)


def first_unknown(job: BuildJob, positions: torch.Tensor) -> int | None:
    """The first of some positions [P] whose query the finished index of the folder lacks; None if it has all."""
    unknown = positions[~torch.isin(positions, _known_positions(job))]
    return int(unknown[0]) if len(unknown) else None


def prefix_queries(job: BuildJob, positions: torch.Tensor, rows: Callable[[int], Pair]) -> PrefixQueries:
    """What returns a layer's queries [Hq, P, D] at positions [P] of a prefix, rising: those that the finished index of
    the folder has, and those of the other tokens, which run through the model by themselves.

    Args:
        rows: returns keys and values [Hk, T, D] of a layer of that index, of the tokens of the prefix.
    """
    known = _known_positions(job)
    there = torch.isin(positions, known)
    stored, others, made = torch.searchsorted(known, positions[there]), positions[~there], dict[int, torch.Tensor]()
    if len(others):
        plan = job.plan
        made = queries_of_tokens(plan.loaded.model, plan.prompt.input_ids, others, rows, plan.chunk_size)

    def queries(layer: int, at: torch.Tensor) -> torch.Tensor:
        assert torch.equal(at, positions)
        # Each layer's are asked for once.
        own, known = made.pop(layer, None), _known_queries(job, layer)[:, stored] if len(stored) else None
        if own is None or known is None:
            found = known if own is None else own
            assert found is not None
            return found
        found = own.new_empty(len(own), len(positions), own.shape[2])
        found[:, there], found[:, ~there] = known, own
        return found

    return queries


def _known_queries(job: BuildJob, layer: int) -> torch.Tensor:
    """All queries [Hq, P, D] of a layer that the finished index has."""
    folders = {"samples": "queries", "queries": "tail"}
    return torch.cat([job.read_base(layer_file(one, layer))[folders[one]] for one in _folders(job)], 1)


def _base(job: BuildJob) -> Manifest:
    assert job.writer.base is not None
    return job.writer.base


def _folders(job: BuildJob) -> list[str]:
    base = _base(job)
    sampled = layer_file("samples", base.indexed_layers[0]) in base.files
    return ["samples", "queries"] if sampled else ["queries"]


def _is_whole(job: BuildJob) -> bool:
    base = _base(job)
    files = [base.files[layer_file(folder, layer)] for folder in _folders(job) for layer in base.indexed_layers]
    return all(job.writer.is_whole(record) for record in files)


def _known_positions(job: BuildJob) -> torch.Tensor:
    """Positions [P], rising, whose queries the finished index has: its sample's, in the middle, then its tail's.

    They are none at all where a file of queries is damaged.
    """
    base = _base(job)
    if not _is_whole(job):
        return torch.zeros(0, dtype=torch.int64)
    tail = torch.arange(base.split.sinks + base.split.middle, base.split.tokens)
    if "samples" not in _folders(job):
        return tail
    sampled = job.writer.read_base(layer_file("samples", base.indexed_layers[0]))["positions"]
    return torch.cat([sampled.long(), tail])
