"""How the documents of one call are indexed: all options but the documents, and the work for one document."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sparsekv.cli.building.targets import Target
from sparsekv.cli.common.console import note, note_plain
from sparsekv.cli.common.loading import load
from sparsekv.cli.common.stored import stored_line
from sparsekv.formats.documents.document import open_document
from sparsekv.formats.documents.prompt import encode_prompt
from sparsekv.formats.errors import ArtifactError
from sparsekv.formats.hints import tune_hint
from sparsekv.formats.kv_storage import KVDtype
from sparsekv.formats.manifest import read_manifest
from sparsekv.formats.models.load import LoadedModel
from sparsekv.formats.ours import check_output
from sparsekv.formats.schema import Defaults, Manifest
from sparsekv.indexing.build import build_index
from sparsekv.indexing.indexers.interface import Indexer
from sparsekv.indexing.plan import BuildPlan, Progress, choose_chunk_size
from sparsekv.indexing.prefill.interface import Prefill


@dataclass(frozen=True)
class Recipe:
    """What `build-index` was asked to do with each document; every field but `methods` and `prefill` is an option.

    methods: an indexer with its parameters, by name. prefill: what a chunk attends to. chunk_size: None for the
    device's. kv_dtype: None for the model's dtype.
    """

    methods: dict[str, Indexer]
    prefill: Prefill
    model: str | None
    device: str
    dtype: str
    kv_dtype: KVDtype | None
    rope_scaling: str | None
    max_tokens: int | None
    sinks: int
    tail: int
    chunk_size: int | None
    raw: bool
    special_tokens: bool
    force: bool
    quiet: bool

    def load(self) -> LoadedModel:
        """The model that prefills the documents; raises what `load_model` raises."""
        return load(self.model, self.device, self.dtype, self.rope_scaling, quiet=self.quiet)

    def index(self, target: Target, loaded: Callable[[], LoadedModel], show: Progress) -> None:
        """Build a document's index, or resume or update it.

        Args:
            loaded: gives the model; called once the document and its folder have been found usable.

        Raises:
            SparsekvError: the document, the folder or an option cannot be used.
        """
        with open_document(target.document, whole=self.max_tokens is None) as text:
            check_output(target.folder)
            model = loaded()
            prompt = encode_prompt(
                model.tokenizer,
                text,
                raw=self.raw,
                max_tokens=self.max_tokens,
                special_tokens=self.special_tokens,
            )
        note_plain("the document", prompt.plain, quiet=self.quiet)
        if prompt.cut:
            note(f"the first {self.max_tokens:,} of more tokens are indexed: the document goes on", quiet=self.quiet)
        plan = BuildPlan(
            loaded=model,
            prompt=prompt,
            methods=self.methods,
            sinks=self.sinks,
            tail=self.tail,
            chunk_size=choose_chunk_size(self.chunk_size, model.model.device, self.prefill),
            prefill=self.prefill,
            rope_scaling=self.rope_scaling,
            force=self.force,
            kv_dtype=self.kv_dtype,
        )
        note(f"indexing {plan.split().tokens:,} tokens with {model.name}", quiet=self.quiet)
        before = _tuned(target.folder)
        manifest = build_index(plan, target.folder, show)
        self._tell(target.folder, before, manifest)

    def _tell(self, folder: Path, before: Defaults | None, manifest: Manifest) -> None:
        """Notes about what was built: what storing costs, and that a default of the index before is gone."""
        if (stored := stored_line(manifest)) is not None:
            note(stored, quiet=self.quiet)
        if before is not None and manifest.defaults is None:
            again = tune_hint(folder, before.target)
            note(f"what tune found was for the index before: run {again} again", quiet=self.quiet)


def _tuned(folder: Path) -> Defaults | None:
    """The default setting that `tune` wrote into the index in a folder, if there is one."""
    try:
        return read_manifest(folder).defaults
    except ArtifactError:
        return None
