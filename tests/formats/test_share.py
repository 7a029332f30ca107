"""A rank's share of an index: its heads alone, in every tensor that has heads."""

from pathlib import Path

import pytest
import torch
from support.artifacts import CONTEXT, HEAD_DIM, KV_HEADS, METHOD, QUERIES, small_artifact, small_files
from support.sealing import change_tensors, reseal

from sparsekv.formats.errors import ArtifactError, UsageError
from sparsekv.formats.index.context_rows import CENTROID_SCALES, quantise, with_centroids_in_8_bits
from sparsekv.formats.index.reader import Artifact, ArtifactShare
from sparsekv.formats.index.schema import TOKENS


def shares(index: Path, heads: int) -> list[ArtifactShare]:
    whole = Artifact(index)
    return [ArtifactShare(whole, number, 2, dict.fromkeys(whole.manifest.attending, heads)) for number in range(2)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("file", [CONTEXT, QUERIES, METHOD])
def test_the_shares_are_the_whole(index: Path, file: str, device: str) -> None:
    where, whole = torch.device(device), Artifact(index).tensors(file)
    parts = [one.tensors(file, where) for one in shares(index, KV_HEADS // 2)]
    for name, tensor in whole.items():
        assert torch.equal(torch.cat([part[name] for part in parts]).cpu(), tensor)


def test_a_share_has_fewer_heads_and_all_tokens(index: Path) -> None:
    for one in shares(index, KV_HEADS // 2):
        assert one.heads_and_channels(0) == (KV_HEADS // 2, HEAD_DIM)
        assert torch.equal(one.input_ids(), small_files()[TOKENS]["input_ids"])


def test_ranks_that_have_all_heads_read_all(index: Path) -> None:
    for one in shares(index, KV_HEADS):
        assert one.heads_and_channels(0) == (KV_HEADS, HEAD_DIM)
        assert torch.equal(one.context(0)[0], Artifact(index).context(0)[0])


def test_another_number_of_heads_is_another_model(index: Path) -> None:
    with pytest.raises(ArtifactError, match="has 2 KV heads, and 2 ranks have 3 each"):
        shares(index, 3)


def test_a_tensor_of_unknown_axes_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "some.skv"
    small_artifact(folder)
    change_tensors(folder, METHOD, lambda tensors: tensors | {"own": torch.zeros(3)})
    with pytest.raises(UsageError, match=r"own of squeezed .* its axes are not known"):
        shares(folder, KV_HEADS // 2)[0].tensors(METHOD)


def test_centroids_in_8_bits_are_shared_out_with_their_scales(index: Path) -> None:
    change_tensors(index, CONTEXT, lambda tensors: quantise(tensors["keys"], tensors["values"]))
    change_tensors(index, METHOD, with_centroids_in_8_bits)
    storage = {"dtype": "int8", "errors": [0.01], "measured_ids": "0" * 64, "measured_tokens": 40}
    reseal(index, lambda fields: fields.update(kv_storage=storage))
    whole, parts = Artifact(index).tensors(METHOD), [one.tensors(METHOD) for one in shares(index, KV_HEADS // 2)]
    assert CENTROID_SCALES & whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), tensor)
