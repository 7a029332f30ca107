"""A differential fuzzer: drawn models, documents, options and deeds, held to oracles that share no code of ours."""
