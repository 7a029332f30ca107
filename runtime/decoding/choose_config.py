"""Choose the config that answers are decoded with: the user's choice, or else the index's default."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any, NoReturn

from sparsekv.formats.documents.document_hints import tune_hint
from sparsekv.formats.errors import ArtifactError, UsageError, add_methods_hint, any_of
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import Defaults, given_parameters, layer_file
from sparsekv.runtime.attention.config import QUESTION_BUDGET, DecodeConfig, Dense, Own, QuestionPrefill
from sparsekv.runtime.decoding.prepare import residual_source
from sparsekv.runtime.selection.interface import DENSE, Budget, Method, MethodSpec, methods
from sparsekv.runtime.selection.registry import configure, method_of, methods_of, refuse_unused


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
    """Make the decode config of a method, given by name, or of `dense` attention.

    If the user set no method, budget, parameter or residual, the setting that `tune` stored in the index is used, if
    there is one. In all other cases a missing method is chosen by `attention_of`.

    Args:
        parameters: method parameters by name; None for a parameter that the user did not set.
        budget: the budget as the user wrote it; by default the method's own.
        residual: let centroids represent the tokens that the method would drop. The config has no residual for a method
            that drops none.
        prefill: attention of a question's tokens: `own` (the answer's method), a method's name, or `dense` (default).
        prefill_budget: the budget of the method that `prefill` names; by default `QUESTION_BUDGET`.
        others: values of further fields of `DecodeConfig`, by name.

    Raises:
        UsageError: a method, budget or parameter does not exist; a budget, parameter or residual is given with `dense`;
            `prefill_budget` is given without a method in `prefill`; the index has no centroids for a residual; or
            `DecodeConfig` refuses the values.
        ArtifactError: the setting that `tune` stored cannot run any more.
    """
    parameters, prefilling = parameters or {}, prefill_method(artifact, prefill)
    share, defaults = None if budget is None else Budget.parse(budget), artifact.manifest.defaults
    # Parameters of the question's method do not count as parameters of the answer's method.
    elsewhere = {field.name for kind in prefilling.values() for field in fields(kind)}
    is_set = any(value is not None and name not in elsewhere for name, value in parameters.items())
    if defaults is not None and method is None and budget is None and not residual and not is_set:
        refuse_unused(prefilling, parameters, asking=prefilling)
        config = _default(artifact, defaults)
    else:
        name, kind = attention_of(artifact, method)
        if kind is Dense:
            refuse_beside_dense({"--budget": budget, "--residual": residual})
        decoding = () if prefill == Own.name else (name,)
        among = {} if kind is Dense else methods()
        built = artifact.manifest.methods
        lacking = {
            one: add_methods_hint(artifact.folder, [one])
            for one, method in among.items()
            if method.needs_index and one not in built
        }
        refuse_unused({name: kind} | prefilling, parameters, among, decoding, asking=prefilling, lacking=lacking)
        chosen = configure(kind, parameters)
        if isinstance(chosen, Dense):
            config = DecodeConfig(chosen)
        else:
            share = share or chosen.default_budget(artifact.manifest.split.middle)
            config = DecodeConfig(MethodSpec(name, "", chosen, residual and not chosen.replaces()), share)
    question = question_prefill(prefill, prefill_budget, prefilling, parameters)
    if config.attention.residual:
        residual_source(artifact)
    return replace(config, question=question, **others)


SHORT = 48 * 2**20
"""Bytes of one layer's keys and values below which dense attention on a GPU is as fast as selecting tokens.

