"""Python API, for notebooks: open an index, ask it, and report what methods keep and read.

    import sparsekv

    index = sparsekv.open_index("manual.skv")
    print(index.ask("How is it installed?").text)
    rows = index.recall_report(["codes", "quest"], budgets=["5%", "10%"])
    pandas.DataFrame(rows)

The commands `generate` and `recall-report` run the same code. Everything raises `SparsekvError` with one line for the
user, or its subclasses `UsageError` (a wrong argument) and `ArtifactError` (an index that cannot be used); all three
are in `sparsekv`.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, cast

from sparsekv.formats.errors import UsageError, suggestion
from sparsekv.formats.hints import no_folder
from sparsekv.formats.index.reader import Artifact
from sparsekv.runtime.attention.config import Dense, QuestionPrefill
from sparsekv.runtime.decoding.choose_config import choose_config, refuse_beside_dense
from sparsekv.runtime.decoding.generate import Answer, Sampling
from sparsekv.runtime.decoding.load import load_and_open
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.session import Session
from sparsekv.runtime.decoding.threads import exclusive, exclusive_process
from sparsekv.runtime.reporting.questions import question_queries
from sparsekv.runtime.reporting.report import GROUPS, recall_report, row_records
from sparsekv.runtime.selection.interface import Budget
from sparsekv.runtime.selection.registry import configured_form, methods, methods_of, refuse_unused

_OPTION = re.compile(r"--([a-z][a-z-]*)")


@contextmanager
def api_words() -> Iterator[None]:
    """Within it a UsageError names arguments, `page_size` for `--page-size`; shown commands stay as they are."""
    try:
        yield
    except UsageError as error:
        parts = str(error).split("`")
        parts[::2] = [_OPTION.sub(lambda found: found[1].replace("-", "_"), part) for part in parts[::2]]
        raise UsageError("`".join(parts)) from None


def refuse_unknown(given: Iterable[str], own: Iterable[str]) -> None:
    """Raise UsageError for the name of an argument that no method has, nor the call itself, whose are `own`."""
    known = [*own, *dict.fromkeys(field.name for method in methods().values() for field in fields(method))]
    for name in given:
        if name not in known:
            meant = suggestion(name, [*known, *(field.name for field in fields(Sampling))])
            raise UsageError(f"{name} is no argument{meant}; name it as in docs/how-to/python.md, or leave it out")


T = TypeVar("T")
ASKING = ("method", "budget", "residual", "placement", "prefill", "prefill_budget", "question")
"""Arguments of `asker`, and `ask`'s, for one that is mistyped."""


@dataclass(frozen=True)
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
    ) -> Session:
        """A session that answers many questions by one config: `asker.ask(question).text`.

        Allocates the document's keys and values where `placement` says: `device`, `host`, or nowhere with `disk`.

        Args:
            method: by name, or `dense`; by default what `sparsekv tune` found for the index, or its first method.
            budget: tokens of the document that a step attends to, as on the command line: "5%", 0.05 or 512.
            residual: centroids represent the tokens that the method does not choose.
            prefill: what a question's tokens attend to: `dense` for everything, as by default, `own` for what the
                answer's method selects, or what this method does.
            prefill_budget: tokens of the document that each chunk of a question attends to, with a method as `prefill`.
            parameters: of the method, named as its options: `rerank=4`.
        """
        of_sampling = {one.name for one in fields(Sampling)}
        for name, value in parameters.items():
            if name in of_sampling:
                raise UsageError(f"{name} is Sampling's: give ask a Sampling({name}={value!r})")
        refuse_unknown(parameters, ASKING)
        for argument, text in {"method": method, "prefill": prefill, "placement": placement}.items():
            if text is not None and not isinstance(text, str):
                raise UsageError(f"{argument} is {text!r}: give a text")
        with api_words():
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
            return Session.open(self.opened, config)

    def ask(self, question: str, sampling: Sampling | None = None, **setting: Any) -> Answer:
        """Answer one question, greedily by default; `setting` is what `asker` takes. Each call makes its cache anew.

        Raises:
            UsageError: an empty question or several, or a sampling that is none.
        """
        if not isinstance(question, str):
            raise UsageError(f"question is a {type(question).__name__}: give one text; an `asker` answers many in turn")
        if not question.strip():
            raise UsageError("the question is empty; ask one")
        if sampling is not None and not isinstance(sampling, Sampling):
            raise UsageError(f"sampling is {sampling!r}: give sparsekv.Sampling(max_new_tokens=...)")
        with exclusive(self.opened.model):
            return self.asker(**setting).ask(question, sampling)

    def recall_report(
        self,
        names: Sequence[str] = (),
        budgets: Sequence[str | float] = ("2%", "5%", "10%"),
        *,
        by: Sequence[str] = (),
        questions: Sequence[str] = (),
        residual: bool = False,
        **parameters: Any,
    ) -> list[dict[str, Any]]:
        """Recall, error and reads of methods against dense attention: one flat dict a row, as `recall-report --json`.

        `method` is the name, and `variant` what tells a form from the method's others: `without replacement`, `flat
        threshold`, `page_size=8`. It never repeats the name, and is empty where the name says all.

        Args:
            names: methods; by default all that can run.
            by: rows for each value of `layer`, of `kv_head`, or of both; without it one row averages over all.
            questions: measure on the queries of these, in place of the document's held-out tail.
            residual: measure each form also with centroids for the tokens that it does not choose.
            parameters: of the methods; one that has any is measured so, in place of its usual forms.
        """
        refuse_unknown(parameters, ("names", "budgets", "by", "questions", "residual"))
        artifact, model = self.opened.artifact, self.opened.model
        with api_words(), exclusive(model):  # on a GPU a captured step forbids all threads to wait for it
            chosen = {name: methods()[name] for name in methods_of(artifact, _several(names))}
            refuse_unused(chosen, parameters)
            if not _several(budgets):
                raise UsageError("budgets: there is none; give one, such as 0.05")
            report = recall_report(
                artifact,
                list(chosen),
                Budget.parse_each(map(str, _several(budgets))),
                question_queries(self.opened, _several(questions)),
                residual=residual,
                configured={name: form for name, one in chosen.items() if (form := configured_form(one, parameters))},
                device=model.device,
            )
        if unknown := sorted(set(_several(by)) - set(GROUPS)):
            raise UsageError(f"by: no rows of {', '.join(unknown)}; give {' or '.join(GROUPS)}, or both")
        return row_records(report.by(*_several(by)))


def _several(given: Sequence[T]) -> Sequence[T]:
    """A text or a number where several may be given is one of them."""
    return cast(Sequence[T], [given]) if isinstance(given, str | int | float) else given


def open_index(
    folder: str | Path,
    model: str | None = None,
    *,
    device: str = "auto",
    dtype: str = "auto",
    progress: Callable[[str], None] = lambda text: None,
) -> Index:
    """Open an index with the model that built it, or with the `model` named: a local folder or a hub id.

    Loads the model's weights, while no other thread answers: torch's default dtype is the model's meanwhile. Arguments
    and errors are those of `load_and_open`, and UsageError for a file.
    """
    if Path(folder).is_file():
        raise UsageError(f"{folder} {no_folder(Path(folder))}")
    with api_words(), exclusive_process():
        return Index(load_and_open(Artifact(Path(folder)), model, device, dtype, progress))
