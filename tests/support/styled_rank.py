"""Process of one of two ranks: loads its share of models and runs them, with sums through memory that both ranks
share."""

from pathlib import Path

import torch
import torch.distributed as dist

from sparsekv.formats.distributed.group import join
from sparsekv.formats.distributed.process import Place
from sparsekv.formats.models.load import load_model
from sparsekv.kernels.distributed import row_style
from support.summing_ranks import as_seen_by


def run(number: int, folder: Path, memory: list[torch.Tensor], ids: torch.Tensor, names: tuple[str, ...]) -> None:
    """Write each model's logits of each row of `ids` to the folder, with the number of sums through the shared
    memory."""
    ranks = join(Place(number, len(memory), number, len(memory), folder / "meeting"))
    group = dist.group.WORLD
    assert group is not None
    view = as_seen_by(number, memory)
    row_style._shared[group.group_name] = view
    row_style.sum_in_one_launch()
    found = {}
    for name in names:
        before, model = int(view.turns[0]), load_model(str(folder / name), device="cpu", ranks=ranks.size).model
        with torch.inference_mode():
            logits = [model(input_ids=row[None], use_cache=False).logits for row in ids]
        found[name] = torch.cat(logits), int(view.turns[0]) - before
    torch.save(found, folder / f"{number}.pt")
