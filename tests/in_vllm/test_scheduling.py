"""The connector within vLLM's own scheduler: when it loads, compares, waits, forgets blocks, and decodes sparsely."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.vllm_steps import BLOCK, BLOCKS, Steps, aborted

from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.reader import Artifact

pytestmark = pytest.mark.vllm

ACCEPTED, REFUSED = {"doc.skv": 1e-6}, {"doc.skv": "rows differ"}


def transferred(step: Any) -> tuple[list[range], range | None]:
    """Positions of the tokens that a step loads, for each request, and of those that it compares."""
    transfer = step.kv_connector_metadata
    compared = None if transfer.comparison is None else transfer.comparison.compared
    return [rows.loaded for rows in transfer.loads], compared


def decoded(step: Any) -> dict[str, tuple[int, str]]:
    """Position and budget of a step's sparse decode steps, by request."""
    return {one.request: (one.position, str(one.budget)) for one in step.kv_connector_metadata.decodes}


def whole(tokens: int) -> int:
    return tokens // BLOCK * BLOCK


def test_the_first_request_is_compared_and_others_wait_for_it(steps: Callable[..., Steps], document: list[int]) -> None:
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


def test_two_indices_are_compared_one_after_the_other(
    steps: Callable[..., Steps], folder: Path, document: list[int]
) -> None:
    other: list[int] = Artifact(folder / "other.skv").input_ids().tolist()
    run = steps(1024, indices=["doc.skv", "other.skv"])
    run.ask("first", [*document, 1])
    run.ask("second", [*other, 1])
    step = run.begin()
    assert set(step.num_scheduled_tokens) == {"first"}
    assert step.kv_connector_metadata.comparison.index == "doc.skv"
    run.end(step, ACCEPTED)
    step = run.begin()
    assert step.kv_connector_metadata.comparison.index == "other.skv"


def test_a_trusted_index_is_loaded_up_to_its_last_whole_block(steps: Callable[..., Steps], document: list[int]) -> None:
    run = steps(512)
    run.ask("first", document)
    step = run.begin()
    run.end(step, ACCEPTED)
    run.scheduler.finish_requests("first", aborted())
    run.scheduler.reset_prefix_cache()
    run.ask("second", [*document[:200], *[9] * 100])
    run.ask("third", [*document, 1])
    step = run.begin()
    # The third request has the second's blocks, and loads those after them.
    assert transferred(step) == ([range(whole(200)), range(whole(200), whole(len(document)))], None)


def test_a_step_of_few_tokens_is_compared_when_all_of_them_are_computed(
    steps: Callable[..., Steps], document: list[int]
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
    steps: Callable[..., Steps], document: list[int]
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


def test_a_late_refusal_is_computed_from_the_first_token_too(steps: Callable[..., Steps], document: list[int]) -> None:
    run = steps(5)
    run.ask("first", [*document, 1, 2, 3])
    run.end(run.begin())
    run.end(run.begin(), refused=REFUSED)
    step = run.begin()
    assert step.num_scheduled_tokens == {"first": 5}
    assert run.scheduler.requests["first"].num_computed_tokens == 5


def test_blocks_that_vllm_has_computed_itself_are_kept(steps: Callable[..., Steps], document: list[int]) -> None:
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
    steps: Callable[..., Steps], document: list[int], budget: int
) -> None:
    run, loaded = steps(budget), whole(len(document) - 8)
    run.ask("first", [*document, 1, 2, 3])
    run.begin()
    run.scheduler.finish_requests("first", aborted())
    run.ask("second", [*document, 4])
    step = run.begin()
    assert transferred(step)[0] == [range(loaded)]


def test_blocks_that_a_trusted_index_could_not_fill_are_not_shared(
    steps: Callable[..., Steps], document: list[int]
) -> None:
    """Its file is damaged after its trial. Both requests that load it then end before vLLM has computed the blocks."""
    run = steps(512)
    run.ask("trial", document, 1)
    run.end(run.begin(), ACCEPTED)
    run.scheduler.reset_prefix_cache()
    longer = [*document, *[5] * 2 * BLOCK]
    run.ask("first", [*document, 1])
    run.ask("second", longer)
    step = run.begin()
    assert transferred(step) == ([range(whole(len(document)))], None)
    assert set(step.num_scheduled_tokens) == {"first", "second"}
    run.end(step, refused=REFUSED)
    run.scheduler.finish_requests(["first", "second"], aborted())
    run.ask("third", [*longer, 2])
    assert run.begin().num_scheduled_tokens == {"third": len(longer) + 1}


