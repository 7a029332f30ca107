"""The chat template's text between an answer and the next question, and the token that ends a turn."""

from transformers import PreTrainedTokenizerBase

from sparsekv.formats.documents.prompt import render
from sparsekv.formats.errors import UsageError
from sparsekv.formats.schema import ChatFrame

_DOCUMENT, _ANSWER, _QUESTION = "<<sparsekv document>>", "<<sparsekv answer>>", "<<sparsekv question>>"
_TURNS = [("user", _DOCUMENT), ("assistant", _ANSWER), ("user", _QUESTION)]


def next_turn(tokenizer: PreTrainedTokenizerBase, chat: ChatFrame) -> ChatFrame | None:
    """The frame of a question that follows an answer, from the end of the answer's text on: the token that ends an
    answer is the template's. None if the template fails, or drops the answer or the question from its output.

    Args:
        chat: the frame of the question that was answered.
    """
    _, answered, rest = _rendered(tokenizer, 3).partition(_ANSWER)
    between, asked, after = rest.partition(_QUESTION)
    if not answered or not asked:
        return None
    return chat.model_copy(update={"between": between, "after": after})


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The added token that the chat template puts behind an answer; None if it puts none there, or text before it."""
    _, _, rest = _rendered(tokenizer, 2).partition(_ANSWER)
    rest = rest.lstrip()
    found = {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if str(token).strip()}
    return next((found[token] for token in sorted(found, key=len, reverse=True) if rest.startswith(token)), None)


def _rendered(tokenizer: PreTrainedTokenizerBase, turns: int) -> str:
    """The first turns of a conversation in the chat template; empty without one, and where it fails."""
    messages = [{"role": role, "content": content} for role, content in _TURNS[:turns]]
    try:
        return render(tokenizer, messages, answered=turns == 2) if tokenizer.chat_template else ""
    except UsageError:  # some templates allow only one turn
        return ""
