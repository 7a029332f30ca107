"""Decide, before the model runs, which rows and files a build reuses of the earlier index in the build's folder.

Methods that build from the document's queries have a sample of positions whose queries are stored. A token's priority
is a pseudo-random number that depends only on the token's position. The sample consists of the tokens with the lowest
priorities. Therefore it does not depend on the chunk size. When a document grows, the sample of the longer document
consists of tokens of the earlier sample and of tokens that were not in the earlier middle.

A file is reused if its recipe, the hash of all inputs that determine its content, is the same, and its checksum is
right. If a file of the context cannot be reused, both prompts may still begin with the same tokens. Then the rows of
these tokens are reused under the conditions of `shared_prefix`. All other tokens are prefilled. With `force`, no file
and no row is reused.
"""

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
import torch

from sparsekv.formats.checksums import chained_block_hashes, common_prefix_tokens, hash_json
from sparsekv.formats.index.context_rows import Pair
from sparsekv.formats.index.layout import in_this_form
from sparsekv.formats.index.schema import TOKENS, Manifest, Split, layer_file, state_file, state_tokens
from sparsekv.formats.index.writer import ArtifactWriter
from sparsekv.formats.models.rope import rope_depends_on_length
from sparsekv.indexing.capture.capture import PrefixQueries, TakenOver
from sparsekv.indexing.capture.rotation import queries_of_tokens
from sparsekv.indexing.context_files import ContextFacts, facts_from_note, row_settings
from sparsekv.indexing.plan import Build, BuildPlan, EarlierIndex

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


LEAST_SHARE = 0.5
"""Minimum share of a document's tokens that int8 channel scales must have been measured on. If scales are measured on
the first quarter, the storage error is 1.5 times that of scales measured on all tokens; on the first sixteenth, twice
(docs/reference/eight-bits.md)."""


@dataclass(frozen=True)
class ReusePlan:
    """The parts of a context that a build reuses.

    Args:
        missing: names of the context's files to write; the others are reused.
        facts: facts of layers, probe and canary that an earlier build noted; None if there are none.
        positions: [P] int64, ascending, the sample whose queries the methods need.
        sample_recipe: the recipe of the sample's files.
        has_samples: the sample's files are reused.
        prefix_tokens: number of leading tokens that are not prefilled, because the earlier index has their rows.
    """

    missing: AbstractSet[str]
    facts: ContextFacts | None
    positions: torch.Tensor
    sample_recipe: str
    has_samples: bool
    prefix_tokens: int

    @property
    def is_complete(self) -> bool:
        """Whether the whole context is reused, so that no prefill is needed."""
        return self.facts is not None and not self.missing and self.has_samples


def plan_reuse(build: Build) -> ReusePlan:
    """Decide what a build reuses, and record the reused files in the build's journal."""
    recipe, layers = build.context_recipe, build.plan.kinds.attending
    recipes = dict.fromkeys(
        [TOKENS, *(layer_file(of, layer) for layer in layers for of in ("context", "queries"))], recipe
    )
    recipes |= {state_file(tokens): build.state_recipe(tokens) for tokens in build.marks}
    missing = {name for name, recipe in recipes.items() if not build.writer.reuse(name, recipe)}
    reused = [name for name in recipes if name not in missing and state_tokens(name) is None]
    # After an interrupted build with --force, files of that build and of the finished index may have the same recipe.
    sources = {build.writer.is_of_base(name) for name in reused}
    facts = _known_facts(build, sources)
    positions = sample_positions(build.split, sample_size(build.plan))
    sampled = sample_recipe(recipe, positions)
    has_samples = facts is not None and not missing and _reuse_samples(build, facts, positions, sampled)
    earlier = build.earlier
    # If only queries are missing, they are computed from the rows of this prompt in the earlier index.
    needed = not has_samples or (earlier is not None and earlier.manifest.prompt.ids_sha256 != build.ids_sha256)
    prefix = shared_prefix(build, positions, missing) if needed else 0
    if build.plan.config.kv_dtype is not None and (missing or facts is None or len(sources) > 1):
        # The channel scales of reused files may be those of an earlier prompt, and rows that are computed after reused
        # int8 rows differ a little from those of the earlier build. So this build writes all rows and states after the
        # prefix, and its probe is computed over rows of one build.
        missing = {name for name in recipes if (tokens := state_tokens(name)) is None or tokens > prefix}
    return ReusePlan(missing, facts, positions, sampled, has_samples, prefix)


def reused_rows(build: Build, prefix_tokens: int) -> TakenOver | None:
    """Return the earlier index's int8 rows of the first `prefix_tokens` tokens; None if no int8 rows are reused."""
    earlier = build.earlier
    if not prefix_tokens or earlier is None or earlier.manifest.kv_storage is None:
        return None
    return TakenOver(
        prefix_tokens, lambda layer: earlier.read(layer_file("context", layer)), earlier.manifest.kv_storage
    )


