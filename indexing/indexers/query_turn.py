"""Turns queries and keys so that what product codes of the keys lose is what the document's queries ask least for.

A code's error e matters as q e, whose mean square over the queries is e' S e with S the mean of q q'. In coordinates
where S is the identity that is the length of e, which k-means makes small. There the keys are turned to their principal
components, which are dealt out to the parts so that the parts' variances have about one product (Optimized Product
Quantization, Ge et al., CVPR 2013, section 3.2.3).
"""

import math

import torch

SHRINK = 0.3  # of S, towards the same in all directions: a sample knows too little of those that it hardly has


def query_turn(keys: torch.Tensor, queries: torch.Tensor, parts: int, weights: torch.Tensor) -> torch.Tensor:
    """[Hk, D, D] float16 by which queries are multiplied; keys are by `key_turn` of it, and products stay the same.

    Allocates the keys three times more in float32.

    Args:
        keys: [Hk, M, D].
        queries: [Hk, P, D], a sample of all heads of a group.
        parts: that a key's channels are cut into, neighbouring ones together.
        weights: [Hk, M], above 0: how much the error of each key matters.
    """
    root, shares = _root(queries.float()), weights / weights.sum(1, keepdim=True)
    turned = keys.float() @ root
    turned -= shares[:, None] @ turned
    variances, directions = torch.linalg.eigh(turned.transpose(1, 2) @ (shares[..., None] * turned))
    # A direction's sign is rounding's: with its largest part above 0 the same keys have the same codes everywhere.
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    directions = directions * largest.sign()
    dealt = torch.stack([_deal(of_head, parts) for of_head in variances]).to(keys.device)
    directions = directions.gather(2, dealt[:, None].expand_as(directions))
    # Queries take the inverse of the root; the directions are orthogonal.
    turn: torch.Tensor = torch.linalg.inv(root) @ directions
    return turn.half()


def key_turn(turn: torch.Tensor) -> torch.Tensor:
    """[Hk, D, D] float32 by which keys are multiplied, for queries that are by `turn`."""
    inverse: torch.Tensor = torch.linalg.inv(turn.double())
    return inverse.transpose(1, 2).float()


def _root(queries: torch.Tensor) -> torch.Tensor:
    """The symmetric root [Hk, D, D] of the queries' second moments, shrunk, with a mean variance of 1."""
    moments = queries.transpose(1, 2) @ queries
    even = torch.eye(queries.shape[2], device=queries.device)
    # A head without queries that differ from 0 has no say.
    size = moments.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None].clamp(min=1e-12)
    variances, directions = torch.linalg.eigh((1 - SHRINK) * moments / size + SHRINK * even)
    root: torch.Tensor = directions @ (variances.clamp(min=0).sqrt()[..., None] * directions.transpose(1, 2))
    return root


def _deal(variances: torch.Tensor, parts: int) -> torch.Tensor:
    """Numbers [D] of components, part by part, given their variances [D] in rising order: the largest that is left goes
    to the part with the smallest product that has room."""
    room = len(variances) // parts
    logs = variances.clamp(min=1e-12).log().tolist()
    least, dealt, products = logs[0], [list[int]() for _ in range(parts)], [0.0] * parts
    for number in reversed(range(len(logs))):
        part = min((part for part in range(parts) if len(dealt[part]) < room), key=lambda part: products[part])
        dealt[part].append(number)
        products[part] += logs[number] - least + math.ulp(1.0)
    return torch.tensor([number for part in dealt for number in part])
