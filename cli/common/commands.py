"""The subcommands by name, with their help texts. `sparsekv --help` prints them without importing their modules."""

from collections.abc import Sequence

COMMANDS = {
    "build-index": "Prefill a document once, and write its keys, values and index.",
    "generate": "Answer questions over an index.",
    "chat": "Ask one question after another over an index, in a terminal.",
    "serve": "Answer questions over indices by HTTP, as OpenAI's API does.",
    "trace": "Answer a question, and show what each token of the answer attended to.",
    "recall-report": "Measure each method's recall, output error and reads, by layer and head.",
    "eval": "Score each method's answers beside those of dense attention.",
    "tune": "Find the cheapest setting that meets a target, and make it the index's default.",
    "bench": "Time a decode step of one layer with each method beside the fastest dense attention.",
    "bench-model": "Time a whole model's decode steps with each method beside dense attention.",
    "append": "Append more text to an index.",
    "convert": "Copy an index with keys and values in int8, which takes less room.",
    "inspect": "Show an index's contents; --verify recomputes every checksum.",
    "start": "Start a server in the background, so that later commands begin at once.",
    "stop": "End the server that start has started.",
    "models": "List the built-in models, and download models.",
    "config": "Show the defaults that are set, and where: sparsekv.toml or the environment.",
    "completion": "Print the script that completes commands and options in your shell.",
}
BY_RANKS = ("build-index", "generate")
"""Commands that several processes (ranks) can run together."""
MOVED = dict.fromkeys(("end-to-end", "config", "distinct-layers", "compile"), "bench-model")
"""Options that `bench` once had, and the command that now has them or replaces them."""


def moved(command: str, option: str) -> str | None:
    """Return the command to which an option of `command` has moved; None if the option did not move."""
    return MOVED.get(option) if command == "bench" else None


HELP = ("--help", "-h")


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Whether an argument before `--` is an option for help. After `--` there are only texts and names."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return any(one in HELP for one in options)
