"""What the options of a command that answers say of the answers, before a model is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsekv.cli.common.index_option import open_artifact
from sparsekv.formats.reader import Artifact
from sparsekv.runtime.attention.question import QuestionPrefill
from sparsekv.runtime.decoding.choose_prefill import prefill_method, question_prefill
from sparsekv.runtime.decoding.choose_setting import choose_setting
from sparsekv.runtime.decoding.early_reading import EarlyReading
from sparsekv.runtime.decoding.prepare import files_read, residual_source
from sparsekv.runtime.decoding.setting import Setting
from sparsekv.runtime.selection.interface import Method


@dataclass(frozen=True)
class Chosen:
    """An index, and what its answers are decoded with.

    `question`: what selects for a question's tokens; None: the answer's method. `prefilling`: the method that
    `--prefill` names, by the name that errors use; empty without one, and for `dense`.
    """

    artifact: Artifact
    setting: Setting
    question: QuestionPrefill | None
    prefilling: Mapping[str, type[Method]]

    def early_reading(self, device: str, *, hold: bool) -> EarlyReading:
        """Begin to read what answers need of the index, beside imports and the model's loading; see `EarlyReading`."""
        read = files_read(self.artifact, self.setting.name, self.setting.method)
        return EarlyReading(self.artifact, device, read, hold=hold, form=self.setting.form)


def choose(
    index: Path | None,
    method: str | None,
    parameters: Mapping[str, Any],
    *,
    budget: str | None,
    prefill: str | None,
    prefill_budget: str | None,
    residual: bool,
) -> Chosen:
    """Open an index, and choose by the options of these names.

    Args:
        parameters: of methods, None where a person set none.

    Raises:
        UsageError: what was asked for does not exist, or not together; or a residual, of an index without centroids.
        ArtifactError: the index's default cannot run any more; or what `open_artifact` raises.
    """
    artifact = open_artifact(index)
    prefilling = prefill_method(artifact, prefill)
    setting = choose_setting(artifact, method, budget, parameters, prefilling, residual=residual)
    question = question_prefill(prefill, prefill_budget, prefilling, parameters)
    if setting.residual:
        residual_source(artifact)
    return Chosen(artifact, setting, question, prefilling)
