"""Time one chunk of a sparse prefill in one layer, its choice of keys included, and compare it with dense attention.

Run it as `python docs/benchmarks/time_prefill.py [TOKENS]`.

On a CPU the layer has SmolLM2's shape in float32, with chunks of 128 and 512 after 32,768 keys. Dense attention is the
faster of two calls of torch's fused attention: with grouped heads, and with repeated keys and values.

On a GPU there are 32 query heads on 8 KV heads, D = 128, bfloat16, and a chunk of 2,048 after 65,536 keys. Caches are
cold. Dense attention is timed with every kernel of torch that can compute it. Sparse prefills are timed in three ways:
with kernels launched one by one, where launching may take longer than the kernels; in the layers of a model of an 8B
model's shape, as a prefill launches them; and as a CUDA graph.
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import median, quantiles

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from sparsekv.indexing.prefill.prefills import QuokaPrefill, SampleAttentionPrefill, SparsePrefill
from sparsekv.kernels.attention.attention import causal_mask
from sparsekv.kernels.common.hook import AttentionCall, route_attention
from sparsekv.runtime.benchmark.end_to_end import model_config, random_model

SINKS = 10
Run = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """Shape of one layer, the default number of keys before a chunk, the chunks' lengths, and the number of runs."""

    device: str
    dtype: torch.dtype
    heads: int
    group: int
    dims: int
    before: int
    chunks: tuple[int, ...]
    runs: int


ON_CPU = Shape("cpu", torch.float32, 3, 3, 64, 32_768, (128, 512), 15)
ON_GPU = Shape("cuda", torch.bfloat16, 8, 4, 128, 65_536, (2048,), 40)
LAYERS = 8  # of a model that a chunk passes through
LARGEST_ERROR = 1e-2  # of a form of dense attention against another, in bfloat16


def timed(run: Run, runs: int) -> tuple[float, float]:
    """Return the median of the milliseconds of some runs, and the distance between their quartiles."""
    run()
    found = []
    for _ in range(runs):
        started = time.perf_counter()
        run()
        found.append(1000 * (time.perf_counter() - started))
    low, _, high = quantiles(found, n=4)
    return median(found), high - low


def timed_on_gpu(run: Run, runs: int) -> tuple[float, float]:
    """Time like `timed`, by CUDA events; 256 MB of other memory are read before each run, so that caches are cold."""
    scrap = torch.ones(2**26, device="cuda")
    for _ in range(3):
        run()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
    for start, stop in events:
        scrap.sum()
        start.record()
        run()
        stop.record()
    return between(events)


def between(events: list[list[torch.cuda.Event]]) -> tuple[float, float]:
    """Return the median of the milliseconds between pairs of events, and the distance between their quartiles."""
    torch.cuda.synchronize()
    low, middle, high = quantiles([start.elapsed_time(stop) for start, stop in events], n=4)
    return middle, high - low


def timed_in_a_model(
    model: PreTrainedModel, prefill: SparsePrefill, call: AttentionCall, passes: int = 5
) -> tuple[float, float]:
    """Time by CUDA events the attention of each layer while a chunk passes through a model, as in `build-index`."""
    events: list[list[torch.cuda.Event]] = []

    def attend(asked: AttentionCall) -> torch.Tensor:
        events.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
        events[-1][0].record()
        output = prefill.attend(replace(call, query=asked.query), SINKS)
        events[-1][1].record()
        return output

    chunk = torch.arange(call.query.shape[1], device=call.query.device)[None]
    with route_attention(model, attend):
        for _ in range(1 + passes):
            model.base_model(input_ids=chunk, use_cache=False)
    return between(events[LAYERS:])


def chunk_call(shape: Shape, before: int, chunk: int) -> AttentionCall:
    """Make the attention call of a chunk of random queries after `before` random keys."""
    generator = torch.Generator(shape.device).manual_seed(0)
    rows = partial(torch.randn, generator=generator, device=shape.device, dtype=shape.dtype)
    query = rows(shape.heads * shape.group, chunk, shape.dims)
    keys, values = (rows(shape.heads, before + chunk, shape.dims) for _ in range(2))
    return AttentionCall(0, query, keys, values, shape.dims**-0.5, None, None, None)


def dense(call: AttentionCall, *, grouped: bool, masked: bool = False) -> Run:
    """Return a run of causal attention to all keys.

    `masked` passes the mask as a tensor, for kernels that support only square causal masks otherwise.
    """
    group = len(call.query) // len(call.keys)
    keys, values = (rows if grouped else rows.repeat_interleave(group, 0) for rows in (call.keys, call.values))
    queries, tokens = call.query.shape[1], keys.shape[1]
    mask: torch.Tensor = causal_lower_right(queries, tokens)
    if masked:
        hidden = ~causal_mask(queries, tokens, None, keys.device)
        mask = torch.zeros(queries, tokens, dtype=keys.dtype, device=keys.device).masked_fill_(hidden, -torch.inf)
    tensors = call.query[None], keys[None], values[None]
    return lambda: scaled_dot_product_attention(*tensors, attn_mask=mask, scale=call.softmax_scale, enable_gqa=grouped)[
        0
    ]


