"""How the documents of one call are indexed: all options but the documents, and the work for one document."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sparsekv.cli.building.targets import Target
from sparsekv.cli.common.console import note, note_plain
from sparsekv.cli.common.loading import load
from sparsekv.cli.common.stored import stored_line
from sparsekv.formats.device_memory import peak_told
from sparsekv.formats.documents.document import UTF_8, open_document
from sparsekv.formats.documents.prompt import chat_frame, departure, encode_prompt
from sparsekv.formats.errors import ArtifactError
from sparsekv.formats.hints import tune_hint
from sparsekv.formats.manifest import read_manifest
from sparsekv.formats.models.identify import tokenizer_identity
from sparsekv.formats.models.load import LoadedModel
from sparsekv.formats.ours import check_output
from sparsekv.formats.schema import Manifest
from sparsekv.indexing.build import build_index
from sparsekv.indexing.capture.team import Alone, Team
from sparsekv.indexing.existing_index import first_difference
from sparsekv.indexing.plan import BuildConfig, BuildPlan, Progress


@dataclass(frozen=True)
class BuildRecipe:
    """The options of `build-index` for each document: settings of the build, the model, and how its text is read."""

    config: BuildConfig
    model: str | None
    device: str
    dtype: str
    max_tokens: int | None
    raw: bool
    special_tokens: bool
    quiet: bool
    encoding: str = UTF_8

    def load(self) -> LoadedModel:
        """The model that prefills the documents; raises what `load_model` raises."""
        return load(self.model, self.device, self.dtype, self.config.rope_scaling, quiet=self.quiet)

    def index(
        self,
        target: Target,
        loaded: Callable[[], LoadedModel],
        show: Progress,
        team: Callable[[LoadedModel], Team] = lambda loaded: Alone(),
    ) -> None:
        """Build a document's index, or resume or update it.

        Args:
            loaded: gives the model; called once the document and its folder have been found usable.
            team: gives the processes that run the model.

        Raises:
            SparsekvError: the document, the folder or an option cannot be used.
        """
        with open_document(target.document, whole=self.max_tokens is None, encoding=self.encoding) as text:
            check_output(target.folder)
            model, before = loaded(), _finished(target.folder)
            prompt = encode_prompt(
                model.tokenizer,
                text,
                raw=self.raw,
                before=self._kept_head(model, before, target.folder),
                max_tokens=self.max_tokens,
                special_tokens=self.special_tokens,
            )
            differs = "" if prompt.cut else departure(model.tokenizer, prompt, text.whole())
        if differs:
            note(differs, quiet=self.quiet)
        note_plain("the document", prompt.plain, quiet=self.quiet)
        if prompt.cut:
            note(f"the first {self.max_tokens:,} of more tokens are indexed: the document goes on", quiet=self.quiet)
        plan = BuildPlan(model, prompt, self.config)
        tell = partial(note, quiet=self.quiet)
        manifest = build_index(plan, target.folder, self._telling(plan, show), team(model), tell)
        built = before is None or before.uuid != manifest.uuid
        if built and (peak := peak_told(model.model)) is not None:
            tell(f"the build {peak}")
        tell_built(target.folder, before, manifest, quiet=self.quiet)

    def _kept_head(self, model: LoadedModel, before: Manifest | None, folder: Path) -> str | None:
        """The chat template's head as the index in the folder has it, where the same template now gives another one.

        Such a template has the date in it. With another head the whole document would be prefilled again.
        """
        if before is None or before.prompt.chat is None or self.raw or self.config.force:
            return None
        head, chat = before.prompt.chat.before, chat_frame(model.tokenizer)
        if chat is None or chat.before == head or before.tokenizer != tokenizer_identity(model.tokenizer):
            return None
        has, gives = first_difference(head, chat.before)
        note(
            f"{folder} keeps the head of the chat template that it was built with: {has!r}, where the template now "
            f"gives {gives!r}; --force takes the new one and prefills all again",
            quiet=self.quiet,
        )
        return head

    def _telling(self, plan: BuildPlan, show: Progress) -> Progress:
        """`show`, which first says what is indexed: there may be nothing to do."""
        told = False

        def told_first(stage: str, done: int, of: int) -> None:
            nonlocal told
            if not told:
                note(f"indexing {plan.split().tokens:,} tokens with {plan.loaded.name}", quiet=self.quiet)
            told = True
            show(stage, done, of)

        return told_first


def tell_built(folder: Path, before: Manifest | None, manifest: Manifest, *, quiet: bool) -> None:
    """Notes about what was built: that it was there, what storing costs, or that a default of before is gone."""
    if before is not None and manifest.uuid == before.uuid:
        note(f"{folder} is up to date: nothing to build", quiet=quiet)
        return
    if (stored := stored_line(manifest)) is not None:
        note(stored, quiet=quiet)
    if before is not None and before.defaults is not None and manifest.defaults is None:
        again = tune_hint(folder, before.defaults.target)
        note(f"what tune found was for the index before, and is used no more: run {again} again", quiet=quiet)


def _finished(folder: Path) -> Manifest | None:
    """The manifest of the index in a folder, if there is one."""
    try:
        return read_manifest(folder)
    except ArtifactError:
        return None
