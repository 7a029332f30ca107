"""Models in GGUF files: their weights, tokenizer and answers are those that the file has, or they are refused."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from support.command import run_here
from support.tiny_gguf import (
    END,
    PIECES,
    SENTENCEPIECE,
    SPECIAL_TOKENS,
    TOKENS,
    tiny_qwen2,
    torch_equal,
    write_gguf,
)
from support.tiny_models import CHAT_TEMPLATE, COMMON
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, NemotronConfig

from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.formats.models.converted import damaged_files
from sparsekv.formats.models.find import EMBEDDED, find_model, known_models, pull, remember
from sparsekv.formats.models.gguf import _pre_tokenizer, build_tokenizer, check_config
from sparsekv.formats.models.load import load_model, load_tokenizer
from sparsekv.runtime.decoding.answer import decoded

TEXT = "The thesis: 12 things, 345 more, and what they're for.\n\n  def f(x):\n\treturn x ** 2\n" * 12


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", tiny_qwen2())


def _by_transformers(file: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()


def test_weights_and_answers_are_transformers_own_of_the_same_file(file: Path) -> None:
    (file.parent / "doc.txt").write_text(TEXT)
    built = run_here("build-index", "doc.txt", "--model", "tiny.gguf", "-o", "doc.skv", "--method", "codes", "-q")
    assert built.code == 0, built.stderr
    plain, tokenizer = _by_transformers(file), load_tokenizer("tiny.gguf")
    assert torch_equal(load_model("tiny.gguf").model, plain)
    answer = json.loads(
        run_here(
            "generate", "-i", "doc.skv", "Why?", "--method", "dense", "--max-new-tokens", "8", "--json", "-q"
        ).stdout
    )
    messages = [{"role": "user", "content": f"{TEXT}\n\nWhy?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = plain.generate(**prompt, max_new_tokens=8, do_sample=False, eos_token_id=END, pad_token_id=0)
    expected = output[0, prompt["input_ids"].shape[1] :]
    assert answer["text"] == tokenizer.decode(expected, skip_special_tokens=True)
    assert answer["generated_tokens"] == len(expected)


def test_a_file_is_converted_once_and_again_when_it_has_changed(file: Path) -> None:
    told: list[str] = []
    folder, name, revision = find_model("tiny.gguf", told.append)
    assert (name, revision) == (str(file.resolve()), None)
    assert told == [
        f"converting tiny.gguf into {folder} (0 MiB in float32, once), with its tokenizer (byte-level BPE, "
        f"{len(TOKENS)} tokens) and chat template"
    ]
    assert damaged_files(folder, full=True) == []
    assert find_model(str(file), told.append)[0] == folder
    os.utime(file, ns=(1, 1))  # touched, and the same
    assert find_model(str(file), told.append)[0] == folder
    assert len(told) == 1
    (folder / "config.json").write_text("{}")
    assert find_model(str(file), told.append)[0] == folder
    assert damaged_files(folder, full=True) == []
    assert len(told) == 2
    write_gguf(file, tiny_qwen2(), **{"tokenizer.chat_template": "{{ messages[0]['content'] }}"})
    assert find_model(str(file), told.append)[0] != folder
    assert load_tokenizer("tiny.gguf").chat_template == "{{ messages[0]['content'] }}"


def test_a_converted_file_that_was_named_is_listed_by_its_path(file: Path) -> None:
    find_model("tiny.gguf", print)
    assert [one.name for one in known_models()] == [EMBEDDED]  # the user has not named it
    remember(find_model("tiny.gguf", print)[1])
    _, listed = known_models()
    folder, name, _ = find_model(listed.name, print, download=False)
    assert (listed.name, listed.folder, listed.cached) == (name, folder, True)
    assert listed.bytes == sum(one.stat().st_size for one in folder.iterdir())
    shown = run_here("models", "list", "--json")
    assert [one["name"] for one in json.loads(shown.stdout)] == [EMBEDDED, str(file.resolve())]
    write_gguf(file, tiny_qwen2(), **{"tokenizer.chat_template": "{{ messages[0]['content'] }}"})
    assert [one.name for one in known_models()] == [EMBEDDED]  # the file is another one now
    file.unlink()
    assert [one.name for one in known_models()] == [EMBEDDED]


def test_a_converted_file_of_the_hub_is_listed_by_its_name_there(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository, commit, name = tmp_path / "hub" / "models--org--tiny", "a" * 40, "org/tiny:tiny.gguf"
    for folder in ("refs", f"snapshots/{commit}"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    file.rename(repository / "snapshots" / commit / "tiny.gguf")
    remember(find_model(name, print)[1])
    _, listed = known_models()
    assert (listed.name, listed.folder) == (name, find_model(name, print, download=False)[0])
    shutil.rmtree(repository)
    assert [one.name for one in known_models()] == [EMBEDDED]


def test_a_file_of_the_size_and_time_of_another_is_another(file: Path) -> None:
    os.utime(file, ns=(1, 1))
    before = find_model("tiny.gguf", print)[0]
    write_gguf(file.with_name("new"), tiny_qwen2(), **{"tokenizer.chat_template": CHAT_TEMPLATE.upper()})
    os.utime("new", ns=(1, 1))
    assert os.path.getsize("new") == file.stat().st_size
    os.replace("new", file)
    assert find_model("tiny.gguf", print)[0] != before


def test_a_file_without_an_output_layer_has_that_of_its_embedding(file: Path) -> None:
    model = load_model(str(write_gguf(file, tiny_qwen2(), without="lm_head.weight"))).model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_indexing_a_folder_tells_that_the_file_is_converted(file: Path) -> None:
    (file.parent / "notes").mkdir()
    (file.parent / "notes" / "a.txt").write_text(TEXT)
    built = run_here("build-index", "notes", "--model", "tiny.gguf")
    assert built.code == 0, built.stderr
    assert built.stderr.count("converting tiny.gguf into ") == 1, built.stderr


def test_a_folder_with_one_gguf_file_is_that_file(file: Path) -> None:
    assert find_model(".", print)[0] == find_model("tiny.gguf", print)[0]
    write_gguf(file.with_name("other.gguf"), tiny_qwen2())
    with pytest.raises(UsageError, match=r"model '\.' holds 2 GGUF files; name one of them, such as other.gguf"):
        find_model(".", print)


def test_a_folder_that_may_be_entered_but_not_listed_is_named(tmp_path: Path) -> None:
    """As a user whom permissions bind, which root is not."""
    tmp_path.chmod(0o755)
    Path("weights").mkdir(mode=0o311)
    user = os.geteuid()
    os.seteuid(user or 65534)
    try:
        with pytest.raises(
            SparsekvError, match=r"^model 'weights' cannot be read: permission denied; make it readable"
        ):
            find_model("weights", print)
    finally:
        os.seteuid(user)
        Path("weights").chmod(0o755)


def test_an_index_names_its_file_and_is_opened_without_it_being_named(file: Path) -> None:
    (file.parent / "doc.txt").write_text(TEXT)
    assert run_here("build-index", "doc.txt", "--model", "tiny.gguf", "-o", "doc.skv", "-q").code == 0
    assert run_here("generate", "-i", "doc.skv", "Why?", "--max-new-tokens", "2", "-q").code == 0
    file.unlink()
    gone = run_here("generate", "-i", "doc.skv", "Why?", "--max-new-tokens", "2", "-q")
    assert gone.code == 1
    assert "this folder does not exist here; name the model's folder with --model PATH" in gone.error()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"pre": "mine"}, "has the pre-tokenizer 'mine', which is not supported"),
        ({"tokenizer.ggml.model": "rwkv"}, "has a tokenizer of kind rwkv, which is not supported"),
        ({"tokenizer.ggml.model": None}, "has no tokenizer; use the model's original"),
        ({"split.count": 3}, "is one of several parts of a GGUF file; join them"),
        ({"qwen2.rope.scaling.type": "yarn"}, r"scales its positions \(RoPE\), which transformers' reader"),
        ({"qwen2.attention.sliding_window": 7}, "has qwen2.attention.sliding_window = 7, which transformers reads as"),
        ({"qwen2.attention.key_length": 24}, "has qwen2.attention.key_length = 24, which transformers reads as 16"),
        ({"qwen2.rope.scaling.factor": 4.0}, r"scales its positions \(RoPE\), which transformers' reader"),
        ({"qwen2.rope.scale_linear": 4.0}, r"scales its positions \(RoPE\), which transformers' reader"),
        ({"qwen2.rope.dimension_count": 8}, "has qwen2.rope.dimension_count = 8, which transformers reads as 16"),
        ({"qwen2.final_logit_softcapping": 3.0}, "has qwen2.final_logit_softcapping = 3.0, which transformers reads"),
        ({"qwen2.attention.causal": False}, "lets tokens attend to later tokens; choose a model that generates text"),
        ({"without": "model.norm.weight"}, r"lacks 1 weights of its architecture \(the first: model.norm.weight\)"),
        ({"more": {"blk.1.attn_output.bias": np.ones(64, np.float32)}}, "has 126,720 values in its tensors, of which"),
        ({"general.architecture": "mine"}, "cannot be read as a GGUF file: "),
    ],
)
def test_what_would_be_read_wrongly_is_refused(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "odd.gguf", tiny_qwen2(), **changes)
    with pytest.raises(UsageError, match=f"^model 'odd.gguf' {told}") as error:
        find_model("odd.gguf", print)
    assert "\n" not in str(error.value)
    assert [one.suffix for one in (tmp_path / "cache" / "models" / "gguf").iterdir() if one.is_dir()] == []
    assert file.exists()


def test_a_gemma_whose_logits_transformers_would_scale_otherwise_is_refused(file: Path) -> None:
    """As Gemma 2 with 27 billion weights, whose heads have 128 channels: transformers assumes 256."""
    reader = GGUFReader(file)
    check_config(reader, Gemma2Config(**COMMON, head_dim=16, query_pre_attn_scalar=16))
    with pytest.raises(
        UsageError, match="has heads of 16 channels, whose logits transformers would scale as those of 256"
    ):
        check_config(reader, Gemma2Config(**COMMON, head_dim=16))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"qwen2.rope.freq_base": 1e4}, "freq_base = 10000.0, which transformers reads as 1000000.0"),
        ({"qwen2.rope.freq_base_swa": 5e5}, "freq_base_swa = 500000.0, which transformers reads as 10000.0"),
        ({"qwen2.attention.sliding_window_pattern": 3}, "sliding_window_pattern = 3, and transformers gives other"),
        ({"qwen2.attention.sliding_window_pattern": [True, False]}, r"sliding_window_pattern = \[True, False\], and"),
        ({"qwen2.rope.freq_base_swa": 1e4, "qwen2.attention.sliding_window_pattern": 2}, None),
        ({"qwen2.attention.sliding_window_pattern": [True, False, True]}, None),
    ],
)
def test_windows_and_positions_of_some_layers_are_those_of_the_file(
    changes: dict[str, Any], told: str | None, tmp_path: Path
) -> None:
    """transformers reads neither key, and gives a Gemma 3 the usual ones."""
    reader = GGUFReader(write_gguf(tmp_path / "odd.gguf", tiny_qwen2(), **{"qwen2.rope.freq_base": 1e6} | changes))
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    layers = {**COMMON, "num_hidden_layers": 3, "layer_types": kinds}
    gemma = Gemma3TextConfig(**layers, head_dim=16, query_pre_attn_scalar=16)
    if told is None:
        return check_config(reader, gemma)
    with pytest.raises(UsageError, match=told):
        check_config(reader, gemma)


def test_another_epsilon_than_that_of_the_config_is_refused(tmp_path: Path) -> None:
    """transformers reads no epsilon of a Nemotron or a Falcon."""
    changes = {"qwen2.attention.layer_norm_epsilon": 1e-3, "qwen2.attention.layer_norm_rms_epsilon": None}
    reader = GGUFReader(write_gguf(tmp_path / "odd.gguf", tiny_qwen2(), **changes))
    check_config(reader, NemotronConfig(**COMMON, norm_eps=1e-3, partial_rotary_factor=1.0))
    with pytest.raises(UsageError, match=r"attention.layer_norm_epsilon = 0.001.*, which transformers reads as 1e-05"):
        check_config(reader, NemotronConfig(**COMMON, partial_rotary_factor=1.0))


@pytest.mark.parametrize("kept", [0, 3, 40, 4000], ids=["empty", "magic", "header", "cut"])
def test_a_file_that_is_cut_off_is_refused(kept: int, file: Path) -> None:
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(UsageError, match=r"^model 'tiny.gguf' cannot be read as a GGUF file: ") as error:
        load_model("tiny.gguf")
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_is_told_so() -> None:
    for name in ("none.gguf", "org/none.GGUF", "./none.gguf"):
        with pytest.raises(UsageError, match=f"^model '{name}' names a file that does not exist; check its spelling"):
            find_model(name, print)


def test_a_disk_without_room_is_told_before_a_byte_is_written(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1 << 10})())
    with pytest.raises(
        SparsekvError, match=r"not enough space for model 'tiny.gguf' in .*/gguf: 0 MiB needed, 0 MiB free"
    ):
        find_model("tiny.gguf", print)


def test_pull_converts_a_file_too(file: Path) -> None:
    assert damaged_files(pull(str(file)), full=True) == []


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["I", "'ll", " pay", " 12345", ",", " they", "'", "RE", " in", "\n\n  ", " x"]),
        (
            "smollm",
            ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", ",", " they", "'", "RE", " in", "\n\n  ", " x"],
        ),
        ("llama-bpe", ["I", "'ll", " pay", " ", "123", "45", ",", " they", "'RE", " in", "\n\n", "  ", " x"]),
        ("qwen2", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", ",", " they", "'RE", " in", "\n\n", "  ", " x"]),
    ],
)
def test_text_is_split_as_the_families_split_it(pre: str, pieces: list[str]) -> None:
    """Written by hand from the patterns of their own tokenizers."""
    letters = {byte: letter for letter, byte in zip(*_alphabet(), strict=True)}
    found = [piece for piece, _ in _pre_tokenizer(pre).pre_tokenize_str("I'll pay 12345, they'RE in\n\n   x")]
    assert found == ["".join(letters[byte] for byte in piece.encode()) for piece in pieces]


def _alphabet() -> tuple[list[str], list[int]]:
    """The letters that stand for bytes in byte-level BPE (GPT-2), and the bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = [*map(chr, shown), *(chr(256 + number) for number in range(len(hidden)))]
    assert sorted(letters) == sorted(pre_tokenizers.ByteLevel.alphabet())
    return letters, shown + hidden


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("the then", ["\u2581the", "\u2581the", "n"]),
        (" the", ["\u2581", "\u2581the"]),  # the better pair first, and not the two spaces
        ("\u00e9\n", ["\u2581", "<0xC3>", "<0xA9>", "<0x0A>"]),
        (f"the{SPECIAL_TOKENS[2]}the", ["\u2581the", SPECIAL_TOKENS[2], "\u2581the"]),
    ],
)
def test_sentencepiece_merges_by_score_and_spells_the_unknown_in_bytes(text: str, pieces: list[str]) -> None:
    """As the `sentencepiece` package splits them, and llama.cpp between special tokens."""
    write_gguf(Path("tiny.gguf"), tiny_qwen2(PIECES), **SENTENCEPIECE)
    tokenizer = load_tokenizer("tiny.gguf")
    assert tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids) == pieces
    assert tokenizer.decode(tokenizer("  the thesis\n").input_ids, skip_special_tokens=True) == "  the thesis\n"


