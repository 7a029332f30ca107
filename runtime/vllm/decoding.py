"""Sparse decode steps of an engine's requests over indices, in which a method selects the rows of the document.

Each request has its own layers, with the exact rows: sinks, tail, and the rows after the document. All requests over an
index share its selectors and the middle's rows, which are read from the index's files. A server's settings and a
request's extra arguments name the method and the budget.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.reader import ArtifactShare
from sparsekv.kernels.common.hook import AttentionCall
from sparsekv.runtime.attention.config import Dense
from sparsekv.runtime.attention.plan import LayerPlan, plan_layer
from sparsekv.runtime.attention.sparse_layer import SparseLayer
from sparsekv.runtime.cache.index_cache import BuiltLayers
from sparsekv.runtime.cache.kv_store import LayerRows
from sparsekv.runtime.decoding.choose_config import choose_config
from sparsekv.runtime.decoding.prepare import PreparedMethod, files_read
from sparsekv.runtime.decoding.sparse_layers import SparseLayers
from sparsekv.runtime.selection.interface import DENSE, Budget, methods
from sparsekv.runtime.selection.token_choice import LayerSharing
from sparsekv.runtime.vllm.paged import BlockLayout, PagedLayer, slots_of

Within = Budget | Literal["default"]
"""Budget of a sparse request; "default": the method's default for the request's index."""

SETTINGS = ("indices", "method", "budget")
"""Names in kv_connector_extra_config."""
REQUEST = "sparsekv_budget"
"""Name of a request's budget among its extra arguments."""


def refuse_unknown(config: Mapping[str, Any]) -> None:
    """Raise UsageError if kv_connector_extra_config has a name that is not among SETTINGS, or no list of indices."""
    for name in config:
        if name not in SETTINGS:
            raise UsageError(f'kv_connector_extra_config: no setting is called "{name}"; use {", ".join(SETTINGS)}')
    names = config.get("indices")
    if not names or not isinstance(names, list):
        raise UsageError('kv_connector_extra_config needs "indices", a list of folders, such as ["manual.skv"]')


@dataclass(frozen=True)
class DecodeSetting:
    """The method of a server's decode steps, and the `budget` of requests that name no budget.

    If `budget` is None, these requests attend densely.
    """

    method: str
    budget: Within | None

    def __str__(self) -> str:
        budget = "its default budget" if self.budget == "default" else self.budget or DENSE
        return f"{self.method} within {budget}"

    @classmethod
    def parse(cls, method: Any, budget: Any) -> "DecodeSetting | None":
        """Return the setting; None without a method.

        Raises:
            UsageError: there is no such method, the budget is not valid, or a budget is given without a method.
        """
        if method is None:
            if budget is not None:
                raise UsageError('kv_connector_extra_config: "budget" needs "method", such as "codes"')
            return None
        if not isinstance(method, str) or method not in methods():
            names = ", ".join(sorted(name for name, kind in methods().items() if kind.needs_index))
            raise UsageError(
                f'kv_connector_extra_config: no "method" {method!r}; use one of {names}, if the indices '
                "were built with it, or one that needs no index, such as quest"
            )
        if budget is None:
            return cls(method, "default")
        return cls(method, _budget(budget, 'kv_connector_extra_config: "budget"'))


def budget_of(setting: DecodeSetting | None, arguments: Mapping[str, Any]) -> Within | None:
    """Return the budget of a request with the extra arguments `arguments`; None: the request attends densely.

    Raises:
        UsageError: the request's budget is not valid, or is given while the server has no method.
    """
    asked = arguments.get(REQUEST)
    if setting is None:
        if asked is not None:
            raise UsageError(f'{REQUEST} {asked} needs a server with "method" in its kv_connector_extra_config')
        return None
    return setting.budget if asked is None else _budget(asked, REQUEST)


def _budget(value: Any, option: str) -> Budget | None:
    return None if value == DENSE else Budget.parse(str(value), option)


AnswerLayers = Mapping[int, SparseLayer]
"""The layers that attend sparsely for a request, by their number in the model."""


@dataclass(frozen=True)
class Decode:
    """A decode step of a request over an index, for the answer's token at `position`.

    Attributes:
        blocks: numbers of the request's blocks from the token `first` on. They include all tokens after the index's
            prompt.
    """

    request: str
    index: str
    budget: Within
    position: int
    blocks: list[int]
    first: int

    def slots(self, size: int, tokens: range) -> torch.Tensor:
        """Return the cache slots [T] of tokens in `blocks`; a block has `size` tokens."""
        return slots_of(self.blocks, size, range(tokens.start - self.first, tokens.stop - self.first))


