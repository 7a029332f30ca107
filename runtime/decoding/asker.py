"""Questions over one open index with one config: the cache is made once and rewound for each question."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.attention.config import DecodeConfig
from sparsekv.runtime.attention.executors import GatherMaker
from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.decoding.batch import Batch, why_alone
from sparsekv.runtime.decoding.exclusive import exclusive
from sparsekv.runtime.decoding.generate import Answer, Sampling, generate, question_ids
from sparsekv.runtime.decoding.open import OpenIndex


@dataclass(frozen=True)
class Asker:
    """An open index, a config and its cache, which holds the document's keys and values."""

    index: OpenIndex
    config: DecodeConfig
    cache: IndexCache

    @classmethod
    def open(
        cls,
        index: OpenIndex,
        config: DecodeConfig,
        gather_makers: Callable[[int], GatherMaker] | None = None,
    ) -> "Asker":
        """Make the cache of a config; arguments, memory and errors are those of `OpenIndex.cache`."""
        with exclusive(index.model):
            return cls(index, config, index.cache(config, gather_makers=gather_makers))

    def ask(
        self,
        question: str | torch.Tensor,
        sampling: Sampling | None = None,
        on_text: Callable[[str], None] = lambda text: None,
        stop: Callable[[], bool] | None = None,
    ) -> Answer:
        """Answer one question, greedily by default; raises what `question_ids` and `generate` raise.

        Threads that ask the same model wait for each other, whichever of its askers they ask.

        Args:
            question: text, for the index's chat template, or token ids [Q] as `question_ids` gives them.
            on_text: called with each piece of text as it is decoded.
            stop: asked after each token; what came until it is True is the answer.
        """
        with exclusive(self.index.model):
            return generate(self.index, self.cache, self._ids(question), sampling or Sampling(), on_text, stop)

    def ask_all(
        self, questions: Sequence[str | torch.Tensor], sampling: Sampling | None = None, *, together: int = 16
    ) -> list[Answer]:
        """Answer questions, so many `together`, in their order; raises what `ask` raises.

        Raises:
            UsageError: this config's questions cannot share a step, or `questions` is a text.
        """
        if isinstance(questions, str):
            raise UsageError("questions is a text; give a list of them, or ask it alone")
        if together < 1:
            raise UsageError(f"{together} questions together: give at least 1")
        with exclusive(self.index.model):
            if reason := why_alone(self.index, self.config.attention, self.cache):
                raise UsageError(f"{reason}; ask one question at a time")
            ids = [self._ids(one) for one in questions]
            found = dict(Batch(self.index, self.cache, sampling or Sampling(), together).answers(ids))
        return [found[number] for number in range(len(ids))]

    def _ids(self, question: str | torch.Tensor) -> torch.Tensor:
        """A question's token ids [Q]; UsageError if the model lacks one."""
        if isinstance(question, str):
            return question_ids(self.index, question)
        if not self.index.knows(question):
            raise UsageError("the question has token ids that the model does not have; make them with question_ids")
        return question