@pytest.mark.parametrize("tried", [False, True])
def test_an_index_is_compared_again_after_vllm_has_reset_its_caches(
    steps: Callable[..., Steps], document: list[int], tried: bool
) -> None:
    """As for new weights. The request that runs meanwhile is preempted, on trial or afterwards."""
    run, loaded = steps(5), whole(len(document) - 8)
    run.ask("first", [*document, 1, 2, 3])
    run.end(run.begin())
    if tried:
        run.end(run.begin(), ACCEPTED)
    assert run.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    run.ask("second", [*document, 4])
    step = run.begin()
    assert transferred(step) == ([range(loaded)], None)
    run.end(step)
    step = run.begin()
    assert transferred(step) == ([], range(loaded, loaded + 8))
    run.end(step, refused=REFUSED)
    assert run.begin().num_scheduled_tokens == {"first": 5}
    assert run.scheduler.requests["first"].num_computed_tokens == 5


def test_a_request_with_an_adapter_gets_nothing(steps: Callable[..., Steps], document: list[int]) -> None:
    from vllm.lora.request import LoRARequest

    run = steps(512)
    run.ask("first", [*document, 1], lora_request=LoRARequest("adapter", 1, "/nowhere"))
    step = run.begin()
    assert transferred(step) == ([], None)
    assert step.num_scheduled_tokens["first"] == len(document) + 1


def sparse(steps: Callable[..., Steps], document: list[int], blocks: int = BLOCKS) -> Steps:
    """Steps over a trusted index whose rows are in vLLM's blocks; requests that name no budget have 5%."""
    run = steps(512, blocks, method="codes", budget="5%")
    run.ask("trial", document, 1)
    run.end(run.begin(), ACCEPTED)
    return run


def test_only_decode_steps_over_the_whole_document_are_sparse(steps: Callable[..., Steps], document: list[int]) -> None:
    run = sparse(steps, document)
    run.ask("over", [*document, 1, 2])
    run.ask("edited", [*document[:-1], 9, 1, 2])
    run.ask("other", [9] * 40)
    run.end(step := run.begin())
    assert decoded(step) == {}
    for number in range(3):
        run.end(step := run.begin())
        assert set(step.num_scheduled_tokens) == {"over", "edited", "other"}
        assert decoded(step) == {"over": (len(document) + 2 + number, "5%")}
    assert run.begin().kv_connector_metadata.decodes == []


def test_a_last_prompt_token_alone_is_no_decode_step(steps: Callable[..., Steps], document: list[int]) -> None:
    run = steps(5, method="codes", budget="5%")
    prompt = [*document, *[3] * (5 - (len(document) - whole(len(document) - 8)) % 5 + 1)]
    run.ask("first", prompt)
    alone = 0
    while "first" not in run.texts:
        step = run.begin()
        alone += step.num_scheduled_tokens["first"] == 1
        assert decoded(step) == {}
        run.end(step, ACCEPTED if step.kv_connector_metadata.comparison else None)
    assert alone == 1
    assert decoded(run.begin()) == {"first": (len(prompt), "5%")}


def test_an_index_that_no_request_has_tried_is_decoded_densely(
    steps: Callable[..., Steps], document: list[int]
) -> None:
    """The comparison has no result yet when the first tokens are decoded, as with asynchronous scheduling."""
    run = steps(512, method="codes")
    run.ask("first", [*document, 1])
    run.end(run.begin())
    run.end(step := run.begin())
    assert decoded(step) == {}


