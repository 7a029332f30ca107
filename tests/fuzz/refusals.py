"""Expected refusals: a case asks for something that is documented as impossible, and the command says so in one
line."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from .case import Case
from .models import WITH_STATES, config_of, positions_of

LATENT = ("deepseek_v3",)
"""Families of latent attention."""
BY_LENGTH = ("dynamic", "longrope")
"""Kinds of scaled positions whose rotation depends on the length of the sequence."""
TUNING, TRACING, EVALUATING = (
    {"many commands", *more} for more in (("tune command", "tuned"), ("trace", "trace without"), ("eval command",))
)  # the deeds that tune, trace and evaluate


DRAWING_INDEXERS = ("more methods", "edit", "one after another")
"""Deeds that draw an indexer of their own, whose options the case does not have."""


@dataclass(frozen=True)
class Due:
    """A message that may be expected, by a pattern that matches it from its beginning.

    Args:
        when: whether the message may be expected in a case.
        less: True if the message's first number must be at most the second; False if it must be at least the second;
            None: numbers are not compared. A group `positions` must be the model's number of positions.
    """

    pattern: str
    when: Callable[[Case], bool] = lambda case: True
    less: bool | None = None

    def allows(self, case: Case, message: str) -> bool:
        found = re.match(self.pattern, message)
        if found is None or not self.when(case):
            return False
        if (told := found.groupdict().get("positions")) and int(told.replace(",", "")) != positions_of(case):
            return False
        numbers = [int(number.replace(",", "")) for number in found.groups()]
        return self.less is None or (numbers[0] <= numbers[1]) == self.less or numbers[0] == numbers[1]


def _few_positions(case: Case) -> bool:
    return bool(case.positions) or case.rope == "qwen-yarn"


def _options(case: Case, name: str) -> list[object]:
    """Return an option's values, of the method and of all indexers of the case."""
    kinds = (case.options, case.prefill_options, *(options for _, options in case.indexers))
    return [value for options in kinds for option, value in options if option == name]


