"""What a person chose for the answers: on the command line, and by /method and /budget since."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sparsekv.formats.reader import Artifact
from sparsekv.runtime.decoding.choose_setting import attention_of, choose_setting, refuse_beside_dense
from sparsekv.runtime.decoding.setting import Setting
from sparsekv.runtime.selection.budget import Budget


@dataclass
class Choices:
    """A budget (None: each method's own), the methods' options, and --residual."""

    artifact: Artifact
    budget: str | None
    parameters: Mapping[str, Any]
    residual: bool

    def other_method(self, name: str) -> Setting:
        """The setting of another method, with those options that it has; raises UsageError if there is none."""
        known, given = attention_of(self.artifact, name).options, {"budget": self.budget, **self.parameters}
        kept = {option: value for option, value in given.items() if option in known}
        budget, residual = kept.pop("budget", None), self.residual and "residual" in known
        return choose_setting(self.artifact, name, budget, kept, {}, residual=residual)

    def other_budget(self, setting: Setting, text: str) -> Setting:
        """A setting with another budget; raises UsageError if it is none, or the setting reads everything."""
        if setting.form is None:
            refuse_beside_dense({"/budget": text})
        return replace(setting, budget=Budget.parse(text, "/budget"), layer_budgets=None, origin="")
