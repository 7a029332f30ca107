"""What an answer is worth to a model that does not see some passages of the document."""

import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import torch
from torch.nn.functional import log_softmax

from sparsekv.formats.errors import UsageError
from sparsekv.kernels.common.cache_argument import with_cache
from sparsekv.kernels.common.hook import route_attention
from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.decoding.exclusive import exclusive
from sparsekv.runtime.decoding.few_rows_linear import all_cores
from sparsekv.runtime.decoding.free_cores import free_cores
from sparsekv.runtime.decoding.open import OpenIndex

MOST_FOUND = 64
"""Places of one passage: one that is found more often is a word or a mark rather than a passage."""


def tokens_of(
    passages: Iterable[str], texts: Sequence[str], as_stored: Callable[[str], str] = lambda passage: passage
) -> torch.Tensor:
    """[N] bool: the tokens of a prompt, by their texts, that have a character of one of the passages, wherever it is
    found. White space in a passage is any white space.

    Args:
        as_stored: gives a passage as the tokenizer normalises it, such as with NFC.

    Raises:
        UsageError: a passage is empty, or not in the prompt, or in more than `MOST_FOUND` places.
    """
    whole, stops = "".join(texts), torch.tensor(list(accumulate(map(len, texts))))
    starts = torch.cat([stops.new_zeros(1), stops[:-1]])
    found = torch.zeros(len(texts), dtype=torch.bool)
    for passage in passages:
        for start, stop in _places(passage, as_stored(passage), whole):
            # The tokens before the last of a character have no text of their own.
            found |= (starts < stop) & ((stops > start) | (starts >= start))
    return found


def _places(passage: str, stored: str, whole: str) -> list[tuple[int, int]]:
    words = stored.split()
    if not passage.strip():
        raise UsageError("--without is empty; give a passage of the document")
    pattern = re.compile(r"\s+".join(map(re.escape, words)))
    places = [match.span() for match, _ in zip(pattern.finditer(whole), range(MOST_FOUND + 1), strict=False)]
    if not places:
        raise UsageError(
            f"--without {shlex.quote(passage)}: the indexed prompt has no such passage; copy it from the document"
        )
    if len(places) > MOST_FOUND:
        raise UsageError(f"--without {passage}: found in more than {MOST_FOUND} places; give more of the passage")
    return places


@torch.inference_mode()
def log_probability(
    index: OpenIndex, cache: IndexCache, question: torch.Tensor, answer: Sequence[int], *, at_once: bool
) -> float:
    """The sum of the log-probabilities of an answer's tokens after a question, each given those before it.

    The cache is rewound first. The question is prefilled at once and the answer fed token by token, as when it is made.

    Args:
        cache: one of this index's.
        question: [Q] token ids after the stored prompt.
        at_once: feed the answer with the question: the same where every token attends to everything.
    """
    device = index.model.device
    said = torch.tensor(answer, dtype=question.dtype)
    fed = [torch.cat([question, said[:-1]])] if at_once else [question, *said[:-1, None]]
    total = torch.zeros((), dtype=torch.float64, device=device)
    model = index.model
    with exclusive(model), route_attention(model, cache.attend), free_cores(model) as cores, all_cores(model):
        cache.rewind()
        cache.expect_prompt(index.split.tokens + len(question))
        for ids, next_ids in zip(fed, said.split(len(said) if at_once else 1), strict=True):
            cores.follow()
            model_input = {"input_ids": ids[None].to(device), **with_cache(model, cache)}
            logits = model(**model_input, logits_to_keep=len(next_ids)).logits[0]
            total += log_softmax(logits.double(), -1).gather(1, next_ids[:, None].to(device)).sum()
    return float(total)
