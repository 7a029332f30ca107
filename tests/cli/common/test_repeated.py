"""An option that takes one value is given once: of two the last one would win without a word."""

import pytest
from support.command import fails, run_here

TWICE = "is given twice and takes one value; give it once"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (("generate", "-i", "a.skv", "-i", "b.skv", "Why?"), f"--index {TWICE}"),
        (("generate", "Why?", "--index=a.skv", "-i", "b.skv"), f"--index {TWICE}"),
        (("build-index", "doc.txt", "--seed", "1", "--seed", "2"), f"--seed {TWICE}"),
        (("append", "more.txt", "--dtype", "float32", "--dtype", "float32"), f"--dtype {TWICE}"),
        (("--gpus", "2", "--gpus", "3", "generate", "Why?"), f"--gpus {TWICE}"),
        (("chat", *("--budget", "5%") * 3), "--budget is given 3 times and takes one value"),
        (("inspect", "--clusters", "3", "--clusters", "4"), f"--clusters {TWICE}"),
    ],
    ids=lambda call: call[0] if isinstance(call, tuple) else "",
)
def test_it_is_refused_in_every_command(call: tuple[str, ...], says: str) -> None:
    fails(2, *call, says=(says,))


def test_help_options_without_a_value_and_lists_may_come_twice() -> None:
    shown = run_here("generate", "-i", "a.skv", "-i", "b.skv", "--help")
    assert shown.code == 0
    assert "--max-new-tokens" in shown.stdout
    fails(2, "recall-report", "-i", "no.skv", "-q", "-q", "--budget", "5%", "--budget", "1", says=("no.skv",))
    fails(2, "generate", "-i", "no.skv", "Why?", "--", "--index", says=("unexpected extra argument",))
