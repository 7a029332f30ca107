"""Checks of the ranks that kernels compute."""

from dataclasses import replace

import torch

from sparsekv.kernels.posting_lists.list_ranks import TokenRanks, laid_out

from .reference import assert_close


def on_cpu(ranks: TokenRanks) -> TokenRanks:
    """Return the ranks on the CPU."""
    return replace(ranks, ranks=ranks.ranks.cpu(), coarse=ranks.coarse.cpu(), logsumexp=ranks.logsumexp.cpu())


def assert_ranks(found: TokenRanks, expected: TokenRanks, most: int = 1, usual: float = 0.15) -> None:
    """Fail unless the ranks are equal except for rounding, and their layout and counts fit them.

    Args:
        most, usual: largest difference of a rank, and largest mean difference.
    """
    difference = (found.in_order() - expected.in_order()).abs()
    assert int(difference.max()) <= most
    assert float(difference.float().mean()) < usual
    assert_close(found.logsumexp, expected.logsumexp.double(), 1e-5)
    again = laid_out(found.in_order(), found.logsumexp, few=expected.each_counted())
    assert torch.equal(found.ranks, again.ranks)
    assert torch.equal(found.coarse, again.coarse)


def least_kept(chosen: torch.Tensor, logits: torch.Tensor) -> float:
    """Return the lowest share, over heads, of the best keys' probability that the chosen keys [H, K] have.

    The logits are [H, G, M] float64.
    """
    probability = logits.softmax(-1).mean(1)
    kept = probability.gather(1, chosen.long()).sum(1) / probability.topk(chosen.shape[1]).values.sum(1)
    return float(kept.min())
