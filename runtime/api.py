"""Python API for notebooks: open an index, ask questions, and measure what the methods select and read.

    import sparsekv

    index = sparsekv.open_index("manual.skv")
    print(index.ask("How is it installed?").text)
    rows = index.recall_report(["codes", "quest"], budgets=["5%", "10%"])
    pandas.DataFrame(rows)

The commands `generate` and `recall-report` run the same code. Errors are `SparsekvError` with a message of one line.
The subclass `UsageError` means a wrong argument, `ArtifactError` an index that cannot be used, and `IdentityError` an
index that does not belong to the model. All these classes can be imported from `sparsekv`.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar, cast

import torch

from sparsekv.formats.errors import SparsekvError, UsageError, check_type, no_folder, suggestion
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import AUTO
from sparsekv.runtime.attention.config import DecodeConfig, Dense, QuestionPrefill
from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.decoding.answer import Answer, Sampling
from sparsekv.runtime.decoding.choose_config import (
    choose_config,
    refuse_beside_dense,
    refuse_idle_budget,
    refuse_residual,
)
from sparsekv.runtime.decoding.engine import why_alone
from sparsekv.runtime.decoding.load import load_and_open
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.open import open_index as open_decoding
from sparsekv.runtime.decoding.session import Session, chosen_sampling
from sparsekv.runtime.decoding.threads import exclusive, exclusive_process
from sparsekv.runtime.reporting.questions import question_queries
from sparsekv.runtime.reporting.report import GROUPS, in_order, recall_report, row_records
from sparsekv.runtime.selection.interface import Budget, MethodSpec, methods
from sparsekv.runtime.selection.registry import configured_form, methods_of, refuse_unused
from sparsekv.runtime.serving.scheduler import Scheduler
from sparsekv.runtime.serving.stream import Stream, Submission

WAITING = 1 << 20
"""Maximum number of questions of one process that wait for a slot."""


@dataclass(frozen=True, repr=False, eq=False)
class StreamingSession(Session):
    """A session with streamed answers for many threads and asyncio tasks at once.

    Concurrent questions share steps if the config allows shared steps. Otherwise the questions are answered one after
    another, over a second cache.
    """

    _schedulers: list[Scheduler] = field(default_factory=list)
    _lock: Lock = field(default_factory=Lock)

    def stream(
        self,
        question: str | torch.Tensor,
        sampling: Sampling | None = None,
        *,
        stop: str | Sequence[str] = (),
        logprobs: int | None = None,
        timeout: float | None = None,
        sources: int = 0,
    ) -> Stream:
        """Ask a question; return an iterator of the pieces of the answer, for `for` and for `async for`.

        Decoding is greedy by default. Leaving the loop ends the answer. This method raises the errors of
        `question_ids` and of `Scheduler.submit`, and UsageError for an argument of another type. The iterator raises
        the errors of `generate`.

        Args:
            question: as for `ask`.
            stop, logprobs, timeout, sources: as in `Submission`.
        """
        if not isinstance(stop, str | Sequence) or not all(isinstance(text, str) for text in stop):
            raise UsageError(f"stop is {stop!r}: give a string, or a list of strings")
        for name, value, kind in (("logprobs", logprobs, int | None), ("timeout", timeout, float | None)):
            check_type(name, value, kind)
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        ids = self._ids(question)
        return self._scheduler().submit(
            Submission("", self.config, ids, chosen_sampling(sampling), stops, logprobs, timeout, sources)
        )

    def _scheduler(self) -> Scheduler:
        with self._lock:
            if not self._schedulers:
                self._schedulers.append(Scheduler({"": self.index}, queue=WAITING, make_cache=self._cache))
            return self._schedulers[0]

    def _cache(self, index: OpenIndex, config: DecodeConfig) -> IndexCache:
        """Return the session's cache if several questions can share steps over that cache, otherwise a new cache."""
        return index.cache(config) if why_alone(index, config.attention, self.cache) else self.cache


_OPTION = re.compile(r"--([a-z][a-z-]*)")


@contextmanager
def api_words() -> Iterator[None]:
    """Rewrite the message of a SparsekvError raised in the context: `--page-size` becomes the argument `page_size`.

    Commands in backticks stay unchanged.
    """
    try:
        yield
    except SparsekvError as error:
        parts = str(error).split("`")
        parts[::2] = [_OPTION.sub(lambda found: found[1].replace("-", "_"), part) for part in parts[::2]]
        error.args = ("`".join(parts),)
        raise


def refuse_unknown(names: Iterable[str], arguments: Iterable[str]) -> None:
    """Raise UsageError for a name that is neither a parameter of a method nor one of a call's `arguments`."""
    known = [*arguments, *dict.fromkeys(field.name for method in methods().values() for field in fields(method))]
    for name in names:
        if name not in known:
            meant = suggestion(name, [*known, *(field.name for field in fields(Sampling))])
            raise UsageError(
                f"{name} is not an argument of this call{meant}; name it as in docs/how-to/python.md, or leave it out"
            )


