"""Builds indices of many prompts in one way, as an evaluation needs them."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparsekv.formats.documents.prompt import FixedPrompt
from sparsekv.formats.kv_storage import KVDtype
from sparsekv.formats.models.load import LoadedModel
from sparsekv.formats.ways_out import WaysOut
from sparsekv.indexing.build import build_index
from sparsekv.indexing.indexers.interface import Indexer
from sparsekv.indexing.plan import BuildPlan, Progress, choose_chunk_size
from sparsekv.indexing.prefill.interface import Prefill


@dataclass(frozen=True)
class Builder:
    """A model, what builds each method's tensors, and ways to prefill, by name; `chunk_size` None: the device's;
    `kv_dtype` None: keys and values are stored in the model's dtype."""

    loaded: LoadedModel
    methods: dict[str, Indexer]
    prefills: dict[str, Prefill]
    sinks: int = 10
    tail: int = 128
    chunk_size: int | None = None
    kv_dtype: KVDtype | None = None

    @property
    def parameters(self) -> dict[str, dict[str, Any]]:
        """What each method's tensors are built with; the first revision of one does not say so."""
        later = {name: one.revision for name, one in self.methods.items() if one.revision > 1}
        known = {name: {"revision": revision} for name, revision in later.items()}
        return {name: asdict(indexer) | known.get(name, {}) for name, indexer in self.methods.items()}

    @property
    def queries(self) -> int:
        """How many of a document's queries the methods are made of at most."""
        return max((indexer.queries_wanted() for indexer in self.methods.values()), default=0)

    def decides(self, prefill: str) -> dict[str, Any]:
        """What else decides an index, beside its prompt and the model."""
        # Answers over exact rows stay those of versions that had no others.
        stored = {} if self.kv_dtype is None else {"kv_dtype": self.kv_dtype}
        return {
            "split": [self.sinks, self.tail],
            "prefill": [self._chunk_size(prefill), asdict(self.prefills[prefill])],
            **stored,
        }

    def sample_of(self, name: str) -> dict[str, int]:
        """What else decides a method's tensors: of how many queries they are made, where another method wants more."""
        own = self.methods[name].queries_wanted() if name in self.methods else 0
        return {"queries": self.queries} if own and own != self.queries else {}

    def build(self, prompt: FixedPrompt, prefill: str, folder: Path, progress: Progress) -> None:
        """Build the index of a prompt, or resume it; errors are those of `build_index`, with remedies of `eval`."""
        plan = BuildPlan(
            self.loaded,
            prompt,
            self.methods,
            sinks=self.sinks,
            tail=self.tail,
            chunk_size=self._chunk_size(prefill),
            prefill=self.prefills[prefill],
            kv_dtype=self.kv_dtype,
        )
        ways_out = WaysOut("choose another folder with --work", "give a smaller --length")
        build_index(plan, folder, progress, ways_out=ways_out)

    def _chunk_size(self, prefill: str) -> int:
        return choose_chunk_size(self.chunk_size, self.loaded.model.device, self.prefills[prefill])
