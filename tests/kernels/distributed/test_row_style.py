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


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_two_ranks_have_the_logits_of_one(biased: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # also where there is a GPU, for a CPU's memory
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    model = build_tiny(LlamaConfig, attention_bias=biased, mlp_bias=biased)()
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "meeting").mkdir()
    ids = torch.randint(VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(1))
    memory = [torch.zeros(bytes_shared(RANKS), dtype=torch.uint8).share_memory_() for _ in range(RANKS)]
    run_together(run, [(number, tmp_path, memory, ids) for number in range(RANKS)], 200)
    with torch.inference_mode():
        expected = model(input_ids=ids, use_cache=False).logits
    for number in range(RANKS):
        logits, sums = torch.load(tmp_path / f"{number}.pt")
        assert_close(logits, expected, 1e-5)
        assert sums == len(ids) * 2 * LAYERS
