"""Puts known faults into a copy of the code, one at a time, and fuzzes until each is found.

`python tests/fuzz/mutations.py --workers 4`; `--fault WORD` selects the faults whose name has the word. A fault's old
text must occur exactly once in its file; otherwise the run ends before it begins, and the patch needs an update. A case
that also fails without the fault does not count. The exit code is 1 if a fault was not found.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Patch:
    """A text of a file, and the text that replaces it."""

    file: str
    old: str
    new: str

    def check(self, tree: Path) -> None:
        """Raise SystemExit unless the old text occurs exactly once in the file."""
        path = tree / self.file
        if (times := path.read_text().count(self.old) if path.exists() else 0) != 1:
            raise SystemExit(f"a fault's patch fits no more: {self.old!r} stands {times} times in {self.file}")


@dataclass(frozen=True)
class Fault:
    """A fault by name, and the patch that makes it. All cases get `deed`, for a fault that only one deed finds."""

    name: str
    patch: Patch
    deed: str = ""


HOOK, BATCH, TALK = "kernels/common/hook.py", "runtime/cache/packed_cache.py", "runtime/decoding/session.py"
SHARED, LAYER, ROPE = "indexing/reuse.py", "runtime/attention/sparse_layer.py", "formats/models/rope.py"
PROMPT, LAYERS = "formats/documents/prompt.py", "runtime/decoding/sparse_layers.py"
FOLLOWING, DOCUMENT = "formats/documents/continuation.py", "formats/documents/document.py"
FAULTS = (
    Fault(
        "attention ignores the model's window",
        Patch(HOOK, "softcap, window_of(mask), sink_logits", "softcap, None, sink_logits"),
    ),
    Fault(
        "probabilities of re-ranked keys are clamped, so that many are equal",
        Patch(
            "runtime/selection/token_choice.py",
            "(logits - totals[..., None]).logsumexp(1)",
            "(logits - totals[..., None] + 200).clamp(max=60).logsumexp(1)",
        ),
        "choices",
    ),
    Fault(
        "weights of sampled tokens are ignored",
        Patch(
            "runtime/attention/executors.py",
            "Segment(self.keys, self.values, valid, self.log_weights)",
            "Segment(self.keys, self.values, valid)",
        ),
        "masked",
    ),
    Fault("attention ignores the model's soft cap", Patch(HOOK, 'kwargs.get("softcap"),', "None,")),
    Fault(
        "dense layers choose as the others", Patch(LAYERS, "if layer < self.config.dense_layers and", "if False and")
    ),
    Fault("rows of an earlier turn are not restored", Patch(BATCH, "into.copy_(of_layer)", "into.copy_(into)")),
    Fault(
        "a question follows the one before it",
        Patch(
            "runtime/cache/stored_layer.py", "self.used, self.prompt_tokens = self.first, 0", "self.prompt_tokens = 0"
        ),
    ),
    Fault(
        "rows stay under other settings",
        Patch(SHARED, "== row_settings(build.model, build.split, ", "== row_settings(build.model, base.split, "),
    ),
    Fault(
        "int8 files of two builds are mixed",
        Patch(SHARED, "(missing or facts is None or len(sources) > 1):", "missing and prefix:"),
    ),
    Fault(
        "a sparse prefill goes on within a chunk",
        Patch(SHARED, "min(shared, base.split.tokens - 1)", "min(shared, base.split.tokens)"),
    ),
    Fault(
        "a short question is taken for a decode step",
        Patch(LAYER, "not self.prefills(call.query.shape[1])", "call.query.shape[1] == 1"),
    ),
    Fault(
        "a report's batches divide the steps of a search",
        Patch(
            "runtime/reporting/recall.py",
            "one.together for one in measured), *(one.form.method.cycle() for one in measured))",
            "one.together for one in measured))",
        ),
    ),
    Fault(
        "one token and everything are one budget",
        Patch("runtime/selection/interface.py", '"is_share", isinstance(self.value, float))', '"is_share", False)'),
    ),
    Fault(
        "positions that change are ignored",
        Patch(ROPE, "return min((switch for switch in switches if switch is not None), default=None)", "return None"),
    ),
    Fault(
        "the template's head begins with a token too many",
        Patch(PROMPT, "add_special_tokens=chat is None", "add_special_tokens=True"),
    ),
    Fault("a turn ends twice", Patch(TALK, 'finish_reason(turn.answer, ending_tokens(index)) == "stop"', "False")),
    Fault(
        "an offset of 8 bits is taken the wrong way",
        Patch(
            "formats/index/context_rows.py",
            "rows.mul_(of_channels).add_(offsets)",
            "rows.mul_(of_channels).sub_(offsets)",
        ),
    ),
    Fault(
        "the tail begins a token too early",
        Patch(
            LAYERS,
            "sinks, end = self.split.sinks, self.split.sinks + self.split.middle\n",
            "sinks, end = self.split.sinks, self.split.sinks + self.split.middle - 1\n",
        ),
    ),
    Fault(
        "questions that share a step are a position too late",
        Patch(BATCH, "(tokens + self.step.rows)[None]", "(tokens + 1 + self.step.rows)[None]"),
    ),
    Fault(
        "an answer goes on after its template's end",
        Patch("runtime/decoding/answer.py", "return found | {end}", "return found"),
    ),
    Fault("a template that trims is none", Patch(FOLLOWING, "if chat.trimmed:", "if False:")),
    Fault(
        "a text that is appended to a talk begins no message",
        Patch(FOLLOWING, "if chat is not None and chat.between != BETWEEN:", "if False:"),
    ),
    Fault(
        "YaRN beside unchanged positions gives no more of them",
        Patch(ROPE, "max(positions, int(original * factor)), getattr", "positions, getattr"),
    ),
    Fault(
        "blank lines that a template trims are in no source's lines",
        Patch("runtime/sources/places.py", "if prompt.first_line is None else", "if True else"),
    ),
    Fault(
        "passages begin within a character",
        Patch("runtime/sources/places.py", "        edge = _first_of_character(texts, edge)\n", ""),
    ),
    Fault(
        "sinks and tail are seen without a passage of theirs",
        Patch("runtime/tracing/trace.py", "[chosen, _masked(exact, beside), *rest]", "[chosen, exact, *rest]"),
    ),
    Fault(
        "a declared encoding is not read",
        Patch(DOCUMENT, "and encoding in _MARKABLE else encoding", "and encoding in _MARKABLE else UTF_8"),
    ),
    Fault(
        "products of codes are told apart within 24 octaves alone",
        Patch(
            "kernels/codes/code_ranks.py",
            "reach.clamp(min=LEAST_OCTAVES) / LEVELS",
            "torch.full_like(reach, 24 / LEVELS)",
        ),
    ),
    Fault(
        "rows are ranked by an estimate that is far too large",
        Patch("kernels/posting_lists/list_ranks.py", "ranks_of(logits, totals - excess,", "ranks_of(logits, totals,"),
    ),
    Fault(
        "a union counts centroids twice",
        Patch(
            "runtime/selection/clusters/selector.py",
            "rows_of_union=None if flat else self.steps.rows_of_union",
            "rows_of_union=self.steps.rows_of_union",
        ),
    ),
    Fault(
        "a file's schedule is read beside a budget that is typed",
        Patch("cli/configuring/sources.py", "if any(on_command_line(ctx, one.name) for one in held):", "if False:"),
        "project file",
    ),
    Fault(
        "answers of other settings are taken over",
        Patch("cli/answering/output.py", "if not _same(before, value):", "if False:"),
        "resume otherwise",
    ),
    Fault(
        "requests over another index are answered over the first",
        Patch(
            "runtime/serving/scheduler.py",
            "if lane.index is index and lane.config == config:",
            "if lane.config == config:",
        ),
        "served",
    ),
    Fault(
        "sampled queries of other heads are converted",
        Patch("indexing/convert.py", 'sample["queries"], positions,', 'sample["queries"].flip(0), positions,'),
        "convert",
    ),
    Fault(
        "a second question begins as the first",
        Patch("runtime/serving/messages.py", "return Place(chat, border)", "return Place(place.chat, border)"),
        "messages",
    ),
    Fault(
        "a tuned default is of another budget",
        Patch("runtime/decoding/choose_config.py", "Budget(defaults.budget),", "Budget(defaults.budget / 2),"),
        "tuned",
    ),
    Fault(
        "the beginning of a stop string is shown",
        Patch("runtime/serving/lane.py", "else len(self._held) - self._may_begin()", "else len(self._held)"),
        "served",
    ),
)


def copied(folder: Path) -> Path:
    """Copy the tree's files, and make a folder in which the copy is the package `sparsekv`."""
    tree = folder / "tree"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tree / name)
    (folder / "path").mkdir()
    (folder / "path" / "sparsekv").symlink_to(tree)
    return tree


