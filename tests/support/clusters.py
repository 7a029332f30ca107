"""Labels and means of clusters, computed from an index's tensors."""

from itertools import pairwise

import torch


def token_labels(tensors: dict[str, torch.Tensor], level: int = 0, first_token: int = 0) -> torch.Tensor:
    """Return the cluster [Hk, M] of each token at a level, or -1; `first_token` is the lowest position in
    `token_order`."""
    order, offsets = tensors["token_order"].long() - first_token, tensors["token_offsets"]
    labels = torch.full_like(order, -1)
    for head, of_head in enumerate(offsets.tolist()):
        for cluster, (start, end) in enumerate(pairwise(of_head)):
            labels[head, order[head, start:end]] = cluster
    for below in range(level):
        labels = tensors[f"level{below}.parent"].long().gather(1, labels)
    return labels


def member_means(rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return [Hk, M, D] float64: for each of the rows [Hk, M, D], the mean of all rows with its label [Hk, M]."""
    same = (labels[:, :, None] == labels[:, None]).double()
    return same @ rows.double() / same.sum(-1, keepdim=True)


def spread_by_definition(rows: torch.Tensor, labels: torch.Tensor) -> float:
    """Return sqrt(sum |r - its cluster's mean|^2 / sum |r - its head's mean|^2) of rows [Hk, M, D] with labels [Hk,
    M]."""
    rows = rows.double()
    lost = (rows - member_means(rows, labels)).square().sum()
    return float((lost / (rows - rows.mean(1, keepdim=True)).square().sum()).sqrt())
