"""Run the first stage of a build: capture every layer's keys, values and queries, and compute probe and canary.

The probe is the model's top logits at the last prompt token. The canary is its top logits at a few earlier tokens.
"""

from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from sparsekv.formats.checksums import hash_json
from sparsekv.formats.errors import REBUILD, SparsekvError
from sparsekv.formats.index.context_rows import Pair, context_rows
from sparsekv.formats.index.context_rows import row_bytes as int8_row_bytes
from sparsekv.formats.index.kept_prefill import PrefillNote
from sparsekv.formats.index.manifest import difference
from sparsekv.formats.index.schema import TOKENS, CanaryToken, LayerFacts, Probe, layer_file, state_file
from sparsekv.indexing.capture.canary import (
    RUN,
    canary_positions,
    canary_runs,
    check_distances,
    check_int8_state,
    compare_canary,
    compare_state,
    judge_canary,
    logit_tolerance,
    preflight,
    rounding_dtype,
    row_distances,
    run_canary,
    run_over_rows,
)
from sparsekv.indexing.capture.canary import TOKENS as FIRST_TOKENS
from sparsekv.indexing.capture.capture import BegunPrefill, RowsDone, TakenOver, capture, is_finite, rows_as_stored
from sparsekv.indexing.capture.rotation import measure_rotations
from sparsekv.indexing.capture.team import Captured, MeasureRotations, RunCanary, RunPrompt, SharedRows, TryModel
from sparsekv.indexing.context_files import ContextFacts, ContextFiles
from sparsekv.indexing.plan import PREFILL, Build, EarlierIndex, tell_memory
from sparsekv.indexing.reuse import ReusePlan, prefix_queries, reused_rows, shared_tokens, write_sample
from sparsekv.kernels.common.given_rows import keys_of_one_token
from sparsekv.kernels.common.states import State


def early_rows(build: Build, missing: AbstractSet[str]) -> tuple[RowsDone, SharedRows | None]:
    """Return a callback that writes rows to the context's `missing` files while later chunks are prefilled.

    The second result is the team's `SharedRows` if each of several processes writes the rows of its own heads to the
    same files. Otherwise it is None. The callback writes nothing for int8 storage, whose scales depend on all tokens.
    It also writes nothing if the heads are split over several processes and one of them cannot open the files.

    Raises:
        ArtifactError: the files cannot be written.
    """
    files = {layer: layer_file("context", layer) for layer in build.plan.kinds.attending}
    names = [name for name in files.values() if name in missing]

    def rows_done(layer: int, keys: torch.Tensor, values: torch.Tensor, end: int) -> None:
        if (name := files[layer]) in missing:
            build.writer.write_rows(name, {"keys": keys, "values": values}, build.context_recipe, end, build.team.part)

    shared = build.team.shared_rows
    if build.plan.config.kv_dtype is None and shared is not None and _begun(build, shared, names):
        return rows_done, shared
    if build.plan.config.kv_dtype is None and build.team.has_all_heads:
        return rows_done, None
    return lambda layer, keys, values, end: None, None


def _begun(build: Build, shared: SharedRows, names: list[str]) -> bool:
    """Create files that all processes of the team open. Return whether all could; if not, the files are removed."""
    files = {name: build.writer.share_rows(name, build.context_recipe) for name in names}
    begun = shared.share(build.writer.folder, files)
    if not begun:
        build.writer.unshare_rows()
    return begun


def build_context(build: Build, reuse: ReusePlan) -> ContextFacts:
    """Write the files of the context (keys, values, queries, states) that are not reused; return the context's facts.

    The prefill runs unless the whole context is reused (`ReusePlan.is_complete`).

    Raises:
        SparsekvError: the model cannot be indexed; or keys, values, queries or logits are not finite; or the model's
            own attention over the stored rows differs from sparsekv's.
        IdentityError: over the reused rows of the earlier index, the model's logits differ from the index's canary.
        UsageError: a method cannot be built for a layer's RoPE.
        ArtifactError: files cannot be written, the disk lacks space, or a reused state does not fit the model.
    """
    if reuse.facts is not None and reuse.is_complete:
        return _checked(build, reuse.facts)
    return ContextStage(build, reuse).run()


