"""Time whole commands at a real size, and compare them with plain transformers.

Run it as `python docs/benchmarks/real_size.py FOLDER [TOKENS] [PART...]`. Without PART all parts run.

A model with random weights, a text and an index of the text are written to FOLDER. The model has the shape of Qwen3-8B
on a GPU, that of SmolLM2-135M on a CPU, and SmolLM2's tokenizer. Every command runs in a process of its own, so that
its time includes imports and loading, for which a user waits too. Keys of random weights have no clusters, and the
model knows no facts. So these are times only, and no measure of quality. Prints a Markdown table.
"""

import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from transformers import AutoTokenizer

from sparsekv.formats.models.find import pull_embedded
from sparsekv.runtime.benchmark.end_to_end import model_config, random_model

HERE = Path(__file__).parent
DOCUMENTS = HERE.parent
QUESTION = "What is a context manager?"
PYTHON = sys.executable
START = """
import os
import sys
from sparsekv.cli.common.process import rest_collector
rest_collector()
import sparsekv.cli.build_index
from sparsekv.cli.common.loading import load
load(sys.argv[1], "auto", "auto", None, quiet=True)
# As the command leaves: Python's own end waits for no thread that maps weights, and may abort in it.
os._exit(0)
"""
PARTS = ("build", "open", "answer", "together", "dense", "report")
BOTH = ["multipole", "squeezed"]
SPARSEKV = [PYTHON, "-c", "from sparsekv.cli.main import main; main()"]
GPU = torch.cuda.is_available()
SHAPE, TOKENS, DTYPE = ("qwen3-8b", 131_000, torch.bfloat16) if GPU else ("smollm2-135m", 6_144, torch.float32)
CHUNKS = (2048, 8192, 16384) if GPU else (128, 512, 2048)
REPEATS = 3
QUESTIONS, ANSWER_TOKENS = (64, 128) if GPU else (16, 32)
ABOUT_WORDS = 16


@dataclass(frozen=True)
class Ran:
    """A finished process: its wall seconds, its peak memory in GB without mapped files, its stdout and stderr."""

    seconds: float
    own: float
    out: str
    err: str

    def told(self, pattern: str) -> float:
        """Return the number that a regular expression finds in the command's stderr; exit if it finds none."""
        found = re.search(pattern, self.err)
        if found is None:
            sys.exit(f"{pattern} is not in what was said: {self.err}")
        return float(found[1].replace(",", ""))


def run(*command: str) -> Ran:
    """Run a process to its end, and sample its memory; exit if the process fails."""
    print("  " + " ".join(part for part in command[1:] if part != START), file=sys.stderr, flush=True)
    started, most = time.perf_counter(), 0
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while True:
        try:
            out, err = process.communicate(timeout=0.05)
            break
        except subprocess.TimeoutExpired:
            most = max(most, own_memory(process.pid))
    if process.returncode:
        sys.exit(f"it failed: {err}")
    return Ran(time.perf_counter() - started, most / 1e6, out, err)


