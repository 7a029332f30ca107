"""Opening an index with its model: the identity checks, the probe, and the caches to decode with."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparsekv.formats.errors import ArtifactError, IdentityError, UsageError
from sparsekv.formats.identity import check_model, check_tokenizer
from sparsekv.formats.manifest import REBUILD
from sparsekv.formats.reader import Artifact
from sparsekv.formats.schema import ModelIdentity, Split, TokenizerIdentity, layer_file
from sparsekv.formats.values import check_values
from sparsekv.kernels.common.hook import route_attention
from sparsekv.runtime.attention.guard import Gauge, Guard, tells_missed
from sparsekv.runtime.attention.question import QuestionPrefill, QuestionSearch
from sparsekv.runtime.attention.sparse_layer import SparseLayer
from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.cache.kv_store import DiskRows, MemoryRows, MiddleRows, Pair, check_placement
from sparsekv.runtime.cache.stored_layer import DenseLayer, MappedDenseLayer, StoredLayer
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.interface import LayerPlace, Method, MiddleContext, Selector, methods
from sparsekv.runtime.selection.residual import ResidualSelector, residual_clusters

# Largest difference of a probe's logits, relative to the largest of them, that rounding explains.
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}


def middle_context(
    artifact: Artifact,
    layer: int,
    name: str,
    device: torch.device | str = "cpu",
    board: dict[str, Any] | None = None,
) -> MiddleContext:
    """What the method called `name` selects from in one layer of an index; reads the method's tensors.

    Args:
        board: one for all layers that are used together; a new one by default.
    """
    manifest = artifact.manifest
    keys, values = artifact.context(layer)
    record = manifest.methods.get(name) if methods()[name].needs_index else None
    stored = {} if record is None else artifact.method_tensors(name, layer)
    tensors = {key: tensor.to(device) for key, tensor in stored.items()}
    check_values(tensors, manifest.split, f"layer {layer} of {name} of {artifact.folder}")
    if "token_order" in tensors:
        tensors["token_order"] = tensors["token_order"] - manifest.split.sinks
    split, indexed = manifest.split, manifest.indexed_layers
    middle = slice(split.sinks, split.sinks + split.middle)
    observed = artifact.queries(layer)["tail"][:, : split.tail // 2]
    return MiddleContext(
        keys=keys[:, middle].to(device),
        facts=manifest.layers[layer],
        tensors=tensors,
        calibration={} if record is None else record.calibration,
        parameters={} if record is None else record.parameters,
        first_token=split.sinks,
        mapped=(keys, *stored.values()) if torch.device(device).type == "cpu" else (),
        load_values=lambda: values[:, middle].to(device),
        observed=observed.unflatten(0, (len(keys), -1)).to(device),
        place=LayerPlace(indexed.index(layer), len(indexed), {} if board is None else board),
    )


def prepare_layer(
    artifact: Artifact,
    layer: int,
    name: str,
    method: Method,
    device: torch.device | str,
    *,
    residual: bool = False,
    board: dict[str, Any] | None = None,
) -> Selector:
    """A method made ready for one layer of an index.

    Args:
        board: one for all layers that are used together; a new one by default.
        residual: centroids stand for what the method leaves: its own, or those of another method of the index.

    Raises:
        UsageError: no method of the index has value centroids, or the method takes in tokens that these do not hold.
    """
    context = middle_context(artifact, layer, name, device, board)
    try:
        selector = method.prepare(context)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        # Parameters and calibration are a method's own: it alone can tell that a manifest's are not.
        raise ArtifactError(
            f"{name} of {artifact.folder} is not what this version builds ({type(error).__name__}: {error}); {REBUILD}"
        ) from error
    selector.mapped = context.mapped
    if not residual or method.replaces() or selector.replace_by_own_clusters():
        return selector
    if selector.takes:
        raise UsageError(
            f"--residual: {name} takes generated tokens in, and no cluster holds these; leave out --residual, or let "
            "them stay exact"
        )
    lender = middle_context(artifact, layer, residual_source(artifact), device)
    replacing = ResidualSelector(selector, residual_clusters(lender.tensors))
    replacing.mapped = context.mapped + lender.mapped
    return replacing


def residual_source(artifact: Artifact) -> str:
    """Name of the method of an index with the fewest value centroids, so that they cost least to read.

    Raises:
        UsageError: none has any.
    """
    manifest = artifact.manifest
    first_layers = {name: manifest.files[layer_file(name, manifest.indexed_layers[0])] for name in manifest.methods}
    key = "level0.value_centroids"
    found = {name: file.tensors[key].shape[1] for name, file in first_layers.items() if key in file.tensors}
    if not found:
        raise UsageError(
            "--residual needs clusters with value centroids, and the index has none: build it with --method multipole"
        )
    return min(found, key=lambda name: found[name])


@dataclass
class OpenIndex:
    """An index together with the model it was built from."""

    artifact: Artifact
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def __post_init__(self) -> None:
        self.input_ids = self.artifact.input_ids().clone()
        known = int(self.model.get_input_embeddings().weight.shape[0])  # type: ignore[index]
        named = torch.cat([self.input_ids, torch.tensor(self.artifact.manifest.probe.token_ids)])
        if named.amin() < 0 or named.amax() >= known:
            raise ArtifactError(
                f"{self.artifact.folder} names tokens that its model does not have, which knows {known}; {REBUILD}"
            )

    @property
    def split(self) -> Split:
        return self.artifact.manifest.split

    def sparse_cache(
        self,
        name: str,
        method: Method,
        budget: Budget,
        *,
        residual: bool = False,
        gauge: bool = False,
        guard: Guard | None = None,
        placement: str = "device",
        ahead: bool = False,
        question: QuestionPrefill | None = None,
        budgets: Mapping[int, Budget] | None = None,
        tail: bool = True,
    ) -> IndexCache:
        """Decode with one method; layers with a sliding window stay dense.

        Allocates the context in the model's dtype where `placement` says: on its device, in host memory, page-locked
        for a GPU, or nowhere, for rows are then read from the index's files as they are chosen.

        Args:
            residual: centroids stand for what the method does not choose.
            gauge: keep account of how much attention is left, where the method can tell; costs a pass over the logits.
            guard: gauge it, and let no head leave more.
            placement: one of PLACEMENTS.
            ahead: search for a step's rows while the step before is attended to, with that step's query.
            question: how a question's tokens attend, where they are not to choose as the answer's do.
            budgets: of layers, by number, whose budget is not the one of all others.
            tail: without it the stored context ends with the middle, and what comes next takes the tail's place.

        Raises:
            UsageError: no such placement, a residual is asked for and the index has no value centroids, or a guard for
                a method that cannot tell what it leaves.
        """
        check_placement(placement)
        if guard is not None:
            guard.check(name, method, residual=residual)
        gauged = guard is not None or (gauge and tells_missed(method, residual=residual))
        manifest = self.artifact.manifest
        read = [name, "queries"] if method.needs_index else ["queries"]
        self.artifact.check_sums(layer_file(folder, layer) for folder in read for layer in manifest.indexed_layers)
        split = self.split if tail else self.split.model_copy(update={"tail": 0})
        layers: list[StoredLayer] = []
        board: dict[str, Any] = {}
        question_board: dict[str, Any] = {}
        for layer, facts in enumerate(manifest.layers):
            if facts.sliding_window is not None:
                layers.append(self._dense_layer(layer, split.tokens))
                continue
            where = self._search_device(method, placement)
            selector = prepare_layer(self.artifact, layer, name, method, where, residual=residual, board=board)
            exact, rows = self._exact(layer, split), self._middle(layer, selector, placement)
            measured = Gauge(guard) if gauged else None
            layers.append(
                SparseLayer(
                    exact,
                    rows,
                    split,
                    facts,
                    selector,
                    (budgets or {}).get(layer, budget),
                    measured,
                    ahead=ahead,
                    search_device=where,
                    let_go=placement == "disk",
                    question=self._question_search(layer, question, selector, placement, question_board),
                )
            )
        return IndexCache(layers)

    def _question_search(
        self,
        layer: int,
        question: QuestionPrefill | None,
        decoding: Selector,
        placement: str,
        board: dict[str, Any],
    ) -> QuestionSearch | None:
        if question is None:
            return None
        selector, where = None, self.model.device
        if question.method is not None:
            where = self._search_device(question.method, placement)
            selector = prepare_layer(self.artifact, layer, question.name, question.method, where, board=board)
        return QuestionSearch(question, selector, where, decoding.token_order, self.split.middle)

    def _search_device(self, method: Method, placement: str) -> torch.device:
        return torch.device("cpu") if method.searched_on_host and placement != "device" else self.model.device

    def dense_cache(self, tokens: int | None = None) -> IndexCache:
        """Dense attention over the first `tokens` of the stored context (all by default), as views of the files."""
        tokens = self.split.tokens if tokens is None else tokens
        return IndexCache([self._dense_layer(layer, tokens) for layer in range(len(self.artifact.manifest.layers))])

    def _dense_layer(self, layer: int, tokens: int, *, mapped: bool = False) -> DenseLayer:
        """Of a layer that slides, the rows that a coming token can see, and no others."""
        window = self.artifact.manifest.layers[layer].sliding_window
        first = 0 if window is None else max(0, tokens - window + 1)
        if mapped:
            return MappedDenseLayer(partial(self._rows, layer, slice(first, tokens)), out_of_sight=first)
        return DenseLayer(*self._rows(layer, slice(first, tokens)), out_of_sight=first, window=window)

    def _rows(self, layer: int, tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.artifact.context(layer)
        device, dtype = self.model.device, self.model.dtype
        return keys[:, tokens].to(device, dtype), values[:, tokens].to(device, dtype)

    def _exact(self, layer: int, split: Split) -> Pair:
        """Sinks and tail."""
        keys, values = self.artifact.context(layer)
        end = split.sinks + split.middle
        both = (torch.cat([rows[:, : split.sinks], rows[:, end : split.tokens]], 1) for rows in (keys, values))
        keys, values = (rows.to(self.model.device, self.model.dtype) for rows in both)
        return keys, values

    def _middle(self, layer: int, selector: Selector, placement: str) -> MiddleRows:
        device, dtype, order = self.model.device, self.model.dtype, selector.token_order
        if placement == "disk":
            return DiskRows(self.artifact, layer, order, device, dtype)
        where = torch.device("cpu") if placement == "host" else device
        middle = slice(self.split.sinks, self.split.sinks + self.split.middle)
        keys, values = (rows[:, middle].to(where, dtype) for rows in self.artifact.context(layer))
        return MemoryRows(keys, values, None if order is None else order.to(where), device)

    @torch.inference_mode()
    def check_probe(self) -> None:
        """Recompute the last prompt token over the stored context.

        Raises:
            IdentityError: its logits differ beyond rounding, so the model is not the one that filled the index.
        """
        probe = self.artifact.manifest.probe
        layers = range(len(self.artifact.manifest.layers))
        cache = IndexCache([self._dense_layer(layer, self.split.tokens - 1, mapped=True) for layer in layers])
        with route_attention(self.model, cache.attend):
            last = self.input_ids[None, -1:].to(self.model.device)
            logits = self.model(input_ids=last, past_key_values=cache, use_cache=True).logits[0, -1].float().cpu()
        stored = torch.tensor(probe.logits)
        difference = float((logits[probe.token_ids] - stored).abs().max() / stored.abs().max())
        tolerance = max(PROBE_TOLERANCE[self.model.dtype], PROBE_TOLERANCE[_dtype(self.artifact.manifest.dtype)])
        if not difference <= tolerance:
            raise IdentityError(
                "the probe (logits of the last prompt token over the stored context)",
                f"{probe.logits[0]:.4f} at its top",
                f"{logits[probe.token_ids[0]]:.4f}, {difference:.1%} away",
                "these are other weights: use the model it was built with "
                f"(--model {self.artifact.manifest.model.id}) or build the index again for this one",
            )


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def open_index(
    artifact: Artifact,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    identity: tuple[ModelIdentity, TokenizerIdentity],
) -> OpenIndex:
    """Check that an index belongs to a model and tokenizer, by their hashes and then by the probe.

    Raises:
        IdentityError: names the field, both values and the way out.
    """
    check_model(artifact.manifest, identity[0], str(model.dtype).removeprefix("torch."))
    check_tokenizer(artifact.manifest, identity[1])
    index = OpenIndex(artifact, model, tokenizer)
    index.check_probe()
    return index
