"""The same on a GPU: kernels, k-means, a build, an answer, a report, and a decode step that waits for nothing."""

from pathlib import Path

import pytest
import torch
from support.configs import sparse
from support.random_tensors import clustered
from support.reference import assert_close, attention_probabilities, random_attention, reference_attention
from support.replaced_decoding import decoding_errors
from support.small_index import INDEXERS, both_outputs, plain_logits, random_ids, reopen, small_plan, stepped_logits

from sparsekv.formats.index.reader import Artifact
from sparsekv.indexing.build import build_index
from sparsekv.indexing.indexers.cluster_indexer import kmeans
from sparsekv.kernels.attention.attention import Segment, attend
from sparsekv.kernels.common.hook import AttentionCall
from sparsekv.kernels.kmeans.kmeans import cluster_means
from sparsekv.kernels.scores.logits import cluster_scores
from sparsekv.runtime.decoding.answer import Sampling, question_ids
from sparsekv.runtime.decoding.engine import generate
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.prepare import residual_source
from sparsekv.runtime.methods.codes import Codes
from sparsekv.runtime.methods.csattention import CSAttention
from sparsekv.runtime.methods.h2o import H2O
from sparsekv.runtime.methods.keydiff import KeyDiff
from sparsekv.runtime.methods.lessismore import LessIsMore
from sparsekv.runtime.methods.loki import Loki
from sparsekv.runtime.methods.magicpig import MagicPIG
from sparsekv.runtime.methods.multipole import Multipole, WindowedMultipole
from sparsekv.runtime.methods.pqcache import PQCache
from sparsekv.runtime.methods.quest import Quest
from sparsekv.runtime.methods.snapkv import SnapKV
from sparsekv.runtime.methods.sparq import SparQ
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.methods.tidaldecode import TidalDecode
from sparsekv.runtime.methods.window import Window
from sparsekv.runtime.reporting.questions import question_queries
from sparsekv.runtime.reporting.report import recall_report
from sparsekv.runtime.selection.interface import Budget, Method
from sparsekv.runtime.selection.registry import choose_methods

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-3}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)

METHODS: dict[str, tuple[Method, bool]] = {
    "squeezed": (Squeezed(), False),
    "squeezed hierarchical": (Squeezed("hierarchical"), False),
    "squeezed hierarchical + residual": (Squeezed("hierarchical"), True),
    "multipole": (Multipole(), False),
    "multipole hierarchical": (Multipole("hierarchical"), False),
    "multipole-windowed": (WindowedMultipole(), False),
    "multipole-windowed hierarchical": (WindowedMultipole("hierarchical"), False),
    "csattention": (CSAttention(), False),
    "csattention by its lists alone + residual": (CSAttention(rerank=1.0), True),
    "quest + residual": (Quest(), True),
    "window + residual": (Window(), True),
    "snapkv": (SnapKV(), False),
    "h2o": (H2O(), False),
    "keydiff": (KeyDiff(), False),
    "tidaldecode": (TidalDecode(), False),
    "lessismore": (LessIsMore(), False),
    "pqcache": (PQCache(), False),
    "codes": (Codes(), False),
    "sparq": (SparQ(mean_value=True), False),
    "loki": (Loki(dims=5), False),
    "magicpig": (MagicPIG(hash_bits=4, hash_tables=10), False),
}
"""Each method that is decoded with, and whether with a residual."""


@pytest.fixture(scope="module", params=["llama", "gemma2", "gpt-oss"])
def on_gpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OpenIndex:
    """A small index built and opened on the GPU."""
    plan, folder = small_plan(request.param, methods=INDEXERS), tmp_path_factory.mktemp("gpu") / "small.skv"
    plan.loaded.model.to("cuda")  # type: ignore[arg-type]  # transformers wraps torch's own `to`
    build_index(plan, folder)
    return reopen(plan, folder)


@dtypes
@pytest.mark.parametrize("D", [64, 96, 128, 256])
def test_attention_and_lookup(dtype: torch.dtype, D: int) -> None:
    query, keys, values = random_attention(D=D, T=300, dtype=dtype)
    scale = D**-0.5
    moved = [tensor.cuda() for tensor in (query, keys, values)]
    output = attend(
        moved[0], [Segment(moved[1][:, :90], moved[2][:, :90]), Segment(moved[1][:, 90:], moved[2][:, 90:])], scale
    )
    assert_close(output.cpu(), reference_attention(query, keys, values, scale), TOLERANCE[dtype])
    ones = torch.ones(keys.shape[:2], dtype=torch.int32, device="cuda")
    expected = attention_probabilities(query, keys, scale).mean(1)
    assert_close(cluster_scores(moved[0], moved[1], ones, scale).cpu(), expected, TOLERANCE[dtype])


