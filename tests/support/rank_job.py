"""Program of two ranks, each a process, that builds an index of each family's model, and answers over indices.

The arguments are the families, the methods and the storage dtype of keys and values; then, for each rank, its current
folder, and the path by which it finds the work folder. The work folder has the models `FAMILY/`, the document, and the
indices `FAMILY-alone.skv`, built by one process. The ranks build the indices `FAMILY-ranks.skv`. With each method they
answer over both indices of a family, and the first rank writes the answers to `answers.json`. Each rank writes the
counts of its work in the builds to `deeds-NUMBER.json`, in its current folder.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from sparsekv.cli.building.recipe import BuildRecipe, Target, index_by_ranks
from sparsekv.cli.common.loading import load_for
from sparsekv.cli.distributed.launch import join_ranks
from sparsekv.formats.distributed.group import Ranks
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import AUTO, kv_dtype_named
from sparsekv.formats.models.load import identify, load_model
from sparsekv.indexing.indexers.interface import indexers
from sparsekv.indexing.plan import BuildConfig
from sparsekv.runtime.decoding.answer import Sampling
from sparsekv.runtime.decoding.choose_config import choose_config
from sparsekv.runtime.decoding.load import join_answer
from sparsekv.runtime.decoding.open import open_index
from sparsekv.runtime.decoding.session import Session

from .rank_deeds import Deeds

QUESTION = "What does line 7 say?"
TOKENS = 12


def recipe(model: Path, methods: list[str], kv_dtype: str = AUTO) -> BuildRecipe:
    """Return the recipe of a build, by one process or by ranks, of those `methods` that have an index."""
    return BuildRecipe(
        config=BuildConfig(
            methods={name: indexer() for name, indexer in indexers().items() if name in methods},
            tail=32,
            chunk_size=100,
            kv_dtype=kv_dtype_named(kv_dtype),
        ),
        model=str(model),
        device="auto",
        dtype="auto",
        max_tokens=None,
        raw=False,
        special_tokens=False,
        quiet=True,
    )


def asked(artifact: Path, model: Path, method: str, ranks: Ranks | None) -> dict[str, Any]:
    """Return the greedy answer over an index, and the share of keys and values that was read."""
    index = Artifact(artifact)
    config = choose_config(index, method, budget=None if method == "dense" else "0.2", prefill="own")
    if ranks is None:
        loaded = load_model(str(model))
        opened = open_index(index, loaded.model, loaded.tokenizer, identify(loaded))
    else:
        opened = load_for(index, str(model), "auto", "auto", quiet=True, hold=True, ranks=ranks)
    answer = Session.open(opened, config).ask(QUESTION, Sampling(max_new_tokens=TOKENS))
    answer = answer if ranks is None else join_answer(ranks, answer)
    return {"ids": answer.ids, "kv_fraction": answer.kv_fraction}


def answers(folder: Path, families: list[str], methods: list[str], ranks: Ranks | None) -> dict[str, Any]:
    """Return the answers by family, index and method."""
    return {
        f"{family} {built} {method}": asked(folder / f"{family}-{built}.skv", folder / family, method, ranks)
        for family in families
        for built in ("alone", "ranks")
        for method in methods
    }


def main(folder: Path, families: list[str], methods: list[str], kv_dtype: str) -> None:
    ranks = join_ranks("auto")
    assert ranks is not None
    deeds = Deeds()
    deeds.note_all()
    for family in families:
        target = Target(str(folder / "doc.txt"), folder / f"{family}-ranks.skv")
        index_by_ranks(ranks, recipe(folder / family, methods, kv_dtype), target, lambda stage, done, of: None)
        ranks.share("built")
    Path(f"deeds-{ranks.number}.json").write_text(json.dumps(deeds.done))
    found = answers(folder, families, methods, ranks)
    if ranks.first:
        (folder / "answers.json").write_text(json.dumps(found))


def _become(number: int, home: str) -> None:
    """Make this process one of the ranks, in its current folder."""
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
    os.chdir(home)
    torch.set_num_threads(1)  # torch renews its thread pool after a fork


if __name__ == "__main__":
    families, methods, kv_dtype, *places = sys.argv[1:]
    second = os.fork()  # a fork saves a second import of all modules
    number = 0 if second else 1
    _become(number, places[2 * number])
    main(Path(places[2 * number + 1]), families.split(","), methods.split(","), kv_dtype)
    ended = os.waitstatus_to_exitcode(os.waitpid(second, 0)[1]) if second else 0
    os._exit(ended)  # like the command: at Python's normal exit, threads of gloo may abort the process
