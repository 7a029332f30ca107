"""The served indices by name, and what a request's model name means: an index, a method and a budget."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path

from sparsekv.cli.serving.errors import ApiError
from sparsekv.cli.serving.requests import Extension
from sparsekv.cli.serving.responses import ModelDetails, ModelSent
from sparsekv.formats.errors import UsageError, suggestion
from sparsekv.runtime.api import api_words
from sparsekv.runtime.attention.config import DecodeConfig, Dense, QuestionPrefill
from sparsekv.runtime.decoding.choose_config import (
    choose_config,
    prefill_method,
    question_prefill,
    refuse_beside_dense,
)
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.selection.interface import Budget
from sparsekv.runtime.selection.registry import DENSE, methods_of

SETTING = re.compile(r"(?::(?P<method>[^@:]+))?(?:@(?P<budget>[^@:]+))?")
"""What may follow the name of an index: `:METHOD`, `@BUDGET`, or both."""
KEPT_CONFIGS = 256


def served_name(folder: Path) -> str:
    """Return the name under which an index is served: its folder's, without the ending.

    Raises:
        UsageError: the name is not text in UTF-8.
    """
    name = folder.absolute().name.removesuffix(".skv")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{folder}: its name is not text in UTF-8, so no request can name it; rename it") from None
    return name


def refuse_same_names(folders: Iterable[Path]) -> None:
    """Raise UsageError if two indices would be served under one name."""
    seen: dict[str, Path] = {}
    for folder in folders:
        name = served_name(folder)
        if name in seen:
            raise UsageError(f"{seen[name]} and {folder} would both be served as {name}; rename one of them")
        seen[name] = folder


@dataclass(frozen=True)
class Served:
    """A served index, and the config of requests that name no method, budget or prefill.

    budget: the budget that the command line gave, which holds for every method; None for each method's own.
    """

    name: str
    opened: OpenIndex
    config: DecodeConfig
    budget: str | None = None

    @property
    def sent(self) -> ModelSent:
        """The index as `/v1/models` lists it."""
        artifact = self.opened.artifact
        details = ModelDetails(
            model=Path(artifact.manifest.model.id).name,  # of a local model not its folder
            tokens=artifact.manifest.split.tokens,
            methods=[*methods_of(artifact), DENSE],
            method=self.config.attention.name,
            budget=self.config.budget.value,
        )
        created = int(datetime.fromisoformat(artifact.manifest.created).timestamp())
        return ModelSent(id=self.name, created=created, sparsekv=details)

    def config_of(self, method: str | None, budget: str | None, prefill: str | None) -> DecodeConfig:
        """Return the config of a request that names some of these.

        Raises:
            UsageError: a method or a budget does not exist, or they do not go together.
        """
        config, artifact = self.config, self.opened.artifact
        if method is not None:
            of_server = None if method == DENSE else self.budget
            chosen = choose_config(artifact, method, budget=budget or of_server, placement=config.placement)
            config = replace(chosen, question=config.question)
        elif budget is not None:
            if isinstance(config.attention, Dense):
                refuse_beside_dense({"--budget": budget})
            config = replace(config, budget=Budget.parse(budget), layer_budgets={}, origin="")
        if prefill is not None:
            named = prefill_method(artifact, prefill)
            config = replace(config, question=question_prefill(prefill, None, named, {}))
        if isinstance(config.attention, Dense) and isinstance(config.question, QuestionPrefill):
            refuse_beside_dense({"--prefill": config.question.name})
        return config


class Catalog:
    """The served indices by name."""

    def __init__(self, served: Mapping[str, Served]):
        self.served = served
        # Requests of equal configs share steps: the same setting gets the same object.
        self._config = lru_cache(maxsize=KEPT_CONFIGS)(self._config_of)

    def find(self, model: str, extension: Extension | None = None) -> tuple[Served, DecodeConfig]:
        """Return the index that a model name means, and the config of an answer.

        Raises:
            ApiError: there is no such index (404), or no such setting of it (400).
        """
        served, method, budget = self._parsed(model)
        own = extension or Extension()
        for name, by_model, given in (("method", method, own.method), ("budget", budget, own.budget)):
            if by_model is not None and given is not None:
                told = f"the model {model} names a {name} already; leave sparsekv.{name} out"
                raise ApiError(400, told, param=f"sparsekv.{name}", code="invalid_value")
        # As on the command line a whole number counts tokens, and 1.0 is everything.
        written = budget if own.budget is None else str(own.budget)
        try:
            return served, self._config(served.name, method or own.method, written, own.prefill)
        except UsageError as error:
            param = "model" if method or budget else "sparsekv"
            raise ApiError(400, str(error), param=param, code="invalid_value") from None

    def without_folders(self, message: str) -> str:
        """Return a message with the names of indices in place of their paths, which are not for clients."""
        for name, served in self.served.items():
            message = message.replace(str(served.opened.artifact.folder), name)
        return message

    def _parsed(self, model: str) -> tuple[Served, str | None, str | None]:
        if (served := self.served.get(model)) is not None:
            return served, None, None
        for name in sorted(self.served, key=len, reverse=True):
            if model.startswith(name) and (found := SETTING.fullmatch(model, len(name))):
                return self.served[name], found["method"], found["budget"]
        told = f"no model '{model}'{suggestion(model, self.served)}; there are: {', '.join(self.served)}"
        raise ApiError(404, told, param="model", code="model_not_found")

    def _config_of(self, name: str, method: str | None, budget: str | None, prefill: str | None) -> DecodeConfig:
        with api_words():
            return self.served[name].config_of(method, budget, prefill)
