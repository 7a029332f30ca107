"""Indices of sparsekv as models of `llm`: `llm -m sparsekv/manual "How is it installed?"`."""

import os
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llm
from pydantic import Field

if TYPE_CHECKING:
    import sparsekv

FOLDER = "SPARSEKV_INDICES"
"""The environment variable that names the folder of the indices; without it, the current folder."""


@llm.hookimpl
def register_models(register: Callable[[llm.Model], None]) -> None:
    """Register each index of the folder by its name without `.skv`. Nothing is opened, and torch is not imported."""
    for manifest in sorted(Path(os.environ.get(FOLDER) or ".").glob("*.skv/manifest.json")):
        register(IndexModel(manifest.parent))


class IndexModel(llm.Model):
    """An index, which is opened with its model at the first prompt."""

    can_stream = True

    class Options(llm.Options):
        """Options of a prompt, `-o budget 10%`."""

        method: str | None = Field(default=None, description="Method that selects the tokens to attend to, or dense")
        budget: str | None = Field(default=None, description="Share (10%) or number of tokens to attend to")
        max_new_tokens: int = Field(default=256, ge=1, description="Longest answer, in tokens")
        temperature: float = Field(default=0.0, ge=0.0, description="0 takes the likeliest token each time")
        top_p: float | None = Field(
            default=None, gt=0.0, le=1.0, description="Draw among the likeliest tokens of this mass"
        )
        seed: int = Field(default=0, description="Seed of what is drawn")

    def __init__(self, folder: Path):
        self.folder = folder.absolute()
        self.model_id = f"sparsekv/{folder.stem}"

    @cached_property
    def index(self) -> "sparsekv.Index":
        """The open index."""
        import sparsekv

        return sparsekv.open_index(self.folder)

    def execute(
        self, prompt: llm.Prompt, stream: bool, response: llm.Response, conversation: llm.Conversation | None
    ) -> Iterator[str]:
        """Yield the pieces of an answer to a prompt, after the turns of the conversation.

        Raises:
            llm.ModelError: the index cannot be opened or asked; the message names the remedy.
        """
        from sparsekv import Sampling, SparsekvError
        from sparsekv.runtime.serving.messages import Message, conversation_tokens

        messages = [Message("system", prompt.system)] if prompt.system else []
        for turn in conversation.responses if conversation else ():
            messages += [Message("user", turn.prompt.prompt), Message("assistant", turn.text_or_raise())]
        messages.append(Message("user", prompt.prompt))
        options: Any = prompt.options
        sampling = Sampling(options.max_new_tokens, options.temperature, top_p=options.top_p, seed=options.seed)
        try:
            tokens = conversation_tokens(self.index.opened, messages)
            for piece in self.index.asker(options.method, options.budget).stream(tokens, sampling):
                yield piece.text
        except SparsekvError as error:
            raise llm.ModelError(str(error)) from None
        if piece.usage:
            response.set_usage(input=piece.usage.prompt_tokens, output=piece.usage.answer_tokens)
