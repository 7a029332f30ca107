"""The scheduler's part of sparse decode steps: which requests decode sparsely, within which budget."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.vllm.decoding import Decode, DecodeSetting, Within, budget_of
from sparsekv.runtime.vllm.prefixes import PrefixTable

logger = init_logger("vllm.sparsekv")  # vLLM prints loggers of its own name only


@dataclass
class Answer:
    """An answer whose tokens attend sparsely within a budget, as soon as the index is trusted.

    Attributes:
        request: vLLM's request.
        begun: whether a token has attended sparsely. The keys and values after it are not those of dense attention.
    """

    request: Any
    index: str
    budget: Within
    begun: bool = False


class Answers:
    """The requests in vLLM's scheduler, and the answers among them that attend sparsely.

    A request decodes sparsely if its prompt begins with the whole prompt of a trusted index, and `budget_of` gives it a
    budget. All tokens of prompts attend densely, and so do tokens of an answer that are computed again after a
    preemption.

    Args:
        setting: the server's method and budget; None: all requests attend densely.
        block: number of tokens in a block of vLLM's cache.
    """

    def __init__(self, setting: DecodeSetting | None, table: PrefixTable, block: int):
        self._setting, self._table, self._block = setting, table, block
        self._answers: dict[str, Answer | None] = {}
        self._dense, self._told = set[str](), set[str]()

    def begin(self, request: Any) -> None:
        """Register a request, unless it is registered. A wrong budget is logged, and the request attends densely."""
        if request.request_id in self._answers:
            return
        asked = None if request.sampling_params is None else request.sampling_params.extra_args
        index, budget = self._table.whole(request.prompt_token_ids), None
        try:
            budget = budget_of(self._setting, asked or {})
        except UsageError as error:
            logger.warning("request %s attends densely: %s", request.request_id, error)
        answer = None if index is None or budget is None else Answer(request, index, budget)
        self._answers[request.request_id] = answer

    def end(self, name: str) -> None:
        """Forget a request."""
        self._answers.pop(name, None)

    def attend_densely(self, index: str, reason: str) -> None:
        """Let all requests over an index attend densely from now on."""
        if index not in self._dense:
            logger.error("index %s: its requests attend densely: %s", index, reason)
        self._dense.add(index)

    def decodes(self, computed: Mapping[str, range], manager: Any) -> list[Decode]:
        """Return the sparse decode steps in one step of the engine.

        Full blocks with rows of a sparse answer are removed from vLLM's prefix cache, because a prompt with the same
        tokens attends densely, and so has other rows.

        Args:
            computed: positions of the tokens that the step computes, by request.
            manager: vLLM's manager of blocks.
        """
        found = []
        for name, tokens in computed.items():
            if (answer := self._answers.get(name)) is None:
                continue
            prompt, blocks = answer.request.num_prompt_tokens, manager.get_block_ids(name)[0]
            trusted = self._table.trusts(answer.index) and answer.index not in self._dense
            if len(tokens) == 1 and tokens.start >= prompt and trusted:
                if not answer.begun and answer.index not in self._told:
                    self._told.add(answer.index)
                    logger.info("index %s: request %s is the first to decode sparsely", answer.index, name)
                answer.begun = True
                first = self._table.tokens(answer.index) // self._block
                place = tokens.start, blocks[first:], first * self._block
                found.append(Decode(name, answer.index, answer.budget, *place))
            if answer.begun:
                full = range(max(tokens.start, prompt) // self._block, tokens.stop // self._block)
                manager.evict_blocks({blocks[number] for number in full})
        return found

    def completes_block_of(self, request: Any, computed: int) -> bool:
        """Whether vLLM's prefix cache gives a request a block that a sparse answer fills up in this step.

        `decodes` removes this block from the prefix cache only later in the step, so the request must wait.

        Args:
            computed: number of the request's first tokens that are in the prefix cache.
        """
        return any(self._completes(answer.request, request, computed) for answer in self._answers.values() if answer)

    def _completes(self, answering: Any, request: Any, computed: int) -> bool:
        tokens = answering.num_computed_tokens + 1
        if not answering.num_prompt_tokens < tokens <= computed or tokens % self._block:
            return False
        return bool(request.prompt_token_ids[:tokens] == answering.all_token_ids[:tokens])
