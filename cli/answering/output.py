"""Print answers: as they stream, one a line, or as JSON."""

from dataclasses import asdict, dataclass
from typing import Any

from sparsekv.cli.answering.resuming import AnswersFile
from sparsekv.cli.common.console import say
from sparsekv.cli.common.printable import json_text
from sparsekv.cli.common.stats import print_stats
from sparsekv.runtime.decoding.generate import NO_ANSWER, Answer
from sparsekv.runtime.decoding.setting import Setting


@dataclass(frozen=True)
class Output:
    """How the answers of a call are printed.

    as_json: an object a line. streamed: the answer's text was printed as it came. measured: what each layer leaves is
    known. stats: print times too, to stderr. resumed: the file that takes each line, too.
    """

    setting: Setting
    as_json: bool
    streamed: bool
    measured: bool
    stats: bool
    resumed: AnswersFile | None = None

    def piece(self, text: str) -> None:
        """Print a piece of a streamed answer."""
        if self.streamed:
            say(text, end="")

    def answer(self, question: str, answer: Answer) -> None:
        """Print one answer, or its end where it was streamed."""
        line = " ".join(answer.text.split())
        if self.as_json:
            line = json_text(self._record(question, answer))
        if self.resumed is not None:
            self.resumed.add(line)
        say("" if self.streamed else line)
        if self.stats and answer is not NO_ANSWER:
            print_stats(answer)

    def _record(self, question: str, answer: Answer) -> dict[str, Any]:
        """An answer as a JSON object, with the same keys for every question of a call."""
        left_out = {"ids"} if self.measured else {"ids", "layers"}
        kept = {name: value for name, value in asdict(answer).items() if name not in left_out}
        return {"question": question, **kept, **identity(self.setting)}


def identity(setting: Setting) -> dict[str, Any]:
    """What a record says of the setting."""
    return {"method": setting.form.name, "budget": setting.budget.value}
