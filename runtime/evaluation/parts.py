"""Parts of an evaluation that other processes answer: each has a folder of its own in the work folder."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from sparsekv.formats.checksums import hash_json
from sparsekv.runtime.evaluation.answers import Answers
from sparsekv.runtime.evaluation.engine import INDICES
from sparsekv.runtime.evaluation.tasks import Context

FOLDER = "parts"


@dataclass(frozen=True)
class Parts:
    """The parts in a work folder: one a context."""

    work: Path

    def of(self, context: Context) -> Path:
        """Where the answers to a context's questions go; whoever resumes them finds them there."""
        return self.work / FOLDER / hash_json([context.name, context.task, context.length, context.text])[:16]

    def take(self, context: Context, answers: Answers) -> None:
        """Take over what a context's part has, if it has any.

        Raises:
            SparsekvError: its answers are damaged, in use by another process, or cannot be written.
        """
        if (part := self.of(context)).is_dir():
            with Answers(part) as theirs:
                answers.take_over(theirs)

    def finish(self, context: Context) -> None:
        """Remove a context's part, of which all answers have been taken over; indices that were kept are kept."""
        part = self.of(context)
        for index in part.glob(f"{INDICES}/*"):
            kept = self.work / INDICES / index.name
            kept.parent.mkdir(exist_ok=True)
            if not kept.exists():
                index.rename(kept)
        shutil.rmtree(part, ignore_errors=True)
