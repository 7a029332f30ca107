"""Checks of an index's answers against plain transformers, and against each other."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from sparsekv.kernels.common.given_rows import tokens_at, with_cache
from sparsekv.kernels.common.hook import AttentionCall, AttentionFunction, route_attention
from sparsekv.runtime.decoding.answer import Sampling, question_ids
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.session import Session

from .oracles import ROUNDING, error_of, expect, expect_greedy, plain, plain_over
from .rounding import Rounding, expect_logits, movement
from .world import Rows, World, stored_rows

Oracle = Callable[[], torch.Tensor]
"""A plain pass that computes logits [T, vocabulary]."""
IN_8_BITS = 0.05
"""Largest relative error of int8 rows."""
AFTER_8_BITS = 4 * IN_8_BITS
"""Largest relative error of int8 rows of tokens that attend to int8 rows. It grows from layer to layer."""
NEVER_EVERYTHING = ("window",)
"""Methods that leave tokens out at any budget."""


def takes_everything(world: World) -> bool:
    """Whether a case's answers with a budget of everything equal those of dense attention.

    On a GPU tokens that `--stream` moves into an int8 index are rounded to int8, as the document's tokens are.
    """
    case = world.case
    rounded = world.device != "cpu" and case.kv_dtype is not None and ("stream", True) in case.options
    return not rounded and not {case.method, case.question_prefill} & set(NEVER_EVERYTHING)


class Checks:
    """The checks of an index: of its rows, and of answers by dense attention, at a budget of everything, and at the
    case's.

    After a sparse prefill, or with int8 rows, answers are compared with plain attention over the stored rows.
    """

    def __init__(self, world: World, index: OpenIndex):
        self.world, self.index, self.case = world, index, world.case
        self.sampling = Sampling(self.case.answer)

    def run(self, *, all_of_them: bool = True) -> None:
        """Check token ids and answers to the first question; without `all_of_them`, only dense answers."""
        question = self.world.question(0)
        asked = question_ids(self.index, question, raw=self.case.raw)
        whole = self.world.whole_ids(question)
        ours = torch.cat([self.index.input_ids, asked])
        expect(ours.tolist() == whole.tolist(), "ids", apart(self.world, ours.tolist(), whole.tolist()))
        dense = self.world.dense(self.index)
        answer = dense.ask(asked, self.sampling).ids
        fed = fed_with(asked, answer)
        oracle = self.oracle(fed)
        self.held(dense, "dense", len(asked), fed, answer, oracle)
        if not all_of_them:
            return
        if takes_everything(self.world):
            everything = self.world.asker(self.index, "100%", prefill_budget=self.all_of_a_prefill())
            found = everything.ask(asked, self.sampling).ids
            refed = torch.cat([asked, torch.tensor(found[:-1], dtype=torch.long)])
            again = oracle if found == answer else self.oracle(refed)
            self.held(everything, "everything", len(asked), refed, found, again)
        self.sparse(asked)

    def after_growth(self) -> None:
        """Check a dense answer over an index to which text was appended; such a prompt is not a template's."""
        asked = question_ids(self.index, self.world.question(1), raw=self.case.raw)
        dense = self.world.dense(self.index)
        answer = dense.ask(asked, self.sampling).ids
        fed = torch.cat([asked, torch.tensor(answer[:-1], dtype=torch.long)])
        self.held(dense, "dense", len(asked), fed, answer, self.oracle(fed, AFTER_8_BITS))

    def all_of_a_prefill(self) -> str | None:
        return "100%" if self.case.question_prefill not in (None, "own", "dense") else None

    def truth(self, fed: torch.Tensor) -> torch.Tensor:
        """Return plain transformers' logits [T, vocabulary] of tokens [T] after the stored prompt."""
        return self.oracle(fed)()

    def oracle(self, fed: torch.Tensor, in_8_bits: float = IN_8_BITS) -> Oracle:
        """Check the stored rows, and return the pass that computes the logits [T, vocabulary] of tokens [T] after them.

        `in_8_bits` is the largest relative error of int8 rows.
        """
        case, tokens = self.case, len(self.index.input_ids)
        stored = stored_rows(self.index.artifact.folder, case.layers)
        over = partial(plain_over, self.world, stored, self.index.input_ids, fed)
        if case.prefill != "dense":
            return over
        ids = torch.cat([self.index.input_ids, fed])
        rows = plain(self.world, ids)[1]
        most = ROUNDING if case.kv_dtype is None else in_8_bits
        rounding = Rounding(self.world, self.index.input_ids)
        near = rounding.expect_rows(stored, _first(tokens, rows), most, "stored", "plain ones")
        return (lambda: plain(self.world, ids)[0][tokens:]) if near and case.kv_dtype is None else over

    def held(
        self, asker: Session, kind: str, question: int, fed: torch.Tensor, answer: list[int], oracle: Oracle
    ) -> None:
        """Check an answer, and the logits of its steps, against an oracle."""
        steps = slice(question - 1, None)
        expect_greedy(oracle()[steps], answer, f"{kind} answer", "against plain transformers")
        most = min(self.case.answer, self.world.room(len(self.index.input_ids), question))
        ended = answer[-1] in self.world.ends
        expect(ended or len(answer) == most, f"{kind} answer", f"of {most} tokens ends early: {answer}")
        expect(not self.world.ends & {*answer[:-1]}, f"{kind} answer", f"goes on after its end: {answer}")
        found = stepped(self.index, asker, fed, question)
        expect_logits(found[steps], oracle, self.world, f"{kind} logits", "plain transformers'", steps)

    def sparse(self, asked: torch.Tensor) -> None:
        """Check that the case's own setting answers with finite numbers, and twice in the same way."""
        asker = self.world.asker(self.index)
        first = asker.ask(asked, self.sampling)
        again = asker.ask(asked, self.sampling)
        expect(first.ids == again.ids, "sparse again", f"{first.ids}, then {again.ids}")
        read = first.kv_fraction
        expect(len(first.ids) < 2 if read is None else 0 <= read < math.inf, "kv fraction", f"{read}")
        fed = torch.cat([asked, torch.tensor(first.ids[:-1], dtype=torch.long)])
        found = stepped(self.index, asker, fed, len(asked))
        expect(bool(found.isfinite().all()), "sparse logits", "are not finite")
        expect_greedy(found[len(asked) - 1 :], first.ids, "sparse steps", "against the same steps by hand")
        dense = asker.config.dense_layers >= self.case.layers
        expect(not dense or len(first.ids) == 1 or read == 1, "kv fraction", f"dense: {read}")
        if dense and self.case.question_prefill in (None, "own", "dense"):
            steps = slice(len(asked) - 1, None)
            expect_logits(found[steps], self.oracle(fed), self.world, "dense layers", "plain ones", steps)
        if self.case.question_prefill in (None, "dense"):
            told, steps = "plain ones, after a question prefilled densely", slice(len(asked) - 1, len(asked))
            expect_logits(found[steps], self.oracle(asked), self.world, "first logits", told, steps)