def _checked(build: Build, facts: ContextFacts) -> ContextFacts:
    """Return the facts of a reused context, after a check that the build's model has computed its rows.

    The prompt's last tokens run over the stored rows. If their rows are the model's and their logits differ from the
    probe, as with another soft cap of logits, then canary and probe are computed again. They are also computed again if
    an earlier version of sparsekv wrote the facts without a canary. If several processes share the model, nothing is
    checked, because the other processes hold no rows of a reused context.

    Raises:
        SparsekvError: the model's own attention over the stored rows differs from sparsekv's.
        ArtifactError: the last tokens' rows differ beyond rounding, because another model computed them.
    """
    plan, storage = build.plan, facts.storage
    model, ids, kv_dtype = plan.loaded.model, plan.prompt.input_ids, plan.config.kv_dtype
    if not build.team.starts_after_prefix:
        return facts

    def rows(layer: int) -> Pair:
        stored = build.writer.read(layer_file("context", layer), model.device)
        return context_rows(stored, model.dtype).part(slice(None))

    # An index has the state before the last token. After a sparse prefill, only the last token has attended densely.
    last, keeps = len(ids) - 1, bool(plan.kinds.keeping)
    first = last if keeps or not plan.config.prefill.exact else max(0, len(ids) - RUN)
    states = {last: build.writer.read(state_file(last), model.device)} if keeps else {}
    logits, distances = run_over_rows(model, ids[first:], first, lambda layer, own: rows(layer), states.get(first, {}))
    over_exact = storage is not None and storage.exact_probe
    same = difference(facts.probe, logits[-1]) <= logit_tolerance(model, kv_dtype if over_exact else None)
    if not same or not (facts.canary or keeps or len(canary_positions(model, len(ids))) == 1):
        runs = run_canary(model, ids, rows, states, last if keeps else 0)
        canary, probe = judge_canary(runs, rounding_dtype(model), plan.loaded.name)
        storage = storage and storage.model_copy(update={"exact_probe": False})
        facts = replace(facts, canary=canary, probe=probe, storage=storage)
    check_distances(distances, model, kv_dtype)
    if not same:
        build.tell(
            f"{plan.loaded.name} gives other logits than at the build of {build.writer.folder}, over the same keys and "
            "values: the logits that are compared when the index is opened are stored again"
        )
    return facts


