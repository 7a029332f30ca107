"""Loading models: what comes back, and one clear line for everything that cannot be loaded."""

import json
import os
import shutil
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from huggingface_hub import close_session
from safetensors.torch import load_file, save_file
from support.command import run_here
from support.reference import relative_error
from support.short_memory import check_weights_are_not_blamed
from support.spawned import run_together
from support.tiny_models import FAMILIES, save_tiny
from transformers import GptOssConfig, T5Config, WhisperConfig
from transformers.utils import logging

from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.formats.models.find import EMBEDDED, find_model, known_models, pull
from sparsekv.formats.models.load import load_model, load_tokenizer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache of its own, without a network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_a_local_folder_loads_as_it_was_saved(tiny_folder: Path) -> None:
    loaded = load_model(str(tiny_folder), device="cpu")
    ids = torch.arange(40)[None]
    with torch.inference_mode():
        assert relative_error(loaded.model(input_ids=ids).logits, FAMILIES["llama"]()(input_ids=ids).logits) < 1e-6
    assert (loaded.name, loaded.revision) == (str(tiny_folder), None)
    assert not loaded.model.training
    assert loaded.tokenizer.decode(load_tokenizer(str(tiny_folder))("as it was").input_ids) == "as it was"


def test_a_folder_named_from_here_is_remembered_by_its_whole_path(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_folder.parent)
    assert load_model(tiny_folder.name, device="cpu").name == str(tiny_folder)


def test_a_hub_model_in_the_cache_loads_offline_with_its_commit(hub_cache: Path, tiny_folder: Path) -> None:
    repository = hub_cache / "models--someone--tiny"
    shutil.copytree(tiny_folder, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    loaded = load_model("someone/tiny", device="cpu")
    assert (loaded.name, loaded.revision) == ("someone/tiny", COMMIT)
    assert pull("someone/tiny") == repository / "snapshots" / COMMIT


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("auto", torch.float32), ("float32", torch.float32), ("float16", torch.float16), ("bfloat16", torch.bfloat16)],
)
def test_dtypes(tiny_folder: Path, dtype: str, expected: torch.dtype) -> None:
    assert load_model(str(tiny_folder), device="cpu", dtype=dtype).model.dtype == expected


def test_loading_is_silent_and_leaves_the_settings_of_transformers_alone(
    embedded_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load_model(EMBEDDED, device="cpu")
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_the_embedded_model_is_known_and_needs_no_pulling(embedded_folder: Path) -> None:
    (known,) = known_models()
    assert (known.name, known.licence, known.cached, known.folder) == (EMBEDDED, "Apache-2.0", True, embedded_folder)
    assert known.bytes > 500_000_000
    assert pull() == embedded_folder


@pytest.mark.parametrize("name", ["someone/unknown", "./nowhere", "/nowhere/at all", "two words", ""])
def test_an_unknown_model_is_named_with_the_way_out(hub_cache: Path, name: str) -> None:
    for attempt in (load_model, pull):
        with pytest.raises(UsageError, match="sparsekv models list") as error:
            attempt(name)
        assert str(error.value).startswith(f"model '{name}' ")
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("file", "told"),
    [("m.gguf", "cannot be read as a GGUF file"), ("m.bin", "is a file: name a GGUF file, or a folder")],
)
def test_a_file_is_no_model_and_is_not_said_to_lack_permission(file: str, told: str, tmp_path: Path) -> None:
    (tmp_path / file).write_bytes(b"GGUF")
    with pytest.raises(UsageError, match=told):
        load_model(str(tmp_path / file))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("device", "tpu", "--device tpu: choose one of auto, cpu, cuda, cuda:N"),
        ("device", "meta", "--device meta: choose one of auto, cpu, cuda, cuda:N"),
        ("device", f"cuda:{torch.cuda.device_count()}", "CUDA devices; use --device cpu or auto"),
        ("dtype", "int8", "--dtype int8: choose one of auto, float32, float16, bfloat16"),
        ("rope_scaling", "yarn", "--rope-scaling yarn: give yarn:FACTOR"),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(option: str, value: str, message: str) -> None:
    options: dict[str, Any] = {option: value}
    with pytest.raises(UsageError, match=message):
        load_model("never/looked-for", **options)


def test_pulling_a_folder_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(UsageError, match="is a folder already"):
        pull(str(tiny_folder))


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def with_config(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "config.json").write_text(text)

    return write


def without_head(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def with_other_shape(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 32}))


