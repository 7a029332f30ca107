"""The setting to decode with: what a person asked for, or else what `tune` found for the index."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from sparsekv.formats.errors import ArtifactError, UsageError
from sparsekv.formats.hints import tune_hint
from sparsekv.formats.reader import Artifact
from sparsekv.formats.schema import Defaults
from sparsekv.runtime.attention.question import DENSE
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.configure import configure, refuse_unused
from sparsekv.runtime.selection.form import Form
from sparsekv.runtime.selection.interface import Method
from sparsekv.runtime.selection.registry import methods, methods_of


@dataclass(frozen=True)
class DenseAttention:
    """Dense attention as a thing with options, of which it has none."""


@dataclass(frozen=True)
class Setting:
    """A form of a method with its budgets, or dense attention, which has no form.

    `origin` says where they are from, where the user did not choose.
    """

    form: Form | None
    budget: Budget
    layer_budgets: dict[int, Budget] | None = None
    origin: str = ""

    @property
    def name(self) -> str:
        """The method's, or `dense`."""
        return DENSE if self.form is None else self.form.name

    @property
    def method(self) -> Method | None:
        """The method with its parameters; None for dense attention."""
        return None if self.form is None else self.form.method

    @property
    def residual(self) -> bool:
        """Whether another method's centroids stand for what is not chosen."""
        return self.form is not None and self.form.residual


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
        prefilling: the method of a question's tokens, if they have one: its parameters say nothing of the answer's.

    Raises:
        UsageError: no such method, budget or parameter, or one of these beside `dense`, which reads everything.
        ArtifactError: the default's method cannot run any more.
    """
    wanted = None if budget is None else Budget.parse(budget)
    defaults = artifact.manifest.defaults
    elsewhere = {field.name for of in prefilling.values() for field in fields(of)}
    given = {name for name, value in parameters.items() if value is not None}
    asked = method or wanted or residual or given - elsewhere
    if defaults is not None and not asked:
        return _default(artifact, defaults)
    if method == DENSE:
        refuse_beside_dense({"--budget": budget, "--residual": residual})
        refuse_unused({DENSE: DenseAttention} | dict(prefilling), parameters)
        return Setting(None, Budget(1.0))
    indexed = list(artifact.manifest.methods)
    name = methods_of(artifact, [method] if method else indexed)[0]
    kind = methods()[name]
    refuse_unused({name: kind} | dict(prefilling), parameters)
    form = Form(name, "", configure(kind, parameters), residual)
    return Setting(form, wanted or Budget(kind.default_budget))


def options_of(artifact: Artifact, method: str) -> set[str]:
    """The options that mean something to a method: its parameters, `budget` and `residual`; none to dense attention.

    Raises:
        UsageError: the index cannot be used with it.
    """
    if method == DENSE:
        return set()
    kind = methods()[methods_of(artifact, [method])[0]]
    return {"budget", "residual", *(field.name for field in fields(kind))}


def refuse_beside_dense(given: Mapping[str, Any]) -> None:
    """Raise UsageError for the first of these options that was given: dense attention reads everything."""
    for option, value in given.items():
        if value:
            told = option if value is True else f"{option} {value}"
            raise UsageError(f"{told}: means nothing with --method {DENSE}, which reads everything; leave it out")


def _default(artifact: Artifact, defaults: Defaults) -> Setting:
    try:
        methods_of(artifact, [defaults.method])
        configured = _configured(methods()[defaults.method], defaults.parameters)
    except UsageError as error:
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
    """A method with the parameters that a manifest holds, in which tuples are lists."""
    unknown = parameters.keys() - {field.name for field in fields(method)}
    if unknown:
        raise UsageError(f"this version knows no {', '.join(sorted(unknown))}")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in parameters.items()}
    return method(**values)