def test_kmeans_labels_are_the_nearest_centres_of_their_clusters() -> None:
    """Converged, so that the final assignment's means are the centres that it was made to."""
    points = clustered(0, 3, 4000, 16, 20).cuda()
    labels = kmeans(points, 20, 60, seed=0)
    means, counts = cluster_means(points, labels, 20)
    distances = torch.cdist(points.double(), means.double()).masked_fill(counts[:, None] == 0, torch.inf)
    chosen = distances.gather(2, labels[..., None])[..., 0]
    # Points and centres are up to 20 from the mean, and rounded to 11 bits.
    assert float((chosen - distances.amin(-1)).max()) <= 2**-10 * 40
    assert torch.equal(labels, kmeans(points, 20, 60, seed=0))


@pytest.mark.parametrize("name", ["squeezed", "multipole", "csattention", "dense"])
def test_everything_is_the_plain_model(on_gpu: OpenIndex, name: str) -> None:
    tokens = random_ids(40)
    cache = on_gpu.dense_cache() if name == "dense" else on_gpu.cache(sparse(name, METHODS[name][0], Budget(1.0)))
    logits = stepped_logits(on_gpu, cache, tokens.cuda(), question=9)
    plain = plain_logits(on_gpu.model, torch.cat([on_gpu.input_ids, tokens]).cuda())
    assert_close(logits.cpu(), plain[len(on_gpu.input_ids) :].cpu(), 1e-4)


@pytest.mark.parametrize("ahead", [False, True], ids=["in place", "ahead"])
@pytest.mark.parametrize("name", ["multipole", "csattention"])
def test_everything_is_the_plain_model_while_tokens_are_taken_in(on_gpu: OpenIndex, name: str, ahead: bool) -> None:
    tokens = random_ids(150)
    method = {"multipole": Multipole(stream=True, buffer=8), "csattention": CSAttention(stream=True, buffer=8)}[name]
    cache = on_gpu.cache(sparse(name, method, Budget(1.0), ahead=ahead))
    logits = stepped_logits(on_gpu, cache, tokens.cuda(), question=9)
    plain = plain_logits(on_gpu.model, torch.cat([on_gpu.input_ids, tokens]).cuda())
    assert_close(logits.cpu(), plain[len(on_gpu.input_ids) :].cpu(), 1e-4)


@pytest.mark.parametrize("lookup", ["flat", "hierarchical"])
def test_clusters_that_take_tokens_in_stand_for_them_wherever_rows_lie(on_gpu: OpenIndex, lookup: str) -> None:
    """By kernels where rows are chosen in place, by torch where they come from the host."""
    tokens, method = random_ids(90).cuda(), Multipole(lookup, stream=True, buffer=8)
    on_device, elsewhere = (
        on_gpu.cache(sparse("multipole", method, Budget(0.1), placement=place)) for place in ("device", "host")
    )
    expected = stepped_logits(on_gpu, elsewhere, tokens, question=9)
    assert_close(stepped_logits(on_gpu, on_device, tokens, question=9).cpu(), expected.cpu(), 1e-4)


@pytest.mark.parametrize(
    ("name", "method", "clusters"),
    [("multipole", Multipole(), "multipole"), ("squeezed", Squeezed(), "squeezed"), ("quest", Quest(), "codes")],
    ids=["multipole", "squeezed", "quest"],
)
def test_centroids_stand_for_tokens_as_the_definition_says(
    on_gpu: OpenIndex, name: str, method: Method, clusters: str
) -> None:
    """A method without clusters takes the clusters of the index's method that has the fewest."""
    assert residual_source(on_gpu.artifact) == "codes"
    assert max(decoding_errors(on_gpu, name, method, clusters, Budget(0.05))) <= 1e-4


def test_a_biased_row_in_another_precision_than_the_query() -> None:
    query, keys, values = random_attention(T=100, dtype=torch.bfloat16)
    bias = torch.full((1, 1, 1, 60), 300.0).log().cuda()
    biased = Segment(keys[:, :60].float().cuda(), values[:, :60].float().cuda(), bias=bias)
    output = attend(query.cuda(), [biased, Segment(keys[:, 60:].cuda(), values[:, 60:].cuda())], 0.125)
    repeated = [torch.cat([rows[:, :60].repeat(1, 300, 1), rows[:, 60:]], 1) for rows in (keys, values)]
    assert_close(output.cpu(), reference_attention(query, *repeated, 0.125), TOLERANCE[torch.bfloat16])


def test_an_answer_and_a_report(on_gpu: OpenIndex) -> None:
    cache = on_gpu.cache(sparse("squeezed", Squeezed(lookup="hierarchical"), Budget(0.1)))
    answer = generate(on_gpu, cache, question_ids(on_gpu, "What comes next?"), Sampling(max_new_tokens=12))
    assert 0 < answer.kv_fraction < 1
    report = recall_report(
        on_gpu.artifact,
        choose_methods([], list(INDEXERS)),
        [Budget(0.1)],
        question_queries(on_gpu, ["What next?"]),
        residual=True,
    )
    assert all(0 <= row.recall <= 1 for row in report.by())


def test_an_index_of_the_gpu_opens_on_the_cpu(on_gpu: OpenIndex, tmp_path: Path) -> None:
    family = on_gpu.artifact.manifest.model.id.removeprefix("tiny-")
    opened = reopen(small_plan(family), on_gpu.artifact.folder)
    assert opened.model.device.type == "cpu"
    assert list(Artifact(on_gpu.artifact.folder).verify())