def truncated(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("spoil", "kind", "message"),
    [
        (without("config.json"), UsageError, "has no config.json"),
        (with_config("{"), UsageError, "config that cannot be read"),
        (with_config('{"model_type": "no-such-type"}'), UsageError, "config that cannot be read.*no-such-type"),
        (
            with_config(json.dumps(GptOssConfig().to_dict() | {"num_hidden_layers": 1})),
            UsageError,
            r"config that cannot be read: `num_hidden_layers` \(1\) must be equal",
        ),
        (
            with_config('{"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}'),
            UsageError,
            "code of its own, which is not run",
        ),
        (with_config(json.dumps(T5Config().to_dict())), UsageError, r"\(t5\) is not a causal language model"),
        (
            with_config(json.dumps(WhisperConfig(is_encoder_decoder=False).to_dict())),
            UsageError,
            r"\(whisper\) is an encoder-decoder model, and only models without an encoder can be indexed",
        ),
        (without("tokenizer.json"), UsageError, "no tokenizer"),
        (without("model.safetensors"), SparsekvError, "weights of .* cannot be loaded: .*no file named"),
        (truncated, SparsekvError, "weights of .* cannot be loaded"),
        (with_other_shape, SparsekvError, "weights of .* cannot be loaded"),
        (without_head, SparsekvError, "lacks 1 weights .*lm_head.weight"),
    ],
)
def test_a_folder_that_is_no_whole_model_is_refused_in_one_line(
    tiny_folder: Path, tmp_path: Path, spoil: Callable[[Path], None], kind: type[SparsekvError], message: str
) -> None:
    folder = tmp_path / "spoilt"
    shutil.copytree(tiny_folder, folder)
    spoil(folder)
    with pytest.raises(SparsekvError, match=message) as error:
        load_model(str(folder), device="cpu")
    assert type(error.value) is kind
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


def test_weights_are_not_blamed_where_memory_runs_out(embedded_folder: Path) -> None:
    run_together(check_weights_are_not_blamed, [(EMBEDDED,)], 100)


def test_a_tokenizer_alone_is_never_downloaded(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEKV_CACHE", str(hub_cache))
    with pytest.raises(SparsekvError, match=r"is not in the cache; fetch it with `sparsekv models pull`"):
        load_tokenizer(EMBEDDED)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(UsageError, match=r"is not on this machine; fetch it with `sparsekv models pull someone/tiny`"):
        load_tokenizer("someone/tiny")


def test_a_home_of_nobody_is_no_folder(hub_cache: Path) -> None:
    for attempt in (load_model, pull, load_tokenizer):
        with pytest.raises(UsageError, match="'~nouser/model' names a folder that does not exist"):
            attempt("~nouser/model")


def test_an_adapter_is_not_left_out_without_a_word(tiny_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "adapted")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(UsageError, match="has an adapter, which needs peft: install peft"):
        load_model(str(folder))


@pytest.mark.parametrize("proxy", ["nothing://127.0.0.1:9", "http://127.0.0.1:{port}"], ids=["unknown", "refusing"])
def test_a_proxy_that_does_not_serve_is_told(proxy: str, hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a client of the hub that has yet to read it."""

    class Refusing(BaseHTTPRequestHandler):
        def do_CONNECT(self) -> None:
            self.send_error(403)

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing is to be printed."""

    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        where = proxy.format(port=server.server_address[1])
        for name in os.environ:
            if name.lower().endswith("_proxy"):
                monkeypatch.delenv(name)
        monkeypatch.setenv("HTTPS_PROXY", where)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        close_session()
        done = run_here("models", "pull", "someone/model")
        close_session()
        server.shutdown()
    assert done.code == 1
    assert done.error().startswith("cannot download 'someone/model': ")
    assert done.error().endswith("; check the network and the proxy (HTTPS_PROXY), and run the same command again")


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation"])
@pytest.mark.parametrize(
    ("asked", "loaded"), [("flash_attention_2", "sdpa"), ("flex_attention", "sdpa"), ("eager", "eager")]
)
def test_attention_that_a_config_asks_for_is_not_needed(tmp_path: Path, key: str, asked: str, loaded: str) -> None:
    folder = save_tiny(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: asked}))
    assert load_model(str(folder), device="cpu").model.config._attn_implementation == loaded


def test_a_hub_that_the_environment_forbids_is_not_called_unreachable(hub_cache: Path) -> None:
    with pytest.raises(
        UsageError, match=r"HF_HUB_OFFLINE forbids a download; unset HF_HUB_OFFLINE, give a local folder"
    ):
        find_model("someone/tiny", print)
