"""Choose the config that answers are decoded with, and prepare its method for each layer of an index.

The config is the user's choice, or else the index's default. A layer's method has a residual if requested.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, NoReturn

import torch

from sparsekv.formats.documents.document_hints import tune_hint
from sparsekv.formats.errors import REBUILD, ArtifactError, UsageError, add_methods_hint
from sparsekv.formats.index.reader import CPU, Artifact
from sparsekv.formats.index.schema import Defaults, given_parameters, layer_file
from sparsekv.runtime.attention.config import QUESTION_BUDGET, DecodeConfig, Dense, Own, QuestionPrefill
from sparsekv.runtime.cache.kv_store import LayerRows, read_centroids
from sparsekv.runtime.selection.checked import prepare_selector
from sparsekv.runtime.selection.interface import (
    DENSE,
    Budget,
    LayerPosition,
    Method,
    MethodSpec,
    MiddleContext,
    Selector,
    methods,
)
from sparsekv.runtime.selection.registry import configure, method_of, methods_of, refuse_unused
from sparsekv.runtime.selection.wrappers import ResidualSelector, residual_clusters


def files_read(artifact: Artifact, attention: MethodSpec | Dense) -> list[str]:
    """Return the index's files that a method reads in addition to keys and values; none for dense attention.

    The files of the method whose clusters a residual uses are not included.
    """
    if isinstance(attention, Dense):
        return []
    folders = [attention.name, "queries"] if attention.method.needs_index else ["queries"]
    return [layer_file(folder, layer) for folder in folders for layer in artifact.manifest.indexed_layers]


def stored_context(
    rows: LayerRows, name: str, device: torch.device = CPU, shared: dict[str, Any] | None = None
) -> MiddleContext:
    """Return a selector's input for the layer of `rows`, with the index's tensors of the method `name`.

    Keys and values are read at first use.

    Args:
        shared: the state shared by the layers of one cache or report; new by default.
    """
    artifact, layer = rows.artifact, rows.layer
    manifest = artifact.manifest
    record = manifest.methods.get(name) if methods()[name].needs_index else None
    stored = {} if record is None else rows.method_tensors(name, device)
    tensors, in_8_bits = read_centroids(stored, getattr(torch, manifest.dtype))
    if "token_order" in tensors:
        tensors["token_order"] = tensors["token_order"] - manifest.split.sinks
    split, indexed = manifest.split, manifest.indexed_layers
    return MiddleContext(
        load_keys=partial(rows.middle, "keys", device),
        load_values=partial(rows.middle, "values", device),
        load_observed=partial(rows.observed_queries, device),
        facts=manifest.attending[layer],
        tensors=tensors,
        calibration={} if record is None else record.calibration,
        parameters={} if record is None else record.parameters,
        first_token=split.sinks,
        position=LayerPosition(indexed.index(layer), len(indexed), {} if shared is None else shared),
        centroids_in_8_bits=in_8_bits,
        mapped=(*rows.mapped_keys, *stored.values()) if device.type == "cpu" else (),
    )


@dataclass(frozen=True)
class PreparedLayer:
    """A selector, the context that the selector was prepared with, and the views of index files that it may read."""

    selector: Selector
    context: MiddleContext
    mapped: tuple[torch.Tensor, ...]


def prepare_layer(
    rows: LayerRows, form: MethodSpec, device: torch.device = CPU, shared: dict[str, Any] | None = None
) -> PreparedLayer:
    """Make a method's selector for the layer of `rows`, with a residual if requested.

    The centroids of the residual are the method's own, or those of another method of the index.

    Args:
        shared: the state shared by the layers of one cache or report; new by default.

    Raises:
        UsageError: a residual is requested, but no method of the index has value centroids, or the method appends
            tokens, which are in no cluster.
        ArtifactError: for the method, or for the method whose clusters the residual uses, parameters or calibration in
            the manifest are not valid, or tensors are missing.
    """
    artifact, context = rows.artifact, stored_context(rows, form.name, device, shared)
    with _told_of(form.name, artifact):
        selector = prepare_selector(form.method, context)
    if not form.residual or form.method.replaces() or selector.replace_by_own():
        return PreparedLayer(selector, context, context.mapped)
    if selector.append is not None:
        raise UsageError(
            f"--residual: with --stream, {form.name} adds generated tokens to its index, and the residual's clusters "
            "lack them; leave out one of the two options"
        )
    source = residual_source(artifact)
    lender = stored_context(rows, source, device)
    with _told_of(source, artifact):
        replacing = ResidualSelector(selector, residual_clusters(lender.tensors))
    return PreparedLayer(replacing, context, context.mapped + lender.mapped)


@dataclass
class PreparedMethod:
    """A method for the layers of one cache. Layers may be prepared before the cache takes them.

    Args:
        form: the method and its parameters.
        device: the device that searches the method's tensors.
        shared: the state shared by the layers.
    """

    form: MethodSpec
    device: torch.device = CPU
    shared: dict[str, Any] = field(default_factory=dict)
    _prepared: dict[int, PreparedLayer] = field(default_factory=dict)

    def is_like(self, other: "PreparedMethod") -> bool:
        """Whether both have the same method, residual and device, so that prepared layers are interchangeable."""
        mine, theirs = ((one.form.name, one.form.method, one.form.residual, one.device) for one in (self, other))
        return mine == theirs

    def copy(self) -> "PreparedMethod":
        """Return a copy that refers to the same prepared layers."""
        return replace(self, _prepared=dict(self._prepared))

    def prepare(self, rows: LayerRows) -> None:
        """Prepare the layer of `rows`, and store the result until `take`. Raises the errors of `prepare_layer`."""
        self._prepared[rows.layer] = self.take(rows)

    def take(self, rows: LayerRows) -> PreparedLayer:
        """Return the prepared layer of `rows`, and drop the reference to it. Prepares the layer first if necessary.

        Raises the errors of `prepare_layer`.
        """
        held = self._prepared.pop(rows.layer, None)
        return held or prepare_layer(rows, self.form, self.device, self.shared)


@contextmanager
def _told_of(name: str, artifact: Artifact) -> Iterator[None]:
    """Within the context, convert errors of preparing a method to an ArtifactError that names the method.

    Methods use an index's tensors, parameters and calibration without checking them first.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ArtifactError(
            f"{name} of {artifact.folder} does not have the tensors and parameters that this version builds "
            f"({type(error).__name__}: {error}); {REBUILD}"
        ) from error


