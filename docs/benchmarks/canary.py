"""Time the probe when an index is opened, and preflight and canary when it is built.

    sparsekv build-index manual.txt --max-tokens 6144
    python docs/benchmarks/canary.py manual.skv --rounds 7
    python docs/benchmarks/canary.py manual.skv --whole --rounds 9
    python docs/benchmarks/canary.py manual.skv --build
    python docs/benchmarks/canary.py capped.skv --soft-cap capped

Each round opens the index once with every variant of the probe, one after another, in one process. It loads the model,
compares the model's identity, runs the probe, prepares the layers and answers with one token. The answer is timed too,
because without a probe it is the first to read weights and rows. A printed ratio is the median over rounds of a
variant's time divided by the time without a probe. `--whole` runs `generate` for one token in new processes, by turns
with and without its probe, and prints the ratio of their times. `--build` builds an index of the same tokens with
`squeezed` in a temporary folder, and times preflight and canary. `--soft-cap` writes a random model with a soft cap, of
the embedded model's shape, and an index of 6,144 tokens, unless the index exists.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, Gemma2Config

from sparsekv.formats.documents.prompt import FixedPrompt
from sparsekv.formats.index.reader import CPU, Artifact
from sparsekv.formats.models.load import identify, load_model
from sparsekv.indexing.build import build_index
from sparsekv.indexing.capture.canary import compare_canary, preflight, run_canary
from sparsekv.indexing.methods.squeezed import SqueezedIndexer
from sparsekv.indexing.plan import BuildConfig, BuildPlan
from sparsekv.indexing.prefill.prefills import DensePrefill
from sparsekv.kernels.common.given_rows import RowPair
from sparsekv.kernels.common.hook import route_attention
from sparsekv.runtime import api
from sparsekv.runtime.decoding.answer import Sampling
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.threads import all_cores

TOKENS = 6144
Probe = Callable[[OpenIndex], None]
COMMAND = """
import sys
from sparsekv.cli.main import main
from sparsekv.runtime.decoding.open import OpenIndex
index, probe = sys.argv[1:]
if probe == "without":
    OpenIndex.check_probe = lambda *_, **__: None
sys.argv[1:] = ["generate", "--index", index, "What is an assignment?", "--max-new-tokens", "1", "--quiet"]
main()
"""
"""A program that runs `generate` for one token; with the argument `without`, it does not compare the probe."""


def no_probe(index: OpenIndex) -> None:
    """Do nothing: the index is opened after a comparison of hashes alone."""


def own_probe(index: OpenIndex) -> None:
    """Compare the logits of the last token by the model's own attention, as opening an index does."""
    index.check_probe(hold=True)


def our_probe(index: OpenIndex) -> None:
    """Compare the logits of the last token by sparsekv's attention, which cannot show another mask of the model."""
    with route_attention(index.model, lambda call: DensePrefill().attend(call, 0)):
        index.check_probe(hold=True)


def two_tokens(index: OpenIndex) -> None:
    """Compare the logits of the last token, and of one token of the canary, which is in the middle of the prompt."""
    index.check_probe(hold=True)
    manifest = index.artifact.manifest
    middle = manifest.model_copy(update={"canary": manifest.canary[1:2]})
    with all_cores(index.model):
        compare_canary(middle, manifest.split.tokens, index.model, index.input_ids, stored_rows(index.artifact))


VARIANTS: dict[str, Probe] = {
    "without": no_probe,
    "last token": own_probe,
    "the same, our attention": our_probe,
    "last and middle token": two_tokens,
}


def stored_rows(artifact: Artifact) -> Callable[[int], RowPair]:
    """Return a function that returns a layer's keys and values, mapped from the index's file."""
    return lambda layer: artifact.context_rows(layer, CPU).part(slice(None))


def opened(folder: Path, model: str, probe: Probe) -> tuple[float, float, float]:
    """Return the seconds to load the model, to open the index, and to answer with one token."""
    started, artifact = time.perf_counter(), Artifact(folder)
    loaded = load_model(model, device="cpu")
    ready = time.perf_counter()
    identify(loaded, artifact.manifest)
    index = OpenIndex(artifact, loaded.model, loaded.tokenizer)
    probe(index)
    asker = api.Index(index).asker()
    made = time.perf_counter()
    asker.ask("What is an assignment?", Sampling(max_new_tokens=1))
    return ready - started, made - ready, time.perf_counter() - made


