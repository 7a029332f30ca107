"""The objects of a case: its model and tokenizer, its texts, and its indices in a folder of its own."""

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from support.python_help import BY_NAME
from support.small_index import with_changes
from support.tiny_models import END

from sparsekv.formats.documents.document import UTF_8
from sparsekv.formats.documents.prompt import FixedPrompt, encode_prompt
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.models.load import LoadedModel, identify
from sparsekv.indexing.build import build_index
from sparsekv.indexing.indexers.interface import indexers
from sparsekv.indexing.plan import BuildConfig, BuildPlan
from sparsekv.indexing.prefill.prefills import prefills
from sparsekv.runtime.attention.config import DecodeConfig
from sparsekv.runtime.attention.guard import Guard, estimates_missed
from sparsekv.runtime.decoding.choose_config import choose_config
from sparsekv.runtime.decoding.load import with_weights
from sparsekv.runtime.decoding.open import OpenIndex, open_index
from sparsekv.runtime.decoding.session import Session
from sparsekv.runtime.selection.interface import DENSE, MethodSpec
from sparsekv.runtime.selection.token_choice import first_dense

from .case import Case, from_options
from .models import model_of, positions_of, tokenizer_of

ENGLISH = "".join(letter if letter.isascii() and letter.isprintable() else " " for letter in BY_NAME)
ACCENTS = str.maketrans({"e": "\u00e9", "o": "\u00f6"})
EDGES = "\n ", "  "
"""White space around a document and around a question; questions in files have no newline."""
Rows = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Keys and values [Hk, N, D] of each layer that attends, by its number."""


class World:
    """A case's model, texts and indices.

    Args:
        folder: an empty folder, in which everything is written.
        dtypes: dtypes to which the weights are converted, one after another; empty: they stay in float32.
    """

    def __init__(self, case: Case, folder: Path, device: str, dtypes: Sequence[torch.dtype] = ()):
        self.case, self.folder, self.device = case, folder, device
        self.checkpoint = model_of(case, device)
        self.tokenizer = tokenizer_of(case.tokenizer, case.template)
        # Models of several cases are the same object, and weights are rounded in place.
        own = self.checkpoint if case.rounded is None and not dtypes else deepcopy(self.checkpoint)
        for dtype in dtypes:
            own = own.to(dtype)
        loaded = LoadedModel(own, self.tokenizer, f"tiny-{case.family}", None)
        self.loaded = with_weights(loaded, case.rounded, lambda text: None)
        self.model = self.loaded.model

    @cached_property
    def document(self) -> str:
        """A text with the case's number of tokens before a question; a token is a byte."""
        letters = self.case.tokens - self._head()
        return self.padded(self.some_text(letters - self.case.padded * 2 * len(EDGES[0]), self.case.text), EDGES[0])

    def some_text(self, letters: int, seed: int) -> str:
        """Return an English text of `letters` letters, without spaces at its ends.

        In a case with an encoding, some letters are beyond ASCII. Then the text has `letters` bytes of UTF-8, or one
        less if a letter does not fit.
        """
        start = seed * 7919 % (len(ENGLISH) - max(2000, letters))
        text = ("x" + ENGLISH[start + 1 : start + letters - 1] + "y")[: max(1, letters)]
        if self.case.encoding == UTF_8:
            return text
        return text[:-1].translate(ACCENTS).encode()[: len(text) - 1].decode(errors="ignore") + text[-1]

    def padded(self, text: str, edge: str) -> str:
        """Return a text between edges if the case is padded, else the text."""
        return f"{edge}{text}{edge}" if self.case.padded else text

    def _head(self) -> int:
        """Return the number of the template's tokens before a user's text."""
        if self.case.raw:
            return 0
        user = [{"role": "user", "content": "@@@"}]
        rendered = str(self.tokenizer.apply_chat_template(user, tokenize=False, add_generation_prompt=True))
        return len(self.tokenizer(rendered.partition("@@@")[0], add_special_tokens=False).input_ids)

    @property
    def ends(self) -> set[int]:
        """Tokens that end an answer: those of the generation config and, in a chat, of the template's end of turn."""
        if self.case.raw:
            return {*self.case.eos}
        talk = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "@@@"}]
        rendered = str(self.tokenizer.apply_chat_template(talk, tokenize=False))
        closed = rendered.rpartition("@@@")[2].lstrip().startswith("<|end|>")
        return {*self.case.eos, *((END,) if closed else ())}

    def room(self, stored: int, question: int) -> int:
        """Return the number of tokens that an answer may have, after a question of `question` tokens over `stored`
        tokens."""
        case = self.case
        changes = case.rope == "longrope" and stored <= case.original
        return (case.original if changes else positions_of(case)) - stored - question

    def question(self, number: int) -> str:
        """Return the text of a question by its number."""
        length = self.case.questions[number % len(self.case.questions)]
        if length == 1:
            return "qzx"[number % 3]
        return self.padded(self.some_text(length, self.case.text + 31 * (number + 1)), EDGES[1])

    def whole_ids(self, question: str, document: str | None = None) -> torch.Tensor:
        """Return the token ids [N] of document and question, by the tokenizer and its template."""
        document = self.document if document is None else document
        if self.case.raw:
            ids = self.tokenizer(document + question).input_ids
        else:
            messages = [{"role": "user", "content": f"{document}\n\n{question}"}]
            ids = self.tokenizer.apply_chat_template(
                messages, tokenize=True, add_generation_prompt=True, return_dict=True
            )["input_ids"]
        return torch.tensor(ids)

    def prompt(self, document: str | None = None) -> FixedPrompt:
        """Return the prompt of a document, as a build makes it."""
        return encode_prompt(self.tokenizer, self.document if document is None else document, raw=self.case.raw)

    def plan(self, document: str | None = None, **changes: Any) -> BuildPlan:
        """Return the plan of a build; `changes` are fields of the plan or of its config."""
        case = self.case
        plan = BuildPlan(
            loaded=self.loaded,
            prompt=self.prompt(document),
            config=BuildConfig(
                methods={name: from_options(indexers(), name, options) for name, options in case.indexers},
                sinks=case.sinks,
                tail=case.tail,
                chunk_size=case.chunk_size,
                prefill=from_options(prefills(), case.prefill, case.prefill_options),
                kv_dtype=case.kv_dtype,
            ),
        )
        return with_changes(plan, **changes)

    def build(self, name: str, plan: BuildPlan | None = None) -> OpenIndex:
        """Build the index of a name, or build onto it, and open it."""
        build_index(plan or self.plan(), self.folder / name)
        return self.open(name)

    def open(self, name: str) -> OpenIndex:
        """Open the index of a name with the case's model."""
        return open_index(Artifact(self.folder / name), self.model, self.tokenizer, identify(self.loaded))

    def asker(self, index: OpenIndex, budget: str | None = None, **changes: Any) -> Session:
        """Open a session with the case's settings, at its budget or at another."""
        return Session.open(index, self.config(index, budget, **changes))

    def config(self, index: OpenIndex, budget: str | None = None, **changes: Any) -> DecodeConfig:
        """Return the decoding config of the case's questions, at its budget or at another."""
        case = replace(self.case, **changes)
        config = choose_config(
            index.artifact,
            case.method,
            dict(case.options_read),
            budget=budget or case.budget or None,
            residual=case.residual,
            prefill=case.question_prefill,
            prefill_budget=case.prefill_budget,
            placement=case.placement,
            ahead=case.ahead,
        )
        form = config.attention
        if isinstance(form, MethodSpec):
            config = replace(config, dense_layers=first_dense(form.method, case.dense_layers))
        if (
            case.guard is not None
            and isinstance(form, MethodSpec)
            and estimates_missed(form.method, residual=form.residual)
        ):
            config = replace(config, guard=Guard(case.guard))
        return config

    def sinks(self, name: str) -> list[torch.Tensor | None]:
        """Return each layer's learned sinks [H] from an index's files."""
        files = files_of(self.folder / name)
        queries = (files.get(f"queries/layer_{layer:03d}.safetensors", {}) for layer in range(self.case.layers))
        return [stored.get("sink_logits") for stored in queries]

    def dense(self, index: OpenIndex) -> Session:
        """Open a session with dense attention."""
        return Session.open(index, choose_config(index.artifact, DENSE))


def files_of(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Return an index's tensors by logical file, read without any code of ours."""
    manifest = json.loads((folder / "manifest.json").read_text())
    return {name: load_file(folder / record["path"]) for name, record in manifest["files"].items()}


def stored_rows(folder: Path, layers: int) -> Rows:
    """Return an index's keys and values in float32 from its files; int8 rows are dequantised as the format defines."""
    files = files_of(folder)
    names = {layer: f"context/layer_{layer:03d}.safetensors" for layer in range(layers)}
    return {layer: _meant(files[name]) for layer, name in names.items() if name in files}


def _meant(stored: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = stored["keys"].double(), stored["values"].double()
    if "key_scales" in stored:
        channels, offsets = stored["channel_scales"].double(), stored["channel_offsets"].double()
        keys = keys * stored["key_scales"].double()[..., None] * channels[:, None] + offsets[:, None]
        values = values * stored["value_scales"].double()[..., None]
    return keys.float(), values.float()