T = TypeVar("T")
ASKING = ("method", "budget", "residual", "placement", "prefill", "prefill_budget", "question", "sources")
"""Argument names of `asker` and `ask` that the error for a mistyped argument can suggest."""


@dataclass(frozen=True, eq=False)
class Index:
    """An index that is open with its model."""

    opened: OpenIndex

    def __repr__(self) -> str:
        artifact = self.opened.artifact
        manifest = artifact.manifest
        return f"Index({str(artifact.folder)!r}, {manifest.model.id}, {manifest.split.tokens:,} tokens)"

    @property
    def methods(self) -> list[str]:
        """Names of the methods that can run on this index."""
        return methods_of(self.opened.artifact)

    def asker(
        self,
        method: str | None = None,
        budget: str | float | None = None,
        *,
        residual: bool = False,
        placement: str = "device",
        prefill: str | None = None,
        prefill_budget: str | float | None = None,
        **parameters: Any,
    ) -> StreamingSession:
        """Open a session that answers many questions with one config: `asker.ask(question).text`.

        Args:
            method: name of a method, or `dense`. Without `method`, `budget`, `residual` and `parameters`, the session
                uses the setting that `sparsekv tune` stored in the index. Otherwise the default is the index's first
                method.
            budget: share or number of the document's tokens that a decode step attends to, as on the command line:
                "5%", 0.05 or 512. Default: the method's own.
            residual: attend to centroids instead of the tokens that the method does not select.
            placement: where the document's keys and values are stored for a model on a GPU: on the GPU (`device`), in
                host memory (`host`) or in the index's files (`disk`). A model on a CPU reads them from the files.
                Without `disk`, methods that attend with a CPU kernel, such as `codes`, copy them to memory. Dense
                attention ignores the placement: a model on a GPU has them on the GPU.
            prefill: attention of a question's tokens. `dense` (default): all tokens. `own`: the selection of the
                method that answers. The name of a method: the selection of that method.
            prefill_budget: share or number of the document's tokens that each chunk of a question attends to, if
                `prefill` is a method. Default: 1,024 tokens.
            parameters: parameters of the method, named as its command-line options: `rerank=4`.

        Raises:
            UsageError: an argument does not exist, is not valid, or has no effect with the other arguments.
            ArtifactError: the index is damaged, or the setting that `tune` stored can no longer run.
        """
        of_sampling = {one.name for one in fields(Sampling)}
        for name, value in parameters.items():
            if name in of_sampling:
                raise UsageError(f"{name} is an argument of Sampling: give ask a Sampling({name}={value!r})")
        refuse_unknown(parameters, ASKING)
        for argument, text in {"method": method, "prefill": prefill, "placement": placement}.items():
            if text is not None and not isinstance(text, str):
                raise UsageError(f"{argument} is {text!r}: give a string")
        with api_words():
            check_type("residual", residual, bool)
            config = choose_config(
                self.opened.artifact,
                method,
                parameters,
                budget=None if budget is None else str(budget),
                residual=residual,
                prefill=prefill,
                prefill_budget=None if prefill_budget is None else str(prefill_budget),
                placement=placement,
            )
            if isinstance(config.attention, Dense) and isinstance(config.question, QuestionPrefill):
                refuse_beside_dense({"--prefill": prefill})
            if residual and isinstance(config.attention, MethodSpec) and config.attention.method.replaces():
                refuse_residual([config.attention.name])
            refuse_idle_budget(config.attention, "--budget", budget)
            refuse_idle_budget(config.question, "--prefill-budget", prefill_budget)
            return StreamingSession.open(self.opened, config)

    def ask(self, question: str, sampling: Sampling | None = None, *, sources: int = 0, **setting: Any) -> Answer:
        """Answer one question, by default with greedy decoding. Each call allocates a new cache.

        Args:
            sources: maximum number of sources, the passages to which the answer attended most.
            setting: the arguments of `asker`.

        Raises:
            UsageError: the question is empty or not a text, `sampling` is not a `Sampling`, or another argument is not
                valid. Also raises the errors of `asker` and of `Session.ask`.
        """
        if not isinstance(question, str):
            raise UsageError(f"question is a {type(question).__name__}: give one text; an `asker` answers many in turn")
        with exclusive(self.opened.model):
            return self.asker(**setting).ask(question, sampling, sources=sources)

    def recall_report(
        self,
        names: Iterable[str] = (),
        budgets: Iterable[str | float] = ("2%", "5%", "10%"),
        *,
        by: Iterable[str] = (),
        questions: Iterable[str] = (),
        residual: bool = False,
        **parameters: Any,
    ) -> list[dict[str, Any]]:
        """Measure recall, output error and rows read of methods against dense attention.

        Returns one flat dict per row, as `recall-report --json` prints them. The key `method` holds the method's name.
        The key `variant` distinguishes the method's variants, such as `without replacement`, `flat threshold` or
        `page_size=8`. For many methods the default variant has an empty name.

        Args:
            names: names of methods; by default all methods that can run on the index.
            budgets: shares or numbers of the document's tokens, at each of which the methods are measured.
            by: `layer`, `kv_head` or both: return a row for each layer, for each KV head, or for each pair of them.
                Default: each row is the mean over all layers and KV heads.
            questions: measure on the queries of these questions, instead of the document's held-out tail.
            residual: measure each variant a second time with centroids for the tokens that the variant does not
                select. A method is measured once if one of its variants represents these tokens anyway.
            parameters: parameters of the methods. A method that has any of them is measured only with the given
                parameters, instead of in its usual variants.

        Raises:
            UsageError: an argument does not exist or is not valid, or the index has no centroids for `residual`.
            ArtifactError: the index is damaged, or dense attention over it is not finite.
        """
        refuse_unknown(parameters, ("names", "budgets", "by", "questions", "residual"))
        artifact, model, groups, shares = self.opened.artifact, self.opened.model, _texts("by", by), _several(budgets)
        if unknown := sorted({*groups} - {*GROUPS}):
            raise UsageError(f"by: a report has no rows by {', '.join(unknown)}; give {' or '.join(GROUPS)}, or both")
        with api_words(), exclusive(model):  # no thread may sync with the GPU while another captures a CUDA graph
            check_type("residual", residual, bool)
            chosen = {name: methods()[name] for name in methods_of(artifact, _texts("names", names))}
            refuse_unused(chosen, parameters, decoding=chosen, answers=False)
            if not shares:
                raise UsageError("budgets is empty; give at least one, such as 0.05")
            report = recall_report(
                artifact,
                list(chosen),
                Budget.parse_each(map(str, shares)),
                question_queries(self.opened, _texts("questions", questions)),
                residual=residual,
                configured={name: form for name, one in chosen.items() if (form := configured_form(one, parameters))},
                device=model.device,
            )
        return row_records(in_order(report.by(*groups)))


