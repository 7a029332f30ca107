"""Random tensors that a test can name by a seed."""

import torch


def normal(seed: int, *shape: int) -> torch.Tensor:
    """Return a standard normal float32 tensor, the same for the same seed and shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def clustered(seed: int, heads: int, points: int, dims: int, centres: int) -> torch.Tensor:
    """Return points [heads, points, dims] around random centres, like the keys of a text."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(centres, (heads, points), generator=generator)
    means = normal(seed + 1, heads, centres, dims) * 3
    return means.gather(1, chosen[..., None].expand(-1, -1, dims)) + normal(seed + 2, heads, points, dims)
