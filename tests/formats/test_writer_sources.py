"""Files that are made from others of the same build, and what is read of them before it is on the disk."""

from pathlib import Path

import torch
from support.artifacts import CONTEXT, METHOD, small_files, small_recipe

from sparsekv.formats.index.writer import ArtifactWriter

RECIPE = small_recipe(CONTEXT, 0, 0)


def test_what_is_made_from_another_file_is_reused_with_that_file_alone(tmp_path: Path) -> None:
    folder, files = tmp_path / "some.skv", small_files()
    with ArtifactWriter(folder) as writer:
        writer.write(CONTEXT, files[CONTEXT], RECIPE)
        writer.write(METHOD, files[METHOD], "method", [CONTEXT])
    with ArtifactWriter(folder) as writer:  # nothing has changed
        assert writer.reuse(CONTEXT, RECIPE)
        assert writer.reuse(METHOD, "method", [CONTEXT])
        assert not writer.reuse(METHOD, "method")
        assert not writer.reuse(METHOD, "another", [CONTEXT])
    with ArtifactWriter(folder) as writer:  # the context is new
        writer.write(CONTEXT, small_files(1)[CONTEXT], small_recipe(CONTEXT, 1, 0))
        assert not writer.reuse(METHOD, "method", [CONTEXT])
    with ArtifactWriter(folder) as writer:  # it is there, and not what the method's file was made from
        assert writer.reuse(CONTEXT, small_recipe(CONTEXT, 1, 0))
        assert not writer.reuse(METHOD, "method", [CONTEXT])


def test_what_is_being_written_is_read_from_memory_and_then_from_the_disk(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "some.skv") as writer:
        for number in range(30):
            large = {"keys": torch.full((1000, 1000), float(number))}
            writer.write(f"context/{number}.safetensors", large, "recipe", wait=False)
            assert torch.equal(writer.read(f"context/{number}.safetensors")["keys"], large["keys"])
        for number in range(30):
            writer.record(f"context/{number}.safetensors")
            assert (writer.read(f"context/{number}.safetensors")["keys"] == number).all()
