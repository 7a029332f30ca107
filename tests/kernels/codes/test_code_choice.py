"""Keys chosen while their codes are scanned: exactly those chosen after a scan, and nearly those of the definition."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support.coded_keys import moved, small_clusters, small_codes
from support.kernel_runs import DEVICE, compiled_or_interpreted, poisoned_memory
from support.random_tensors import normal

from sparsekv.kernels.codes import code_ranks
from sparsekv.kernels.codes.code_choice_triton import best_by_codes_triton
from sparsekv.kernels.codes.code_ranks import CodeChoice, LaidOutCodes, WeighedClusters, best_by_codes, rank_codes
from sparsekv.kernels.codes.code_ranks_triton import rank_codes_triton
from sparsekv.kernels.common.launch import is_hopper
from sparsekv.kernels.posting_lists.list_ranks import ExactKeys, KeyGroups, top_ranked

pytestmark = compiled_or_interpreted
SCALE, CLUSTERS = 0.3, 70


@dataclass(frozen=True)
class Choice:
    """Arguments of a choice of `wanted` keys of two heads, on the device of the kernels."""

    query: torch.Tensor
    codes: LaidOutCodes
    clusters: WeighedClusters
    exact: ExactKeys
    wanted: int
    labels: torch.Tensor
    softcap: float | None = None

    def made(self) -> CodeChoice:
        """Return the choice of the kernel."""
        rows = torch.zeros(2, len(self.query), self.codes.keys, self.query.shape[2], dtype=self.query.dtype)
        keys, values = rows.to(DEVICE)
        first = self.query, self.codes, self.clusters, self.exact, self.wanted, self.labels
        with poisoned_memory():
            return best_by_codes_triton(*first, (keys, values), SCALE, self.softcap)

    def ranked_first(self) -> CodeChoice:
        """Return the choice of the kernel that ranks all keys, and of a sort."""
        first = self.query, self.codes, self.clusters, self.exact, self.wanted
        found = rank_codes_triton(*first, SCALE, self.softcap)
        chosen = top_ranked.reference(found.ranks, self.wanted, None, KeyGroups(self.labels, found.taken))
        return CodeChoice(chosen, found.logits, found.taken, ahead=False)

    def check(self) -> CodeChoice:
        """Fail unless the kernel's choice is the same as if the keys were ranked first; return it."""
        found, expected = self.made(), self.ranked_first()
        assert torch.equal(found.chosen, expected.chosen)
        assert torch.equal(found.taken, expected.taken)
        assert torch.equal(found.logits, expected.logits)
        return found


def some_choice(
    G: int = 4, size: int = 8, keys: int = 4500, wanted: int = 150, dtype: torch.dtype = torch.bfloat16
) -> Choice:
    """Return a choice by codes of eight bytes; clusters are of uneven sizes, and some are empty."""
    D = 8 * size
    (codes, _), clusters = small_codes(G, 8, size, keys=keys), small_clusters(7, keys, D, CLUSTERS)
    clusters = replace(clusters, keys=clusters.keys.to(dtype))
    drawn = torch.rand(2, 2, keys, generator=torch.Generator().manual_seed(5))
    labels = (drawn[0] * drawn[1] * CLUSTERS).short().to(DEVICE)
    query, exact = 2 * normal(1, 2, G, D).to(DEVICE, dtype), ExactKeys(normal(2, 2, 90, D).to(dtype))
    return Choice(query, moved(codes), moved(clusters), moved(exact), wanted, labels)


@pytest.mark.thinned
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("G", "size"), [(1, 16), (2, 8), (3, 16), (4, 16)])
def test_the_same_as_if_keys_were_ranked_first(G: int, size: int, dtype: torch.dtype, softcap: float | None) -> None:
    replace(some_choice(G, size, dtype=dtype), softcap=softcap).check()


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [(1, 1), (40, 3), (4095, 4094), (4096, 1), (4097, 200), (9000, 450)],
)
def test_any_number_of_keys(keys: int, wanted: int) -> None:
    some_choice(2, keys=keys, wanted=wanted).check()