def _several(elements: Iterable[T] | None) -> list[T]:
    """Return the elements as a list. A single text or number is the only element, and None gives an empty list."""
    if isinstance(elements, str) or not isinstance(elements, Iterable | None):
        return cast(list[T], [elements])
    return [] if elements is None else [*elements]


def _texts(name: str, texts: Iterable[str]) -> list[str]:
    """Return one or several texts as a list. Raises UsageError for an element that is no text."""
    found = _several(texts)
    for one in found:
        if not isinstance(one, str):
            raise UsageError(f"{name} has {one!r}: give a text, or a list of texts")
    return found


def open_index(
    folder: str | Path,
    model: "str | Path | Index | None" = None,
    *,
    device: str = AUTO,
    dtype: str = AUTO,
    weights: str = AUTO,
    progress: Callable[[str], None] = lambda text: None,
) -> Index:
    """Open an index with the model that built it, or with `model`: a local folder, a hub id or an open index.

    If `model` is an open index, both indices share its model. Otherwise the model's weights are loaded. While they are
    loaded, no other thread can answer a question, because torch's default dtype is set to the model's dtype.

    The other arguments are as in `load_and_open`. Also raises the errors of `load_and_open`.

    Raises:
        UsageError: `folder` is a file, `folder` or `model` has a wrong type, or an argument has no effect on a model
            that is loaded already.
        IdentityError: the index does not belong to the model.
    """
    given: Any = folder
    if not isinstance(given, str | Path):
        raise UsageError(f"folder is a {type(folder).__name__}: give the index's folder")
    if Path(folder).is_file():
        raise UsageError(f"{folder} {no_folder(Path(folder))}")
    given = model
    if not isinstance(given, str | Path | Index | None):
        raise UsageError(f"model is a {type(model).__name__}: give a folder, a hub id or an open index")
    if isinstance(model, Index):
        for name, value in {"device": device, "dtype": dtype, "weights": weights}.items():
            if value != AUTO:
                raise UsageError(f"{name} {value!r} has no effect: the model is loaded already; leave it out")
        return Index(_opened_beside(model.opened, Artifact(Path(folder))))
    with api_words(), exclusive_process():
        named = None if model is None else str(model)
        return Index(load_and_open(Artifact(Path(folder)), named, device, dtype, progress, weights=weights))


def _opened_beside(other: OpenIndex, artifact: Artifact) -> OpenIndex:
    """Open an index with the model of another open index, after the same checks as with a loaded model."""
    manifest = other.artifact.manifest
    its = manifest.model, manifest.tokenizer
    with exclusive(other.model):
        return open_decoding(artifact, other.model, other.tokenizer, its, files=other.tokenizer_files)