@pytest.mark.parametrize(
    ("architecture", "pieces"),
    [
        ("phi3", [SPECIAL_TOKENS[1], "\u2581the", SPECIAL_TOKENS[2], SPECIAL_TOKENS[1], "<s>", "\u2581", "<0x0A>"]),
        ("llama", [SPECIAL_TOKENS[1], "\u2581", "<0x0A>", "the", SPECIAL_TOKENS[2], "\u2581", "<0x0A>",
                   SPECIAL_TOKENS[1], "<s>", "\u2581", "<0x0A>"]),
    ],
)  # fmt: skip
def test_special_tokens_of_phi3_take_in_the_white_space_after_them(architecture: str, pieces: list[str]) -> None:
    """As those of its own tokenizer, in which they have `rstrip`; a GGUF file does not have this property."""
    changes = {"general.architecture": architecture, "tokenizer.ggml.add_bos_token": False}
    file = write_gguf(Path("tiny.gguf"), tiny_qwen2(PIECES), **SENTENCEPIECE | changes)
    tokenizer = build_tokenizer(GGUFReader(file))
    _, start, end, _ = SPECIAL_TOKENS
    assert tokenizer.convert_ids_to_tokens(tokenizer(f"{start}\nthe{end}\n{start}<s>\n").input_ids) == pieces


def test_a_file_that_adds_no_space_before_a_text_gets_none() -> None:
    write_gguf(Path("tiny.gguf"), tiny_qwen2(PIECES), **SENTENCEPIECE, **{"tokenizer.ggml.add_space_prefix": False})
    tokenizer = load_tokenizer("tiny.gguf")
    ids = tokenizer("the the").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["the", "\u2581the"]
    assert tokenizer.decode(ids) == "the the"


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("the  then the", ["the", "\u2581\u2581", "the", "n", "\u2581the"]),
        ("\n\n\nthe", ["\n\n\n", "the"]),
        ("\u00e9", ["<0xC3>", "<0xA9>"]),
    ],
)
def test_gemmas_pairs_are_merged_in_the_order_of_their_ids(text: str, pieces: list[str]) -> None:
    """Whatever the scores, and whatever transformers makes of them: in 5.17, a tokenizer that merges no pairs."""
    merged = ["\n", "\n\n", "\n\n\n", "  "]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *merged, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["th", "\u2581t", "he", "the", "\u2581the", *"\u2581then"]
    writer = GGUFWriter("gemma.gguf", "gemma3")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, 2, *[4] * len(merged), *[6] * 256, *[1] * (len(tokens) - 260 - len(merged))])
    writer.add_token_scores([0.0] * len(tokens))
    for name, number in {"pad": 0, "eos": 1, "bos": 2, "unk": 3}.items():
        getattr(writer, f"add_{name}_token_id")(number)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = build_tokenizer(GGUFReader("gemma.gguf"))
    assert tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids) == ["<bos>", *pieces]
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_a_tokenizer_is_loaded_as_the_file_has_it_whatever_the_architecture_usually_has() -> None:
    """A Qwen 2 usually has each digit by itself, and no first token."""
    write_gguf(Path("tiny.gguf"), tiny_qwen2(), pre="llama-bpe", **{"tokenizer.ggml.add_bos_token": True})
    tokenizer = load_tokenizer("tiny.gguf")
    assert tokenizer.convert_ids_to_tokens(tokenizer("th12").input_ids) == [SPECIAL_TOKENS[1], "th", "12"]


def test_answers_of_a_sentencepiece_file_are_transformers_own() -> None:
    file = write_gguf(Path.cwd() / "tiny.gguf", tiny_qwen2(PIECES), **SENTENCEPIECE)
    Path("doc.txt").write_text(TEXT)
    assert run_here("build-index", "doc.txt", "--model", "tiny.gguf", "-o", "doc.skv", "-q").code == 0
    given = ("generate", "-i", "doc.skv", "Why?", "--method", "dense", "--max-new-tokens", "8", "--json", "-q")
    answer = json.loads(run_here(*given).stdout)
    plain, tokenizer = _by_transformers(file), load_tokenizer("tiny.gguf")
    messages = [{"role": "user", "content": f"{TEXT}\n\nWhy?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = plain.generate(**prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
    expected = output[0, prompt["input_ids"].shape[1] :].tolist()
    assert answer["text"] == decoded(tokenizer, expected)  # these bytes end within a character


def test_special_tokens_are_tokens_and_text_comes_back(file: Path) -> None:
    tokenizer = load_tokenizer("tiny.gguf")
    ids = tokenizer(f"the 12{SPECIAL_TOKENS[1]}the").input_ids
    assert [TOKENS[one] for one in ids].count(SPECIAL_TOKENS[1]) == 1
    assert tokenizer.decode(tokenizer(TEXT).input_ids) == TEXT
    assert tokenizer.eos_token == SPECIAL_TOKENS[2]
