"""The subcommands by name, with what help says of each; their modules are imported when they are called."""

COMMANDS = {
    "build-index": "Prefill a document once and index what its attention reads.",
    "generate": "Answer questions over an index.",
    "chat": "Ask one question after another over an index, in a terminal.",
    "trace": "Answer a question, and show what each token of the answer attended to.",
    "recall-report": "Measure what each method keeps of the model's attention, and what it reads.",
    "eval": "Measure what each method's answers are worth beside dense attention's.",
    "tune": "Find the cheapest setting that meets a target, and make it the index's default.",
    "bench": "Time a decode step with each method beside the fastest dense attention.",
    "append": "Append more text to an index.",
    "convert": "Store the keys and values of an index in 8 bits, in another index.",
    "inspect": "Show what an index holds; --verify rechecks every checksum.",
    "models": "List models that are ready, and fetch one.",
    "config": "Show which defaults are set, and where: sparsekv.toml, and the environment.",
    "completion": "Print the script that completes commands and options in your shell.",
}
BY_RANKS = ("build-index", "generate")
"""Commands that several processes can run together."""
