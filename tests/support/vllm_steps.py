"""vLLM's scheduler with the connector, step by step, without a model."""

from typing import Any

import torch

BLOCK, BLOCKS = 16, 200


class Steps:
    """vLLM's scheduler with the connector, with results of workers that a test sets.

    Args:
        room: maximum number of tokens of a step.
        blocks: number of vLLM's blocks.
        extra: further settings of the connector.
    """

    def __init__(self, room: int, blocks: int = BLOCKS, **extra: Any):
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        transfer = {
            "kv_connector": "SparseKVConnector",
            "kv_connector_module_path": "sparsekv.runtime.vllm.connector",
            "kv_role": "kv_consumer",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"indices": ["doc.skv"], **extra},
        }
        config = EngineArgs(
            model="model",
            dtype="float32",
            max_model_len=2048,
            block_size=BLOCK,
            max_num_batched_tokens=room,
            max_num_seqs=4,
            kv_transfer_config=transfer,
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = blocks
        layers = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.float32)
        cache = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], layers)])
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self.scheduler = Scheduler(config, cache, StructuredOutputManager(config), block_size=BLOCK)
        self.texts: dict[str, list[int]] = {}

    def ask(
        self, name: str, prompt: list[int], tokens: int = 4, asked: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """Add a request; `asked` are its extra arguments."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(max_tokens=tokens, temperature=0, extra_args=asked)
        self.scheduler.add_request(Request(name, prompt, sampling, None, block_hasher=self._hasher, **options))

    def begin(self) -> Any:
        """Schedule a step."""
        return self.scheduler.schedule()

    def end(
        self,
        step: Any,
        accepted: dict[str, float] | None = None,
        refused: dict[str, str] | None = None,
        dense: dict[str, str] | None = None,
    ) -> None:
        """Pass the workers' results to the scheduler: token 7 for each request whose prompt is computed.

        A refused index has failed in the step's comparison or, if there is none, in its loads.
        """
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        from sparsekv.runtime.vllm.connector import Verdicts

        transfer, bad = step.kv_connector_metadata, set[int]()
        for rows in [transfer.comparison] if transfer.comparison else transfer.loads:
            if refused and rows.index in refused:
                bad |= set(rows.loaded_blocks(BLOCK))
        meta = Verdicts(accepted or {}, refused or {}, dense or {}) if accepted or refused or dense else None
        names = list(step.num_scheduled_tokens)
        requests = self.scheduler.requests
        sampled = [[7] if requests[name].num_computed_tokens >= requests[name].num_tokens else [] for name in names]
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: number for number, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=KVConnectorOutput(invalid_block_ids=bad, kv_connector_worker_meta=meta),
        )
        for outputs in self.scheduler.update_from_output(step, output).values():
            for one in outputs.outputs:
                self.texts.setdefault(one.request_id, []).extend(one.new_token_ids)


def aborted() -> Any:
    """Return the status of a request whose client has disconnected."""
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED
