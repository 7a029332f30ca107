"""A model that two ranks share, whose small sums go through memory that both see, answers as the whole one."""

from pathlib import Path

import pytest
import torch
from support.reference import assert_close
from support.spawned import run_together
from support.styled_rank import run
from support.tiny_models import VOCABULARY, build_tiny, tiny_tokenizer
from transformers import LlamaConfig

from sparsekv.kernels.distributed.shared_memory import bytes_shared

LAYERS, RANKS = 3, 2


def test_two_ranks_have_the_logits_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # also where there is a GPU, for a CPU's memory
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    models = {
        name: build_tiny(LlamaConfig, attention_bias=biased, mlp_bias=biased)()
        for name, biased in (("plain", False), ("biased", True))
    }
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
        tiny_tokenizer().save_pretrained(tmp_path / name)
    (tmp_path / "meeting").mkdir()
    ids = torch.randint(VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(1))
    memory = [torch.zeros(bytes_shared(RANKS), dtype=torch.uint8).share_memory_() for _ in range(RANKS)]
    run_together(run, [(number, tmp_path, memory, ids, tuple(models)) for number in range(RANKS)], 200)
    found = [torch.load(tmp_path / f"{number}.pt") for number in range(RANKS)]
    for name, model in models.items():
        with torch.inference_mode():
            expected = model(input_ids=ids, use_cache=False).logits
        for of_rank in found:
            logits, sums = of_rank[name]
            assert_close(logits, expected, 1e-5)
            assert sums == len(ids) * 2 * LAYERS
