"""A synthetic trace of any length in the form of `sparsekv trace --json`; its numbers are random, but consistent."""

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from statistics import fmean
from typing import Any

SINKS, TAIL = 4, 64
SHARES = ("exact", "chosen", "stood_for", "missed")
MEASURES = ("recall", "attention_mass", "output_error", "kv_fraction")
SYLLABLES = ("ka", "lo", "mi", "ter", "su", "ne", "ra", "pho", "dic", "ble", "con", "est", "ver", "ing", "or", "la")
ANSWER = ("It", " is", " in", " the", " case", " on", " the", " third", " shelf", ",", " under", " a", " lamp", ".")
LONGEST, MOST, MOST_IN_RECORD, LEAST = 64, 64, 16, 1e-4

Passages = dict[int, tuple[float, ...]]
"""Shares of attention by passage: on chosen tokens, on represented tokens, and missed."""


def synthetic_trace(tokens: int, answer_tokens: int, layers: int, kv_heads: int, seed: int) -> dict[str, Any]:
    """Return a trace with `--truth` of these numbers of tokens, layers and heads, the same for the same arguments.

    Each answer token attends to three passages of its own, and each head to one more. Records have up to 16 passages.
    """
    rng = random.Random(seed)
    passages = list(_passages(rng, tokens))
    answer = [ANSWER[number % len(ANSWER)] for number in range(answer_tokens)]
    numbers = [2 * layer + 1 for layer in range(layers)]
    keys = [(token, layer, head) for token in range(answer_tokens) for layer in numbers for head in range(kv_heads)]
    at_token = [rng.sample(range(len(passages)), min(3, len(passages))) for _ in answer]
    at_head = {key: rng.randrange(len(passages)) for key in sorted({key[1:] for key in keys})}
    records = [_record(rng, key, passages, [*at_token[key[0]], at_head[key[1:]]]) for key in keys]
    heads = [_measures(rng, layer, head) for layer in numbers for head in range(kv_heads)]
    return {
        "version": 1,
        "index": "manual.skv",
        "model": "made-up/model",
        "method": "codes",
        "budget": 0.05,
        "residual": False,
        "question": "Where does the <spare> key of the \u201cnorth\u201d tower lie?",
        "options": ["--method", "codes", "--budget", "5%"],
        "answer": "".join(answer),
        "sources": [_source(passages[number], rank) for rank, number in enumerate(dict.fromkeys(chain(*at_token)))][:8],
        "truth": True,
        "n_context": tokens,
        "n_sinks": SINKS,
        "n_middle": tokens - SINKS - TAIL,
        "n_tail": TAIL,
        "passages": passages,
        "answer_tokens": answer,
        "layers": numbers,
        "kv_heads": kv_heads,
        "measures": {name: fmean(one[name] for one in heads) for name in MEASURES},
        "by_head_measures": heads,
        "by_token": [_mean(group) for group in _grouped(records, ("token",)).values()],
        "by_head": [
            {"layer": layer, "kv_head": head} | _mean(group)
            for (layer, head), group in _grouped(records, ("layer", "kv_head")).items()
        ],
        "records": [one | {"passages": _largest(one["passages"], MOST_IN_RECORD)} for one in records],
    }


