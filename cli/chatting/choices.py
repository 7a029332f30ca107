"""What a person chose for the answers: on the command line, and by /method and /budget since."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from sparsekv.formats.reader import Artifact
from sparsekv.runtime.decoding.setting import Setting, choose_setting
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.interface import Method
from sparsekv.runtime.selection.registry import choose_methods, methods


@dataclass
class Choices:
    """A budget (None: each method's own), the methods' options, and --residual; `prefilling` is `choose_setting`'s."""

    artifact: Artifact
    budget: str | None
    parameters: Mapping[str, Any]
    prefilling: Mapping[str, type[Method]]
    residual: bool

    def setting(self, method: str | None) -> Setting:
        """The first setting; raises what `choose_setting` raises, also for options that mean nothing to it."""
        return choose_setting(
            self.artifact, method, self.budget, self.parameters, self.prefilling, residual=self.residual
        )

    def other_method(self, name: str) -> Setting:
        """The setting of another method, with those options that it has; raises UsageError if there is none."""
        kind = methods()[choose_methods([name], list(self.artifact.manifest.methods))[0]]
        known = {field.name for field in fields(kind)}
        parameters = {name: value for name, value in self.parameters.items() if name in known}
        return choose_setting(self.artifact, name, self.budget, parameters, {}, residual=self.residual)

    def other_budget(self, setting: Setting, text: str) -> Setting:
        """A setting with another budget; raises UsageError if it is none."""
        return replace(setting, budget=Budget.parse(text, "/budget"), layer_budgets=None, origin="")
