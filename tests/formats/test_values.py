"""Tensors are checked before kernels use them as indices: those that a build writes pass, invalid ones do not."""

import re
from collections.abc import Callable

import pytest
import torch
from support.small_index import INDEXERS, build_small

from sparsekv.formats.errors import ArtifactError
from sparsekv.formats.index.context_rows import CENTROID_SCALES, with_centroids_in_8_bits
from sparsekv.formats.index.layout import check_values
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import layer_file

Tensors = dict[str, torch.Tensor]
Change = Callable[[torch.Tensor], None]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return build_small(tmp_path_factory.mktemp("values") / "small.skv", methods=INDEXERS).artifact


def _first(value: int) -> Change:
    def change(tensor: torch.Tensor) -> None:
        tensor.view(-1)[0] = value

    return change


def _last(value: int) -> Change:
    def change(tensor: torch.Tensor) -> None:
        tensor.view(-1)[-1] = value

    return change


def _swapped(tensor: torch.Tensor) -> None:
    tensor[..., :2] = tensor[..., :2].flip(-1)


def _repeated(tensor: torch.Tensor) -> None:
    tensor[..., 1] = tensor[..., 0]


LARGEST = 2**31 - 1
FOLLOWED: dict[str, list[Change]] = {
    "token_order": [_first(-1), _first(0), _last(LARGEST), _repeated],
    "token_offsets": [_first(1), _last(LARGEST), _last(0), _swapped],
    "level0.counts": [_first(-1), _first(LARGEST), _swapped],
    "level1.counts": [_first(-1), _first(LARGEST)],
    "level0.parent": [_first(-1), _last(LARGEST), _first(1)],
    "block_offsets": [_first(1), _last(LARGEST), _repeated],
    "block_clusters": [_first(1), _last(LARGEST), _repeated, _swapped],
    "channels": [_first(-1), _first(LARGEST), _repeated],
    "table_tokens": [_first(-1), _first(0), _last(LARGEST)],
    "positions": [_first(-1), _first(0), _last(LARGEST), _swapped, _repeated],
}


def _files(artifact: Artifact) -> dict[str, Tensors]:
    return {
        name: artifact.tensors(name) for name in artifact.manifest.files if name.split("/")[0] in {*INDEXERS, "samples"}
    }


def test_what_builds_write_passes(artifact: Artifact) -> None:
    files = _files(artifact)
    assert {name.split("/")[0] for name in files} == {*INDEXERS, "samples"}
    for name, tensors in files.items():
        check_values(tensors, artifact.manifest.split, name)


def test_every_integer_tensor_that_is_followed_has_its_attacks(artifact: Artifact) -> None:
    of_integers = {
        key for tensors in _files(artifact).values() for key, one in tensors.items() if one.dtype == torch.int32
    }
    assert of_integers == FOLLOWED.keys()


@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name, all_ in FOLLOWED.items() for number in range(len(all_))]
)
def test_a_number_that_leads_elsewhere_is_told(artifact: Artifact, name: str, number: int) -> None:
    met = False
    for file, tensors in _files(artifact).items():
        if name in tensors:
            changed = {key: tensor.clone() for key, tensor in tensors.items()}
            FOLLOWED[name][number](changed[name])
            if torch.equal(changed[name], tensors[name]):
                continue
            met = True
            with pytest.raises(ArtifactError, match=r"holds numbers that no build writes.*--force"):
                check_values(changed, artifact.manifest.split, file)
    assert met


def test_a_tensor_that_no_build_writes_is_told_or_does_no_harm(artifact: Artifact) -> None:
    tensors, split = artifact.method_tensors("squeezed", 0), artifact.manifest.split
    for harmless in (torch.empty(0), torch.ones(3).to(torch.float8_e4m3fn)):
        check_values(tensors | {"own": harmless}, split, "it")
    for name in ("levelX.centroids", "level", "level0.a.b"):
        with pytest.raises(ArtifactError, match=rf"it has a tensor {re.escape(name)}, but .* levelN.NAME; .*--force"):
            check_values(tensors | {name: torch.ones(3)}, split, "it")


def test_a_token_in_another_blocks_cluster_is_told(artifact: Artifact) -> None:
    layer = artifact.manifest.indexed_layers[0]
    tensors = artifact.method_tensors("multipole", layer)
    assert len(tensors["block_offsets"]) > 2
    order = tensors["token_order"].clone()
    order[:, [0, -1]] = order[:, [-1, 0]]
    with pytest.raises(ArtifactError, match="block_offsets in"):
        check_values(tensors | {"token_order": order}, artifact.manifest.split, "it")


def test_an_empty_cluster_before_its_siblings_is_told(artifact: Artifact) -> None:
    tensors = {name: tensor.clone() for name, tensor in artifact.method_tensors("squeezed", 0).items()}
    siblings = (tensors["level0.parent"][0].diff() == 0).nonzero()[0, 0]
    counts, offsets = tensors["level0.counts"], tensors["token_offsets"]
    counts[0, siblings + 1] += counts[0, siblings]
    counts[0, siblings] = 0
    offsets[0, 1:] = counts[0].cumsum(0)
    with pytest.raises(ArtifactError, match=r"level0\.parent in"):
        check_values(tensors, artifact.manifest.split, "it")


def test_a_code_without_a_centroid_is_told(artifact: Artifact) -> None:
    tensors = artifact.method_tensors("pqcache", artifact.manifest.indexed_layers[0])
    fewer = tensors | {"codebooks": tensors["codebooks"][:, :, : int(tensors["codes"].max())]}
    with pytest.raises(ArtifactError, match="codes in"):
        check_values(fewer, artifact.manifest.split, "it")


@pytest.mark.parametrize("name", sorted(CENTROID_SCALES))
@pytest.mark.parametrize("value", [torch.nan, -torch.inf, 3e38])
def test_a_scale_of_centroids_whose_products_are_not_finite_is_told(
    artifact: Artifact, name: str, value: float
) -> None:
    """Kernels take products of scales as they are; an offset, which is in none, may be large."""
    tensors = with_centroids_in_8_bits(artifact.method_tensors("squeezed", 0))
    check_values(tensors, artifact.manifest.split, "it")
    tensors[name].view(-1)[0] = value
    if name.endswith("offsets") and value == 3e38:
        check_values(tensors, artifact.manifest.split, "it")
        return
    with pytest.raises(ArtifactError, match=f"{name} in"):
        check_values(tensors, artifact.manifest.split, "it")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_not_finite_are_told(artifact: Artifact, value: float) -> None:
    for file, tensors in _files(artifact).items():
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                changed = tensor.clone()
                changed.view(-1)[changed.numel() // 2] = value
                with pytest.raises(ArtifactError, match=f"{name} in .* holds numbers that no build"):
                    check_values(tensors | {name: changed}, artifact.manifest.split, file)


@pytest.mark.parametrize("name", ["level0.counts", "level1.counts", "block_clusters", "codebooks"])
def test_a_tensor_without_its_partner_is_told(artifact: Artifact, name: str) -> None:
    layer = artifact.manifest.indexed_layers[0]
    method = "pqcache" if name == "codebooks" else "multipole"
    tensors = {key: tensor for key, tensor in artifact.method_tensors(method, layer).items() if key != name}
    with pytest.raises(ArtifactError, match=f"{name} is not in {layer_file(method, layer)}"):
        check_values(tensors, artifact.manifest.split, layer_file(method, layer))