class IndexLayers:
    """An index's layers that attend sparsely, prepared for a method.

    Args:
        artifact: the index, with the KV heads of this process.
        calls: an attention call of each layer of this process, in the engine's dtype, with the layer's scale, window,
            soft cap and sinks.

    Raises:
        SparsekvError: the index lacks the method, its files are damaged, the method keeps state of one request or lets
            layers share a ranking, or the engine attends with other settings than the build.
    """

    def __init__(self, artifact: ArtifactShare, method: str, calls: Sequence[AttentionCall]):
        self._config, self._split = choose_config(artifact, method), artifact.manifest.split
        attention, built = self._config.attention, BuiltLayers(artifact.manifest.layers)
        if isinstance(attention, Dense) or isinstance(attention.method, LayerSharing):
            raise UsageError(f"{method} does not select each layer's tokens for each request alone; use codes")
        for call in calls:
            built.check(call)
        artifact.check_sums(files_read(artifact, attention))
        device, dtype = calls[0].query.device, calls[0].query.dtype
        prepared = PreparedMethod(attention, device)
        sparse = SparseLayers(
            artifact, device, dtype, lambda layer: LayerRows(artifact, layer), prepared, self._split, self._config, None
        )
        indexed = [call for call in calls if call.window is None]
        self._parts = {call.layer: sparse.parts(call.layer) for call in indexed}
        if not all(_serves_many(plan_layer(parts, self._config)) for _, parts in self._parts.values()):
            raise UsageError(f"{method} keeps state of one request, which others cannot use; use codes")
        if indexed:
            attend(self.answer(Budget(1)), indexed[0])  # compiles the step, which takes seconds the first time

    @property
    def tokens(self) -> int:
        """Number of the index's tokens."""
        return self._split.tokens

    def answer(self, budget: Within) -> AnswerLayers:
        """Make the layers of a request that decodes within a budget. Copies the rows of sinks and tail."""
        config = self._config if budget == "default" else replace(self._config, budget=budget)
        return {
            number: SparseLayer(exact, self._split, plan_layer(parts, config))
            for number, (exact, parts) in self._parts.items()
        }


def _serves_many(plan: LayerPlan) -> bool:
    return plan.shareable and plan.selector.conversation is None


class DecodeSteps:
    """The requests that decode sparsely in the engine's current step.

    A request's layers are kept from one engine step to the next. They are made anew from the engine's cache if the
    previous engine step had no decode step of the request, or if the request is not at the layers' next position.

    Args:
        caches: the engine's caches of the layers, with their layouts.
        block: number of tokens of a block.
    """

    def __init__(self, caches: Mapping[int, tuple[PagedLayer, BlockLayout]], block: int):
        self._caches, self._block = caches, block
        self._indices: dict[str, IndexLayers] = {}
        self._answers: dict[str, AnswerLayers] = {}
        self._by_slot: dict[int, AnswerLayers] = {}

    def add(self, name: str, index: IndexLayers) -> None:
        self._indices[name] = index

    def begin(self, decodes: Iterable[Decode]) -> None:
        """Begin an engine step with its sparse decode steps. Steps over an index that was not added attend densely."""
        answers, self._by_slot = self._answers, {}
        self._answers = {}
        for one in decodes:
            if one.index not in self._indices:
                continue
            layers = answers.get(one.request)
            if layers is None or any(layer.get_seq_length() != one.position for layer in layers.values()):
                layers = self._resume(one)
            (slot,) = one.slots(self._block, range(one.position, one.position + 1)).tolist()
            self._answers[one.request] = self._by_slot[slot] = layers

    def at(self, slot: int) -> AnswerLayers | None:
        """Return the layers of the request whose new token writes to a cache slot; None if it attends densely."""
        return self._by_slot.get(slot)

    def _resume(self, decode: Decode) -> AnswerLayers:
        """Make a request's layers, with the rows of its tokens after the document that the engine has computed."""
        index = self._indices[decode.index]
        layers, slots = index.answer(decode.budget), decode.slots(self._block, range(index.tokens, decode.position))
        for number, layer in layers.items():
            cache, layout = self._caches[number]
            keys, values = layout.read(cache, slots)
            layer.update(keys[None], values[None])
        return layers


def attend(layers: AnswerLayers, call: AttentionCall) -> torch.Tensor:
    """Append a decode step's row to a request's layer, and attend; return [Hq, 1, D]."""
    layer = layers[call.layer]
    layer.update(call.keys[None], call.values[None])
    return layer.attend(call)


class SparseAttention(ABC):
    """Mixin for an engine's attention of one layer, with which the layer can decode sparsely.

    Attributes:
        number: index of the layer in its model.
        steps: the requests that decode sparsely; None: all tokens attend densely.
    """

    number: int
    steps: DecodeSteps | None = None

    @abstractmethod
    def call(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> AttentionCall:
        """Return the attention call of one token's query [Hq, D], keys and values [Hk, D]."""
