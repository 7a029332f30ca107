"""The chat template's text between an answer and the next question."""

from transformers import PreTrainedTokenizerBase

from sparsekv.formats.documents.prompt import render
from sparsekv.formats.errors import UsageError
from sparsekv.formats.schema import ChatFrame

_DOCUMENT, _ANSWER, _QUESTION = "<<sparsekv document>>", "<<sparsekv answer>>", "<<sparsekv question>>"


def next_turn(tokenizer: PreTrainedTokenizerBase, chat: ChatFrame, ending: str) -> ChatFrame:
    """The frame of a question that follows an answer.

    Args:
        chat: the frame of the question that was answered; returned unchanged if the template fails, or drops the
            answer or the question from its output.
        ending: the answer's last token as text; if the template's text begins with it, it is removed there, so that
            the end of a turn does not come twice.
    """
    turns = [("user", _DOCUMENT), ("assistant", _ANSWER), ("user", _QUESTION)]
    messages = [{"role": role, "content": content} for role, content in turns]
    try:
        rendered = render(tokenizer, messages)
    except UsageError:  # some templates allow only one turn
        return chat
    _, answered, rest = rendered.partition(_ANSWER)
    between, asked, after = rest.partition(_QUESTION)
    if not answered or not asked:
        return chat
    return ChatFrame(before=chat.before, between=between.removeprefix(ending), after=after)