N, HELD = r"([\d,]+)", r"(?P<positions>[\d,]+)"
DUE = (
    Due(
        rf"document and question have {N} tokens, and the model has {HELD} positions; ask a shorter",
        _few_positions,
        False,
    ),
    Due(
        rf"document and question have {N} tokens, and this model's RoPE changes beyond {N}, so that the index's "
        "keys are wrong there",
        lambda case: case.rope == "longrope",
        False,
    ),
    Due(
        rf"the document and the appended text have {N} tokens together, and \S+ has {HELD} positions; append less",
        _few_positions,
        False,
    ),
    Due(
        rf"the document has {N} tokens, and \S+ has {HELD} positions; (?:leave files out with .*, or )?shorten it with",
        _few_positions,
        False,
    ),
    Due(
        rf"a document of \S+ has {N} tokens, and \S+ has positions for {N} besides",
        lambda case: case.deed in EVALUATING and (_few_positions(case) or case.rope in BY_LENGTH),
        False,
    ),
    Due(
        r"the question and the answer of \S+ take all positions of \S+, so no document fits;",
        lambda case: case.deed in EVALUATING and (_few_positions(case) or case.rope in BY_LENGTH),
    ),
    Due(
        rf"(?:\S+, .+: )?the document is too short to index: it has {N} tokens with the chat template, and sinks and "
        rf"tail alone take {N};",
        less=True,
    ),
    Due(
        r"[\w, -]+ of talk\.skv cannot append tokens; give --rebuild to build such methods again from all tokens",
        lambda case: case.rope in BY_LENGTH or bool({"squeezed", "h2o"} & dict(case.indexers).keys()),
    ),
    Due("--method oracle: this is only an upper bound for other methods", lambda case: case.deed in TUNING),
    Due("no setting that reads less than the whole document reaches --target-", lambda case: case.deed in TUNING),
    Due(
        "--stream: a trace covers only the document's own tokens; leave it out",
        lambda case: case.deed in TRACING and True in _options(case, "stream"),
    ),
    Due(
        "--without: the model has layers with a state, from which a passage cannot be removed; leave the option out",
        lambda case: case.deed in TRACING and case.family in WITH_STATES,
    ),
    Due(
        r"--stream cannot be used with --prefill \S+: at the next question, \S+ cannot select tokens that --stream",
        lambda case: True in _options(case, "stream") and case.question_prefill not in (None, "dense", "own"),
    ),
    Due(
        "--residual needs clusters with value centroids, and the index has none",
        lambda case: case.residual and not any(name.startswith("multipole") for name, _ in case.indexers),
    ),
    Due(
        r"--residual: with --stream, \S+ adds generated tokens to its index",
        lambda case: case.residual and True in _options(case, "stream"),
    ),
    Due(
        r"--subspace-size (\d*[13579]) splits pairs of channels that RoPE rotates together; give an even size",
        lambda case: (
            case.deed in DRAWING_INDEXERS
            or any(isinstance(size, int) and size % 2 for size in _options(case, "subspace_size"))
        ),
    ),
    Due(r"--(?:dims|channels) (\d+): the model's heads have (\d+) channels; give at most", less=False),
    Due(r"--select-layer (\d+): the index has (\d+) layers, counted from 0; give a smaller number", less=False),
    Due(
        "--lookup hierarchical: the index has one level of clusters",
        lambda case: "hierarchical" in _options(case, "lookup"),
    ),
    Due(
        r"(?:\S+ cannot be indexed: )?the model's attention applies a sliding window of (\d+) tokens to a sequence "
        r"longer than max_position_embeddings \((\d+) in the config\)",
        lambda case: case.rope == "qwen-yarn" and (config_of(case).sliding_window or 0) >= case.original,
        False,
    ),
    Due(
        r"\S+ cannot be indexed: every layer of \S+ has a sliding window, and only layers that attend to all tokens",
        lambda case: case.window > 0,
    ),
    Due(
        r"--prefill \S+: the RoPE of \S+ depends on the prompt's length, so the prompt must be prefilled in one piece",
        lambda case: case.rope in BY_LENGTH,
    ),
    # Latent attention rotates only a head's last channels.
    Due(
        "--subspaces rope-pairs: how this model rotates its keys could not be determined",
        lambda case: case.family in LATENT,
    ),
    Due(
        "(?:--method multipole-windowed: the model does not rotate its keys by RoPE"
        "|windowed RoPE needs to know how each layer rotates its keys, which this index does not record)",
        lambda case: case.family in LATENT,
    ),
    # With sharp attention, int8 rounding of keys changes the attention. A conversion runs no model that would notice.
    Due(
        r"the (?:probe|canary) \(.*\) differs: .*; int8 storage changes this model's logits too much, or",
        lambda case: case.deed == "convert" and case.loud > 0,
    ),
    # Random weights may have nearly flat logits, which int8 rounding moves by little more than the allowed 5%.
    Due(
        r"the (?:probe|canary) \(.*\) differs: .*, [5-7]\.\d% away; int8 storage changes this model's logits too much",
        lambda case: case.deed == "convert",
    ),
    # This family makes its own masks.
    Due(r"\S+ cannot be indexed: .* has a mask that the model itself makes", lambda case: case.family == "doge"),
    # From a config without a window, transformers 5.17 makes a window of no tokens.
    Due(r"\S+ cannot be indexed: .* hides a token from itself", lambda case: case.family == "qwen2_moe"),
    # states after sharp attention
    Due(
        r"int8 storage changes the states of \S+ layers too much: after the document's last token they are",
        lambda case: case.loud > 0 and case.family in WITH_STATES,
    ),
    Due(
        r"the state that \S+ stores for the end of the document differs by .*; int8 storage changes it too much, or",
        lambda case: case.deed == "convert" and case.loud > 0 and case.family in WITH_STATES,
    ),
)


def is_due(case: Case, message: str) -> bool:
    """Whether a case may be refused with this message."""
    line = re.sub(r"^\S+ line \d+: ", "", message.strip().removeprefix("sparsekv: error: "))  # of a file of questions
    return "\n" not in line and any(one.allows(case, line) for one in DUE)
