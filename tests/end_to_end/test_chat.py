"""A talk with the real model, on a terminal: what dense attention says to the document and all that was said before."""

from pathlib import Path

import pytest
import torch
from support.chats import cut
from support.dialogue import dialogue

from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.models.load import LoadedModel

QUESTIONS = ("What is this text about?", "Say that in one sentence.")
TOKENS = 8
PROMPT = r"\x1b\[\?2004h> "


@torch.inference_mode()
def dense_talk(embedded: LoadedModel, document: torch.Tensor) -> list[str]:
    """Greedy answers of the plain model to `QUESTIONS`, one after another."""
    model, tokenizer, said, answers, between = embedded.model, embedded.tokenizer, document, list[str](), "\n\n"
    for question in QUESTIONS:
        text = f"{between}{question}<|im_end|>\n<|im_start|>assistant\n"
        said = torch.cat([said, torch.tensor(tokenizer(text, add_special_tokens=False).input_ids)])
        said = model.generate(said[None], max_new_tokens=TOKENS, do_sample=False)[0]  # type: ignore[operator]
        answers.append(str(tokenizer.decode(said[-TOKENS:])))
        assert "<|im_end|>" not in answers[-1], "the answers are to be cut off"
        between = "<|im_end|>\n<|im_start|>user\n"
    return answers


@pytest.mark.slow
def test_a_talk_that_reads_everything_is_dense_attentions(
    index: Artifact, embedded: LoadedModel, embedded_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "models").symlink_to(embedded_folder.parent)
    options = ("--budget", "100%", "--max-new-tokens", str(TOKENS), "--device", "cpu")
    answers = []
    with dialogue("chat", "-i", index.folder, *options, cwd=tmp_path) as one:
        one.until(PROMPT)
        for question in QUESTIONS:
            one.send(f"{question}\r")
            answers.append(one.until(PROMPT).rpartition("\x1b[?2004l")[2].strip())
        one.press("d")
    told = [answer.removesuffix(cut(TOKENS).strip()).strip() for answer in answers]
    assert told == [answer.strip() for answer in dense_talk(embedded, index.input_ids())]
