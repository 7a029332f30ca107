"""The index, method and budget that a request's model name stands for, and the description of an index."""

import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from sparsekv.cli.serving.errors import ApiError
from sparsekv.cli.serving.requests import Extension
from sparsekv.cli.serving.responses import ModelDetails, ModelSent
from sparsekv.cli.serving.shelf import ENDING, Served, Shelf
from sparsekv.formats.errors import UsageError, suggestion
from sparsekv.runtime.api import api_words
from sparsekv.runtime.attention.config import DecodeConfig, Dense, QuestionPrefill, estimates_missed
from sparsekv.runtime.decoding.choose_config import (
    attention_of,
    choose_config,
    prefill_method,
    question_prefill,
    refuse_beside_dense,
    refuse_idle_budget,
)
from sparsekv.runtime.selection.interface import DENSE, Budget, methods
from sparsekv.runtime.selection.registry import methods_of

SETTING = re.compile(r"(?::(?P<method>[^@:]+))?(?:@(?P<budget>[^@:]+))?")
"""The part of a model name after the name of an index: `:METHOD`, `@BUDGET`, or both."""


async def find(shelf: Shelf, model: str, extension: Extension | None = None) -> tuple[Served, DecodeConfig]:
    """Return the index of a model name, and the config of the answer.

    Raises:
        ApiError: the index does not exist (404), or the method, budget, prefill or gauge cannot be used (400).
        SparsekvError: the index cannot be opened.
    """
    name, method, budget = _parsed(shelf, model)
    if (served := await shelf.find(name)) is None:
        raise unknown(shelf, model)
    own = extension or Extension()
    for field, by_model, given in (("method", method, own.method), ("budget", budget, own.budget)):
        if by_model is not None and given is not None:
            told = f"the model {model} names a {field} already; leave sparsekv.{field} out"
            raise ApiError(400, told, param=f"sparsekv.{field}", code="invalid_value")
    # `str` keeps 1 (one token) and 1.0 (all tokens) apart, as on the command line.
    written = budget if own.budget is None else str(own.budget)
    try:
        with api_words():
            config = config_of(served, method or own.method, written, own.prefill, gauge=bool(own.gauge))
            return served, _gauged(served, config) if own.gauge else config
    except UsageError as error:
        param = "model" if method or budget else "sparsekv"
        raise ApiError(400, str(error), param=param, code="invalid_value") from None


def described(served: Served) -> ModelSent:
    """Return the entry of an open index in `/v1/models`."""
    artifact = served.opened.artifact
    details = ModelDetails(
        model=Path(artifact.manifest.model.id).name,  # clients must not see the folder of a local model
        tokens=artifact.manifest.split.tokens,
        methods=[*methods_of(artifact), DENSE],
        method=served.config.attention.name,
        budget=served.config.budget.value,
        dense_from=served.config.dense_from,
    )
    created = int(datetime.fromisoformat(artifact.manifest.created).timestamp())
    return ModelSent(id=served.name, created=created, sparsekv=details)


def listed(shelf: Shelf) -> list[ModelSent]:
    """Return the entries of all indices in `/v1/models`. Indices that are not open have no details."""
    opened = {one.name: described(one) for one in shelf.opened()}
    return [opened.get(name) or ModelSent(id=name, created=0) for name in shelf.names()]


def _parsed(shelf: Shelf, model: str) -> tuple[str, str | None, str | None]:
    """Split a model name into the name of an index, a method and a budget.

    A model name that equals the name of an index has neither method nor budget. The name of the index may end in
    `.skv`, like the name of its folder. Raises ApiError (404) if no index has the name.
    """
    names = shelf.names()
    if model in names:
        return model, None, None
    for name in sorted(names, key=len, reverse=True):
        for written in (name + ENDING, name):
            if model.startswith(written) and (found := SETTING.fullmatch(model, len(written))):
                return name, found["method"], found["budget"]
    raise unknown(shelf, model)


def unknown(shelf: Shelf, model: str, param: str = "model") -> ApiError:
    """Return the error for a name without an index. `param` is the field of the request that has the name."""
    names = shelf.names()
    told = f"no model '{model}'{suggestion(model, names)}; there are: {', '.join(names)}"
    return ApiError(404, told, param=param, code="model_not_found")


def config_of(
    served: Served,
    method: str | None = None,
    budget: str | None = None,
    prefill: str | None = None,
    *,
    gauge: bool = False,
) -> DecodeConfig:
    """Return the config of a request. An argument is None if the request does not set it.

    Dense attention does not use the method that `--prefill` of the server names. Where the server takes dense attention
    because it is faster, a budget, a gauge or a method in `prefill` still needs the method.

    Args:
        gauge: whether the request needs a method that estimates its missed mass. The config does not measure it yet.

    Raises:
        UsageError: the method or the prefill does not exist, the budget is not valid, or the values contradict each
            other.
    """
    artifact, given, named = served.opened.artifact, budget, prefill_method(served.opened.artifact, prefill)
    needs_method = budget is not None or named or gauge
    config = served.by_method if needs_method and isinstance(served.config.attention, Dense) else served.config
    if method is not None:
        _, kind = attention_of(artifact, method)
        if budget is None and kind is not Dense:
            budget = served.budget
        chosen = choose_config(artifact, method, budget=budget, placement=config.placement)
        config = replace(chosen, question=config.question)
    elif budget is not None:
        if isinstance(config.attention, Dense):
            refuse_beside_dense({"--budget": budget})
        config = replace(config, budget=Budget.parse(budget), layer_budgets={}, dense_from=None, origin="")
    refuse_idle_budget(config.attention, "--budget", given)
    if prefill is not None:
        config = replace(config, question=question_prefill(prefill, None, named, {}))
    if isinstance(config.attention, Dense) and isinstance(config.question, QuestionPrefill):
        refuse_beside_dense({"--prefill": prefill})
        return replace(config, question=Dense())
    return config


def _gauged(served: Served, config: DecodeConfig) -> DecodeConfig:
    """Return a config that measures the missed mass. Raises UsageError if the method cannot estimate it."""
    if isinstance(config.attention, Dense):
        refuse_beside_dense({"gauge": True})
    elif not estimates_missed(config.attention.method, residual=config.attention.residual):
        artifact = served.opened.artifact
        able = [name for name in methods_of(artifact) if estimates_missed(methods()[name](), residual=False)]
        remedy = f"ask by {' or '.join(able)}, or leave it out" if able else "leave it out"
        raise UsageError(f"gauge: {config.attention.name} cannot estimate how much attention it misses; {remedy}")
    return replace(config, gauge=True)