On an H200 a step of the method codes takes at least 24 microseconds, in which dense attention reads 45 to 60 MB.
"""


def dense_if_short(artifact: Artifact, config: DecodeConfig) -> DecodeConfig:
    """Return the config for one question on a GPU: dense attention if the document is short (`SHORT`), else `config`.

    A config that comes from the setting that `tune` stored is returned unchanged.
    """
    layer = artifact.manifest.files[layer_file("context", artifact.manifest.indexed_layers[0])]
    if isinstance(config.attention, Dense) or config.origin or layer.bytes >= SHORT:
        return config
    return config.densely(
        "dense attention, which is as fast on a GPU over so short a document; "
        f"--method {config.attention.name} selects tokens"
    )


def attention_of(artifact: Artifact, name: str | None) -> tuple[str, type[Method] | type[Dense]]:
    """Return the name and class of a method or of dense attention.

    Without a name, return the first method that the index was built with, or, if there is none, the first registered
    method that needs no index.

    Raises:
        UsageError: there is no such method, or the index was not built with it.
    """
    if name == DENSE:
        return DENSE, Dense
    if name is None:
        name = methods_of(artifact, list(artifact.manifest.methods)[:1], [DENSE])[0]
    found = method_of(artifact, name, [DENSE])
    return found, methods()[found]


def refuse_beside_dense(options: Mapping[str, Any]) -> None:
    """Raise UsageError for the first option whose value is set, because dense attention uses none of the options."""
    for option, value in options.items():
        if value:
            told = option if value is True else f"{option} {value}"
            raise UsageError(f"{told} has no effect with --method {DENSE}, which attends to all tokens; leave it out")


def idle_budget(attention: MethodSpec | QuestionPrefill | Dense | Own, option: str) -> str:
    """Return a line that says that a budget has no effect on a method; an empty string if the budget has an effect.

    Args:
        option: the option and its value, such as `--budget 5%`.
    """
    if isinstance(attention, MethodSpec | QuestionPrefill) and attention.method.ignores_budget:
        return f"{option} has no effect on {attention.name}, which selects the same tokens for any budget"
    return ""


def refuse_idle_budget(attention: MethodSpec | QuestionPrefill | Dense | Own, option: str, budget: object) -> None:
    """Raise UsageError if the method ignores its budget, unless the budget is None."""
    if budget is not None and (told := idle_budget(attention, f"{option} {budget}")):
        raise UsageError(f"{told}; leave it out")


def refuse_residual(methods: Iterable[str]) -> NoReturn:
    """Raise UsageError for --residual with methods that represent unselected tokens without it."""
    raise UsageError(
        f"--residual has no effect on {any_of(methods)}: the tokens that are not selected are represented without "
        "it; leave it out"
    )


def prefill_method(artifact: Artifact, name: str | None) -> dict[str, type[Method]]:
    """Return a dict with the method class that `--prefill` names. The key is `--prefill NAME`, for error messages.

    The dict is empty if `name` is None, `dense` or `own`. Raises UsageError if there is no such method, or if the index
    was not built with it.
    """
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
    """Make the prefill config of a question's tokens; dense if `name` is None.

    Args:
        named: the result of `prefill_method` for `name`.
        options: the command-line options of `name` and `budget`, for errors.

    Raises:
        UsageError: a budget is given without a prefill method that uses one, the text is not a budget, or a parameter
            of the method is not valid.
    """
    if budget is not None and not named:
        own = f"; {options[0]} own has the answer's budget" if name == Own.name else ""
        raise UsageError(
            f"{options[1]} {budget}: this option needs {options[0]} with a method that selects tokens, such "
            f"as quoka{own}"
        )
    if name is None or not named:
        return Own() if name == Own.name else Dense()
    (kind,) = named.values()
    share = Budget.parse(QUESTION_BUDGET if budget is None else budget, options[1])
    return QuestionPrefill(name, configure(kind, parameters), share)


def _default(artifact: Artifact, defaults: Defaults) -> DecodeConfig:
    try:
        method_of(artifact, defaults.method)
        configured = _configured(methods()[defaults.method], defaults.parameters)
    except (UsageError, TypeError, ValueError) as error:
        anew = defaults.target.model_copy(update={"methods": []})  # the index may lack some of the target's methods now
        raise ArtifactError(
            f"the default of {artifact.folder}, {defaults.method}, can no longer run: {error}; run "
            f"{tune_hint(artifact.folder, anew)} again, or name a method with --method"
        ) from None
    form = MethodSpec(defaults.method, defaults.variant, configured, defaults.residual)
    return DecodeConfig(
        form,
        Budget(defaults.budget),
        {layer: Budget(share) for layer, share in (defaults.layer_budgets or {}).items()},
        origin=f"the index's default: {form.title} at {100 * defaults.budget:.3g}%",
    )


def _configured(method: type[Method], parameters: Mapping[str, Any]) -> Method:
    """Make a method with the parameters that a manifest stores; raise UsageError if they do not fit the method."""
    own = {field.name: field.default for field in fields(method)}
    if unknown := parameters.keys() - own.keys():
        raise UsageError(f"this version has no option {', '.join(sorted(unknown))}")
    for name, value in parameters.items():
        # Checked here, because a value of another type might only fail in the middle of an answer.
        if isinstance(own[name], bool | int | str) and type(value) is not type(own[name]):
            raise UsageError(f"its {name} is {value!r}, which is not of type {type(own[name]).__name__}")
    return method(**given_parameters(parameters))