def shared_prefix(build: Build, positions: torch.Tensor, missing: AbstractSet[str]) -> int:
    """Return the number of leading tokens whose rows are taken from the index in the folder instead of a prefill.

    The result is 0 with `force`, if several processes share the model, if the index is damaged or does not fit
    (`_fits`), or if its int8 scales were measured on too few tokens (LEAST_SHARE). If layers keep a state, the prefix
    ends at a number of tokens after which the index stores the state.

    Args:
        positions: [P], ascending, positions of the query sample. A query that the index lacks is usually computed from
            the rows before its position. This is not possible after a sparse prefill, if the model scales queries by
            the cache's length, or if layers keep a state. Then the prefix ends before the first position whose query
            the index lacks.
        missing: names of the files to write, files of states included.
    """
    earlier, plan = build.earlier, build.plan
    if earlier is None or plan.config.force or not build.team.starts_after_prefix or not _fits(build, earlier.manifest):
        return 0
    base = earlier.manifest
    if base.kv_storage is not None and base.kv_storage.measured_tokens < len(plan.prompt.input_ids) * LEAST_SHARE:
        return 0
    if not earlier.are_whole(layer_file("context", layer) for layer in base.attending):
        return 0
    if plan.kinds.keeping:
        return _last_shared_state(build, earlier, positions, missing)
    chain = chained_block_hashes(plan.prompt.input_ids.tolist())
    # Queries are stored for the old tail, which the edit may have moved, so the new tail is prefilled again.
    shared = min(common_prefix_tokens(base.prompt.block_hashes, chain), build.split.sinks + build.split.middle)
    exact = plan.config.prefill.exact
    # Llama 4 scales a query by the number of tokens in the cache, so no token may run without all tokens before it.
    counts = getattr(plan.loaded.model.config.get_text_config(), "attn_temperature_tuning", False)
    if shared and (counts or not exact):
        unknown = positions[~torch.isin(positions, earlier.query_positions())]
        shared = min(shared, int(unknown[0])) if len(unknown) else shared
    if exact:
        return shared
    # Rows of a sparse prefill depend on the chunk boundaries, so the prefix ends after a chunk that is complete in both
    # prompts. The index's last token is in no chunk, because it ran alone with dense attention.
    return min(shared, base.split.tokens - 1) // plan.chunk_size * plan.chunk_size


def shared_tokens(earlier: EarlierIndex, input_ids: torch.Tensor) -> int:
    """Return the number of first tokens that an index and a prompt [N] have in common.

    The result is 0 if the file of the index's tokens is damaged.
    """
    if not earlier.are_whole([TOKENS]):
        return 0
    stored = earlier.read(TOKENS)["input_ids"].cpu()
    length = min(len(stored), len(input_ids))
    differing = (stored[:length] != input_ids[:length]).nonzero()
    return int(differing[0]) if len(differing) else length


def _last_shared_state(build: Build, earlier: EarlierIndex, positions: torch.Tensor, missing: AbstractSet[str]) -> int:
    """Return the largest number of common first tokens of both prompts after which the index stores the state, or 0.

    All later tokens are prefilled. These include all tokens whose queries or states the index lacks, and at least one
    token of both prompts, by which `compare_state` checks the stored state.
    """
    most = [build.split.sinks + build.split.middle]
    most += positions[~torch.isin(positions, earlier.query_positions())][:1].tolist()
    most += [tokens for name in missing if (tokens := state_tokens(name)) is not None]
    most.append(shared_tokens(earlier, build.plan.prompt.input_ids) - 1)
    for tokens in reversed(earlier.manifest.states):
        name = state_file(tokens)
        same = tokens <= min(most) and earlier.manifest.files[name].recipe == build.state_recipe(tokens)
        if same and earlier.are_whole([name]):
            return tokens
    return 0


def _fits(build: Build, base: Manifest) -> bool:
    """Whether a build may keep the index's rows and add its own after them.

    Both must have the same settings, rows of an int8 index must satisfy `_continues_int8`, and RoPE must not depend on
    the length of the prompt.
    """
    plan = build.plan
    return (
        row_settings(base.model, base.split, base.dtype, base.prefill)
        == row_settings(build.model, build.split, plan.dtype, plan.prefill_record)
        and (base.kv_storage is None or _continues_int8(build, base))
        and not rope_depends_on_length(base.rope.parameters)
    )


def _continues_int8(build: Build, base: Manifest) -> bool:
    """Whether a build may keep the rows of an int8 index and add its own after them.

    The index must be in this version's int8 format. The build must store int8 itself, because otherwise rounded rows
    would be taken for unquantised rows. Its prefill must be dense, because a sparse prefill would select other tokens
    by rounded keys.
    """
    assert base.kv_storage is not None
    stored = base.kv_storage.dtype == build.plan.config.kv_dtype and in_this_form(base)
    return stored and build.plan.config.prefill.exact


def _known_facts(build: Build, sources: AbstractSet[bool]) -> ContextFacts | None:
    """Return the facts of an unfinished build or of the finished index; None if none fit the build's recipe.

    `sources` has True if files of the finished index are reused, and False if files of an unfinished build are reused.
    The facts of the finished index fit only its own files.
    """
    noted = facts_from_note(build.writer.notes.get(build.context_recipe))
    if noted and tuple(noted.layers) == build.plan.kinds.attending:
        return noted
    base = build.writer.base
    if base and base.files[TOKENS].recipe == build.context_recipe and False not in sources:
        return ContextFacts(base.attending, base.probe, base.kv_storage, base.canary)
    return None


def _reuse_samples(build: Build, facts: ContextFacts, positions: torch.Tensor, recipe: str) -> bool:
    """Reuse the sample files of indexed layers; return whether all needed files could be reused."""
    names = [layer_file("samples", layer) for layer in facts.indexed_layers] if len(positions) else []
    reused = [build.writer.reuse(name, recipe) for name in names]
    return all(reused)
