"""Times what follows a prefill when an index is built: `python docs/benchmarks/time_index.py [FOLDER]`.

On a GPU 36 layers of 8 KV heads, 131,072 tokens, D = 128, bfloat16, which is an 8B model's context of 128K; elsewhere
two small layers. Their keys and values are a mixture's, made on the device, as a prefill leaves them there. They are
written as a build writes them, with sums and syncs, and the squeezed index of two levels is built from the files, in
a new folder in FOLDER (or where temporary files go) that is removed again. What is read was written just before: it
comes from the system's cache of files.
"""

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from time_kmeans import DEVICE, ON_GPU, SHARE, mixture
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sparsekv.formats.documents.prompt import FixedPrompt
from sparsekv.formats.models.load import LoadedModel
from sparsekv.formats.schema import LayerFacts, ModelIdentity, Probe, TokenizerIdentity, layer_file
from sparsekv.formats.writer import ArtifactWriter
from sparsekv.indexing.capture.capture import CapturedLayer
from sparsekv.indexing.capture.team import Alone
from sparsekv.indexing.context_stage import ContextFacts, _write_layer
from sparsekv.indexing.indexers.interface import LayerInput
from sparsekv.indexing.method_stage import build_method
from sparsekv.indexing.methods.squeezed import SqueezedIndexer
from sparsekv.indexing.plan import BuildJob, BuildPlan, Progress


@dataclass(frozen=True)
class Shape:
    """Layers, KV heads, query heads, tokens, channels."""

    layers: int
    heads: int
    query_heads: int
    tokens: int
    dims: int


SHAPE = Shape(36, 8, 32, 131_072, 128) if ON_GPU else Shape(2, 2, 4, 4096, 64)


def synthetic_layer(shape: Shape, tail: int) -> CapturedLayer:
    """What a prefill leaves of one layer."""
    keys, values = (mixture(shape.heads, shape.tokens, shape.dims, torch.bfloat16) for _ in range(2))
    queries = torch.randn(shape.query_heads, tail, shape.dims, device=DEVICE, dtype=torch.bfloat16)
    return CapturedLayer(keys, values, queries, None, None)


def synthetic_job(shape: Shape, writer: ArtifactWriter, indexer: SqueezedIndexer, progress: Progress) -> BuildJob:
    """The build of a model of which nothing but the device is asked."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 8, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1, max_position_embeddings=shape.tokens))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    loaded = LoadedModel(model.to(DEVICE), tokenizer, "synthetic", None)
    prompt = FixedPrompt(torch.zeros(shape.tokens, dtype=torch.int64), "", None)
    plan = BuildPlan(loaded, prompt, {"squeezed": indexer})
    identity = ModelIdentity(
        id="", revision=None, kv_config={}, config_hash="", weights_hash="", adapter=None, quantisation=None
    )
    tokens = TokenizerIdentity(tokenizer_hash="", chat_template_hash=None, special_tokens_hash="")
    return BuildJob(plan, plan.split(), identity, tokens, writer, progress, Alone())


def now() -> float:
    """Seconds, once the device has done what it was given."""
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def check(job: BuildJob, layer: int, rows: CapturedLayer, indexer: SqueezedIndexer, facts: ContextFacts) -> None:
    """That a layer's files hold the rows that it had, and what is built from these on their own."""
    stored, sinks = job.read(layer_file("context", layer)), job.split.sinks
    assert torch.equal(stored["keys"], rows.keys)
    assert torch.equal(stored["values"], rows.values)
    middle = slice(sinks, sinks + job.split.middle)
    expected = indexer.build_layer(
        LayerInput(rows.keys[:, middle], rows.values[:, middle], facts.layers[layer], job.split)
    )
    built = job.read(layer_file("squeezed", layer))
    assert built.keys() == expected.keys()
    assert all(torch.equal(built[name], tensor) for name, tensor in expected.items())
    for folder in ("context", "squeezed"):
        record = job.writer.files[layer_file(folder, layer)]
        assert job.writer.is_whole(record)


def time_build(shape: Shape, folder: Path) -> None:
    """Build an index in a folder and print what its parts took."""
    indexer, clustered = SqueezedIndexer(levels=(SHARE, 0.01)), []
    plain = LayerFacts(softmax_scale=shape.dims**-0.5, softcap=None, sliding_window=None, attention_sinks=False)
    facts = ContextFacts([plain] * shape.layers, Probe(token_ids=[], logits=[]))
    with ArtifactWriter(folder) as writer:
        job = synthetic_job(shape, writer, indexer, lambda *_: clustered.append(now()))
        captured = [synthetic_layer(shape, job.split.tail) for _ in range(shape.layers)]
        kept = {layer: captured[layer] for layer in (0, shape.layers - 1)}
        indexer.build_layer(LayerInput(kept[0].keys, kept[0].values, plain, job.split))  # compiles the kernels
        started = now()
        for layer in range(shape.layers):
            _write_layer(job, captured.pop(0), layer, "recipe")
        files = writer.files
        written = now()
        build_method(job, "squeezed", indexer, facts)
        both = writer.files
        ended = now()
        for layer, rows in kept.items():
            check(job, layer, rows, indexer, facts)
    context, all_bytes = (sum(record.bytes for record in made.values()) / 1e9 for made in (files, both))
    show("context: copied from the device, hashed, written", written - started, context)
    show("index: read, clustered, hashed, written", clustered[-1] - written, all_bytes - context)
    show("index: calibrated", ended - clustered[-1], 0)
    show("all of it", ended - started, all_bytes)


def show(name: str, seconds: float, gigabytes: float) -> None:
    """One line of a table."""
    rate = f"{gigabytes:8.3f} GB written, {gigabytes / seconds:6.2f} GB/s" if gigabytes else ""
    print(f"  {name:50s} {seconds:8.3f} s {rate}", flush=True)


def main() -> None:
    name = torch.cuda.get_device_name() if ON_GPU else f"{torch.get_num_threads()} threads"
    print(f"{name}, torch {torch.__version__}, {SHAPE}")
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if sys.argv[1:] else None) as folder:
        time_build(SHAPE, Path(folder) / "some.skv")


if __name__ == "__main__":
    main()
