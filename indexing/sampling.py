"""Sample the positions whose queries are stored, for methods that build from the document's queries.

A token's priority is a pseudo-random number that depends only on the token's position. The sample consists of the
tokens with the lowest priorities. Therefore it does not depend on the chunk size. When a document grows, the sample of
the longer document consists of tokens of the earlier sample and of tokens that were not in the earlier middle.
"""

from collections.abc import Callable

import numpy as np
import torch

from sparsekv.formats.checksums import hash_json
from sparsekv.formats.index.context_rows import Pair
from sparsekv.formats.index.schema import Split, layer_file
from sparsekv.formats.index.writer import ArtifactWriter
from sparsekv.indexing.capture.capture import PrefixQueries
from sparsekv.indexing.capture.rotation import queries_of_tokens
from sparsekv.indexing.plan import BuildPlan, EarlierIndex

SEED = 0


def sample_positions(split: Split, count: int) -> torch.Tensor:
    """Return the positions [P] int64, ascending, of a sample of `count` tokens between sinks and tail.

    The sample has the tokens of lowest priority, a pseudo-random number that depends only on the position. If there are
    at most `count` tokens, all are returned.
    """
    end = split.sinks + split.middle
    # The raw stream of a bit generator is the same in every numpy version. A longer stream begins with a shorter one.
    priorities = np.random.Philox(SEED).random_raw(end)[split.sinks :]
    lowest = np.sort(np.argsort(priorities, kind="stable")[:count]) + split.sinks
    return torch.from_numpy(lowest)


def sample_size(plan: BuildPlan) -> int:
    """Return the number of positions in the query sample. A position has G queries for each KV head."""
    rows = max((indexer.queries_wanted() for indexer in plan.config.methods.values()), default=0)
    config = plan.loaded.model.config.get_text_config()
    group = config.num_attention_heads // config.num_key_value_heads
    return min(-(-rows // int(group)), plan.split().middle)


def sample_recipe(context_recipe: str, positions: torch.Tensor) -> str:
    return hash_json([context_recipe, "samples", positions.tolist()])


def write_sample(
    writer: ArtifactWriter, layer: int, queries: torch.Tensor, positions: torch.Tensor, recipe: str
) -> None:
    """Write the queries [Hq, P, D] of one layer at positions [P], unless the file can be reused."""
    name = layer_file("samples", layer)
    if not writer.reuse(name, recipe):
        writer.write(name, {"queries": queries, "positions": positions.int()}, recipe, wait=False)


def prefix_queries(
    plan: BuildPlan, earlier: EarlierIndex, positions: torch.Tensor, rows: Callable[[int], Pair]
) -> PrefixQueries:
    """Return a function that returns a layer's queries [Hq, P, D] at `positions`, which are in a prefix.

    The prefix is the prompt's first tokens, whose rows the earlier index stores. Queries that this index stores are
    read from it. The other queries are computed by running only their tokens through the model.

    Args:
        positions: [P] int64, ascending.
        rows: returns the earlier index's keys and values [Hk, T, D] of a layer, for the prefix's tokens.
    """
    known = earlier.query_positions()
    there = torch.isin(positions, known)
    stored, others, made = torch.searchsorted(known, positions[there]), positions[~there], dict[int, torch.Tensor]()
    if len(others):
        made = queries_of_tokens(plan.loaded.model, plan.prompt.input_ids, others, rows, plan.chunk_size)

    def queries(layer: int, at: torch.Tensor) -> torch.Tensor:
        assert torch.equal(at, positions)
        # Each layer's queries are requested only once.
        computed = made.pop(layer, None)
        reused = earlier.queries(layer)[:, stored] if len(stored) else None
        if computed is None or reused is None:
            complete = reused if computed is None else computed
            assert complete is not None
            return complete
        both = computed.new_empty(len(computed), len(positions), computed.shape[2])
        both[:, there], both[:, ~there] = reused, computed
        return both

    return queries