def in_two_parts(call: AttentionCall) -> torch.Tensor:
    """Compute causal attention to all keys by cuDNN, which supports only square causal masks.

    The keys before the chunk and the chunk's keys are attended separately, and the two outputs are merged.
    """
    before, outputs, totals = call.keys.shape[1] - call.query.shape[1], [], []
    for part, causal in ((slice(None, before), False), (slice(before, None), True)):
        keys, values = call.keys[None, :, part], call.values[None, :, part]
        # Its arguments: no bias, the log-sum-exps too, no dropout, whether it is causal, no mask in return.
        output, total, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            call.query[None], keys, values, None, True, 0.0, causal, False, scale=call.softmax_scale
        )
        outputs.append(output[0])
        totals.append(total.view(len(call.query), -1, 1))
    share = (totals[0] - totals[1]).sigmoid()
    return torch.lerp(outputs[1].float(), outputs[0].float(), share).to(call.query.dtype)


def with_kernel(backend: SDPBackend, run: Run) -> torch.Tensor:
    """Run dense attention with one of torch's kernels only."""
    with sdpa_kernel(backend):
        return run()


def dense_on_gpu(call: AttentionCall) -> Iterator[tuple[str, Run]]:
    """Yield runs of dense attention by name, one for each kernel; RuntimeError in a run means that it is missing."""
    flash, cudnn, efficient = (
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
    )
    for name, grouped in (("grouped", True), ("repeated", False)):
        yield f"Flash, {name}", partial(with_kernel, flash, dense(call, grouped=grouped))
        yield f"cuDNN with a mask, {name}", partial(with_kernel, cudnn, dense(call, grouped=grouped, masked=True))
        yield f"memory-efficient, {name}", partial(with_kernel, efficient, dense(call, grouped=grouped))
    yield "cuDNN in two parts", lambda: in_two_parts(call)


def relative_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    return float((output.float() - expected.float()).norm() / expected.float().norm())


def as_graph(run: Run) -> tuple[Run, torch.Tensor]:
    """Capture a run as a CUDA graph; return a run that replays it, and the tensor that a replay writes.

    Raises RuntimeError if the run waits for the GPU.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()

    def replay() -> torch.Tensor:
        graph.replay()
        return output

    return replay, output


def show(name: str, took: tuple[float, float], best: float) -> None:
    print(f"  {name:34s} {took[0]:8.3f} ms ({took[1]:.3f})  {best / took[0]:6.2f}", flush=True)


def time_on_gpu(call: AttentionCall, sparse: dict[str, SparsePrefill], runs: int) -> None:
    """Time each kernel of dense attention, then sparse prefills; print each one's speed-up over the fastest kernel."""
    found: dict[str, tuple[float, float]] = {}
    expected = dense(call, grouped=True)()
    for name, form in dense_on_gpu(call):
        try:
            error = relative_error(form(), expected)
            if not error < LARGEST_ERROR:
                print(f"  {name:34s} is off by {error:.4f}: left out")
                continue
            found[name] = timed_on_gpu(form, runs // 2)
        except RuntimeError as reason:
            print(f"  {name:34s} not there: {str(reason).splitlines()[0][:60]}")
            torch.cuda.synchronize()
    best = min(took[0] for took in found.values())
    for name, took in found.items():
        show(f"dense, {name}", took, best)
    config = model_config("qwen3-8b")
    config.num_hidden_layers = LAYERS
    model = random_model(config, call.query.device, call.query.dtype, 0)
    for name, prefill in sparse.items():
        step = partial(prefill.attend, call, SINKS)
        eager = step()
        show(f"{name}, launch by launch", timed_on_gpu(step, runs), best)
        show(f"{name}, in a model's layers", timed_in_a_model(model, prefill, call), best)
        try:
            replay, output = as_graph(step)
        except RuntimeError:
            print(f"  {name} waits for the GPU: no graph")
            continue
        output.fill_(torch.nan)
        assert relative_error(replay(), eager) < 1e-3
        show(f"{name}, as a graph", timed_on_gpu(replay, runs), best)


def time_on_cpu(call: AttentionCall, sparse: dict[str, SparsePrefill], runs: int) -> None:
    """Time two calls of dense attention, then sparse prefills; print each one's speed-up over the faster call."""
    found = {name: timed(dense(call, grouped=name == "grouped"), runs) for name in ("grouped", "repeated")}
    best = min(took[0] for took in found.values())
    for name, took in found.items():
        show(f"dense, {name}", took, best)
    for name, prefill in sparse.items():
        show(name, timed(partial(prefill.attend, call, SINKS), runs), best)


@torch.inference_mode()
def main() -> None:
    shape = ON_GPU if torch.cuda.is_available() else ON_CPU
    before = int(sys.argv[1]) if len(sys.argv) > 1 else shape.before
    machine = torch.cuda.get_device_name() if shape is ON_GPU else f"{torch.get_num_threads()} threads"
    print(f"{before:,} keys before, {machine}, torch {torch.__version__}: median (between quartiles), times as fast")
    sparse: dict[str, SparsePrefill] = {"quoka": QuokaPrefill(), "sampleattention": SampleAttentionPrefill()}
    for chunk in shape.chunks:
        print(f"chunk of {chunk:,}, {QuokaPrefill().prefill_budget:,} keys kept")
        time_them = time_on_gpu if shape is ON_GPU else time_on_cpu
        time_them(chunk_call(shape, before, chunk), sparse, shape.runs)


if __name__ == "__main__":
    main()
