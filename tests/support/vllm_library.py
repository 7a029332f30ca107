"""A folder of indices of the embedded model for a server of vLLM."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from sparsekv.formats.documents.continuation import encode_question
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.models.load import LoadedModel

from .command import run_here
from .python_help import DOCUMENT

LONG, QUESTION = 6000, "Which method is called to implement attribute deletion?"
SHORT = DOCUMENT[40_000:43_200]
OTHER = DOCUMENT[90_000:92_500]


@dataclass(frozen=True)
class Library:
    """A folder of indices, and token ids of their prompts with a question."""

    folder: Path
    model: LoadedModel

    def build(self, name: str, text: str, *options: str) -> None:
        (self.folder / "text.txt").write_text(text, encoding="utf-8")
        command = ("build-index", self.folder / "text.txt", "-q", "-o", self.folder / name, "--dtype", "float32")
        built = run_here(*command, *options)
        assert built.code == 0, built.stderr

    def prompt(self, index: str, question: str = QUESTION) -> list[int]:
        artifact = Artifact(self.folder / index)
        about = artifact.manifest.prompt
        asked = encode_question(self.model.tokenizer, about.border, about.chat, question)
        return artifact.input_ids().tolist() + asked

    def tokens(self, index: str) -> int:
        return Artifact(self.folder / index).manifest.split.tokens

    def plain(self, prompt: list[int], tokens: int = 12) -> str:
        """Return the model's own greedy answer by transformers."""
        ids = torch.tensor([prompt])
        out = self.model.model.generate(ids, max_new_tokens=tokens, do_sample=False)
        return str(self.model.tokenizer.decode(out[0, len(prompt) :], skip_special_tokens=True))

    def generated(self, index: str, questions: list[str], tokens: int, *options: str) -> list[str]:
        """Return the answers of `sparsekv generate` to questions, one after another."""
        batch = self.folder / "questions.txt"
        batch.write_text("\n".join(questions), encoding="utf-8")
        command = ("generate", "--index", self.folder / index, "--batch-file", batch, "--batch-size", "1", "--json")
        answered = run_here(*command, "-q", "--max-new-tokens", str(tokens), *options)
        assert answered.code == 0, answered.stderr
        return [json.loads(line)["text"] for line in answered.stdout.splitlines()]


def make_library(folder: Path, model: LoadedModel) -> Library:
    """Build indices: of a long and a short document; in int8 and without codes; of another RoPE; a truncated one."""
    library = Library(folder, model)
    library.build("manual.skv", DOCUMENT, "--max-tokens", str(LONG))
    library.build("short.skv", SHORT)
    library.build("int8.skv", OTHER, "--raw", "--kv-dtype", "int8", "--method", "squeezed")
    library.build("yarn.skv", OTHER[:1000], "--rope-scaling", "yarn:2")
    shutil.copytree(folder / "manual.skv", folder / "bent.skv")
    shutil.copytree(folder / "short.skv", folder / "truncated.skv")
    rows = next((folder / "truncated.skv" / "context").iterdir())
    with rows.open("rb+") as file:
        file.truncate(rows.stat().st_size - 100)
    return library
