"""Building an index: prefill and capture, each method layer by layer, calibration, and the manifest last.

Every file has a recipe, the hash of what decides its content: a file of an interrupted build, or of an earlier
index in the same folder, is taken over when its recipe is the same and made anew when it is not.
"""

import json
import platform
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

from sparsekv.formats.checksums import chained_block_hashes, common_prefix_tokens, hash_json, hash_tokens
from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.formats.schema import (
    TOKENS,
    LayerFacts,
    Manifest,
    MethodRecord,
    ModelIdentity,
    Prefill,
    Probe,
    Prompt,
    Split,
    TokenizerIdentity,
    layer_file,
)
from sparsekv.formats.writer import ArtifactWriter
from sparsekv.indexing.capture import Capture, capture
from sparsekv.indexing.identify import identify
from sparsekv.indexing.methods import BuiltLayer, Indexer, LayerInput
from sparsekv.indexing.models import LoadedModel
from sparsekv.indexing.prompt import FixedPrompt

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class BuildPlan:
    """Everything that decides what an index will hold."""

    loaded: LoadedModel
    prompt: FixedPrompt
    methods: dict[str, Indexer]
    sinks: int = 10
    tail: int = 128
    chunk_size: int = 512
    rope_scaling: str | None = None
    force: bool = False


def build_index(plan: BuildPlan, folder: Path, progress: Progress = lambda stage, done, of: None) -> Manifest:
    """Build, resume or update the index in `folder`.

    Memory: the model and its cache of N rows during the prefill, then one layer at a time.

    Args:
        progress: called with a stage's name, how much of it is done, and how much there is.

    Raises:
        UsageError: the document does not fit the split or the model's positions.
        ArtifactError: the folder cannot be written, is locked, or holds something damaged.
    """
    split = _split(plan)
    with ArtifactWriter(folder, force=plan.force) as writer:
        return _Build(plan, split, writer, progress).run()


def _split(plan: BuildPlan) -> Split:
    tokens = len(plan.prompt.input_ids)
    positions = getattr(plan.loaded.model.config.get_text_config(), "max_position_embeddings", None)
    if plan.sinks < 1 or plan.tail < 2:
        raise UsageError(f"--sinks {plan.sinks} --tail {plan.tail}: give at least 1 sink and 2 tail tokens")
    if tokens <= plan.sinks + plan.tail:
        raise UsageError(
            f"the document is too short to index: {tokens} tokens with the chat template, where sinks and tail "
            f"alone take {plan.sinks + plan.tail}; give a longer one or lower --sinks and --tail"
        )
    if positions is not None and tokens > positions:
        factor = -(-tokens // positions)
        raise UsageError(
            f"the document has {tokens} tokens and {plan.loaded.name} has {positions} positions; shorten it with "
            f"--max-tokens or stretch the model with --rope-scaling yarn:{factor}"
        )
    return Split(sinks=plan.sinks, middle=tokens - plan.sinks - plan.tail, tail=plan.tail)


@dataclass
class _Build:
    plan: BuildPlan
    split: Split
    writer: ArtifactWriter
    progress: Progress
    model: ModelIdentity = field(init=False)
    tokenizer: TokenizerIdentity = field(init=False)
    layers: int = field(init=False)

    def __post_init__(self) -> None:
        self.model, self.tokenizer = identify(self.plan.loaded)
        self.layers = self.plan.loaded.model.config.get_text_config().num_hidden_layers

    def run(self) -> Manifest:
        facts, probe = self._context()
        records = {name: self._method(name, indexer, facts) for name, indexer in self.plan.methods.items()}
        base = self.writer.base
        if base and base.methods == records and base.files == self.writer.files:
            self.writer.leave_as_it_was()
            return base
        return self.writer.finish(self._manifest(facts, probe, records))

    # --- the context ---------------------------------------------------------------------------------------------

    def _context_recipe(self) -> str:
        model = self.model
        return hash_json(
            {
                "model": [model.config_hash, model.weights_hash, model.adapter, model.quantisation],
                "ids": hash_tokens(self.plan.prompt.input_ids.tolist()),
                "split": self.split.model_dump(),
                "dtype": str(self.plan.loaded.model.dtype),
                "prefill": "dense",
            }
        )

    def _context(self) -> tuple[list[LayerFacts], Probe]:
        """Facts of the layers and the probe; runs the model only when a file of the context is missing."""
        recipe = self._context_recipe()
        names = [layer_file(folder, layer) for layer in range(self.layers) for folder in ("context", "queries")]
        whole = all([self.writer.reuse(name, recipe) for name in [TOKENS, *names]])  # noqa: C419 (no short circuit)
        if whole and (known := self._known_facts(recipe)):
            return known
        self.writer.need_space(self._context_bytes())
        captured = self._capture(recipe)
        facts = [captured.facts(layer) for layer in range(self.layers)]
        if all(layer.sliding_window is not None for layer in facts):
            raise SparsekvError(f"every layer of {self.plan.loaded.name} has a sliding window: nothing to index")
        self.writer.write(TOKENS, {"input_ids": self.plan.prompt.input_ids}, recipe)
        note = {"layers": [layer.model_dump() for layer in facts], "probe": captured.probe.model_dump()}
        self.writer.note(recipe, note)
        for layer in range(self.layers):
            self._write_context(captured, layer, recipe)
        return facts, captured.probe

    def _known_facts(self, recipe: str) -> tuple[list[LayerFacts], Probe] | None:
        if note := self.writer.notes.get(recipe):
            return [LayerFacts(**layer) for layer in note["layers"]], Probe(**note["probe"])
        base = self.writer.base
        if base and base.files[TOKENS].recipe == recipe:
            return base.layers, base.probe
        return None

    def _capture(self, recipe: str) -> Capture:
        input_ids = self.plan.prompt.input_ids
        shared = self._shared_prefix()
        return capture(
            self.plan.loaded.model,
            input_ids,
            tail=self.split.tail,
            chunk_size=self.plan.chunk_size,
            prefix_tokens=shared,
            prefix=self._base_rows,
            progress=lambda done: self.progress("prefill", done, len(input_ids)),
        )

    def _shared_prefix(self) -> int:
        """Leading tokens that the index already in the folder has captured with this very model."""
        base = self.writer.base
        if base is None or self.plan.force:
            return 0
        same = (base.model.config_hash, base.model.weights_hash, base.model.adapter, base.model.quantisation) == (
            self.model.config_hash,
            self.model.weights_hash,
            self.model.adapter,
            self.model.quantisation,
        )
        if not same or base.dtype != str(self.plan.loaded.model.dtype).removeprefix("torch."):
            return 0
        shared = common_prefix_tokens(
            base.prompt.block_hashes, chained_block_hashes(self.plan.prompt.input_ids.tolist())
        )
        return min(shared, self.split.sinks + self.split.middle)

    def _base_rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = self.writer.read_base(layer_file("context", layer))
        return tensors["keys"], tensors["values"]

    def _write_context(self, captured: Capture, layer: int, recipe: str) -> None:
        rows = captured.take(layer)
        queries = {"tail": rows.tail}
        if rows.sink_logits is not None:
            queries["sink_logits"] = rows.sink_logits
        for folder, tensors in (("context", {"keys": rows.keys, "values": rows.values}), ("queries", queries)):
            name = layer_file(folder, layer)
            if not self.writer.reuse(name, recipe):
                self.writer.write(name, tensors, recipe)
        self.progress("write context", layer + 1, self.layers)

    def _context_bytes(self) -> int:
        config = self.plan.loaded.model.config.get_text_config()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        row = 2 * config.num_key_value_heads * head_dim * self.plan.loaded.model.dtype.itemsize
        return int(1.1 * row * self.split.tokens * self.layers)

    # --- the methods ---------------------------------------------------------------------------------------------

    def _method(self, name: str, indexer: Indexer, facts: list[LayerFacts]) -> MethodRecord:
        parameters = json.loads(json.dumps(asdict(indexer)))
        context = {
            layer_file("context", i): self.writer.files[layer_file("context", i)].sha256 for i in range(self.layers)
        }
        indexed = [layer for layer, fact in enumerate(facts) if fact.sliding_window is None]
        recipe = hash_json([name, indexer.revision, parameters, context])
        fresh = False
        for done, layer in enumerate(indexed, 1):
            if not self.writer.reuse(layer_file(name, layer), recipe):
                tensors = indexer.build_layer(self._layer_input(layer, facts[layer]))
                self.writer.write(layer_file(name, layer), tensors, recipe)
                fresh = True
            self.progress(f"index {name}", done, len(indexed))
        base = self.writer.base.methods.get(name) if self.writer.base else None
        return MethodRecord(
            revision=indexer.revision,
            parameters=parameters,
            seed=indexer.seed,
            calibration=base.calibration
            if base and not fresh and base.built_from == context and base.parameters == parameters
            else indexer.calibrate(lambda: self._built_layers(name, indexed, facts)),
            built_from=context,
        )

    def _layer_input(self, layer: int, facts: LayerFacts) -> LayerInput:
        tensors = self._read(layer_file("context", layer))
        middle = slice(self.split.sinks, self.split.sinks + self.split.middle)
        return LayerInput(tensors["keys"][:, middle], tensors["values"][:, middle], facts, self.split)

    def _built_layers(self, name: str, layers: list[int], facts: list[LayerFacts]) -> Iterator[BuiltLayer]:
        for layer in layers:
            queries = self._read(layer_file("queries", layer))
            yield BuiltLayer(self._read(layer_file(name, layer)), queries["tail"], facts[layer])

    def _read(self, name: str) -> dict[str, torch.Tensor]:
        device = self.plan.loaded.model.device
        return {key: tensor.to(device) for key, tensor in self.writer.read(name).items()}

    # --- the manifest --------------------------------------------------------------------------------------------

    def _manifest(self, facts: list[LayerFacts], probe: Probe, methods: dict[str, MethodRecord]) -> Manifest:
        prompt, loaded = self.plan.prompt, self.plan.loaded
        ids = prompt.input_ids.tolist()
        return Manifest(
            writer_version=version("sparsekv"),
            uuid=str(uuid.uuid4()),
            parent_uuid=self.writer.base.uuid if self.writer.base else None,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            model=self.model,
            tokenizer=self.tokenizer,
            prompt=Prompt(
                text_sha256=prompt.text_sha256,
                ids_sha256=hash_tokens(ids),
                block_hashes=chained_block_hashes(ids),
                tokens=len(ids),
                chat=prompt.chat,
            ),
            split=self.split,
            dtype=str(loaded.model.dtype).removeprefix("torch."),
            rope=_rope(loaded, self.plan.rope_scaling),
            layers=facts,
            prefill=Prefill(kind="dense", chunk_size=self.plan.chunk_size),
            versions={
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            methods=methods,
            probe=probe,
            files={},
        )


def _rope(loaded: LoadedModel, scaling: str | None) -> dict[str, Any]:
    config = loaded.model.config.get_text_config()
    return {
        "scaling": scaling,
        "parameters": getattr(config, "rope_parameters", None),
        "max_position_embeddings": getattr(config, "max_position_embeddings", None),
    }
