"""Posting lists laid out by token: a four-bit code for every key in each list, whether the list names it or not.

A list of positions has to be scattered into the logits; lists by token are summed in registers, eight tokens to a word.
Four bits a key are a third of the memory of a list that names a quarter of all keys, at 6 bytes an entry. The rounding
error is small beside the error of using a centroid's scores for another query.
"""

from dataclasses import dataclass

import torch

from sparsekv.kernels.tables.table_lookup import Tables, score_of_others

TILE_TOKENS, TILE_WORDS = 4096, 512
HIGHEST = 15  # largest code
# Shares of a list's highest score to clip at: a few scores far above all others would leave these too few codes.
CUTS = (1.0, 0.8, 0.65, 0.5, 0.4, 0.3, 0.2, 0.1)


@dataclass(frozen=True)
class ListCodes:
    """All lists of one layer, by token.

    codes [Hk, m, C, words] int32: four words, which a GPU thread reads together, have the codes of 32 consecutive
    tokens. With j = 2 j1 + j0, the code of token 8 j + 2 i + h of the 32 is in word i from bit 16 j1 + 8 h + 4 j0 on.
    A key's score in a list is origin + step * code, with origins and steps [Hk, m, C] float32; if `reaching`, scores
    are multiplied by the projection of the query's part on the centroid. centroids [Hk, m, C, D / m] float32, channels
    [m, D / m] int32, and weights [Hk, m] float32 of the subspaces. Past the last of `keys` keys, codes are those of
    keys that are not listed.
    """

    codes: torch.Tensor
    origins: torch.Tensor
    steps: torch.Tensor
    reaching: bool
    centroids: torch.Tensor
    channels: torch.Tensor
    weights: torch.Tensor
    keys: int


def encode_lists(tables: Tables, scoring: str, weights: torch.Tensor | None = None) -> ListCodes:
    """Lay out posting lists by token.

    Args:
        scoring: the score of keys that a list leaves out; see `estimate_part`.
        weights: [Hk, m] of the subspaces; None: all 1.

    Returns:
        See `ListCodes`. Allocates half a byte for every key and list, and a few times the lists of one subspace.
    """
    Hk, m, C, _ = tables.tokens.shape
    words = -(-tables.keys // TILE_TOKENS) * TILE_WORDS
    codes = torch.empty(Hk, m, C, words, dtype=torch.int32, device=tables.tokens.device)
    origins, steps = torch.empty(2, Hk, m, C, device=codes.device)
    for head in range(Hk):
        for part in range(m):
            scores, centroids = tables.scores[head, part].float(), tables.centroids[head, part]
            other = score_of_others(scores, centroids, tables.key_mean[head, part], tables.keys, scoring)
            origin = torch.minimum(other, scores.amin(-1))
            step = _best_step(scores - origin[:, None])
            dense = _codes(other - origin, step)[:, None].repeat(1, 8 * words)
            tokens = tables.tokens[head, part].long() - tables.first_token
            dense.scatter_(1, tokens, _codes(scores - origin[:, None], step[:, None]))
            codes[head, part], origins[head, part], steps[head, part] = _packed(dense), origin, step
    ones = torch.ones(Hk, m, device=codes.device)
    return ListCodes(
        codes,
        origins,
        steps,
        scoring != "paper",
        tables.centroids.contiguous(),
        tables.channels.int().contiguous(),
        ones if weights is None else weights.float().contiguous(),
        tables.keys,
    )


def _codes(heights: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    return (heights / step).round().clamp(0, HIGHEST).to(torch.uint8)


def _best_step(heights: torch.Tensor) -> torch.Tensor:
    """Code step [C] with the least squared error for lists of scores [C, L], given as heights above their origin."""
    highest = heights.amax(-1).clamp(min=torch.finfo(torch.float16).tiny) / HIGHEST
    steps = torch.stack([highest * cut for cut in CUTS])
    wrong = torch.stack([(_codes(heights, step[:, None]) * step[:, None] - heights).square().sum(-1) for step in steps])
    best: torch.Tensor = steps.gather(0, wrong.argmin(0, keepdim=True))[0]
    return best


def _packed(dense: torch.Tensor) -> torch.Tensor:
    """Codes [C, 8 words] packed into words [C, words] int32."""
    by_place = dense.view(len(dense), -1, 2, 2, 4, 2).int()
    words: torch.Tensor = (by_place << _shifts(dense.device)).sum((2, 3, 5), dtype=torch.int32).flatten(1)
    return words


def unpacked(words: torch.Tensor) -> torch.Tensor:
    """Codes [..., 8 words] int32, in token order, from words [..., words] int32."""
    fours = words.unflatten(-1, (-1, 1, 1, 4, 1))
    codes: torch.Tensor = ((fours >> _shifts(words.device)) & HIGHEST).flatten(-5)
    return codes


def _shifts(device: torch.device) -> torch.Tensor:
    """First bit of a code in its word, by j1, j0 and h: [2, 2, 1, 2] int32."""
    j1, j0, h = torch.arange(2, dtype=torch.int32, device=device).expand(3, 2)
    shifts: torch.Tensor = 16 * j1[:, None, None, None] + 4 * j0[:, None, None] + 8 * h
    return shifts
