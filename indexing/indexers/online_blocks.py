"""Split a joined hierarchy of clusters into its blocks again, so that only the last block changes in an append."""

import torch


def split_blocks(tensors: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Undo `join_blocks`: the tensors of each block, with clusters numbered from 0, without token_offsets.

    Args:
        tensors: those of `join_blocks`, and block_offsets [blocks + 1].

    Returns:
        One dictionary per block; all tensors are views but `parent`.
    """
    offsets = tensors["block_offsets"].long()
    blocks: list[dict[str, torch.Tensor]] = [{} for _ in offsets[1:]]
    for name, tensor in tensors.items():
        level = name.partition(".")[0]
        if name != "token_order" and not level.startswith("level"):
            continue
        cuts = offsets if name == "token_order" else _first_clusters(tensors[f"{level}.counts"], offsets)
        first_parents = [0] * len(blocks)
        if name.endswith(".parent"):
            above = f"level{int(level.removeprefix('level')) + 1}.counts"
            first_parents = _first_clusters(tensors[above], offsets).tolist()
        pieces = tensor.tensor_split(cuts[1:-1].cpu(), 1)
        for block, piece, first in zip(blocks, pieces, first_parents, strict=False):
            block[name] = piece - first if first else piece
    return blocks


def _first_clusters(counts: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The first cluster of each block in one level, then the number of clusters; counts [Hk, C], offsets [blocks + 1].

    Empty clusters come last in their block, so a block's first cluster is the first whose tokens end past the block's
    offset. All heads have the same number of clusters in a block.
    """
    ends = counts[0].long().cumsum(0)
    return torch.cat([torch.searchsorted(ends, offsets[:-1], right=True), offsets.new_tensor([len(ends)])])


def finest_labels(block: dict[str, torch.Tensor]) -> torch.Tensor:
    """[Hk, T] int64: the finest cluster of each token of a block, or of all, in the order of the prompt."""
    order = block["token_order"].long()
    ends = block["level0.counts"].long().cumsum(1)
    rows = torch.arange(order.shape[1], device=order.device).expand_as(order).contiguous()
    clusters = torch.searchsorted(ends, rows, right=True)
    return torch.empty_like(clusters).scatter_(1, order - order.min(), clusters)
