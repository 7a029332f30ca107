"""Decode steps of several requests over indices give each what a cache of its own over the index gives."""

import shutil
from pathlib import Path

import pytest
import torch
from support.small_index import INDEXERS, build_small

from sparsekv.formats.errors import ArtifactError, IdentityError, UsageError
from sparsekv.formats.index.reader import Artifact
from sparsekv.kernels.common.hook import AttentionCall
from sparsekv.runtime.attention.config import DecodeConfig
from sparsekv.runtime.attention.sparse_layer import SparseLayer
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.methods.codes import Codes
from sparsekv.runtime.selection.interface import Budget, MethodSpec
from sparsekv.runtime.vllm.decoding import Decode, DecodeSteps, IndexLayers, attend
from sparsekv.runtime.vllm.identity import share_of
from sparsekv.runtime.vllm.paged import PagedLayer

BLOCK, BLOCKS, LAYERS, HEADS, GROUP, CHANNELS = 16, 60, 3, 2, 2, 16
PLACES = torch.randperm(HEADS * BLOCK * 2 * CHANNELS, generator=torch.Generator().manual_seed(1)).view(
    BLOCK, HEADS, 2 * CHANNELS
)
QUESTION = 5


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> OpenIndex:
    folder = tmp_path_factory.mktemp("decoding")
    methods = {name: INDEXERS[name] for name in ("codes", "h2o")}
    return build_small(folder / "doc.skv", methods=methods)


