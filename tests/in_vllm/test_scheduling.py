"""The connector within vLLM's own scheduler: when it loads, compares, waits, and forgets blocks."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.small_index import build_small
from support.tiny_models import save_tiny

from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.reader import Artifact

pytestmark = pytest.mark.vllm

BLOCK, BLOCKS = 16, 200
ACCEPTED, REFUSED = {"doc.skv": 1e-6}, {"doc.skv": "rows differ"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scheduling")
    save_tiny(folder / "model")
    build_small(folder / "doc.skv")
    return folder


@pytest.fixture(scope="module")
def document(folder: Path) -> list[int]:
    ids: list[int] = Artifact(folder / "doc.skv").input_ids().tolist()
    return ids


class Steps:
    """vLLM's scheduler with the connector, and the results of workers that a test decides on."""

    def __init__(self, budget: int):
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
            "kv_connector_extra_config": {"indices": ["doc.skv"]},
        }
        config = EngineArgs(
            model="model",
            dtype="float32",
            max_model_len=2048,
            block_size=BLOCK,
            max_num_batched_tokens=budget,
            max_num_seqs=4,
            kv_transfer_config=transfer,
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = BLOCKS
        layers = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.float32)
        cache = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], layers)])
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self.scheduler = Scheduler(config, cache, StructuredOutputManager(config), block_size=BLOCK)
        self.texts: dict[str, list[int]] = {}

    def ask(self, name: str, prompt: list[int], **options: Any) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(max_tokens=4, temperature=0)
        self.scheduler.add_request(Request(name, prompt, sampling, None, block_hasher=self._hasher, **options))

    def begin(self) -> Any:
        """Schedule a step."""
        return self.scheduler.schedule()

    def end(self, step: Any, accepted: dict[str, float] | None = None, refused: dict[str, str] | None = None) -> None:
        """Give the scheduler the workers' results: token 7 for each request whose prompt is computed."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        from sparsekv.runtime.vllm.connector import Verdicts

        comparison, bad = step.kv_connector_metadata.comparison, set[int]()
        if refused:
            bad = set(comparison.loaded_blocks(BLOCK))
        meta = Verdicts(accepted or {}, refused or {}) if accepted or refused else None
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


@pytest.fixture
def steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Steps]:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    return Steps


def transferred(step: Any) -> tuple[list[range], range | None]:
    """Positions of the tokens that a step loads, for each request, and of those that it compares."""
    transfer = step.kv_connector_metadata
    compared = None if transfer.comparison is None else transfer.comparison.compared
    return [rows.loaded for rows in transfer.loads], compared


def whole(tokens: int) -> int:
    return tokens // BLOCK * BLOCK


def test_the_first_request_is_compared_and_others_wait_for_it(
    steps: Callable[[int], Steps], document: list[int]
) -> None:
    run, loaded = steps(512), whole(len(document) - 8)
    run.ask("first", [*document, 1, 2, 3])
    run.ask("second", [*document, 4])
    run.ask("other", [9] * 40)
    step = run.begin()
    assert transferred(step) == ([range(loaded)], range(loaded, loaded + 8))
    assert set(step.num_scheduled_tokens) == {"first", "other"}
    assert step.num_scheduled_tokens["first"] == len(document) + 3 - loaded
    run.end(step, ACCEPTED)
    step = run.begin()
    assert "second" in step.num_scheduled_tokens
    assert transferred(step) == ([], None)  # the blocks of the first request are vLLM's own now
    run.end(step)
    assert run.texts["first"] == [7, 7]
    assert run.texts["second"] == [7]


def test_a_trusted_index_is_loaded_up_to_its_last_whole_block(
    steps: Callable[[int], Steps], document: list[int]
) -> None:
    run = steps(512)
    run.ask("first", document)
    step = run.begin()
    run.end(step, ACCEPTED)
    run.scheduler.finish_requests("first", _aborted())
    run.scheduler.reset_prefix_cache()
    run.ask("second", [*document[:200], *[9] * 100])
    run.ask("third", [*document, 1])
    step = run.begin()
    # The third request has the second's blocks, and loads those after them.
    assert transferred(step) == ([range(whole(200)), range(whole(200), whole(len(document)))], None)


def test_a_step_of_few_tokens_is_compared_when_all_of_them_are_computed(
    steps: Callable[[int], Steps], document: list[int]
) -> None:
    run, loaded = steps(5), whole(len(document) - 8)
    run.ask("first", [*document, 1, 2, 3])
    run.ask("second", [*document, 4])
    step = run.begin()
    assert transferred(step) == ([range(loaded)], None)
    run.end(step)
    step = run.begin()
    assert transferred(step) == ([], range(loaded, loaded + 8))
    assert set(step.num_scheduled_tokens) == {"first"}
    run.end(step, ACCEPTED)


def test_a_refused_index_is_computed_by_vllm_from_the_first_token(
    steps: Callable[[int], Steps], document: list[int]
) -> None:
    run = steps(512)
    run.ask("first", [*document, 1, 2, 3])
    run.ask("second", [*document, 4])
    step = run.begin()
    run.end(step, refused=REFUSED)
    assert "first" not in run.texts
    step = run.begin()
    assert transferred(step) == ([], None)
    # Neither takes a block that was filled from the index.
    assert step.num_scheduled_tokens["first"] == len(document) + 3
    assert sum(step.num_scheduled_tokens.values()) == 512
    run.end(step)
    assert run.texts["first"] == [7]


def test_a_late_refusal_is_computed_from_the_first_token_too(
    steps: Callable[[int], Steps], document: list[int]
) -> None:
    run = steps(5)
    run.ask("first", [*document, 1, 2, 3])
    run.end(run.begin())
    run.end(run.begin(), refused=REFUSED)
    step = run.begin()
    assert step.num_scheduled_tokens == {"first": 5}
    assert run.scheduler.requests["first"].num_computed_tokens == 5


def test_blocks_that_vllm_has_computed_itself_are_kept(steps: Callable[[int], Steps], document: list[int]) -> None:
    """Another request, which is still running, has the first block, too."""
    run, loaded = steps(512), whole(len(document) - 8)
    run.ask("short", document[:20])
    run.end(run.begin())
    run.ask("first", [*document, 1, 2, 3])
    step = run.begin()
    assert transferred(step) == ([range(BLOCK, loaded)], range(loaded, loaded + 8))
    run.end(step, refused=REFUSED)
    assert run.texts == {"short": [7, 7]}
    step = run.begin()
    assert step.num_scheduled_tokens == {"short": 1, "first": len(document) + 3 - BLOCK}


@pytest.mark.parametrize("budget", [5, 512])
def test_blocks_of_a_request_that_ends_before_its_comparison_are_not_shared(
    steps: Callable[[int], Steps], document: list[int], budget: int
) -> None:
    run, loaded = steps(budget), whole(len(document) - 8)
    run.ask("first", [*document, 1, 2, 3])
    run.begin()
    run.scheduler.finish_requests("first", _aborted())
    run.ask("second", [*document, 4])
    step = run.begin()
    assert transferred(step)[0] == [range(loaded)]


def test_a_request_with_an_adapter_gets_nothing(steps: Callable[[int], Steps], document: list[int]) -> None:
    from vllm.lora.request import LoRARequest

    run = steps(512)
    run.ask("first", [*document, 1], lora_request=LoRARequest("adapter", 1, "/nowhere"))
    step = run.begin()
    assert transferred(step) == ([], None)
    assert step.num_scheduled_tokens["first"] == len(document) + 1


def _aborted() -> Any:
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED


def test_workers_refuse_an_index_together() -> None:
    from sparsekv.runtime.vllm.connector import Verdicts

    joined = Verdicts({"a": 0.1, "b": 0.2}, {}).aggregate(Verdicts({"b": 0.3}, {"a": "differs", "c": "differs"}))
    assert joined == Verdicts({"a": 0.1, "b": 0.3}, {"a": "differs", "c": "differs"})


def test_an_index_that_one_worker_refuses_is_refused(steps: Callable[[int], Steps], document: list[int]) -> None:
    run = steps(512)
    run.ask("first", [*document, 1, 2, 3])
    run.end(run.begin(), ACCEPTED, REFUSED)
    run.scheduler.finish_requests("first", _aborted())
    run.ask("second", document)
    assert transferred(run.begin()) == ([], None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"speculative_config": object()}, "speculative decoding"),
        ({"parallel_config": SimpleNamespace(decode_context_parallel_size=2)}, "decode context parallelism"),
        ({"groups": [1, 2]}, "several groups"),
    ],
)
def test_settings_whose_blocks_are_others_refuse_the_start(change: dict[str, Any], said: str) -> None:
    from sparsekv.runtime.vllm.connector import _refuse_unsupported

    plain: dict[str, Any] = {
        "speculative_config": None,
        "parallel_config": SimpleNamespace(decode_context_parallel_size=1),
    }
    cache = SimpleNamespace(kv_cache_groups=change.pop("groups", [1]))
    with pytest.raises(UsageError, match=said):
        _refuse_unsupported(SimpleNamespace(**(plain | change)), cache)
