"""A KV connector for vLLM: requests that begin with an index's prompt get the prompt's keys and values from the index.

vLLM makes one connector for its scheduler and one for each worker. The scheduler's connector matches prompts, and sends
the worker's connectors a `Transfer` with each step. The worker's connectors write rows of the index into vLLM's blocks
before the step, compare rows after it, and prepare the requests whose tokens attend sparsely.
"""

import os
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import snapshot_download
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index

from sparsekv.formats.errors import ArtifactError, SparsekvError, UsageError
from sparsekv.formats.index.reader import Artifact, ArtifactShare
from sparsekv.runtime.vllm.answers import Answers
from sparsekv.runtime.vllm.decoding import (
    Decode,
    DecodeSetting,
    DecodeSteps,
    IndexLayers,
    SparseAttention,
    refuse_unknown,
)
from sparsekv.runtime.vllm.identity import check_rows, identify_served, row_tolerance, share_of
from sparsekv.runtime.vllm.paged import PagedLayer, slots_of
from sparsekv.runtime.vllm.prefixes import PrefixTable

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.sparsekv")  # vLLM prints loggers of its own name only

FLOAT8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""Dtype of the numbers in a cache of bytes, by the value of vLLM's `--kv-cache-dtype`."""


@dataclass(frozen=True)
class Rows:
    """Rows of an index that the workers load for a request or compare with it.

    Attributes:
        index: the index's folder.
        manifest: the hash of the manifest that the scheduler's connector has read.
        blocks: numbers of the request's blocks, from its first token on.
        loaded: positions of the tokens whose rows the workers load, in whole blocks.
        compared: positions of the tokens whose computed rows the workers compare; empty for a trusted index.
    """

    index: str
    manifest: str
    blocks: list[int]
    loaded: range
    compared: range

    def loaded_blocks(self, size: int) -> list[int]:
        """Return the blocks that are loaded, of `size` tokens each."""
        return self.blocks[self.loaded.start // size : self.loaded.stop // size]


@dataclass
class Transfer(KVConnectorMetadata):
    """Rows that the workers load before a step, computed rows that they compare after it, and sparse decode steps."""

    loads: list[Rows]
    comparison: Rows | None = None
    decodes: list[Decode] = field(default_factory=list)


@dataclass
class Verdicts(KVConnectorWorkerMetadata):
    """Results of a step in the workers, by index.

    Attributes:
        accepted: the relative distance of the compared rows, for indices that are trusted from now on.
        refused: the reason, for indices that are not used any more.
        dense: the reason, for indices whose rows are loaded but whose requests decode densely.
    """

    accepted: dict[str, float]
    refused: dict[str, str]
    dense: dict[str, str] = field(default_factory=dict)

    def aggregate(self, other: "Verdicts") -> "Verdicts":
        """Join the results of two workers: the larger distance, and the reasons of both."""
        names = self.accepted.keys() | other.accepted.keys()
        accepted = {name: max(self.accepted.get(name, 0.0), other.accepted.get(name, 0.0)) for name in names}
        return Verdicts(accepted, other.refused | self.refused, other.dense | self.dense)


class SparseKVConnector(KVConnectorBase_V1):
    """The connector that `--kv-transfer-config` names. Its extra config has `indices`, a list of index folders.

    With `method` in the extra config, the decode steps of requests over an index attend sparsely. `budget` there is the
    budget of requests that name none.

    An index that does not belong to the served model is logged and never loaded. Its documents are prefilled by vLLM.

    Raises:
        UsageError: the extra config is not valid, or the connector does not support a setting of vLLM.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: "KVCacheConfig"):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        given = self._kv_transfer_config.kv_connector_extra_config
        refuse_unknown(given)
        names, setting = given["indices"], DecodeSetting.parse(given.get("method"), given.get("budget"))
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(vllm_config, kv_cache_config, names, setting)
        else:
            self._worker = WorkerSide(vllm_config, kv_cache_config, names, setting)

    # Called in the scheduler.

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler.manager = kv_cache_manager

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.matched(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        if num_external_tokens:
            self._scheduler.load(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        return self._scheduler.transfer(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        verdicts = connector_output.kv_connector_worker_meta
        if isinstance(verdicts, Verdicts):
            self._scheduler.judge(verdicts)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler.finish(request.request_id)
        return False, None

    def reset_cache(self) -> bool:
        self._scheduler.reset()
        return True

    # Called in a worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._worker.begin(self._get_connector_metadata())  # `start_load_kv` may be called after the step

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        self._worker.load(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: rows are loaded before the step."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: rows of vLLM are not stored."""

    def wait_for_save(self) -> None:
        self._worker.compare(self._get_connector_metadata())

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.take_verdicts()


class SchedulerSide:
    """Matches prompts with indices, and decides for each step what the workers load, compare and decode sparsely.

    Args:
        names: folders of the indices.
        setting: method and budget of decode steps; None: all decode steps are dense.
    """

    def __init__(self, config: VllmConfig, cache: "KVCacheConfig", names: list[str], setting: DecodeSetting | None):
        _refuse_unsupported(config, cache)
        self._block, self._blocks = cache.kv_cache_groups[0].kv_cache_spec.block_size, cache.num_blocks
        self.manager: Any = None
        self._manifests: dict[str, str] = {}
        prompts = {}
        served = _served(config)
        for name in names:
            try:
                artifact = Artifact(Path(name))
                served.check(artifact.manifest)
                prompts[name] = artifact.input_ids().tolist()
                self._manifests[name] = artifact.manifest.manifest_sha256
                logger.info("index %s: the first %d tokens of a prompt may be loaded", name, len(prompts[name]))
            except SparsekvError as error:
                logger.error("index %s is not used: %s", name, error)
        self._table = PrefixTable(prompts, self._block)
        self._loads: list[Rows] = []
        self._on_trial: Rows | None = None
        self._answers = Answers(setting, self._table, self._block)
        if setting is not None:
            logger.info("decode steps over an index: %s", setting)

    def matched(self, request: "Request", computed: int) -> int | None:
        """Return the number of tokens to load after the first `computed` tokens; None: ask again in the next step.

        Nothing is loaded for a request with a LoRA adapter, with multimodal input, or without token ids.
        """
        if request.prompt_token_ids is None or request.lora_request is not None or request.mm_features:
            return 0
        self._answers.begin(request)
        trial = self._table.trial
        if trial is not None and trial.request == request.request_id:  # it was preempted before the comparison
            self.finish(request.request_id)
            return None
        if self._table.waits(request.prompt_token_ids) or self._answers.completes_block_of(request, computed):
            return None
        prefix = self._table.longest(request.prompt_token_ids)
        return 0 if prefix is None else max(0, prefix.loaded - computed)

    def load(self, request: "Request", blocks: list[int], tokens: int) -> None:
        """Let the workers load the last `tokens` tokens of a request's prefix before the request's first step.

        If the index is not trusted, its trial begins.
        """
        prefix = self._table.longest(request.prompt_token_ids)
        assert prefix is not None
        loaded = range(prefix.loaded - tokens, prefix.loaded)
        rows = Rows(prefix.index, self._manifests[prefix.index], blocks, loaded, prefix.compared)
        self._loads.append(rows)
        if prefix.compared:
            self._table.begin(request.request_id, prefix)
            self._on_trial = rows

    def transfer(self, step: "SchedulerOutput") -> Transfer:
        """Return the loads and sparse decode steps of an engine step.

        The comparison is included if the step computes the last of the tokens to compare.
        """
        transfer, self._loads = Transfer(self._loads), []
        computed = _computed(step)
        transfer.decodes = self._answers.decodes(computed, self.manager)
        trial, rows = self._table.trial, self._on_trial
        last = range(0) if trial is None else computed.get(trial.request, range(0))
        if trial is not None and rows is not None and last.stop >= rows.compared.stop:
            self._on_trial = replace(rows, blocks=self.manager.get_block_ids(trial.request)[0])
            transfer.comparison = self._on_trial
        return transfer

    def judge(self, verdicts: Verdicts) -> None:
        """Trust or refuse indices by the results of the workers, or let their requests attend densely.

        If an index is refused on its trial, no other request may use the blocks of the trial. If a trusted index is
        refused, because its rows could not be read, all blocks are removed from vLLM's prefix cache. Several requests
        may have computed blocks over the rows that are missing.
        """
        for name, reason in verdicts.refused.items():
            if self._table.on_trial(name):
                self._forget_blocks()
            elif self._table.trusts(name):
                self.manager.evict_blocks(set(range(self._blocks)))
            if self._table.refuse(name):
                logger.error("index %s is not used any more: %s", name, reason)
        for name, distance in verdicts.accepted.items():
            if name not in verdicts.refused:
                self._table.trust(name)
                logger.info("index %s is trusted: rows computed over it are %.4f%% from its own", name, 100 * distance)
        for name, reason in verdicts.dense.items():
            self._answers.attend_densely(name, reason)

    def finish(self, request: str) -> None:
        """Forget a request. If the request is on trial, the trial ends, and no other request may use its blocks."""
        self._answers.end(request)
        trial = self._table.trial
        if trial is not None and trial.request == request:
            self._forget_blocks()
            self._table.end_trial(trial.prefix.index)

    def reset(self) -> None:
        """Compare every index again at its next load, because vLLM may have other weights by then."""
        self._forget_blocks()
        self._table.distrust()

    def _forget_blocks(self) -> None:
        """Remove the blocks of a failed trial from vLLM's prefix cache: the loaded blocks and the blocks after them.

        The trial's request keeps the blocks.
        """
        if self._on_trial is not None:
            first = self._on_trial.loaded.start // self._block
            self.manager.evict_blocks(set(self._on_trial.blocks[first:]))
        self._on_trial = None


class WorkerSide:
    """Writes rows of indices into this worker's blocks, and compares computed rows with those of an index.

    Args:
        names: folders of the indices.
        setting: method and budget of decode steps; None: all decode steps are dense.
    """

    def __init__(self, config: VllmConfig, cache: "KVCacheConfig", names: list[str], setting: DecodeSetting | None):
        self._config = config
        self._block = cache.kv_cache_groups[0].kv_cache_spec.block_size
        self._layers: dict[int, PagedLayer] = {}
        self._indices: dict[str, ArtifactShare] = {}
        self._refused: dict[str, str] = {}
        self._names, self._setting = names, setting
        self._steps: DecodeSteps | None = None
        self._failed = set[int]()
        self._verdicts = Verdicts({}, {})

    def register(self, caches: dict[str, torch.Tensor]) -> None:
        """Find the attention layers of vLLM's caches, and open the indices, reading only this worker's heads.

        Raises the errors of `_paged` and `_prepare`.
        """
        layers = {
            extract_layer_index(name): (self._config.compilation_config.static_forward_context[name], cache)
            for name, cache in caches.items()
        }
        dtype = self._config.model_config.dtype
        self._layers = {number: _paged(layer, cache, dtype) for number, (layer, cache) in layers.items()}
        shapes = {number: (layer.num_kv_heads, layer.head_size) for number, (layer, _) in layers.items()}
        rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        for name in self._names:
            try:
                self._indices[name] = share_of(Artifact(Path(name)), rank, size, shapes)
            except SparsekvError as error:  # the scheduler's connector logs it
                self._refused[name] = str(error)
        if self._setting is not None:
            self._prepare(self._setting.method, {number: layer for number, (layer, _) in layers.items()})

    def _prepare(self, method: str, layers: dict[int, Any]) -> None:
        """Prepare the indices for sparse decode steps.

        If an index cannot be prepared, the scheduler's connector is told so, and the index's requests decode densely.

        Raises:
            UsageError: vLLM does not use the attention of `plugin.register`, the model has ALiBi, or the cache rounds
                keys and values.
        """
        calls = []
        for number, layer in layers.items():
            if not isinstance(layer.impl, SparseAttention) or getattr(layer.impl, "alibi_slopes", None) is not None:
                raise UsageError(
                    f'"method": {method} needs vLLM on a CPU, with the plugin `sparsekv` and a model without ALiBi; '
                    "leave it out of kv_connector_extra_config"
                )
            layer.impl.number = number
            paged = self._layers[number]
            shapes = ((heads, layer.head_size) for heads in (layer.num_heads, layer.num_kv_heads))
            query, rows = (torch.zeros(shape, dtype=paged.dtype, device=paged.cache.device) for shape in shapes)
            calls.append(layer.impl.call(query, rows, rows))
        caches = {
            number: (layer, layer.find_layout(layers[number].head_size)) for number, layer in self._layers.items()
        }
        self._steps = DecodeSteps(caches, self._block)
        for name, index in self._indices.items():
            try:
                self._steps.add(name, IndexLayers(index, method, calls))
            except SparsekvError as error:
                self._verdicts.dense[name] = str(error)
        for layer in layers.values():
            layer.impl.steps = self._steps

    def begin(self, transfer: Transfer) -> None:
        """Prepare the requests whose tokens attend sparsely in a step."""
        if self._steps is not None:
            self._steps.begin(transfer.decodes)

    def load(self, transfer: Transfer) -> None:
        """Write the rows of a step's loads into their blocks.

        If an index's rows cannot be read, vLLM computes their blocks, and the index is refused.
        """
        for rows in transfer.loads:
            try:
                index = self._index(rows)
                slots = slots_of(rows.blocks, self._block, rows.loaded)
                for number, layer in self._layers.items():
                    layer.load(index.context_rows(number), rows.loaded.start, slots)
            except (SparsekvError, OSError) as error:
                self._fail(rows, error)

    def compare(self, transfer: Transfer) -> None:
        """Compare rows that vLLM computed for tokens after a loaded prefix with the index's rows of these tokens.

        If the rows are alike, the index is accepted. Otherwise it is refused, and vLLM computes the request's prompt
        itself.
        """
        rows = transfer.comparison
        if rows is None:
            return
        try:
            index = self._index(rows)
            slots = slots_of(rows.blocks, self._block, rows.compared)
            distances = [
                layer.distance(index.context_rows(number), rows.compared, slots)
                for number, layer in self._layers.items()
            ]
            self._verdicts.accepted[rows.index] = check_rows(index.manifest, distances, self._tolerance(index))
        except (SparsekvError, OSError) as error:
            self._fail(rows, error)

    def take_failed_blocks(self) -> set[int]:
        """Return the blocks of failed loads and comparisons since the last call."""
        failed, self._failed = self._failed, set[int]()
        return failed

    def take_verdicts(self) -> Verdicts | None:
        """Return the results since the last call; None if there are none."""
        verdicts, self._verdicts = self._verdicts, Verdicts({}, {})
        return verdicts if verdicts.accepted or verdicts.refused or verdicts.dense else None

    def _index(self, rows: Rows) -> ArtifactShare:
        index = self._indices.get(rows.index)
        if index is None:
            raise ArtifactError(self._refused[rows.index])
        if index.manifest.manifest_sha256 != rows.manifest:
            raise ArtifactError("another process changed it while the engine started; start the engine again")
        return index

    def _fail(self, rows: Rows, error: Exception) -> None:
        # vLLM computes the request anew from the first of these blocks on.
        self._failed.update(rows.loaded_blocks(self._block))
        self._verdicts.refused[rows.index] = str(error)

    def _tolerance(self, index: ArtifactShare) -> float:
        layer = next(iter(self._layers.values()))
        return row_tolerance(index.manifest, layer.dtype, rounded=layer.stored != layer.dtype)


def _served(config: VllmConfig) -> Any:
    model = config.model_config
    folder = _folder(model.model, model.revision)
    tokenizer = folder if model.tokenizer == model.model else _folder(model.tokenizer, model.tokenizer_revision)
    return identify_served(folder, tokenizer, model.hf_text_config, model.quantization)


def _folder(name: str, revision: str | None) -> str:
    return name if os.path.isdir(name) else snapshot_download(name, revision=revision, local_files_only=True)


def _computed(step: "SchedulerOutput") -> dict[str, range]:
    """Return the positions of the tokens that a step computes, by request."""
    cached = step.scheduled_cached_reqs
    before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    before |= {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
    return {name: range(before[name], before[name] + tokens) for name, tokens in step.num_scheduled_tokens.items()}


def _refuse_unsupported(config: VllmConfig, cache: "KVCacheConfig") -> None:
    """Raise UsageError for settings of vLLM that the connector does not support."""
    parallel = config.parallel_config
    unsupported = {
        "speculative decoding": config.speculative_config is not None,
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "a model with several groups of KV caches": len(cache.kv_cache_groups) != 1,
    }
    for what, found in unsupported.items():
        if found:
            raise UsageError(f"SparseKVConnector does not work with {what}; leave it or the connector out")


def _paged(layer: torch.nn.Module, cache: torch.Tensor, dtype: torch.dtype) -> PagedLayer:
    """Return a layer's cache with the function by which vLLM itself writes keys and values into it.

    Raises:
        UsageError: the layer's backend cannot write keys and values apart from attending, or the cache has an
            unknown dtype.
    """
    write = getattr(getattr(layer, "impl", None), "do_kv_cache_update", None)
    if not isinstance(layer, Attention) or write is None:
        raise UsageError(
            "SparseKVConnector needs an attention backend of vLLM that writes keys and values apart from attending; "
            "choose another with --attention-backend, or leave the connector out"
        )
    stored = cache.dtype if cache.dtype.is_floating_point else FLOAT8.get(layer.kv_cache_dtype)
    if stored is None:
        raise UsageError(f"SparseKVConnector does not support --kv-cache-dtype {layer.kv_cache_dtype}; use auto or fp8")
    return PagedLayer(cache, partial(write, layer), dtype, stored)
