"""Indices of sparsekv as models of `llm`: `llm -m sparsekv/manual "How is it installed?"`."""

import os
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llm
from llm.parts import ReasoningPart, TextPart
from pydantic import Field

if TYPE_CHECKING:
    import sparsekv
    from sparsekv.runtime.serving.messages import Message

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
        """Yield the pieces of an answer to a prompt, after the earlier messages of its conversation.

        Raises:
            llm.ModelError: the index cannot be opened or asked; the message names the remedy.
        """
        from sparsekv import Sampling, SparsekvError
        from sparsekv.runtime.serving.messages import conversation_tokens

        options: Any = prompt.options
        try:
            sampling = Sampling(options.max_new_tokens, options.temperature, top_p=options.top_p, seed=options.seed)
            tokens = conversation_tokens(self.index.opened, _said(prompt))
            for piece in self.index.asker(options.method, options.budget).stream(tokens, sampling):
                yield piece.text
        except SparsekvError as error:
            raise llm.ModelError(str(error)) from None
        if piece.usage:
            response.set_usage(input=piece.usage.prompt_tokens, output=piece.usage.answer_tokens)


def _said(prompt: llm.Prompt) -> "list[Message]":
    """Return all messages up to a prompt's question.

    Only `prompt.messages` has them all: `conversation.responses` lacks a history that `llm -c` has loaded, and one that
    a caller passes as `messages`. A later turn's system prompt is not among them.

    Raises:
        llm.ModelError: a message has a part that is not text, such as an attachment or a call of a tool.
    """
    from sparsekv.runtime.serving.messages import Message

    said = [Message(one.role, _text(one)) for one in prompt.messages]
    if prompt.system and (system := Message("system", prompt.system)) not in said:
        said.insert(0, system)
    return said


def _text(message: Any) -> str:
    """Return the text of a message of `llm`, without reasoning. Raises llm.ModelError if it has other parts."""
    text = ""
    for part in message.parts:
        if isinstance(part, TextPart):
            text += part.text
        elif not isinstance(part, ReasoningPart):
            raise llm.ModelError(
                f"a message of the {message.role} has a part that is not text ({type(part).__name__}); begin a new "
                "conversation"
            )
    return text