def _source(passage: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return a passage as a source; every other source is in a PDF."""
    start, text = passage["start"], "".join(passage["tokens"]).strip()
    of_pdf = rank % 2 == 1
    return {
        "path": "a/paper.pdf" if of_pdf else "a/notes.md",
        "lines": [rank + 1, rank + 1 + text.count("\n")],
        "page": 3 if of_pdf else None,
        "tokens": [start, start + len(passage["tokens"])],
        "text": text,
        "score": 0.4 / (rank + 1),
    }


def _passages(rng: random.Random, tokens: int) -> Iterator[dict[str, Any]]:
    """Yield sentences of 5 to 40 tokens.

    Some have an emoji of three tokens, and paragraphs end in newlines.
    """
    start = 0
    while start < tokens:
        length = min(rng.randint(5, 40), tokens - start, LONGEST)
        texts = [" " + _word(rng) if rng.random() < 0.8 else _word(rng) for _ in range(length)]
        texts[0] = texts[0].strip().capitalize()
        if length > 6 and rng.random() < 0.02:
            texts[1:4] = ["", "", "\U0001f511"]
        texts[-1] = "." if rng.random() < 0.8 else ".\n\n"
        yield {"start": start, "tokens": texts}
        start += length


def _word(rng: random.Random) -> str:
    return "".join(rng.choices(SYLLABLES, k=rng.randint(1, 3)))


def _record(
    rng: random.Random, key: tuple[int, int, int], passages: Sequence[dict[str, Any]], places: list[int]
) -> dict[str, Any]:
    token, layer, head = key
    exact = rng.uniform(0.3, 0.8)
    found = dict.fromkeys([*places, *rng.choices(range(len(passages)), k=28)])
    heights = [rng.paretovariate(1.1) * (4 if number < len(places) else 1) for number in range(len(found))]
    totals = [(1 - exact) * height / sum(heights) for height in heights]
    shares: Passages = {one: _split(rng, total) for one, total in zip(found, totals, strict=True)}
    sums = (sum(column) for column in zip(*shares.values(), strict=True))
    lists = {
        "chosen_tokens": _best_tokens(rng, shares, passages, 0, 8),
        "missed_tokens": _best_tokens(rng, shares, passages, 2, 4),
    }
    totals_of = dict(zip(SHARES, (exact, *sums), strict=True))
    measures = {name: float(f"{value:.4g}") for name, value in _measures(rng, layer, head).items() if name in MEASURES}
    return {"token": token, "layer": layer, "kv_head": head, **totals_of, "passages": shares, **measures, **lists}


def _split(rng: random.Random, total: float) -> tuple[float, ...]:
    """Divide a passage's share into chosen, represented and missed; in a third of the cases nothing is chosen."""
    chosen = total * rng.choice((0.0, 0.6, 0.95))
    stood_for = (total - chosen) * rng.random()
    return chosen, stood_for, total - chosen - stood_for


def _best_tokens(
    rng: random.Random, shares: Passages, passages: Sequence[dict[str, Any]], column: int, most: int
) -> list[list[float]]:
    best = sorted(((share[column] * 0.6, one) for one, share in shares.items() if share[column] > 0), reverse=True)
    return [[_token_of(rng, passages[one]), float(f"{weight:.4g}")] for weight, one in best[:most]]


def _token_of(rng: random.Random, passage: dict[str, Any]) -> int:
    return int(passage["start"]) + rng.randrange(len(passage["tokens"]))


def _grouped(records: list[dict[str, Any]], names: tuple[str, ...]) -> dict[tuple[int, ...], list[dict[str, Any]]]:
    groups: dict[tuple[int, ...], list[dict[str, Any]]] = defaultdict(list)
    for one in records:
        groups[tuple(one[name] for name in names)].append(one)
    return groups


def _mean(group: list[dict[str, Any]]) -> dict[str, Any]:
    sums: defaultdict[int, tuple[float, ...]] = defaultdict(lambda: (0.0, 0.0, 0.0))
    for record in group:
        for one, share in record["passages"].items():
            sums[one] = tuple(have + more for have, more in zip(sums[one], share, strict=True))
    mean = {one: tuple(part / len(group) for part in share) for one, share in sums.items()}
    return {name: fmean(one[name] for one in group) for name in SHARES} | {"passages": _largest(mean, MOST)}


def _largest(shares: Passages, most: int) -> list[list[float]]:
    largest = sorted(((sum(share), one) for one, share in shares.items() if sum(share) >= LEAST), reverse=True)[:most]
    return [[one, *(float(f"{part:.4g}") for part in shares[one])] for _, one in largest]


def _measures(rng: random.Random, layer: int, head: int) -> dict[str, Any]:
    values = (rng.uniform(0.5, 0.95), rng.uniform(0.6, 0.98), rng.uniform(0.005, 0.08), rng.uniform(0.08, 0.1))
    return {"layer": layer, "kv_head": head, **dict(zip(MEASURES, values, strict=True))}
