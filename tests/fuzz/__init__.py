"""A differential fuzzer: random models, documents, options and operations, compared with oracles that share no code of
ours."""