def _first(tokens: int, rows: Rows) -> Rows:
    return {layer: (keys[:, :tokens], values[:, :tokens]) for layer, (keys, values) in rows.items()}


def fed_with(asked: torch.Tensor, answer: list[int]) -> torch.Tensor:
    """Return the token ids [T] that a model is fed for an answer: the question's, and all of the answer's except the
    last."""
    return torch.cat([asked, torch.tensor(answer[:-1], dtype=torch.long)])


@torch.inference_mode()
def stepped(
    index: OpenIndex, asker: Session, fed: torch.Tensor, question: int, attend: AttentionFunction | None = None
) -> torch.Tensor:
    """Return the logits [T, vocabulary] of tokens [T] after the stored prompt, over a session's cache.

    The first `question` tokens run at once, the others one by one. `attend` replaces the cache's own attention.
    """
    cache = asker.cache
    cache.rewind()
    cache.expect_prompt(index.split.tokens + question)
    parts = [fed[:question], *(fed[place : place + 1] for place in range(question, len(fed)))]
    with route_attention(index.model, attend or cache.attend):
        steps = [
            index.model(**tokens_at(index.model, part, cache.get_seq_length()), **with_cache(index.model, cache))
            for part in parts
        ]
    return torch.cat([one.logits[0] for one in steps])


def expect_same_steps(
    found: torch.Tensor, world: World, index: OpenIndex, asker: Session, fed: torch.Tensor, question: int, kind: str,
    of: str,
) -> None:  # fmt: skip
    """Raise Wrong if logits [T, vocabulary] differ from those of an asker's steps by more than rounding explains."""

    def again() -> torch.Tensor:
        return stepped(index, asker, fed, question)

    logits = again()
    apart = error_of(found, logits)
    right = apart <= ROUNDING or rounding_decides(index, asker, fed, question, logits)
    right = right or apart <= movement(world, again, logits)
    expect(right, kind, f"{apart:.2e} from {of}")


def rounding_decides(index: OpenIndex, asker: Session, fed: torch.Tensor, question: int, logits: torch.Tensor) -> bool:
    """Whether a choice in the steps with these logits [T, vocabulary] is a tie.

    A tie changes with queries whose logits differ by a millionth. Then two ways to compute the same result need not
    agree.
    """
    for seed in range(4):
        random = torch.Generator().manual_seed(seed)

        def shaken(call: AttentionCall, random: torch.Generator = random) -> torch.Tensor:
            length = max(float(call.keys.norm(dim=-1).mean()), call.keys.shape[-1] ** 0.5)
            size = 1e-6 / (call.softmax_scale * length)
            noise = torch.randn(call.query.shape, generator=random).to(call.query)
            return asker.cache.attend(replace(call, query=call.query + size * noise))

        if error_of(stepped(index, asker, fed, question, shaken), logits) > ROUNDING:
            return True
    return False


def apart(world: World, ours: list[int], whole: list[int]) -> str:
    """Return a text that shows the first difference of token ids from those of the template."""
    place = next(
        (n for n, pair in enumerate(zip(ours, whole, strict=False)) if pair[0] != pair[1]), min(len(ours), len(whole))
    )
    near = slice(max(0, place - 5), place + 10)
    found, expected = (world.tokenizer.decode(ids[near]) for ids in (ours, whole))
    return f"{found!r} at token {place}, and {expected!r} in the template"