def fuzzed(folder: Path, first: int, cases: int, workers: int, deed: str) -> list[dict[str, object]]:
    """Return the failures of a run over the copy that ends with its first failure, in order of seeds."""
    log = folder / "log.jsonl"
    log.unlink(missing_ok=True)
    command = [sys.executable, str(folder / "tree/tests/fuzz/run.py"), "--no-shrink", "--log", str(log)]
    command += ["--first-seed", str(first), "--cases", str(cases), "--workers", str(workers), "--until-failures", "1"]
    command += ["--deed", deed]
    environment = os.environ | {"PYTHONPATH": str(folder / "path")}
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
    lines = log.read_text().splitlines() if log.exists() else []
    return sorted((json.loads(line) for line in lines), key=lambda one: int(one["seed"]))


def found_by(folder: Path, fault: Fault, given: argparse.Namespace) -> tuple[int, dict[str, object]] | None:
    """Return the number of the first case that fails only with a fault in the copy, and the failure."""
    path, first, end = folder / "tree" / fault.patch.file, given.first_seed, given.first_seed + given.cases
    whole = path.read_text()
    while first < end:
        path.write_text(whole.replace(fault.patch.old, fault.patch.new))
        failures = fuzzed(folder, first, end - first, given.workers, fault.deed)
        path.write_text(whole)
        for failure in failures:
            seed = int(str(failure["seed"]))
            if not fuzzed(folder, seed, 1, 1, fault.deed):
                return seed - given.first_seed + 1, failure
            print(f"    seed {seed} fails without a fault, too", flush=True)
        first = int(str(failures[-1]["seed"])) + 1 if failures else end
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=300, help="number of cases within which a fault must be found")
    parser.add_argument("--fault", default="", help="only faults whose name has this word")
    given = parser.parse_args()
    faults = [one for one in FAULTS if given.fault in one.name]
    with tempfile.TemporaryDirectory(prefix="sparsekv-mutations-") as name:
        folder = Path(name)
        tree = copied(folder)
        for fault in faults:
            fault.patch.check(tree)
        missed = 0
        for fault in faults:
            began, found = time.monotonic(), found_by(folder, fault, given)
            missed += found is None
            told, how = ("NOT FOUND", "") if found is None else (f"case {found[0]}", str(found[1]["told"])[:90])
            print(f"{fault.name:54} {told:10} {time.monotonic() - began:4.0f} s  {how}", flush=True)
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
