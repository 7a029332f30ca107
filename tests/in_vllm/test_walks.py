"""Whatever requests come and go: none reads a row of other tokens, a sparse row as a prompt's, or one never loaded."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from support.vllm_steps import BLOCK, Steps, aborted

from sparsekv.formats.index.reader import Artifact

pytestmark = pytest.mark.vllm

SEEDS, TURNS, REQUESTS = 60, 120, 40
TOKEN = 7  # which `Steps` answers


class Load(NamedTuple):
    """A load of an index in a step."""

    index: str
    step: int


class Row(NamedTuple):
    """A row in vLLM's cache: that of the last of `tokens`, and the loads that it depends on."""

    tokens: list[int]
    sparse: bool
    loads: frozenset[Load]


class Walk:
    """A random walk of requests, and the content of each slot of vLLM's cache."""

    def __init__(self, steps: Callable[..., Steps], folder: Path, random: Random):
        self.random, names = random, ["doc.skv", "other.skv"]
        self.prompts = {name: Artifact(folder / name).input_ids().tolist() for name in names}
        room, blocks = random.choice([2 * BLOCK, 64, 200, 512]), random.choice([50, 64, 100, 200])
        indices = names[: random.choice([1, 2])]
        self.run = steps(room, blocks, method="codes", budget="5%", indices=indices)
        self.rows: dict[int, Row] = {}
        self.trusted, self.failed, self.asked = set[str](), set[Load](), 0
        self.trial = Load("", 0)
        """The load of the index on trial."""

    @property
    def requests(self) -> dict[str, Any]:
        requests: dict[str, Any] = self.run.scheduler.requests
        return requests

    def ask(self) -> None:
        """Ask about a document, a part of it, or all tokens of a running request and some that it may answer next."""
        if len(self.requests) > 3 or self.asked == REQUESTS:
            return
        random, prompt = self.random, self.random.choice(list(self.prompts.values()))
        prompt = prompt[: random.choice([len(prompt), len(prompt) - 1, 100, BLOCK + 1])]
        if self.requests and random.random() < 0.5:
            running = random.choice(list(self.requests.values()))
            prompt = [*running.all_token_ids, *[TOKEN] * random.randint(0, 20)]
        prompt = [*prompt, *random.choices([1, 2, 3], k=random.randint(1, 20))]
        budget = random.choice([{}, {}, {"sparsekv_budget": "dense"}, {"sparsekv_budget": 3}])
        if len(prompt) < 800:  # 50 blocks
            self.asked += 1
            self.run.ask(str(self.asked), prompt, random.randint(1, 40), budget)

    def reset(self) -> None:
        """Reset vLLM's caches, as for new weights."""
        self.run.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        self.trusted.clear()

    def step(self, number: int, fails: float) -> None:
        """Run a step, whose loads fail with a probability, and so does a comparison."""
        step = self.run.begin()
        transfer, compared = step.kv_connector_metadata, step.kv_connector_metadata.comparison
        for rows in transfer.loads:
            assert bool(rows.compared) == (rows.index not in self.trusted)
            load = Load(rows.index, number)
            for place in rows.loaded:
                slot = rows.blocks[place // BLOCK] * BLOCK + place % BLOCK
                self.rows[slot] = Row(self.prompts[rows.index][: place + 1], False, frozenset([load]))
            self.trial = load if rows.compared else self.trial
        for name, tokens in step.num_scheduled_tokens.items():
            self._compute(name, tokens, sparse=name in {one.request for one in transfer.decodes})
        tried = [compared] if compared else transfer.loads
        if not tried or self.random.random() >= fails:
            self.trusted |= {compared.index} if compared else set()
            self.run.end(step, {compared.index: 1e-6} if compared else None)
            return
        index = self.random.choice(tried).index
        self.failed.add(self.trial if compared else Load(index, number))
        self.run.end(step, refused={index: "differs"})
        if self.random.random() < 0.5:
            self.run.scheduler.finish_requests(list(self.requests), aborted())

    def _compute(self, name: str, tokens: int, *, sparse: bool) -> None:
        """Write the rows of a request's next tokens, and check all rows that they attend to."""
        request = self.requests[name]
        blocks, ids = self.run.scheduler.kv_cache_manager.get_block_ids(name)[0], list(request.all_token_ids)
        end = request.num_computed_tokens
        slots = [blocks[place // BLOCK] * BLOCK + place % BLOCK for place in range(end)]
        loads = frozenset[Load]().union(*(self.rows[slot].loads for slot in slots[: end - tokens]))
        assert not loads & self.failed
        for place in range(end - tokens, end):
            self.rows[slots[place]] = Row(ids[: place + 1], sparse, loads)
        for place, slot in enumerate(slots):
            assert self.rows[slot].tokens == ids[: place + 1]
            assert not self.rows[slot].sparse or place >= request.num_prompt_tokens


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_row_is_what_it_is_read_as(steps: Callable[..., Steps], folder: Path, seed: int) -> None:
    random = Random(seed)
    walk, leaves, fails = Walk(steps, folder, random), random.choice([0, 0.05, 0.3]), random.choice([0, 0.3])
    for number in range(TURNS):
        walk.ask()
        if random.random() < 0.03:
            walk.reset()
        elif walk.requests and random.random() < leaves:
            walk.run.scheduler.finish_requests(random.choice(list(walk.requests)), aborted())
        elif walk.requests:
            walk.step(number, fails)
