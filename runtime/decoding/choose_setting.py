"""The setting to decode with: what a person asked for, or else what `tune` found for the index."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

from sparsekv.formats.errors import ArtifactError, UsageError
from sparsekv.formats.hints import tune_hint
from sparsekv.formats.parameters import given_parameters
from sparsekv.formats.reader import Artifact
from sparsekv.formats.schema import Defaults
from sparsekv.runtime.decoding.setting import Setting
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.configure import configure, refuse_unused
from sparsekv.runtime.selection.form import Form
from sparsekv.runtime.selection.interface import Method
from sparsekv.runtime.selection.registry import DENSE, method_of, methods, methods_of


@dataclass(frozen=True)
class Asked:
    """What a person set, None where nothing: a budget as text, parameters by name, centroids for the rest.

    `prefilling` is the method of a question's tokens, if they have one: its parameters say nothing of the answer's.
    """

    budget: str | None
    parameters: Mapping[str, Any]
    prefilling: Mapping[str, type]
    residual: bool

    @property
    def anything(self) -> bool:
        """Whether something about the answer's attention was set."""
        elsewhere = {field.name for of in self.prefilling.values() for field in fields(of)}
        given = {name for name, value in self.parameters.items() if value is not None}
        return bool(self.budget or self.residual or given - elsewhere)


class Attention(Protocol):
    """What a person can name as an answer's attention."""

    @property
    def options(self) -> set[str]:
        """The options that mean something to it, as parameters are named."""

    def setting(self, asked: Asked) -> Setting:
        """The setting; raises UsageError for what was asked and means nothing to it."""


@dataclass(frozen=True)
class DenseAttention:
    """Dense attention: it reads everything, so it has no options."""

    @property
    def options(self) -> set[str]:
        """None."""
        return set()

    def setting(self, asked: Asked) -> Setting:
        """The setting that reads everything."""
        refuse_beside_dense({"--budget": asked.budget, "--residual": asked.residual})
        refuse_unused({DENSE: DenseAttention} | dict(asked.prefilling), asked.parameters)
        return Setting(None, Budget(1.0))


@dataclass(frozen=True)
class IndexedMethod:
    """A method that can run on an index."""

    name: str
    kind: type[Method]

    @property
    def options(self) -> set[str]:
        """Its parameters, `budget` and `residual`."""
        return {"budget", "residual", *(field.name for field in fields(self.kind))}

    def setting(self, asked: Asked) -> Setting:
        """The method as it was asked for, at its own budget where none was."""
        refuse_unused({self.name: self.kind} | dict(asked.prefilling), asked.parameters, methods())
        form = Form(self.name, "", configure(self.kind, asked.parameters), asked.residual)
        return Setting(form, Budget(self.kind.default_budget) if asked.budget is None else Budget.parse(asked.budget))


BESIDE_METHODS: dict[str, Attention] = {DENSE: DenseAttention()}


def attention_of(artifact: Artifact, name: str | None) -> Attention:
    """What a name stands for on an index; without one its first method.

    Raises:
        UsageError: the index cannot be used with it.
    """
    if name in BESIDE_METHODS:
        return BESIDE_METHODS[name]
    first = name or methods_of(artifact, list(artifact.manifest.methods), [*BESIDE_METHODS])[0]
    found = method_of(artifact, first, [*BESIDE_METHODS])
    return IndexedMethod(found, methods()[found])


def choose_setting(
    artifact: Artifact,
    method: str | None,
    budget: str | None,
    parameters: Mapping[str, Any],
    prefilling: Mapping[str, type],
    *,
    residual: bool,
) -> Setting:
    """What was asked for, by a method's name or `dense`; the index's default where nothing was and it has one.

    Args:
        parameters: of methods, None where a person set none.
        prefilling: the method of a question's tokens, if they have one.

    Raises:
        UsageError: no such method, budget or parameter, or one of these beside `dense`, which reads everything.
        ArtifactError: the default's method cannot run any more.
    """
    if budget is not None:
        Budget.parse(budget)
    asked, defaults = Asked(budget, parameters, prefilling, residual), artifact.manifest.defaults
    if defaults is not None and method is None and not asked.anything:
        return _default(artifact, defaults)
    return attention_of(artifact, method).setting(asked)


def refuse_beside_dense(given: Mapping[str, Any]) -> None:
    """Raise UsageError for the first of these options that was given: dense attention reads everything."""
    for option, value in given.items():
        if value:
            told = option if value is True else f"{option} {value}"
            raise UsageError(f"{told}: means nothing with --method {DENSE}, which reads everything; leave it out")


def _default(artifact: Artifact, defaults: Defaults) -> Setting:
    try:
        method_of(artifact, defaults.method)
        configured = _configured(methods()[defaults.method], defaults.parameters)
    except (UsageError, TypeError, ValueError) as error:
        anew = defaults.target.model_copy(update={"methods": []})  # one of them may be gone
        raise ArtifactError(
            f"the default of {artifact.folder}, {defaults.method}, cannot run any more: {error}; run "
            f"{tune_hint(artifact.folder, anew)} again, or choose with --method"
        ) from None
    form = Form(defaults.method, defaults.variant, configured, defaults.residual)
    layers = defaults.layer_budgets
    return Setting(
        form,
        Budget(defaults.budget),
        None if layers is None else {layer: Budget(share) for layer, share in layers.items()},
        f"the index's default: {form.title} at {100 * defaults.budget:.3g}%",
    )


def _configured(method: type[Method], parameters: Mapping[str, Any]) -> Method:
    """A method with the parameters that a manifest holds."""
    own = {field.name: field.default for field in fields(method)}
    if unknown := parameters.keys() - own.keys():
        raise UsageError(f"this version knows no {', '.join(sorted(unknown))}")
    for name, value in parameters.items():
        # What decides a step's course: other kinds of values may first be met in the middle of an answer.
        if isinstance(own[name], bool | int | str) and type(value) is not type(own[name]):
            raise UsageError(f"its {name} is {value!r}")
    return method(**given_parameters(parameters))