def time_opening(folder: Path, model: str, rounds: int) -> None:
    """Print the median times of each variant, and the median of their ratios to those without a probe."""
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in VARIANTS}
    for number in range(rounds + 1):
        for name, probe in VARIANTS.items():
            seconds = opened(folder, model, probe)
            if number:  # the first round warms up
                found[name].append(seconds)
    for name, seconds in found.items():
        load, opening, answer = (statistics.median(part) for part in zip(*seconds, strict=True))
        pairs = list(zip(seconds, found["without"], strict=True))
        opens = statistics.median(sum(one[:2]) / sum(base[:2]) for one, base in pairs)
        all_of_it = statistics.median(sum(one) / sum(base) for one, base in pairs)
        print(
            f"{transformers.__version__} {folder.name:12} {name:24} load {load:.3f} open {opening:.3f} first token "
            f"{answer:.3f} s; load and open x {opens:.3f}, with the first token x {all_of_it:.3f}, of {rounds}"
        )


def time_command(folder: Path, rounds: int) -> None:
    """Print the median times of `generate` for one token with and without its probe, and the median ratio."""
    both = [(command_time(folder, "with"), command_time(folder, "without")) for _ in range(rounds + 1)][1:]
    probe, without = (statistics.median(times) for times in zip(*both, strict=True))
    ratio = statistics.median(one / other for one, other in both)
    print(
        f"{transformers.__version__} {folder.name:12} generate, one token: {probe:.3f} s, without a probe "
        f"{without:.3f} s; x {ratio:.3f}, of {rounds}"
    )


def command_time(folder: Path, probe: str) -> float:
    """Return the seconds of a process that runs COMMAND."""
    command = [sys.executable, "-c", COMMAND, str(folder), probe]
    return timed(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))


def time_build(folder: Path, model: str) -> None:
    """Print the time of a build, and those of its preflight and its canary."""
    artifact, loaded = Artifact(folder), load_model(model, device="cpu")
    ids, manifest = artifact.input_ids().clone(), artifact.manifest
    prompt = FixedPrompt(ids, manifest.prompt.text_sha256, manifest.prompt.chat)
    with tempfile.TemporaryDirectory() as place:
        config = BuildConfig({"squeezed": SqueezedIndexer()}, chunk_size=manifest.prefill.chunk_size)
        plan = BuildPlan(loaded, prompt, config)
        whole = timed(lambda: build_index(plan, Path(place) / "again.skv"))
    first = timed(lambda: preflight(loaded.model, ids, loaded.name))
    last = timed(lambda: run_canary(loaded.model, ids, stored_rows(artifact), {}))
    print(
        f"{transformers.__version__} {folder.name:12} build of {len(ids):,} tokens {whole:.1f} s, of which preflight "
        f"{first:.2f} s, canary {last:.2f} s: {(first + last) / whole:.1%}"
    )


def timed(deed: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    started = time.perf_counter()
    deed()
    return time.perf_counter() - started


def make_soft_capped(model: Path, folder: Path) -> None:
    """Write a model with random weights and a soft cap, and an index of random tokens for this model."""
    embedded = load_model(device="cpu")
    like = embedded.model.config
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    of_embedded = {name: getattr(like, name) for name in (*sizes, "num_key_value_heads", "max_position_embeddings")}
    full = ["full_attention"] * like.num_hidden_layers
    config = Gemma2Config(**of_embedded, head_dim=64, query_pre_attn_scalar=64, layer_types=full)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(model)
    embedded.tokenizer.save_pretrained(model)
    loaded = load_model(str(model), device="cpu")
    prompt = FixedPrompt(torch.randint(1000, 40_000, (TOKENS,)), "0" * 64, None)
    build_index(BuildPlan(loaded, prompt, BuildConfig({"squeezed": SqueezedIndexer()}, chunk_size=2048)), folder)


def main() -> None:
    """Time openings, whole commands or a build, as the options choose."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("index", type=Path)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--whole", action="store_true", help="time whole commands in place of openings")
    options.add_argument("--build", action="store_true", help="time a build in place of openings")
    options.add_argument("--soft-cap", type=Path, metavar="FOLDER", help="of a random model with a soft cap")
    given = options.parse_args()
    transformers.utils.logging.disable_progress_bar()
    if given.soft_cap is not None and not given.index.exists():
        make_soft_capped(given.soft_cap, given.index)
    model = str(given.soft_cap or Artifact(given.index).manifest.model.id)
    if given.whole:
        time_command(given.index, given.rounds)
    elif given.build:
        time_build(given.index, model)
    else:
        time_opening(given.index, model, given.rounds)


if __name__ == "__main__":
    main()
