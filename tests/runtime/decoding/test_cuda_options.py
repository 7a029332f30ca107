"""Each option of decoding on a GPU: kernels answer as plain torch does there, and with everything attended as the CPU.

With less attended a CPU may choose otherwise: there scores are told apart more finely, and random numbers are others.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from support.configs import sparse
from support.reference import assert_close
from support.small_index import INDEXERS, random_ids, reopen, small_plan, stepped_logits
from support.tiny_models import build_tiny, tiny_tokenizer
from transformers import LlamaConfig

from sparsekv.formats.models.load import LoadedModel
from sparsekv.indexing.build import build_index
from sparsekv.runtime.attention.config import QuestionPrefill
from sparsekv.runtime.attention.guard import Guard
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.methods.codes import Codes
from sparsekv.runtime.methods.csattention import CSAttention
from sparsekv.runtime.methods.lessismore import LessIsMore
from sparsekv.runtime.methods.loki import Loki
from sparsekv.runtime.methods.magicpig import MagicPIG
from sparsekv.runtime.methods.multipole import Multipole, WindowedMultipole
from sparsekv.runtime.methods.oracle import Oracle
from sparsekv.runtime.methods.pqcache import PQCache
from sparsekv.runtime.methods.quest import Quest
from sparsekv.runtime.methods.quoka import Quoka
from sparsekv.runtime.methods.sampleattention import SampleAttention
from sparsekv.runtime.methods.snapkv import SnapKV
from sparsekv.runtime.methods.sparq import SparQ
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.methods.tidaldecode import TidalDecode
from sparsekv.runtime.selection.interface import Budget, Method

pytestmark = pytest.mark.gpu


@dataclass(frozen=True)
class Options:
    """A method, and what else `generate` can be told."""

    name: str
    method: Method
    budget: Budget = field(default_factory=lambda: Budget(0.1))
    others: dict[str, Any] = field(default_factory=dict)


QUESTION = QuestionPrefill("quoka", Quoka(), Budget(0.2), chunk_size=5)
EACH: dict[str, Options] = {
    "multipole --no-replace": Options("multipole", Multipole(replace=False)),
    "multipole --opened": Options("multipole", Multipole("hierarchical", opened=2.0)),
    "multipole --guard": Options("multipole", Multipole(), others={"guard": Guard(0.02)}),
    "multipole --guard down two levels": Options("multipole", Multipole("hierarchical"), others={"guard": Guard(0.02)}),
    "multipole --gauge": Options("multipole", Multipole(), others={"gauge": True}),
    "multipole --prefill quoka": Options("multipole", Multipole(), others={"question": QUESTION}),
    "multipole --stream": Options("multipole", Multipole(stream=True, buffer=8)),
    "multipole --stream down two levels": Options("multipole", Multipole("hierarchical", stream=True, buffer=8)),
    "multipole-windowed --stream": Options("multipole-windowed", WindowedMultipole(stream=True, buffer=8)),
    "multipole-windowed --rope-distance": Options("multipole-windowed", WindowedMultipole(rope_distance=64)),
    "squeezed --opened": Options("squeezed", Squeezed("hierarchical", opened=1.5)),
    "squeezed --selection threshold": Options("squeezed", Squeezed("flat", selection="threshold")),
    "squeezed --selection threshold down two levels": Options(
        "squeezed", Squeezed("hierarchical", selection="threshold")
    ),
    "squeezed --residual": Options("squeezed", Squeezed(), others={"residual": True}),
    "squeezed --residual --guard": Options("squeezed", Squeezed(), others={"residual": True, "guard": Guard(0.02)}),
    "squeezed --prefill quoka": Options("squeezed", Squeezed(), others={"question": QUESTION}),
    "csattention --csattention-scoring floor": Options("csattention", CSAttention(csattention_scoring="floor")),
    "csattention --csattention-scoring paper": Options("csattention", CSAttention(csattention_scoring="paper")),
    "csattention --csattention-weights fitted": Options("csattention", CSAttention(csattention_weights="fitted")),
    "csattention --backoff": Options("csattention", CSAttention(backoff=0.5)),
    "csattention --step": Options("csattention", CSAttention(step=3)),
    "csattention --rerank 1": Options("csattention", CSAttention(rerank=1.0)),
    "csattention --stream": Options("csattention", CSAttention(stream=True, buffer=8)),
    "quest --page-size": Options("quest", Quest(page_size=5)),
    "quoka": Options("quoka", Quoka()),
    "quoka --quoka-similarity dot": Options("quoka", Quoka(quoka_similarity="dot")),
    "quoka --quoka-across mean": Options("quoka", Quoka(quoka_across="mean")),
    "quoka --quoka-subset all": Options("quoka", Quoka(quoka_subset="all")),
    "sampleattention": Options("sampleattention", SampleAttention()),
    "oracle": Options("oracle", Oracle()),
    "snapkv --pooling average": Options("snapkv", SnapKV(window_queries=8, pool_size=3, pooling="average")),
    "tidaldecode --select-layer": Options("tidaldecode", TidalDecode(select_layer=3)),
    "lessismore --recent-share": Options("lessismore", LessIsMore(select_layer=3, recent_share=0.5)),
    "sparq --channels": Options("sparq", SparQ(channels=5)),
    "loki --dims": Options("loki", Loki(dims=3)),
    "magicpig --hash-seed": Options("magicpig", MagicPIG(hash_bits=4, hash_tables=10, hash_seed=3)),
    "pqcache --rerank": Options("pqcache", PQCache(rerank=2.0)),
    "codes --scan --no-replace": Options("codes", Codes(scan=0.3, rerank=2.0, replace=False)),
}


def _logits(index: OpenIndex, options: Options, tokens: torch.Tensor, **others: Any) -> torch.Tensor:
    cache = index.cache(sparse(options.name, options.method, options.budget, **options.others, **others))
    return stepped_logits(index, cache, tokens, question=13).cpu()


@pytest.fixture(scope="module")
def on_both(tmp_path_factory: pytest.TempPathFactory) -> tuple[OpenIndex, OpenIndex]:
    """One small index, opened on the CPU and on the GPU; five layers, so that some of them choose for others."""
    folder, model = tmp_path_factory.mktemp("options") / "small.skv", build_tiny(LlamaConfig, num_hidden_layers=5)
    here, moved = (
        small_plan(methods=INDEXERS, loaded=LoadedModel(model(), tiny_tokenizer(), "tiny-deep", None)) for _ in range(2)
    )
    moved.loaded.model.to("cuda")  # type: ignore[arg-type]  # transformers wraps torch's own `to`
    build_index(here, folder)
    return reopen(here, folder), reopen(moved, folder)


@pytest.mark.parametrize("name", [name for name in EACH if name != "csattention --stream"])
def test_rows_in_place_and_rows_on_the_host(on_both: tuple[OpenIndex, OpenIndex], name: str) -> None:
    """Where rows come from the host there are no kernels. CSAttention would search there, by other random numbers."""
    (_, index), tokens = on_both, random_ids(60).cuda()
    on_device, elsewhere = (_logits(index, EACH[name], tokens, placement=place) for place in ("device", "host"))
    assert_close(on_device, elsewhere, 1e-4)


@pytest.mark.parametrize("name", EACH)
def test_with_everything_attended_the_same_as_the_cpu(on_both: tuple[OpenIndex, OpenIndex], name: str) -> None:
    options, tokens = replace(EACH[name], budget=Budget(1.0)), random_ids(60)
    on_cpu, on_gpu = (_logits(index, options, tokens.to(index.model.device)) for index in on_both)
    assert_close(on_gpu, on_cpu, 1e-4)
