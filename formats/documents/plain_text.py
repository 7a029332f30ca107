"""Tokenise text so that control tokens in it are plain text: no text can begin or end a chat turn.

Control tokens are the tokens that a tokenizer marks as special, and other added tokens that occur in its chat template,
or in conversations that the template renders.
"""

import copy
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from sparsekv.formats.errors import SparsekvError, UsageError

_NEUTRAL = ("\n", "0", ".", "-")
"""Texts that are prepended to another text, so that the other text itself gets no prefix.

The prefix is the space that a SentencePiece tokenizer puts before each text. The prepended text's last character rarely
merges with the other text's first character to one token.
"""


class Trusted(str):
    """A part of a text in which control tokens keep their meaning, such as a chat template."""


@dataclass(frozen=True)
class EncodedText:
    """Token ids of a text.

    `plain` has the number of times that each control token was read as plain text. `starts` has the index of each
    token's first character in the text; it is empty unless it was requested.
    """

    ids: list[int]
    plain: dict[str, int]
    starts: list[int] = field(default_factory=list)

    def first(self, tokens: int) -> "EncodedText":
        """Return the first `tokens` tokens; `plain` still counts the control tokens of the whole text."""
        return EncodedText(self.ids[:tokens], self.plain, self.starts[:tokens])


@dataclass(frozen=True)
class _Tokens:
    """Token ids of a part of a text. `starts` has the index of each token's first character, or is empty."""

    ids: list[int]
    starts: list[int]

    def after(self, tokens: int, shift: int = 0) -> "_Tokens":
        """Return the tokens after the first `tokens`, with `shift` added to their `starts`."""
        return _Tokens(self.ids[tokens:], [start + shift for start in self.starts[tokens:]])


def encode_text(
    tokenizer: PreTrainedTokenizerBase,
    *parts: str,
    add_special_tokens: bool = False,
    special_tokens: bool = False,
    starts: bool = False,
) -> EncodedText:
    """Tokenise the parts of a text as one text; control tokens are plain text except in `Trusted` parts.

    If only `Trusted` parts have control tokens, the result is the same as the tokenizer's own.

    Args:
        add_special_tokens: let the tokenizer add its special tokens at the ends.
        special_tokens: let control tokens keep their meaning in all parts.
        starts: also return the index of each token's first character, which only a fast tokenizer reports.

    Raises:
        SparsekvError: the tokenizer cannot read a control token of the text as plain text.
    """
    told = {"return_offsets_mapping": True} if starts else {}
    whole = _encode(tokenizer, "".join(parts), add_special_tokens=add_special_tokens, **told)
    ids = whole.ids
    if special_tokens:
        return EncodedText(ids, {}, whole.starts)
    control, unknown = _control_tokens(tokenizer), _unknown_token(tokenizer)
    frame = "".join(part for part in parts if isinstance(part, Trusted))
    meant = _count(_encode(tokenizer, frame, add_special_tokens=add_special_tokens).ids, control)
    found = _without_unknown(_count(ids, control) - meant, unknown, parts)
    if not found.total():
        return EncodedText(ids, {}, whole.starts)
    untold = {number: token for number, token in control.items() if token != unknown}
    plain = _encode_runs(tokenizer, list(_runs(tokenizer, parts, control)), untold, told)
    before, after = added_ends(tokenizer) if add_special_tokens else ([], [])
    ids = [*before, *plain.ids, *after]
    places = [*(0 for _ in before), *plain.starts, *(len("".join(parts)) for _ in after)] if starts else []
    if left := _count(ids, untold) - meant:
        raise SparsekvError(
            f"the text contains {next(iter(left))}, which this model's tokenizer cannot read as plain text; "
            "remove it, or, if the command has --special-tokens and you wrote the whole text yourself, give that option"
        )
    text = "".join(part for part in parts if not isinstance(part, Trusted))
    return EncodedText(ids, {token: found[token] for token in sorted(+found, key=text.find)}, places)


def has_control_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    """Whether a text has control tokens, so that its token ids depend on whether they keep their meaning."""
    found = _count(_encode(tokenizer, text).ids, _control_tokens(tokenizer))
    return _without_unknown(found, _unknown_token(tokenizer), [text]).total() > 0


def _without_unknown(found: Counter[str], unknown: str | None, parts: Sequence[str]) -> Counter[str]:
    """Return the counts of control tokens, without those that only stand for characters unknown to the tokenizer."""
    if unknown is None or unknown not in found:
        return found
    written = sum(part.count(unknown) for part in parts if not isinstance(part, Trusted))
    return Counter({**found, unknown: written})


