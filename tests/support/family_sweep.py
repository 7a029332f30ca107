"""Builds of an index with a tiny model of a family, and comparisons of an answer with plain transformers."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedModel

from sparsekv.formats.errors import SparsekvError
from sparsekv.formats.models.load import LoadedModel
from sparsekv.indexing.build import build_index
from sparsekv.runtime.methods.codes import Codes
from sparsekv.runtime.selection.interface import Budget

from .causal_families import tiny_config, tiny_model
from .configs import sparse
from .small_index import INDEXERS, random_ids, reopen, small_plan, stepped_logits
from .tiny_models import tiny_tokenizer

TOLERANCE = 1e-3
QUESTION, STEPS = 7, 5


@dataclass(frozen=True)
class Outcome:
    """Outcome of a family.

    `verdict` is `right`; `refused`, in one line before the prefill; or a fault: `wrong` (other logits), `late` (refused
    after the prefill began), `error` (an error that is not sparsekv's), `unmade` (transformers makes no such model).
    """

    verdict: str
    reason: str = ""


def sweep(family: str, changes: dict[str, Any]) -> Outcome:
    """Return the outcome for a family's tiny model, with these changes of its config."""
    try:
        model = tiny_model(tiny_config(family, **changes))
    except Exception as error:
        return Outcome("unmade", f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
    begun = list[str]()
    try:
        with TemporaryDirectory() as folder:
            return _asked(model, family, Path(folder) / "a.skv", begun)
    except SparsekvError as error:
        return Outcome("late" if begun else "refused", str(error))
    except Exception as error:
        return Outcome("error", f"{type(error).__name__}: {error}")


def _asked(model: PreTrainedModel, family: str, folder: Path, begun: list[str]) -> Outcome:
    loaded = LoadedModel(model, tiny_tokenizer(), f"tiny-{family}", None)
    plan = small_plan(loaded=loaded, methods={"codes": INDEXERS["codes"]})
    build_index(plan, folder, lambda stage, done, of: begun.append(stage))
    index = reopen(plan, folder)
    tokens = random_ids(QUESTION + STEPS, seed=1)
    ids = torch.cat([index.input_ids, tokens])
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # other attention of VaultGemma in transformers 5.17 drops the soft cap
    with torch.inference_mode():
        own = model(input_ids=ids[None], use_cache=False).logits[0, -len(tokens) :]
    caches = {"dense": index.dense_cache(), "100%": index.cache(sparse("codes", Codes(), Budget.parse("100%")))}
    for name, cache in caches.items():
        logits = stepped_logits(index, cache, tokens, QUESTION)
        error = float((logits - own).abs().max() / own.abs().max())
        if not error <= TOLERANCE:
            return Outcome("wrong", f"{name}: {error:.2g} away from the model's own logits")
        if not torch.equal(logits.argmax(-1), own.argmax(-1)):
            return Outcome("wrong", f"{name}: other greedy tokens")
    return Outcome("right")