class ContextStage:
    """Prefills the tokens that are not reused, and writes the context's missing files."""

    def __init__(self, build: Build, reuse: ReusePlan):
        self.build, self.reuse, self.plan, self.writer = build, reuse, build.plan, build.writer
        self.model, self.input_ids = self.plan.loaded.model, self.plan.prompt.input_ids

    def run(self) -> ContextFacts:
        """Run the stage and return the context's facts. Raises the errors of `build_context`."""
        build, plan, reuse, writer = self.build, self.plan, self.reuse, self.writer
        kv_dtype, recipe = plan.config.kv_dtype, build.context_recipe
        build.team.begin(TryModel(self.input_ids))
        state = preflight(self.model, self.input_ids, plan.loaded.name)
        begun = self._begun()
        size = self._bytes_to_write(state)
        there = 0 if begun is None else sum(rows.nbytes for pair in begun.rows.values() for rows in pair)
        writer.need_space(size - there)
        tell_memory(build, len(reuse.positions), state)
        self._check_rotations()
        if build.earlier is not None and reuse.prefix_tokens:
            self._compare(build.earlier, reuse.prefix_tokens)
        self._check_last_rows(begun)
        build.progress(PREFILL, self._first(begun), len(self.input_ids))
        build.tell(self._announcement(begun, size))
        rows_done, shared = early_rows(build, reuse.missing)
        captured = self._capture(rows_done, begun)
        taken = reused_rows(build, reuse.prefix_tokens)
        # If only queries were missing, the facts that were measured over the reused rows are still valid.
        known = reuse.facts if not reuse.missing else None
        with writer.refusable():
            if what := captured.not_finite():
                raise SparsekvError(f"{what} are not finite in {plan.dtype}; {self._remedy()}")
            self._check_reused_layers(captured)
            facts = _checked(build, known) if known else self._measure(captured, taken)
        copies = not build.team.has_all_heads
        files = ContextFiles(writer, recipe, reuse.missing, kv_dtype, taken, shared, copies)
        if kv_dtype is None:
            writer.note(recipe, facts.note())
        if TOKENS in reuse.missing:
            writer.write(TOKENS, {"input_ids": self.input_ids}, recipe)
        for done, (layer, of_layer) in enumerate(facts.layers.items(), 1):
            queries = files.take(captured, layer, of_layer)
            if queries.sample is not None and len(reuse.positions):
                write_sample(writer, layer, queries.sample, reuse.positions, reuse.sample_recipe)
            build.progress("write context", done, len(facts.layers))
        if kv_dtype is not None and known is None:
            # The storage error is complete only now: it is measured as each layer's rows are quantised and written.
            storage = files.storage(build.ids_sha256, build.split.tokens, exact_probe=False)
            facts = replace(facts, storage=storage)
            writer.note(recipe, facts.note())
        return facts

    def _compare(self, earlier: EarlierIndex, tokens: int) -> None:
        """Check that the model fits the rows of the first `tokens` tokens that the earlier index stores.

        The model's logits over these rows are compared with the index's canary. If layers keep a state, the rows after
        the stored state are compared with those that the model computes. Raises the errors of `compare_canary` and
        `compare_state`.
        """
        compare_canary(earlier.manifest, tokens, self.model, self.input_ids, self._prefix_rows)
        if not self.plan.kinds.keeping:
            return
        shared = shared_tokens(earlier, self.input_ids)

        def rows(layer: int, own: Pair) -> Pair:
            return earlier.rows(layer, shared)

        ids, state = self.input_ids[tokens:shared], earlier.state(tokens)
        compare_state(earlier.manifest, tokens, self.model, ids, rows, state)

    def _check_last_rows(self, begun: BegunPrefill | None) -> None:
        """Check, by computing them again, that the last of the rows that this build continues are the model's own.

        The canary does not always show this: all its tokens may be after the reused rows, and an interrupted build has
        none. If layers keep a state, `_compare` has made the check. Raises ArtifactError if the rows differ beyond
        rounding.
        """
        tokens, model = self._first(begun), self.model
        if not tokens or self.plan.kinds.keeping:
            return

        def rows(layer: int, own: Pair) -> Pair:
            if begun is None:
                return self._prefix_rows(layer)
            keys, values = begun.rows[layer]
            return keys.to(model.device), values.to(model.device)

        first = max(0, tokens - RUN)
        logits, distances = run_over_rows(model, self.input_ids[first:tokens], first, rows, {})
        # After a sparse prefill, only the first layer's rows are those of dense attention. `capture` reports rows that
        # are not finite.
        compared = distances if self.plan.config.prefill.exact else distances[:2]
        if bool(logits.isfinite().all()):
            check_distances(compared, model, self.plan.config.kv_dtype)

    def _check_reused_layers(self, captured: Captured) -> None:
        """Check that the layers whose files are reused have the rows that this build has captured.

        Otherwise the index could have layers of two models. After a sparse prefill nothing is compared, because
        rounding may change its selections. Raises ArtifactError if the last tokens' rows differ beyond rounding.
        """
        names = {layer: layer_file("context", layer) for layer in self.plan.kinds.attending}
        reused = {layer: name for layer, name in names.items() if name not in self.reuse.missing}
        if not reused or not self.build.team.starts_after_prefix or not self.plan.config.prefill.exact:
            return
        apart = []
        for layer, name in reused.items():
            stored = context_rows(self.writer.read(name, self.model.device), self.model.dtype).part(slice(None))
            pairs = zip(captured.rows(layer), stored, strict=True)
            apart += [row_distances(own[:, -RUN:], rows[:, -RUN:]) for own, rows in pairs]
        check_distances(torch.stack(apart), self.model, self.plan.config.kv_dtype)

    def _check_rotations(self) -> None:
        """Raise UsageError if a method cannot be built for the RoPE of an indexed layer.

        RoPE is measured on the prompt's first tokens only. If RoPE depends on the length, a measurement at the last
        position would set the frequencies for that length before the prefill begins.
        """
        indexers = [indexer for indexer in self.plan.config.methods.values() if indexer.needs_rope]
        if not indexers:
            return
        first = self.input_ids[:FIRST_TOKENS]
        self.build.team.begin(MeasureRotations(first))
        rotations = measure_rotations(self.model, first)
        kinds = getattr(self.model.config.get_text_config(), "layer_types", None)
        for layer, rope in rotations.items():
            for indexer in indexers if kinds is None or kinds[layer] != "sliding_attention" else ():
                indexer.check_rope(rope)

    @property
    def _kept_recipe(self) -> str | None:
        """Hash of all inputs that determine the rows and queries of the prefill's chunks, for resuming the prefill.

        The hash is None if an interrupted prefill must begin anew. It begins anew if keys and values are stored in
        int8, whose scales depend on all tokens; if layers keep a state; or if several processes share the model.
        """
        build = self.build
        in_8_bits, keeping = self.plan.config.kv_dtype is not None, bool(self.plan.kinds.keeping)
        if in_8_bits or keeping or not build.team.starts_after_prefix:
            return None
        return hash_json(["prefill", self.reuse.sample_recipe, self.reuse.prefix_tokens])

    def _begun(self) -> BegunPrefill | None:
        """Return the chunks that an interrupted build has prefilled, or None.

        Chunks of another prompt or of other settings, and damaged chunks, are removed. From now on, the writer stores
        this build's chunks if `_kept_recipe` is not None.
        """
        writer, note, recipe, begun = self.writer, self.writer.kept_note, self._kept_recipe, None
        if note is not None and note.recipe == recipe and note.ends[-1] < len(self.input_ids):
            begun = self._taken(note)
            if begun is None:
                self.build.tell(
                    f"the {note.ends[-1]:,} tokens that an interrupted build has prefilled are damaged: they are "
                    "prefilled again"
                )
        elif note is not None:
            writer.forget_prefill()
            self.build.tell(
                f"an interrupted build has prefilled {note.ends[-1]:,} tokens of another text or with other settings: "
                "they are removed"
            )
        if recipe is not None:
            writer.keep_prefill(recipe)
        return begun

    def _taken(self, note: PrefillNote) -> BegunPrefill | None:
        build, device = self.build, self.model.device
        files = {layer: layer_file("context", layer) for layer in self.plan.kinds.attending}
        # A layer may attend to rows of other sizes than its model's config has, such as for latent attention.
        keys = keys_of_one_token(self.model, self.input_ids[:1], 0)
        shapes = {layer: rows[:, None].expand(-1, len(self.input_ids), -1).to("meta") for layer, rows in keys.items()}
        missing = {layer: name for layer, name in files.items() if name in self.reuse.missing}
        tensors = {name: {"keys": shapes[layer], "values": shapes[layer]} for layer, name in missing.items()}
        kept = self.writer.take_kept(note, tensors, build.context_recipe, device)
        if kept is None:
            return None

        def rows(name: str) -> Pair:
            # The file of such a layer was complete when the build was interrupted.
            stored = self.writer.read(name, device)
            return stored["keys"][:, : kept.tokens], stored["values"][:, : kept.tokens]

        of_layers = {layer: kept.rows[name] if name in kept.rows else rows(name) for layer, name in files.items()}
        queries = [{name: one.to(device) for name, one in chunk.items()} for chunk in kept.queries]
        return BegunPrefill(kept.tokens, of_layers, queries)

    def _first(self, begun: BegunPrefill | None) -> int:
        """Return the number of leading tokens that this build does not prefill."""
        return self.reuse.prefix_tokens if begun is None else begun.tokens

    def _announcement(self, begun: BegunPrefill | None, size: int) -> str:
        """Return a line for the user with the numbers of tokens to prefill and of megabytes to write.

        Args:
            size: bytes to write.
        """
        tokens = len(self.input_ids)
        told = f"{tokens - self._first(begun):,} of {tokens:,} tokens to prefill, about {size / 1e6:,.0f} MB to write"
        if begun is not None:
            return f"{told}; the first {begun.tokens:,} are those that an interrupted build has prefilled"
        return told if self._kept_recipe else f"{told}; an interrupted prefill begins anew"

    def _capture(self, rows_done: RowsDone, begun: BegunPrefill | None) -> Captured:
        build, reuse = self.build, self.reuse
        options: dict[str, Any] = {
            "tail": build.split.tail,
            "positions": reuse.positions,
            "chunk_size": self.plan.chunk_size,
            "prefill": self.plan.config.prefill,
            "sinks": build.split.sinks,
        }
        known = reuse.positions[reuse.positions < reuse.prefix_tokens]
        queries = None
        if len(known) and build.earlier is not None and begun is None:
            queries = prefix_queries(self.plan, build.earlier, known, self._prefix_rows)
        prefix_state = None
        if build.plan.kinds.keeping:
            if build.earlier is not None and reuse.prefix_tokens:
                prefix_state = build.earlier.state(reuse.prefix_tokens)
            before = (first for first, _ in canary_runs(self.model, len(self.input_ids), reuse.prefix_tokens))
            end = set() if build.plan.config.kv_dtype is None else {len(self.input_ids)}  # for `check_int8_state`
            options["marks"] = {*before, *end}
            options["stored"] = {tokens for tokens in build.marks if state_file(tokens) in reuse.missing}
        build.team.begin(RunPrompt(self.input_ids, options))
        own = capture(
            self.model,
            self.input_ids,
            **options,
            prefix_tokens=reuse.prefix_tokens,
            prefix_state=prefix_state,
            state_done=self._write_state,
            prefix=self._prefix_rows,
            prefix_queries=queries,
            rows_done=rows_done,
            begun=begun,
            chunk_done=self.writer.chunk_done,
            progress=lambda done: build.progress(PREFILL, done, len(self.input_ids)),
        )
        return build.team.whole(own)

    def _write_state(self, tokens: int, state: State) -> None:
        """Write the states after the first `tokens` tokens in a thread, while later tokens are prefilled.

        Therefore only a few states are in memory at a time. Raises SparsekvError if a state is not finite.
        """
        if not all(is_finite(tensor) for tensor in state.values()):
            raise SparsekvError(f"states after {tokens:,} tokens are not finite in {self.plan.dtype}; {self._remedy()}")
        self.writer.write(state_file(tokens), state, self.build.state_recipe(tokens))

    def _prefix_rows(self, layer: int) -> Pair:
        assert self.build.earlier is not None
        return self.build.earlier.rows(layer, self.reuse.prefix_tokens)

    def _measure(self, captured: Captured, taken: TakenOver | None) -> ContextFacts:
        canary, probe = self._canary(captured, taken)
        # Measured after the prefill, when length-dependent RoPE frequencies are those of the whole prompt.
        self.build.team.begin(MeasureRotations(self.input_ids))
        rotations = measure_rotations(self.model, self.input_ids)
        layers: dict[int, LayerFacts] = {
            layer: captured.facts(layer).model_copy(update={"rope": rope}) for layer, rope in rotations.items()
        }
        return ContextFacts(layers, probe, canary=canary)

    def _canary(self, captured: Captured, taken: TakenOver | None) -> tuple[list[CanaryToken], Probe]:
        """Compute the canary and the probe by the model's own attention over the rows as the index stores them.

        Raises:
            SparsekvError: sparsekv's attention over these rows gives other logits, logits are not finite, or int8 rows
            change the state at the prompt's end too much.
        """
        kv_dtype = self.plan.config.kv_dtype
        self.build.team.begin(RunCanary(self.input_ids, kv_dtype))
        rows = partial(rows_as_stored, captured.rows, kv_dtype=kv_dtype, taken=taken)
        runs = run_canary(self.model, self.input_ids, rows, captured.states, self.reuse.prefix_tokens)
        judged = judge_canary(runs, rounding_dtype(self.model), self.plan.loaded.name)
        if kv_dtype is not None and (state := captured.states.get(len(self.input_ids))):
            check_int8_state(runs[-1], state, self.model, self.plan.loaded.name)
        return judged

    def _remedy(self) -> str:
        earlier, prefix, dtype = self.build.earlier, self.reuse.prefix_tokens, self.plan.dtype
        if prefix and earlier is not None and not earlier.is_finite(prefix):
            return f"they were taken from {self.writer.folder}, whose rows are not finite either; {REBUILD}"
        if dtype == "float32":
            return "the model's weights may be damaged: use another checkpoint"
        return "use --dtype bfloat16 or float32" if dtype == "float16" else "use --dtype float32"

    def _bytes_to_write(self, state: int) -> int:
        """Estimate the disk space in bytes that the build needs.

        The estimate is the sum of the missing layers' keys and values, the missing states of `state` bytes each, and
        the sampled queries. For methods, it adds a tenth of the exact keys and values of all layers, and the files of
        methods with `bytes_per_token`.
        """
        split, config = self.build.split, self.model.config.get_text_config()
        layers = self.plan.kinds.attending
        missing = sum(layer_file("context", layer) in self.reuse.missing for layer in layers)
        head_dim = self.plan.head_dim
        row = head_dim * self.model.dtype.itemsize
        stored = row if self.plan.config.kv_dtype is None else int8_row_bytes(head_dim)
        rows = config.num_key_value_heads * split.tokens
        samples = row * config.num_attention_heads * len(self.reuse.positions)
        tables = sum(indexer.bytes_per_token(head_dim) for indexer in self.plan.config.methods.values())
        methods = tables * config.num_key_value_heads * split.middle
        states = state * sum(state_file(tokens) in self.reuse.missing for tokens in self.build.marks)
        return int(2 * stored * rows * missing + states + (0.2 * row * rows + samples + methods) * len(layers))