_encoding = Lock()
"""Lock of `_encode`. The tokenizer's call sets its attribute `split_special_tokens` and then reads it. Another thread
could change the attribute in between."""


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, **options: bool) -> _Tokens:
    with _encoding:
        found = tokenizer(text, verbose=False, **{"add_special_tokens": False, **options})
    return _Tokens(found["input_ids"], [start for start, _ in found.get("offset_mapping", ())])


def untrimmed(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a tokenizer that gives the same ids, and reports a token's start before the token's leading white space.

    Some tokenizers report the first character after the white space as a token's start.

    Raises:
        UsageError: the tokenizer does not report where tokens begin.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UsageError(
            "this model's tokenizer does not report where tokens begin in the text, which a document of "
            "several files needs; index one text, or choose another model"
        )
    serialized = json.loads(backend.to_str())
    if not _keep_spaces(serialized["post_processor"]):
        return tokenizer
    exact = copy.copy(tokenizer)
    exact._tokenizer = Tokenizer.from_str(json.dumps(serialized))
    return exact


def _keep_spaces(processor: Any) -> bool:
    """Set `trim_offsets` to false throughout a serialised post-processor; return whether it was true anywhere."""
    if isinstance(processor, list):
        return max(map(_keep_spaces, processor), default=False)
    if not isinstance(processor, dict):
        return False
    trims = bool(processor.get("trim_offsets"))
    processor |= {"trim_offsets": False} if trims else {}
    return _keep_spaces(processor.get("processors")) or trims


_CONVERSATIONS = (("user", "assistant", "user"), ("system", "user"), ("user", "assistant", "tool"), ("user",))
"""Roles of the messages of sample conversations. Some templates refuse some of these conversations."""
_frames = WeakKeyDictionary[PreTrainedTokenizerBase, tuple[str, str]]()
"""Chat template and rendered sample conversations of each tokenizer."""


def _frames_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the sample conversations as the chat template renders them; empty without a template."""
    template = str(tokenizer.chat_template or "")
    known, shown = _frames.get(tokenizer, ("", ""))
    if known != template:
        pieces = []
        for roles in _CONVERSATIONS:
            messages = [{"role": role, "content": "0"} for role in roles]
            with suppress(Exception):  # a template is a program and may raise anything
                pieces.append(str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)))
        shown = "\n".join(pieces)
        _frames[tokenizer] = template, shown
    return shown


def _in_frames(token: str, frames: str) -> bool:
    """Whether a token occurs in rendered conversations and is no word: a word such as `user` counts as plain text."""
    return token in frames and not token.isalnum() and any(map(str.isalnum, token))


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    template, frames = str(tokenizer.chat_template or ""), _frames_of(tokenizer)
    named = {number: str(tokenizer.convert_ids_to_tokens(number)) for number in tokenizer.all_special_ids}
    # Some models begin turns with tokens that are not marked special. Added tokens of white space are plain text. A
    # template may compose a token, such as '<|' + role + '|>'.
    added = {
        number: str(token)
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special or (str(token).strip() and (str(token) in template or _in_frames(str(token), frames)))
    }
    return named | added


def _unknown_token(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the token for unknown characters; None if the tokenizer has none, or if it has another role as well."""
    names = Counter(str(token) for token in tokenizer.special_tokens_map.values())
    token = tokenizer.special_tokens_map.get("unk_token")
    return None if token is None or names[str(token)] > 1 else str(token)


def _count(ids: Sequence[int], control: Mapping[int, str]) -> Counter[str]:
    return Counter(control[number] for number in ids if number in control)


def encode_after(
    tokenizer: PreTrainedTokenizerBase, lead: str, *parts: str, special_tokens: bool = False
) -> EncodedText:
    """Tokenise the parts of a text that continues `lead`.

    `lead` is tokenised together with the parts, and its tokens are left out of the result. The parts alone would get
    the prefix with which a SentencePiece tokenizer begins each text. If the parts change the tokens of `lead`, such a
    tokenizer gets a text of `_NEUTRAL` instead of `lead`. If the parts change the tokens of all these texts, or the
    tokenizer puts no prefix, the parts are tokenised alone.

    Args:
        lead: the end of the text before the parts. Control tokens in it are plain text.
        special_tokens: let control tokens keep their meaning in all parts.

    Raises:
        SparsekvError: the tokenizer cannot read a control token of the text as plain text.
    """
    leads = [lead, *_NEUTRAL] if begins_with_prefix(tokenizer) else [lead]
    for before in filter(None, leads):
        stem = encode_text(tokenizer, before)
        whole = encode_text(tokenizer, before, *map(Trusted, parts) if special_tokens else parts)
        if whole.ids[: len(stem.ids)] == stem.ids:
            return EncodedText(whole.ids[len(stem.ids) :], dict(Counter(whole.plain) - Counter(stem.plain)))
    return encode_text(tokenizer, *parts, special_tokens=special_tokens)


def begins_with_prefix(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer puts a space before a text, as SentencePiece does."""
    letter = _encode(tokenizer, "a").ids
    for lead in _NEUTRAL:
        stem, whole = _encode(tokenizer, lead).ids, _encode(tokenizer, f"{lead}a").ids
        if whole[: len(stem)] == stem:
            return whole[len(stem) :] != letter
    return False


def _runs(
    tokenizer: PreTrainedTokenizerBase, parts: Sequence[str], control: Mapping[int, str]
) -> Iterator[tuple[str | int, int]]:
    """Split the parts of a text at the control tokens in `Trusted` parts.

    Yields runs of plain text and ids of control tokens in turn, each with the index of its first character in the whole
    text. A run may be empty.
    """
    numbers, added = {token: number for number, token in control.items()}, tokenizer.added_tokens_decoder
    literals = re.compile("|".join(f"({re.escape(token)})" for token in sorted(numbers, key=len, reverse=True)))
    run, strips = "", False
    place, began = 0, 0  # characters before the part, and before the run

    def ended(text: str, token: Any = None) -> tuple[str, int]:
        # Some added tokens include the adjacent white space, which the tokenizer itself would strip as well.
        kept = text.lstrip() if strips else text
        return kept.rstrip() if token is not None and token.lstrip else kept, began + len(text) - len(kept)

    for part in parts:
        start = 0
        for match in literals.finditer(part) if isinstance(part, Trusted) else ():
            number = numbers[match[0]]
            yield ended(run + part[start : match.start()], added.get(number))
            yield number, place + match.start()
            run, start, strips = "", match.end(), number in added and added[number].rstrip
            began = place + start
        run += part[start:]
        place += len(part)
    yield ended(run)


def _encode_runs(
    tokenizer: PreTrainedTokenizerBase,
    runs: Sequence[tuple[str | int, int]],
    control: Mapping[int, str],
    told: Mapping[str, bool],
) -> _Tokens:
    """Tokenise the runs of `_runs`. A run gets the tokenizer's prefix where the tokenizer itself would insert it."""
    pieces = []
    for place, (run, start) in enumerate(runs):
        if isinstance(run, int):
            pieces.append(_Tokens([run], [start] if told else []))
            continue
        goes_on = place > 0 and not _prefix_after(tokenizer, control.get(int(runs[place - 1][0]), ""))
        pieces.append(_encode_run(tokenizer, run, control, told, goes_on=goes_on).after(0, start))
    return _joined(pieces)


def _encode_run(
    tokenizer: PreTrainedTokenizerBase, run: str, control: Mapping[int, str], told: Mapping[str, bool], *, goes_on: bool
) -> _Tokens:
    found = _encode_plain(tokenizer, run, told, goes_on=goes_on)
    if left := _count(found.ids, control):
        # Tokenizers split only tokens marked special. Other control tokens are cut in two here, to be plain text.
        cuts = [match.start() + 1 for token in left for match in re.finditer(re.escape(token), run)]
        edges = [0, *sorted(cuts), len(run)]
        return _joined(
            _encode_plain(tokenizer, run[start:end], told, goes_on=goes_on or start > 0).after(0, start)
            for start, end in pairwise(edges)
        )
    return found


def _joined(pieces: Iterable[_Tokens]) -> _Tokens:
    kept = list(pieces)
    return _Tokens([one for piece in kept for one in piece.ids], [one for piece in kept for one in piece.starts])


def _encode_plain(tokenizer: PreTrainedTokenizerBase, text: str, told: Mapping[str, bool], *, goes_on: bool) -> _Tokens:
    """Tokenise a text in which special tokens are plain text.

    Args:
        goes_on: the text continues another and gets no prefix, unless it changes the tokens of all texts of `_NEUTRAL`.
    """
    if goes_on and text and begins_with_prefix(tokenizer):
        for lead in _NEUTRAL:
            stem = _encode(tokenizer, lead, split_special_tokens=True).ids
            whole = _encode(tokenizer, lead + text, split_special_tokens=True, **told)
            if whole.ids[: len(stem)] == stem:
                return whole.after(len(stem), -len(lead))
    return _encode(tokenizer, text, split_special_tokens=True, **told)


def _prefix_after(tokenizer: PreTrainedTokenizerBase, token: str) -> bool:
    """Whether the tokenizer inserts its prefix also after this control token, as at the start of a text."""
    return _encode(tokenizer, f"{token}a").ids[1:] == _encode(tokenizer, "a").ids


def added_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the token ids that the tokenizer adds before and after a text."""
    letter, whole = _encode(tokenizer, "a").ids, _encode(tokenizer, "a", add_special_tokens=True).ids
    start = next(start for start in range(len(whole)) if whole[start : start + len(letter)] == letter)
    return whole[:start], whole[start + len(letter) :]
