"""The CI workflow calls targets of the Makefile, on the Python and transformers versions of pyproject.toml."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
JOBS = [(path.name, name) for path in WORKFLOWS for name in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINNED = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)


def job(file: str, name: str) -> Any:
    found: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / file).read_text(encoding="utf-8"))["jobs"][
        name
    ]
    return found


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def commands(of: dict[str, Any]) -> list[str]:
    return [step["run"] for step in of["steps"] if "run" in step]


@pytest.mark.parametrize(("file", "name"), JOBS)
def test_a_job_calls_targets_of_the_makefile_alone(file: str, name: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    called = commands(job(file, name))
    assert called
    for command in called:
        made = re.fullmatch(r"make ([a-z-]+)( [A-Z]+=\$\{\{ [a-z.]+ \}\})*", command)
        assert made, command
        assert made[1] in targets, command


def test_the_jobs_are_tests_lint_docs_and_wheel() -> None:
    called = {command.split()[1] for file, name in JOBS for command in commands(job(file, name))}
    assert called == {"tests", "transformers", "lint", "docs-check", "wheel"}


def test_tests_run_on_every_python_and_the_oldest_and_newest_transformers() -> None:
    rows = job("test.yml", "tests")["strategy"]["matrix"]["include"]
    assert {row["python"] for row in rows} == {"3.11", "3.12", "3.13"}
    assert f">={min(row['python'] for row in rows)}" == PROJECT["requires-python"]
    versions = sorted(version(row["transformers"]) for row in rows if "transformers" in row)
    (bound,) = (need.split(">=")[1] for need in PROJECT["dependencies"] if need.startswith("transformers>="))
    assert versions[0][: len(version(bound))] == version(bound)
    assert versions[-1] >= version(PINNED["transformers"])