def residual_source(artifact: Artifact) -> str:
    """Return the name of the index's method with the fewest value centroids, because these cost least to read.

    Raises:
        UsageError: no method has value centroids.
    """
    manifest = artifact.manifest
    first_layers = {name: manifest.files[layer_file(name, manifest.indexed_layers[0])] for name in manifest.methods}
    key = "level0.value_centroids"
    found = {name: file.tensors[key].shape[1] for name, file in first_layers.items() if key in file.tensors}
    if not found:
        raise UsageError(
            "--residual needs clusters with value centroids, and the index has none; add them with "
            + add_methods_hint(artifact.folder, ["multipole"])
        )
    return min(found, key=lambda name: found[name])


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
        others: other fields of the config.

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
        config = _default(artifact, defaults)
    else:
        name, kind = attention_of(artifact, method)
        if kind is Dense:
            refuse_beside_dense({"--budget": budget, "--residual": residual})
        decoding = () if prefill == Own.name else (name,)
        refuse_unused({name: kind} | prefilling, parameters, {} if kind is Dense else methods(), decoding)
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
"""Bytes of a layer's keys and values below which a GPU reads all of them while a method's kernels still select tokens.

On an H200 a step of codes takes at least 24 microseconds, in which dense attention reads 45 to 60 MB.
"""


def dense_if_short(artifact: Artifact, config: DecodeConfig) -> DecodeConfig:
    """Return a default config for one question on a GPU: dense attention if the document is short (`SHORT`).

    A setting that `tune` stored stays.
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


def refuse_beside_dense(given: Mapping[str, Any]) -> None:
    """Raise UsageError for the first option in `given` whose value is set; dense attention uses none of them."""
    for option, value in given.items():
        if value:
            told = option if value is True else f"{option} {value}"
            raise UsageError(f"{told} has no effect with --method {DENSE}, which attends to all tokens; leave it out")


def idle_budget(attention: MethodSpec | QuestionPrefill | Dense | Own, option: str) -> str:
    """Return a line that says that a budget has no effect on a method; empty if it has one.

    Args:
        option: the option and its value, such as `--budget 5%`.
    """
    if isinstance(attention, MethodSpec | QuestionPrefill) and attention.method.ignores_budget:
        return f"{option} has no effect on {attention.name}, which selects the same tokens for any budget"
    return ""


def refuse_idle_budget(attention: MethodSpec | QuestionPrefill | Dense | Own, option: str, budget: object) -> None:
    """Raise UsageError if a budget is given, which may be None, and the method ignores it."""
    if budget is not None and (told := idle_budget(attention, f"{option} {budget}")):
        raise UsageError(f"{told}; leave it out")


def refuse_residual(methods: Iterable[str]) -> NoReturn:
    """Raise UsageError for --residual with methods that represent the tokens that they do not select themselves."""
    raise UsageError(
        f"--residual has no effect on {', '.join(methods)}: the tokens that are not selected are represented without "
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
