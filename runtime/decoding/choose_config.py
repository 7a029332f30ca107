"""The config that answers are decoded with: what the user named, or else what `tune` found for the index."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from sparsekv.formats.documents.document_hints import tune_hint
from sparsekv.formats.errors import ArtifactError, UsageError
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import Defaults, given_parameters
from sparsekv.runtime.attention.config import QUESTION_BUDGET, DecodeConfig, Dense, Own, QuestionPrefill
from sparsekv.runtime.decoding.prepare import residual_source
from sparsekv.runtime.selection.interface import Budget, Method, MethodSpec
from sparsekv.runtime.selection.registry import DENSE, configure, method_of, methods, methods_of, refuse_unused


def choose_config(
    artifact: Artifact,
    method: str | None = None,
    parameters: Mapping[str, Any] | None = None,
    *,
    budget: str | None = None,
    residual: bool = False,
    prefill: str | None = None,
    prefill_budget: str | None = None,
    **others: Any,
) -> DecodeConfig:
    """The config of a method, by name, or of `dense`; the index's default if the user named and set nothing.

    Args:
        parameters: of methods by name, None for one that the user did not set.
        budget: as the user wrote it; by default the method's own.
        residual: centroids represent the tokens that the method does not choose.
        prefill: what a question's tokens attend to: `own`, a method's name, or everything, as by default.
        prefill_budget: the budget of a method that is named as `prefill`.
        others: other fields of the config.

    Raises:
        UsageError: no such method, budget or parameter; one of these beside `dense`, which reads everything; a residual
            of an index without centroids; or what `DecodeConfig` raises.
        ArtifactError: the default's method cannot run any more.
    """
    parameters, prefilling = parameters or {}, prefill_method(artifact, prefill)
    share, defaults = None if budget is None else Budget.parse(budget), artifact.manifest.defaults
    # The parameters of a question's method say nothing of the answer's.
    elsewhere = {field.name for kind in prefilling.values() for field in fields(kind)}
    is_set = any(value is not None and name not in elsewhere for name, value in parameters.items())
    if defaults is not None and method is None and budget is None and not residual and not is_set:
        config = _default(artifact, defaults)
    else:
        name, kind = attention_of(artifact, method)
        if kind is Dense:
            refuse_beside_dense({"--budget": budget, "--residual": residual})
        refuse_unused({name: kind} | prefilling, parameters, {} if kind is Dense else methods())
        chosen = configure(kind, parameters)
        if isinstance(chosen, Dense):
            config = DecodeConfig(chosen)
        else:
            config = DecodeConfig(MethodSpec(name, "", chosen, residual), share or Budget(chosen.default_budget))
    question = question_prefill(prefill, prefill_budget, prefilling, parameters)
    if config.attention.residual:
        residual_source(artifact)
    return replace(config, question=question, **others)


def attention_of(artifact: Artifact, name: str | None) -> tuple[str, type[Method] | type[Dense]]:
    """A method's name and class, or those of dense attention; without a name the index's first method.

    Raises:
        UsageError: the index cannot be used with it.
    """
    if name == DENSE:
        return DENSE, Dense
    first = name or methods_of(artifact, list(artifact.manifest.methods), [DENSE])[0]
    found = method_of(artifact, first, [DENSE])
    return found, methods()[found]


def refuse_beside_dense(given: Mapping[str, Any]) -> None:
    """Raise UsageError for the first of these options that was given: dense attention reads everything."""
    for option, value in given.items():
        if value:
            told = option if value is True else f"{option} {value}"
            raise UsageError(f"{told}: means nothing with --method {DENSE}, which reads everything; leave it out")


def prefill_method(artifact: Artifact, name: str | None) -> dict[str, type[Method]]:
    """The method that `--prefill` names, under the name that errors use; empty without one, and for `dense` and
    `own`."""
    if name in (None, Own.name, DENSE):
        return {}
    try:
        found = method_of(artifact, name, [DENSE, Own.name])
    except UsageError as error:
        raise UsageError(f"--prefill {name}: {error}") from None
    return {f"--prefill {found}": methods()[found]}


def question_prefill(
    name: str | None,
    budget: str | None,
    named: Mapping[str, type[Method]],
    parameters: Mapping[str, Any],
    options: tuple[str, str] = ("--prefill", "--prefill-budget"),
) -> Dense | Own | QuestionPrefill:
    """The prefill of a question's tokens: dense if no `name` was given.

    Args:
        named: the method of this name, if there is one, as `prefill_method` returns it.
        options: those that gave `name` and `budget`.

    Raises:
        UsageError: a budget was given without a prefill method that uses one.
    """
    if budget is not None and not named:
        own = f"; {options[0]} own has the answer's budget" if name == Own.name else ""
        raise UsageError(
            f"{options[1]} {budget}: give it with {options[0]} and a method that chooses, such as quoka{own}"
        )
    if name is None or not named:
        return Own() if name == Own.name else Dense()
    (kind,) = named.values()
    return QuestionPrefill(name, configure(kind, parameters), Budget.parse(budget or QUESTION_BUDGET, options[1]))


def _default(artifact: Artifact, defaults: Defaults) -> DecodeConfig:
    try:
        method_of(artifact, defaults.method)
        configured = _configured(methods()[defaults.method], defaults.parameters)
    except (UsageError, TypeError, ValueError) as error:
        anew = defaults.target.model_copy(update={"methods": []})  # one of them may be gone
        raise ArtifactError(
            f"the default of {artifact.folder}, {defaults.method}, cannot run any more: {error}; run "
            f"{tune_hint(artifact.folder, anew)} again, or choose with --method"
        ) from None
    form = MethodSpec(defaults.method, defaults.variant, configured, defaults.residual)
    return DecodeConfig(
        form,
        Budget(defaults.budget),
        {layer: Budget(share) for layer, share in (defaults.layer_budgets or {}).items()},
        origin=f"the index's default: {form.title} at {100 * defaults.budget:.3g}%",
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
