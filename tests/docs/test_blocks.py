"""Every fenced block is run, or says what it is: `make test` is the reader who tries each line."""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file
from support.command import Outcome, run_here, shell
from support.doc_pages import SHELL, WRITTEN, Block, blocks, name
from support.python_help import DOCUMENT

from sparsekv.formats.models.converted import SUMS, seal
from sparsekv.formats.models.find import EMBEDDED

TEXTS = ("manual", "doc", "book", "report", "more", "chapter2")
CHARACTERS = 1300  # of a text: some 400 tokens
QUESTIONS = "What is an assignment?\nWhat is a target?\n"
COMPOSED = re.compile(r"[|&;$`*]|<<|2>")
"""Matches a line that is more than one plain command."""
LOOPS = re.compile(r"<<|^\s*(for|while|if|function) ", re.MULTILINE)
LAYERS, TOKENS = 2, 4096  # of the embedded model, of 30 and of 49,152
ANSWER = "--max-new-tokens 4"
TYPED = "cat questions.txt"
"""In the place of a person, to whom a chat would talk."""
RUNNING = [page for page in WRITTEN if any(block.runs for block in blocks(page))]
Give = Callable[[str, Path], None]


@pytest.mark.parametrize("page", WRITTEN, ids=name)
def test_every_block_is_run_or_says_what_it_is(page: Path) -> None:
    faults = [f"{block}: {fault}" for block in blocks(page) if (fault := block.fault())]
    assert not faults, "\n".join(faults)


@pytest.fixture(scope="session")
def short_model(embedded_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache whose embedded model is the real one's first layers and most frequent tokens: what a page shows runs, and
    in little time."""
    cache = tmp_path_factory.mktemp("cache")
    folder = cache / "models" / EMBEDDED
    shutil.copytree(embedded_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS, "vocab_size": TOKENS}
    (folder / "config.json").write_text(json.dumps(config))
    with safe_open(embedded_folder / "model.safetensors", "pt") as file:
        names = file.keys()
        kept = [one for one in names if int((re.findall(r"layers\.(\d+)\.", one) or [0])[0]) < LAYERS]
        weights = {one: file.get_tensor(one) for one in kept}
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:TOKENS].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    pairs = tokenizer["model"]
    pairs["vocab"] = {token: number for token, number in pairs["vocab"].items() if number < TOKENS}
    pairs["merges"] = [pair for pair in pairs["merges"] if "".join(pair) in pairs["vocab"]]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / SUMS).unlink()
    seal(folder)
    return cache


@pytest.fixture(scope="session")
def give(short_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Give:
    """A function that puts a page's index of one of the texts into a folder: pages may take it for built."""
    place = tmp_path_factory.mktemp("built")

    def give_index(stem: str, folder: Path) -> None:
        index = place / f"{stem}.skv"
        if not index.exists():
            text = place / f"{stem}.txt"
            text.write_text(_text(stem), encoding="utf-8")
            built = run_here("build-index", text, "-q")
            assert built.code == 0, built.stderr
        shutil.copytree(index, folder / index.name)

    return give_index


def _text(stem: str) -> str:
    """A text of its own for each name."""
    first = 5000 * TEXTS.index(stem)
    return DOCUMENT[first : first + CHARACTERS]


@pytest.fixture
def folder(short_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a page's commands run: it has the texts that pages speak of."""
    monkeypatch.setenv("SPARSEKV_CACHE", str(short_model))
    for stem in TEXTS:
        (tmp_path / f"{stem}.txt").write_text(_text(stem), encoding="utf-8")
    (tmp_path / "questions.txt").write_text(QUESTIONS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", RUNNING, ids=name)
def test_what_a_page_shows_runs(page: Path, folder: Path, give: Give) -> None:
    assert not [fault for block in blocks(page) if (fault := block.fault())]
    if any("git " in block.text for block in blocks(page)):
        _repository(folder)
    names: dict[str, object] = {}
    for block in blocks(page):
        if not block.runs:
            continue
        if block.info in SHELL:
            for script in [block.text] if _is_one_script(block) else block.commands:
                _run(block, script, folder, give)
        else:
            exec(compile(block.text, str(block), "exec"), names)


def _is_one_script(block: Block) -> bool:
    """Whether its lines need one another: a loop, a text that follows, a variable that another line reads."""
    lines = block.commands
    assigned = [(number, found[1]) for number, line in enumerate(lines) if (found := re.match(r"(\w+)=", line))]
    shared = any(f"${variable}" in line for at, variable in assigned for line in lines[at + 1 :])
    return shared or LOOPS.search(block.text) is not None


def _run(block: Block, script: str, folder: Path, give: Give) -> None:
    """One line as it is shown, but for the length of answers; what a line begins with is run in this process where it
    is one command of sparsekv, for each process of its own imports for seconds."""
    _given(script, folder, give)
    script = re.sub(r"sparsekv (generate|chat|trace) (?!.*--max-new-tokens)", rf"sparsekv \1 {ANSWER} ", script)
    script = re.sub(r"--max-new-tokens \d+", ANSWER, script)
    script = f"{TYPED} | {script}" if script.startswith("sparsekv chat") else script
    first, separator, rest = re.sub(r"\s+#.*", "", script).partition(" | ")
    command, _, target = first.partition(" > ")
    if COMPOSED.search(command) or "sparsekv" in rest or not command.startswith("sparsekv "):
        _check(block, script, shell(script, folder))
        return
    outcome = run_here(*shlex.split(command)[1:])
    _check(block, script, outcome)
    if target:
        (folder / target.strip()).write_text(outcome.stdout, encoding="utf-8")
    if separator:
        (folder / ".piped").write_text(outcome.stdout, encoding="utf-8")
        _check(block, script, shell(f"cat .piped | {rest}", folder))


def _check(block: Block, script: str, done: Outcome | subprocess.CompletedProcess[str]) -> None:
    code = done.code if isinstance(done, Outcome) else done.returncode
    stopped = code == 141 and "head" in script  # head had enough before its writer ended
    assert code == 0 or stopped, f"{block}: {script.strip()}\n{done.stderr}"
    assert "Traceback" not in done.stderr, f"{block}: {script.strip()}\n{done.stderr}"


def _given(script: str, folder: Path, give: Give) -> None:
    """Builds the index of a text that a command reads and that no command of the page has built."""
    for stem in TEXTS:
        if re.search(rf"(?<!--save-to )(?<!-o )\b{stem}\.skv", script) and not (folder / f"{stem}.skv").exists():
            give(stem, folder)


def _repository(folder: Path) -> None:
    """Three commits, for lines that read from git."""
    git = ["git", "-c", "user.name=A", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "init", "-q"], cwd=folder, check=True)
    for number in range(3):
        change = [*git, "commit", "-q", "--allow-empty", "-m", f"Change {number}"]
        subprocess.run(change, cwd=folder, check=True)