@pytest.mark.parametrize("name", METHODS)
def test_a_decode_step_waits_for_nothing(on_gpu: OpenIndex, name: str) -> None:
    """Every layer's attention, selection included, with each synchronisation made an error."""
    method, residual = METHODS[name]
    cache = on_gpu.cache(sparse(name.partition(" ")[0], method, Budget(0.1), residual=residual))
    config, manifest = on_gpu.model.config, on_gpu.artifact.manifest
    for number in manifest.indexed_layers:
        layer, facts = cache.stored_layers[number], manifest.layers[number]
        keys, _ = layer.exact_rows()
        rows = torch.randn(1, keys.shape[0], 1, keys.shape[2], device="cuda")
        layer.update(rows, rows)
        query = torch.randn(config.num_attention_heads, 1, keys.shape[2], device="cuda")
        sinks = torch.zeros(len(query), device="cuda") if facts.attention_sinks else None
        call = AttentionCall(number, query, rows[0], rows[0], facts.softmax_scale, facts.softcap, None, sinks)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            layer.attend(call)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert cache.kv_fraction() > 0


@pytest.mark.parametrize("name", [*METHODS, "dense"])
def test_captured_steps_answer_as_those_that_are_launched(on_gpu: OpenIndex, name: str) -> None:
    """Over several questions, greedy and sampled, with one graph for all of them, unless a method's index changes."""
    method, residual = METHODS.get(name, (Window(), False))
    captured, launched = (
        on_gpu.dense_cache()
        if name == "dense"
        else on_gpu.cache(sparse(name.partition(" ")[0], method, Budget(0.1), residual=residual))
        for _ in range(2)
    )
    launched.capturing = False
    assert captured.capturable
    graphs = []
    for question, temperature in (("What comes next?", 0.0), ("Why?", 1.0), ("And then, after all of that?", 0.0)):
        asked, sampling = question_ids(on_gpu, question), Sampling(max_new_tokens=12, temperature=temperature, seed=5)
        found, expected = (generate(on_gpu, cache, asked, sampling) for cache in (captured, launched))
        assert found.ids == expected.ids
        assert found.kv_fraction == pytest.approx(expected.kv_fraction)
        graphs.append(captured.graphs.get(1))
    assert not launched.graphs
    assert graphs[0] is not None
    assert all(graph is graphs[0] for graph in graphs) == (name != "snapkv")


def test_a_captured_step_follows_a_buffer_that_grows(on_gpu: OpenIndex) -> None:
    asked, captured, launched = (question_ids(on_gpu, "Why?"), *(on_gpu.dense_cache() for _ in range(2)))
    launched.capturing = False
    lengths = []
    for tokens in (4, 400):
        found, expected = (
            generate(on_gpu, cache, asked, Sampling(max_new_tokens=tokens, temperature=1.0, seed=1))
            for cache in (captured, launched)
        )
        assert found.ids == expected.ids
        lengths.append((captured.graphs.get(1), captured.buffers()))
    assert lengths[0][1] != lengths[1][1]
    assert lengths[0][0] is not lengths[1][0]


def test_steps_that_wait_are_launched(on_gpu: OpenIndex) -> None:
    asked = question_ids(on_gpu, "Why?")
    cache = on_gpu.cache(sparse("squeezed", Squeezed("hierarchical", "threshold"), Budget(0.1)))
    first, second = (generate(on_gpu, cache, asked, Sampling(max_new_tokens=8)) for _ in range(2))
    assert first.ids == second.ids
    assert not cache.graphs
    assert not cache.capturable


@pytest.mark.parametrize("placement", ["host", "disk"])
@pytest.mark.parametrize("name", METHODS)
def test_rows_elsewhere_are_the_same_rows(on_gpu: OpenIndex, name: str, placement: str) -> None:
    method, residual = METHODS[name]
    tokens = random_ids(30).cuda()
    on_device, elsewhere = (
        on_gpu.cache(sparse(name.partition(" ")[0], method, Budget(0.1), residual=residual, placement=place))
        for place in ("device", placement)
    )
    for expected, output in both_outputs(on_gpu, on_device, elsewhere, tokens, question=9):
        assert_close(output.cpu(), expected.cpu(), 1e-5)


@pytest.mark.parametrize("placement", ["device", "host"])
@pytest.mark.parametrize("name", ["multipole", "csattention"])
def test_searching_ahead_on_a_stream_of_its_own(on_gpu: OpenIndex, name: str, placement: str) -> None:
    """Steps repeated many times over, so that a transfer that is not waited for shows as another result."""
    tokens = random_ids(60).cuda()
    caches = [
        on_gpu.cache(sparse(name, METHODS[name][0], Budget(0.1), placement=place, ahead=True))
        for place in ("device", placement)
    ]
    first, *others = (stepped_logits(on_gpu, cache, tokens, question=9) for cache in caches for _ in range(4))
    for logits in others:
        assert_close(logits.cpu(), first.cpu(), 1e-5)