def own_memory(process: int) -> int:
    """Return the kB of a process's memory that are not mapped from files; 0 once the process has ended."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    return sum(int(size) for size in re.findall(r"Rss(?:Anon|Shmem):\s+(\d+) kB", status))


def make_model(folder: Path) -> None:
    """Write a model with random weights, and the tokenizer whose vocabulary it has, unless the folder has a model."""
    if (folder / "config.json").is_file():
        return
    tokenizer = AutoTokenizer.from_pretrained(pull_embedded())
    config = model_config(SHAPE)
    config.vocab_size, config.max_position_embeddings = len(tokenizer), 2**20
    config.bos_token_id = config.eos_token_id = None  # random weights would end an answer at any token
    random_model(config, torch.device("cuda" if GPU else "cpu"), DTYPE, 0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_text(file: Path, tokens: int) -> None:
    """Write sparsekv's docs, repeated until they have more than `tokens` tokens of six characters each.

    A token has fewer than six characters on average.
    """
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted(DOCUMENTS.rglob("*.md")))
    file.write_text(text * -(-6 * tokens // len(text)), encoding="utf-8")


@dataclass(frozen=True)
class Table:
    """Measurements at one size. Each method prints rows with a command, its time or speed, and further figures."""

    folder: Path
    tokens: int

    @property
    def model(self) -> str:
        return str(self.folder / "model")

    @property
    def text(self) -> str:
        return str(self.folder / "text.txt")

    @property
    def index(self) -> str:
        return str(self.folder / "text.skv")

    def row(self, what: str, took: str, beside: str = "") -> None:
        print(f"| {what} | {took} | {beside} |", flush=True)

    def plain(self) -> dict[str, float]:
        """Run plain transformers with several chunk sizes; print and return the times with the fastest."""
        sizes = [str(self.tokens), *map(str, CHUNKS)]
        program = str(HERE / "plain_transformers.py")
        found = [json.loads(run(PYTHON, program, self.model, self.text, sizes[0], one).out) for one in sizes[1:]]
        best: dict[str, float] = min(found, key=lambda one: float(one["prefill"]))
        self.row(f"plain transformers: prefill in chunks of {best['chunk']:,}", f"{best['prefill']:.2f} s")
        self.row("the same, whole process, 4 tokens", f"{whole(best):.2f} s")
        return best

    def started(self) -> float:
        """Return the seconds for a build's imports and for loading the model: the median of REPEATS processes."""
        return median(run(PYTHON, "-c", START, self.model).seconds for _ in range(REPEATS))

    def build(self, names: list[str], plain: dict[str, float], started: float) -> None:
        """Build an index with some methods twice, each time in an empty folder.

        The first process may compile kernels; the second finds them compiled.
        """
        options = ["-o", self.index, "--model", self.model, "--max-tokens", str(self.tokens), "--raw"]
        built = []
        for _ in range(2):
            shutil.rmtree(self.index, ignore_errors=True)  # two of them may not fit on the disk
            built.append(run(*SPARSEKV, "build-index", self.text, *options, *of_methods(names)))
        first, again = ((one.seconds - started) / plain["prefill"] for one in built)
        beside = f"{again:.2f} times the plain prefill, {first:.2f} the first time; {started:.2f} s to import, load "
        beside += "and tokenise taken off"
        if GPU:
            planned, taken = (built[1].told(rf"{said} ([\d.,]+) GiB") for said in ("needs some", "took at most"))
            beside += f"; {planned:.1f} GiB of memory planned, {taken:.1f} taken"
        self.row(
            f"`build-index`, {' and '.join(names)}",
            f"{built[1].seconds:.2f} s; {built[0].seconds:.2f} s the first time",
            beside,
        )

    def answer(self, name: str, plain: dict[str, float]) -> None:
        """Ask for a short answer: once in a process that may compile kernels, then the median of REPEATS processes."""
        command = [*SPARSEKV, *self.asking(name), "--max-new-tokens", "4"]
        first_time = run(*command).seconds
        asked = sorted((run(*command) for _ in range(REPEATS)), key=lambda one: one.seconds)[REPEATS // 2]
        loaded, opened = asked.told(r"loaded in ([\d.]+) s"), asked.told(r"opened in ([\d.]+) s")
        first = asked.told(r"first token after ([\d.]+) s")
        beside = f"{asked.seconds / whole(plain):.2f} times the plain process; model loaded in {loaded:.2f} s, index "
        beside += f"opened in {opened:.2f} s, first token "
        self.row(
            f"`generate`, 4 tokens, {name}",
            f"{asked.seconds:.2f} s; {first_time:.2f} s the first time",
            f"{beside} {first:.2f} s after the question, {asked.own:.1f} GB of memory of its own",
        )

    def speed(self, name: str, mode: str) -> None:
        """Ask for an answer of 400 tokens, and print its tokens per second."""
        asked = run(*SPARSEKV, *self.asking(name), "--max-new-tokens", "400", "--compile", mode)
        speed = asked.told(r"tokens at ([\d.,]+) a second")
        compiled = f", compiled in {asked.told(r'compiled in ([0-9.]+) s'):.1f} s" if mode == "on" else ""
        beside = f"{asked.seconds:.2f} s in all{compiled}"
        self.row(f"`generate`, 400 tokens, {name}, --compile {mode}", f"{speed:.1f} tokens/s", beside)

    def together(self, name: str, size: int, budget: str, mode: str) -> None:
        """Ask many questions over one document twice, each time in a new process; the first may compile kernels."""
        asking = ["generate", "--batch-file", self.questions(), "--batch-size", str(size)]
        asking += ["--max-new-tokens", str(ANSWER_TOKENS), "--compile", mode]
        first, again = (run(*SPARSEKV, *asking, *self.with_index(name, budget)) for _ in range(2))
        before, speed = (one.told(r"([\d.,]+) a second in all") for one in (first, again))
        what = f"`generate`, {QUESTIONS} questions, {ANSWER_TOKENS} tokens each, {name}"
        what += "" if name == "dense" else f" {budget}"
        what += f", --batch-size {size} --compile {mode}"
        beside = (
            f"{again.seconds:.2f} s in all; first tokens {again.told(r'first token after ([0-9.]+) s'):.2f} s after"
        )
        self.row(what, f"{speed:,.0f} tokens/s in all; {before:,.0f} the first time", f"{beside} their questions")

    def questions(self) -> str:
        """Write a file of questions of about 25 tokens, each about other words of the text; return its path."""
        words = re.findall(r"[A-Za-z]+", Path(self.text).read_text(encoding="utf-8"))
        apart = len(words) // QUESTIONS
        asked = [" ".join(words[apart * number :][:ABOUT_WORDS]) for number in range(QUESTIONS)]
        file = self.folder / "questions.txt"
        file.write_text("".join(f"What is said about {one}?\n" for one in asked), encoding="utf-8")
        return str(file)

    def asking(self, name: str) -> list[str]:
        return ["generate", QUESTION, *self.with_index(name, "5%")]

    def with_index(self, name: str, budget: str) -> list[str]:
        within = [] if name == "dense" else ["--budget", budget]
        return ["-i", self.index, "--model", self.model, "--method", name, *within, "--stats"]

    def beside_dense(self, mode: str) -> None:
        """Time steps of the whole model with dense attention and with multipole; `mode` is that of `--compile`."""
        how = ["--config", SHAPE, "--context", str(self.tokens), *of_methods(["multipole"]), "--budget", "5%"]
        timed = run(*SPARSEKV, "bench-model", *how, "--compile", mode, "--json")
        for one in json.loads(timed.out)["rows"]:
            name = f"{one['method']} {one['variant']}".strip()
            rate, beside = (
                f"{one['tokens_per_second']:.1f} tokens/s",
                f"{one['speedup']:.2f} times torch's dense attention",
            )
            self.row(f"`bench-model`, {name}, --compile {mode}", rate, beside)

    def report(self, names: list[str]) -> None:
        """Time `recall-report` of the methods."""
        seconds = run(*SPARSEKV, "recall-report", "-i", self.index, *of_methods(names), "--budget", "5%").seconds
        self.row(f"`recall-report`, {' and '.join(names)}, one budget", f"{seconds:.2f} s")


def of_methods(names: list[str]) -> list[str]:
    return [part for name in names for part in ("--method", name)]


def start(plain: dict[str, float]) -> float:
    """Return the seconds of plain transformers before its prefill."""
    return plain["import"] + plain["load"] + plain["tokenise"]


def whole(plain: dict[str, float]) -> float:
    return start(plain) + plain["prefill"] + plain["answer"]


def measure(table: Table, parts: list[str]) -> None:
    """Print the rows of some parts. All parts but `build` read the index that `build` leaves."""
    plain = table.plain() if {"build", "open"} & set(parts) else {}
    if "build" in parts:
        started = table.started() + plain["tokenise"]
        for names in (["codes"], ["squeezed"], BOTH):
            table.build(names, plain, started)
    if "open" in parts:
        for name in BOTH:
            table.answer(name, plain)
    if "answer" in parts:
        for mode in ("off", "on", "on"):  # the last finds compiled what the one before has left
            table.speed("multipole", mode)
    if "together" in parts:
        run(*SPARSEKV, "build-index", table.index, "--model", table.model, "--method", "codes")
        for size, budget in ((1, "5%"), (16, "5%"), (64, "1%")) if GPU else ((1, "5%"), (16, "5%")):
            for mode in ("off", "on") if GPU and size > 1 else ("off",):
                for name in ("multipole", "codes", "dense"):
                    table.together(name, size, budget, mode)
    if "dense" in parts:
        for mode in ("off", "on"):
            table.beside_dense(mode)
    if "report" in parts:
        table.report(BOTH)


def main() -> None:
    folder, rest = Path(sys.argv[1]), sys.argv[2:]
    tokens = int(rest.pop(0)) if rest and rest[0].isdigit() else TOKENS
    if unknown := set(rest) - set(PARTS):
        sys.exit(f"no part is called {', '.join(unknown)}; there are: {', '.join(PARTS)}")
    folder.mkdir(parents=True, exist_ok=True)
    table = Table(folder, tokens)
    make_model(Path(table.model))
    make_text(Path(table.text), tokens)
    machine = torch.cuda.get_device_name() if GPU else f"{torch.get_num_threads()} threads"
    print(f"{machine}, torch {torch.__version__}, random weights of {SHAPE}'s shape, {DTYPE}, {tokens:,} tokens\n")
    if sys.dont_write_bytecode:
        print("PYTHONDONTWRITEBYTECODE is set: each process compiles what libraries have no bytecode of\n")
    print("| what | took | |\n|---|---|---|")
    measure(table, rest or list(PARTS))


if __name__ == "__main__":
    main()