def shuffled(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """A layout in which a block's numbers are in no order."""
    flat = cache.view(len(cache), -1)
    flat[(slots // BLOCK)[:, None, None], PLACES[slots % BLOCK]] = torch.cat([keys, values], 2)


def calls(opened: OpenIndex, seed: int, heads: slice = slice(None)) -> list[AttentionCall]:
    """A random attention call of each layer."""
    made = []
    generator = torch.Generator().manual_seed(seed)
    for number, facts in opened.artifact.manifest.attending.items():
        query = torch.randn(HEADS, GROUP, 1, CHANNELS, generator=generator)[heads].flatten(0, 1)
        keys, values = torch.randn(2, HEADS, 1, CHANNELS, generator=generator)[:, heads]
        made.append(AttentionCall(number, query, keys, values, facts.softmax_scale, facts.softcap, None, None))
    return made


def layers_of(opened: OpenIndex, method: str = "codes", rank: int = 0, ranks: int = 1) -> IndexLayers:
    heads = HEADS // ranks
    share = share_of(Artifact(opened.artifact.folder), rank, ranks, dict.fromkeys(range(LAYERS), (heads, CHANNELS)))
    return IndexLayers(share, method, calls(opened, 0, slice(heads)))


class Paged:
    """Caches of all layers, and requests whose rows are in them."""

    def __init__(self, opened: OpenIndex):
        self.opened, self.tokens = opened, opened.split.tokens
        empty = torch.zeros(BLOCKS, HEADS, BLOCK, 2 * CHANNELS)
        layers = {n: PagedLayer(empty.clone(), shuffled, torch.float32, torch.float32) for n in range(LAYERS)}
        self.layers = layers
        self.steps = DecodeSteps({n: (layer, layer.find_layout(CHANNELS)) for n, layer in layers.items()}, BLOCK)
        self.first = self.tokens // BLOCK * BLOCK

    def decode(self, name: str, budget: Budget, blocks: list[int], position: int) -> Decode:
        return Decode(name, "doc", budget, position, blocks, self.first)

    def write(self, decode: Decode, each: list[AttentionCall]) -> int:
        """Write the rows of a request's token, as vLLM does before it attends; return the token's slot."""
        slot = decode.slots(BLOCK, range(decode.position, decode.position + 1))
        for call in each:
            layer = self.layers[call.layer]
            layer.write(call.keys.transpose(0, 1), call.values.transpose(0, 1), layer.cache, slot)
        return int(slot)


class Alone:
    """A request with a cache of its own, as `generate` has it."""

    def __init__(self, opened: OpenIndex, budget: Budget):
        self.layers = opened.cache(DecodeConfig(MethodSpec("codes", "", Codes()), budget)).stored_layers

    def write(self, each: list[AttentionCall]) -> None:
        for layer, call in zip(self.layers, each, strict=True):
            layer.update(call.keys[None], call.values[None])

    def attend(self, each: list[AttentionCall]) -> list[torch.Tensor]:
        self.write(each)
        for layer in self.layers:
            assert isinstance(layer, SparseLayer)
        return [layer.attend(call) for layer, call in zip(self.layers, each, strict=True)]


def test_requests_beside_each_other_decode_as_each_alone(opened: OpenIndex) -> None:
    """One of them has no step in the middle, after which its rows are read from the cache again."""
    paged = Paged(opened)
    paged.steps.add("doc", layers_of(opened))
    blocks = {"few": [7, 3, 20, 21], "many": [5, 50, 2, 1]}
    budgets = {"few": Budget(0.05), "many": Budget(40)}
    alone = {name: Alone(opened, budget) for name, budget in budgets.items()}
    position = {}
    for name in blocks:
        for token in range(QUESTION):
            each = calls(opened, hash_of(name, token))
            paged.write(paged.decode(name, budgets[name], blocks[name], paged.tokens + token), each)
            alone[name].write(each)
        position[name] = paged.tokens + QUESTION
    for step in range(30):
        names = ["many"] if 10 < step < 15 else ["many", "few"]
        decodes = {name: paged.decode(name, budgets[name], blocks[name], position[name]) for name in names}
        paged.steps.begin(decodes.values())
        for name, decode in decodes.items():
            each = calls(opened, hash_of(name, position[name]))
            found = paged.steps.at(paged.write(decode, each))
            assert found is not None
            for call, expected in zip(each, alone[name].attend(each), strict=True):
                assert torch.equal(attend(found, call), expected)
            position[name] += 1


def hash_of(name: str, number: int) -> int:
    return 1000 * len(name) + number


def test_other_slots_attend_densely(opened: OpenIndex) -> None:
    paged = Paged(opened)
    paged.steps.add("doc", layers_of(opened))
    decode = paged.decode("request", Budget(3), [7, 8], paged.tokens + 1)
    paged.steps.begin([decode])
    (slot,) = decode.slots(BLOCK, range(decode.position, decode.position + 1)).tolist()
    assert paged.steps.at(slot) is not None
    assert paged.steps.at(slot + 1) is None
    paged.steps.begin([])
    assert paged.steps.at(slot) is None


def test_an_index_that_is_not_prepared_attends_densely(opened: OpenIndex) -> None:
    paged = Paged(opened)
    decode = paged.decode("request", Budget(3), [7, 8], paged.tokens + 1)
    paged.steps.begin([decode])
    assert paged.steps.at(int(decode.slots(BLOCK, range(decode.position, decode.position + 1)))) is None


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_with_some_of_the_heads_attends_as_for_these(opened: OpenIndex, rank: int) -> None:
    own = slice(rank, rank + 1)
    half, whole = layers_of(opened, rank=rank, ranks=2).answer(Budget(9)), layers_of(opened).answer(Budget(9))
    for part, call in zip(calls(opened, 4, own), calls(opened, 4), strict=True):
        expected = attend(whole, call).unflatten(0, (HEADS, GROUP))[own].flatten(0, 1)
        torch.testing.assert_close(attend(half, part), expected)


def test_other_settings_of_attention_are_refused(opened: OpenIndex) -> None:
    share = share_of(Artifact(opened.artifact.folder), 0, 1, dict.fromkeys(range(LAYERS), (HEADS, CHANNELS)))
    wrong = [AttentionCall(**(vars(call) | {"softmax_scale": 0.3})) for call in calls(opened, 0)]
    with pytest.raises(IdentityError, match="softmax scale of layer 0"):
        IndexLayers(share, "codes", wrong)


@pytest.mark.parametrize(
    ("method", "said"),
    [("multipole", "multipole"), ("lessismore", "for each request alone"), ("dense", "for each request alone")],
)
def test_methods_that_an_index_or_requests_cannot_use_are_refused(opened: OpenIndex, method: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        layers_of(opened, method)


def test_damaged_codes_are_refused(opened: OpenIndex, tmp_path: Path) -> None:
    folder = tmp_path / "doc.skv"
    shutil.copytree(opened.artifact.folder, folder)
    file = folder / "codes" / "layer_001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ArtifactError, match="is damaged"):
        layers_of(OpenIndex(Artifact(folder), opened.model, opened.tokenizer))