def test_each_request_has_its_own_budget(steps: Callable[..., Steps], document: list[int]) -> None:
    run = sparse(steps, document)
    budgets: dict[str, Any] = {"share": "2%", "count": 30, "all": 1.0}
    for name, budget in budgets.items():
        run.ask(name, [*document, 1], asked={"sparsekv_budget": budget})
    run.end(run.begin())
    assert {name: budget for name, (_, budget) in decoded(run.begin()).items()} == {
        "share": "2%",
        "count": "30",
        "all": "100%",
    }


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """Lines of the connector's log."""
    lines: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("vllm.sparsekv")
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def test_requests_without_a_budget_or_with_a_wrong_one(
    steps: Callable[..., Steps], document: list[int], logged: list[str]
) -> None:
    run = sparse(steps, document)
    run.ask("usual", [*document, 1], asked={"other": 1})
    run.ask("dense", [*document, 1], asked={"sparsekv_budget": "dense"})
    run.ask("wrong", [*document, 1], asked={"sparsekv_budget": "much"})
    run.end(run.begin())
    assert set(decoded(run.begin())) == {"usual"}
    (line,) = [line for line in logged if "densely" in line]
    assert line.startswith("request wrong attends densely: sparsekv_budget much is not a budget: ")


def test_without_a_method_all_requests_attend_densely(steps: Callable[..., Steps], document: list[int]) -> None:
    run = steps(512)
    run.ask("first", [*document, 1], asked={"sparsekv_budget": "5%"})
    run.end(run.begin(), ACCEPTED)
    assert decoded(run.begin()) == {}


def test_rows_of_a_sparse_answer_are_not_taken_for_those_of_a_prompt(
    steps: Callable[..., Steps], document: list[int]
) -> None:
    """A conversation goes on while the same answer is given to another request, and afterwards."""
    run = sparse(steps, document)
    prompt = [*document, *[3] * (BLOCK - 3 - len(document) % BLOCK)]
    answer, later = [7] * BLOCK, [5] * 4
    run.ask("first", prompt, len(answer))
    run.end(run.begin())
    run.end(step := run.begin())
    assert decoded(step) == {"first": (len(prompt), "5%")}
    run.end(run.begin())
    run.ask("goes on", [*prompt, *answer[:3], *later])  # at the end of a block that is full in the next step
    run.end(step := run.begin())
    assert decoded(step) == {"first": (whole(len(prompt) + 2) + BLOCK - 1, "5%")}
    assert set(step.num_scheduled_tokens) == {"first"}
    run.end(step := run.begin())
    assert step.num_scheduled_tokens == {"first": 1, "goes on": len(prompt) + 3 + len(later) - whole(len(prompt))}
    while run.scheduler.requests:
        run.end(run.begin())
    run.ask("dense", prompt, 16, {"sparsekv_budget": "dense"})
    while run.scheduler.requests:
        run.end(run.begin())
    run.ask("after dense", [*prompt, *answer, *later])
    assert run.begin().num_scheduled_tokens["after dense"] == len(answer) - 3 + len(
        later
    )  # after one whole block of the answer


def test_a_preempted_answer_is_computed_again_densely(steps: Callable[..., Steps], document: list[int]) -> None:
    needed = -(-len(document) // BLOCK)
    run = sparse(steps, document, needed + 7)
    run.ask("first", [*document, 1], 60)
    run.ask("second", [*document, 2], 60)
    preempted, again = False, []
    while run.scheduler.requests:
        step = run.begin()
        preempted = preempted or bool(step.preempted_req_ids)
        many = {name for name, tokens in step.num_scheduled_tokens.items() if tokens > 1}
        again += [name for name in many if run.texts.get(name)]
        assert not many & set(decoded(step))
        run.end(step)
    assert preempted
    assert again
    assert [len(run.texts[name]) for name in ("first", "second")] == [60, 60]


def test_an_index_that_a_worker_cannot_prepare_is_decoded_densely(
    steps: Callable[..., Steps], document: list[int]
) -> None:
    run = sparse(steps, document)
    run.ask("first", [*document, 1])
    run.end(run.begin(), dense={"doc.skv": "has no codes"})
    assert decoded(run.begin()) == {}


def test_workers_refuse_an_index_together() -> None:
    from sparsekv.runtime.vllm.connector import Verdicts

    joined = Verdicts({"a": 0.1, "b": 0.2}, {}).aggregate(Verdicts({"b": 0.3}, {"a": "differs", "c": "differs"}))
    assert joined == Verdicts({"a": 0.1, "b": 0.3}, {"a": "differs", "c": "differs"})


def test_an_index_that_one_worker_refuses_is_refused(steps: Callable[..., Steps], document: list[int]) -> None:
    run = steps(512)
    run.ask("first", [*document, 1, 2, 3])
    run.end(run.begin(), ACCEPTED, REFUSED)
    run.scheduler.finish_requests("first", aborted())
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