@pytest.mark.parametrize("wanted", [1, 33, 4200])
def test_the_first_of_equal_keys_are_chosen(wanted: int) -> None:
    choice = some_choice(4, wanted=wanted)
    found = replace(choice, query=torch.zeros_like(choice.query)).check()
    assert torch.equal(found.chosen, torch.arange(wanted, dtype=torch.int32, device=DEVICE).expand(2, -1))


@pytest.mark.parametrize("there", [0, 40])
def test_sinks_and_as_many_exact_keys_as_are_counted(there: int) -> None:
    choice = some_choice(3)
    count, sinks = torch.tensor([there], dtype=torch.int32, device=DEVICE), normal(7, 2, 3).to(DEVICE)
    replace(choice, exact=replace(choice.exact, count=count, sinks=sinks)).check()


def test_labels_in_four_bytes_and_heads_with_room() -> None:
    choice = some_choice(4)
    room = torch.full((2, choice.codes.keys + 11), 2**30, dtype=torch.int32, device=DEVICE)
    room[:, : choice.codes.keys] = choice.labels
    replace(choice, labels=room[:, : choice.codes.keys]).check()


def test_nearly_the_keys_of_the_definition() -> None:
    """A product that is rounded the other way moves a key to the next rank, and so swaps keys at the last chosen
    rank."""
    choice = some_choice(4, keys=9000, wanted=450)
    found = choice.made()
    first = choice.query, choice.codes, choice.clusters, choice.exact, choice.wanted
    ranks = rank_codes.reference(*first, SCALE).ranks
    expected, of_each = top_ranked.reference(ranks, choice.wanted), ranks.in_order()
    lowest = of_each.gather(1, expected.long()).amin(1, keepdim=True)
    assert bool((of_each.gather(1, found.chosen.long()) >= lowest - 2).all())
    for one, other in zip(found.chosen.tolist(), expected.tolist(), strict=True):
        assert len(set(one) & set(other)) > 0.97 * choice.wanted
    for head, labels in enumerate(choice.labels):
        named = labels[found.chosen[head].long()].long()
        assert torch.equal(found.taken[head].long(), torch.bincount(named, minlength=CLUSTERS))


