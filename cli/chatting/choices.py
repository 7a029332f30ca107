"""What a person chose for the answers: on the command line, and by /method and /budget since."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from sparsekv.formats.reader import Artifact
from sparsekv.runtime.attention.config import DecodeConfig, Dense
from sparsekv.runtime.decoding.choose_config import attention_of, choose_config, refuse_beside_dense
from sparsekv.runtime.selection.budget import Budget


@dataclass
class Choices:
    """A budget (None: each method's own), the methods' options, and --residual."""

    artifact: Artifact
    budget: Budget | None
    parameters: Mapping[str, Any]
    residual: bool

    def other_method(self, before: DecodeConfig, name: str) -> DecodeConfig:
        """The config with another method, with those options that it has; raises UsageError if there is none."""
        name, kind = attention_of(self.artifact, name)
        own = {field.name for field in fields(kind)}
        kept, dense = {option: value for option, value in self.parameters.items() if option in own}, kind is Dense
        config = choose_config(self.artifact, name, kept, residual=self.residual and not dense)
        budget = config.budget if dense or self.budget is None else self.budget
        return replace(config, budget=budget, question=before.question, placement=before.placement)

    def other_budget(self, config: DecodeConfig, text: str) -> DecodeConfig:
        """A config with another budget; raises UsageError if it is none, or the config reads everything."""
        if isinstance(config.attention, Dense):
            refuse_beside_dense({"/budget": text})
        return replace(config, budget=Budget.parse(text, "/budget"), layer_budgets={}, origin="")
