"""Builds the indices of many prompts with the same settings, as an evaluation needs them."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sparsekv.formats.documents.prompt import FixedPrompt
from sparsekv.formats.models.load import LoadedModel
from sparsekv.formats.ways_out import WaysOut
from sparsekv.indexing.build import build_index
from sparsekv.indexing.plan import BuildConfig, BuildPlan, Progress, choose_chunk_size
from sparsekv.indexing.prefill.interface import Prefill


@dataclass(frozen=True)
class Builder:
    """A model, the settings of all builds, and ways to prefill by name, each of which replaces that of the settings."""

    loaded: LoadedModel
    config: BuildConfig
    prefills: dict[str, Prefill]

    @property
    def parameters(self) -> dict[str, dict[str, Any]]:
        """The parameters of each method's tensors; the first revision of a method is left out."""
        later = {name: one.revision for name, one in self.config.methods.items() if one.revision > 1}
        known = {name: {"revision": revision} for name, revision in later.items()}
        return {name: asdict(indexer) | known.get(name, {}) for name, indexer in self.config.methods.items()}

    @property
    def queries(self) -> int:
        """How many of a document's queries the methods are made of at most."""
        return max((indexer.queries_wanted() for indexer in self.config.methods.values()), default=0)

    def decides(self, prefill: str) -> dict[str, Any]:
        """The settings that decide an index, beside its prompt and the model."""
        config, way = self.config, self.prefills[prefill]
        # Answers over exact rows stay those of versions that had no others.
        stored = {} if config.kv_dtype is None else {"kv_dtype": config.kv_dtype}
        chunk_size = choose_chunk_size(config.chunk_size, self.loaded.model.device, way)
        return {"split": [config.sinks, config.tail], "prefill": [chunk_size, asdict(way)], **stored}

    def sample_of(self, name: str) -> dict[str, int]:
        """How many queries a method's tensors are made of, where another method wants more; empty where none does."""
        methods = self.config.methods
        own = methods[name].queries_wanted() if name in methods else 0
        return {"queries": self.queries} if own and own != self.queries else {}

    def build(self, prompt: FixedPrompt, prefill: str, folder: Path, progress: Progress) -> None:
        """Build the index of a prompt, or resume it; errors are those of `build_index`, with remedies of `eval`."""
        plan = BuildPlan(self.loaded, prompt, replace(self.config, prefill=self.prefills[prefill]))
        ways_out = WaysOut("choose another folder with --work", "give a smaller --length")
        build_index(plan, folder, progress, ways_out=ways_out)