def within_limits(monkeypatch: pytest.MonkeyPatch, *, hopper: bool = True, sms: int = 132, **changed: Any) -> bool:
    """Whether the kernel is used for eight heads of 131,072 tokens on a GPU of `sms` multiprocessors."""
    monkeypatch.setattr(code_ranks, "is_hopper", lambda _: hopper)
    monkeypatch.setattr(code_ranks, "count_sms", lambda _: sms)
    given = {"heads": 8, "G": 4, "parts": 8, "keys": 131072, "wanted": 3000, "D": 128, "queries": 8}
    given |= {"dtype": torch.bfloat16, "stored": torch.bfloat16} | changed
    heads, D, parts, keys = (given[name] for name in ("heads", "D", "parts", "keys"))
    nothing = torch.empty(0)
    codes = LaidOutCodes(
        nothing.half(),
        torch.empty(heads, parts, 1, D // parts).half(),
        torch.empty(1, dtype=torch.int32).expand(heads, parts // 4, keys),
        keys,
        nothing,
    )
    row = torch.empty(1, dtype=given["stored"])
    query = torch.empty(given["queries"], given["G"], D, dtype=given["dtype"])
    clusters, exact = WeighedClusters(nothing, nothing, nothing), ExactKeys(nothing)
    return best_by_codes._fits is not None and best_by_codes._fits(
        query, codes, clusters, exact, given["wanted"], nothing, (row, row), SCALE
    )


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, True),
        ({"keys": 17 * 4096}, True),
        ({"keys": 16 * 4096}, False),
        ({"heads": 4, "queries": 4, "keys": 64 * 4096}, True),
        ({"heads": 4, "queries": 4, "keys": 65 * 4096}, False),
        ({"keys": 34 * 4096}, False),
        ({"sms": 127}, False),
        ({"hopper": False}, False),
        ({"queries": 16}, False),
        ({"G": 5}, False),
        ({"parts": 4}, False),
        ({"parts": 16}, False),
        ({"D": 64}, True),
        ({"D": 256}, False),
        ({"D": 96}, False),
        ({"dtype": torch.float32}, False),
        ({"stored": torch.float32}, False),
        ({"wanted": 6144}, True),
        ({"wanted": 6145}, False),
    ],
    ids=str,
)
def test_limits(changed: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert within_limits(monkeypatch, **changed) == expected


@dataclass(frozen=True)
class Step:
    """Arguments of a choice over 131,072 tokens of eight heads on a Hopper GPU, with the rows of a model's shape."""

    query: torch.Tensor
    codes: LaidOutCodes
    clusters: WeighedClusters
    exact: ExactKeys
    labels: torch.Tensor
    rows: tuple[torch.Tensor, torch.Tensor]

    def choose(self) -> CodeChoice:
        return best_by_codes(self.query, self.codes, self.clusters, self.exact, 3000, self.labels, self.rows, SCALE)


@pytest.fixture
def long_step() -> Step:
    if not is_hopper(torch.device("cuda")):
        pytest.skip("only Hopper GPUs choose keys while they scan")
    keys, clusters, D = 131072 - 138, 1023, 128
    (codes, _), weighed = small_codes(3, 8, 16, keys, heads=8), small_clusters(7, keys, D, clusters, heads=8)
    labels = torch.randint(0, clusters, (8, keys), generator=torch.Generator().manual_seed(5)).short()
    rows = torch.zeros(8, keys, D, dtype=torch.bfloat16, device="cuda")
    weighed = replace(weighed, keys=weighed.keys.bfloat16())
    query, exact = normal(1, 8, 4, D).cuda().bfloat16(), ExactKeys(normal(2, 8, 138, D).cuda().bfloat16())
    return Step(query, moved(codes), moved(weighed), exact, labels.cuda(), (rows, torch.zeros_like(rows)))


def is_right(step: Step, found: CodeChoice) -> torch.Tensor:
    """Return [] bool, on the GPU: whether the choice is that of the kernels that rank first."""
    expected = best_by_codes.reference(
        step.query, step.codes, step.clusters, step.exact, 3000, step.labels, step.rows, SCALE
    )
    same = [(found.chosen == expected.chosen).all(), (found.taken == expected.taken).all()]
    return torch.stack([*same, (found.logits == expected.logits).all()]).all()


@pytest.mark.gpu
def test_a_long_document_on_a_gpu(long_step: Step) -> None:
    found = long_step.choose()
    assert found.ahead
    assert bool(is_right(long_step, found))
    query, codes, clusters = long_step.query.cpu(), long_step.codes, long_step.clusters
    on_host = [replace(one, **{k: v.cpu() for k, v in vars(one).items() if isinstance(v, torch.Tensor)})
               for one in (codes, clusters, long_step.exact)]  # fmt: skip
    expected = top_ranked.reference(rank_codes.reference(query, *on_host, 3000, SCALE).ranks, 3000)
    for one, other in zip(found.chosen.tolist(), expected.tolist(), strict=True):
        assert len(set(one) & set(other)) > 0.97 * 3000


@pytest.mark.gpu
def test_every_replay_of_a_graph_gives_the_same_choice(long_step: Step) -> None:
    """Programs wait for each other, in one stream and in three at the same time."""
    streams, graphs, right = [torch.cuda.Stream() for _ in range(3)], [], []
    assert bool(is_right(long_step, long_step.choose()))
    for stream in streams:
        counter = torch.zeros((), dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            counter += is_right(long_step, long_step.choose())
        graphs.append(graph)
        right.append(counter)
    for together in (streams[:1], streams):
        for counter in right:
            counter.zero_()
        torch.cuda.synchronize()
        for _ in range(3000):
            for stream, graph in zip(together, graphs, strict=False):
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        assert [int(counter) for counter in right[: len(together)]] == [3000] * len(together)
