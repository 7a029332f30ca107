"""A case: everything that one run of the fuzzer draws, as a frozen dataclass that prints itself."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

from support.tiny_models import END, PAD, UNUSED

from sparsekv.formats.documents.document import UTF_8
from sparsekv.formats.index.schema import Weights
from sparsekv.indexing.indexers.interface import indexers
from sparsekv.indexing.prefill.prefills import prefills
from sparsekv.runtime.selection.interface import Budget, methods
from sparsekv.runtime.selection.registry import unread

from .options import Options, draw_options


@dataclass(frozen=True)
class Case:
    """A model, a document, an index, a question and a deed (an operation). A failure is simplified towards the
    defaults.

    Model: `original` is the length from which scaled positions differ. `positions` is the model's number of positions,
    or 0 for many, and `window` its sliding window, or 0 for the family's own. `weights` is the seed of the weights,
    `loud` the size of biases of queries and keys, and `rounded` the form to which weights are rounded. With `ends`
    answers are short. `eos` are the tokens that end an answer by the generation config.

    Document: `tokens` is the number of tokens of the whole prompt, and `text` the seed of the text. `tokenizer` and
    `template` are names; with `raw` there is no template. With `padded` there is white space around document and
    questions. `encoding` is that of the document's file; other encodings than UTF-8 also bring letters beyond ASCII.

    Index: `indexers` are names with options.

    Answers: the method `method` has `options` and `budget`; an empty budget is the method's own. `questions` are
    lengths in characters; a raw question of length 1 is one token.

    `threads` is torch's number of threads. `deed` is the name of the deed that follows the common checks, and `more` a
    number for its random choices.
    """

    family: str = "llama"
    layers: int = 1
    kv_heads: int = 1
    group: int = 1
    head_dim: int = 32
    rope: str = "default"
    original: int = 256
    positions: int = 0
    window: int = 0
    softcap: float = 0.0
    tied: bool = False
    weights: int = 0
    loud: float = 0.0
    rounded: Weights | None = None
    ends: bool = False
    eos: tuple[int, ...] = (END,)
    tokenizer: str = "bytes"
    template: str = "chatml"
    raw: bool = False
    text: int = 0
    padded: bool = False
    encoding: str = UTF_8
    tokens: int = 200
    sinks: int = 4
    tail: int = 16
    chunk_size: int = 2048
    prefill: str = "dense"
    prefill_options: Options = ()
    kv_dtype: str | None = None
    indexers: tuple[tuple[str, Options], ...] = ()
    method: str = "oracle"
    options: Options = ()
    budget: str = "0.2"
    residual: bool = False
    question_prefill: str | None = None
    prefill_budget: str | None = None
    placement: str = "device"
    ahead: bool = False
    guard: float | None = None
    dense_layers: int = 0
    questions: tuple[int, ...] = (12,)
    answer: int = 3
    threads: int = 1
    deed: str = ""
    more: int = 0

    def __repr__(self) -> str:
        changed = [one.name for one in fields(self) if getattr(self, one.name) != one.default]
        return f"Case({', '.join(f'{name}={getattr(self, name)!r}' for name in changed)})"

    @property
    def middle(self) -> int:
        """Number of the document's tokens that an index covers."""
        return self.tokens - self.sinks - self.tail

    def budget_in(self, middle: int) -> Budget:
        """Return the budget of answers over a document of `middle` tokens between sinks and tail."""
        return Budget.parse(self.budget) if self.budget else methods()[self.method].default_budget(middle)

    @property
    def options_read(self) -> Options:
        """The method's options, without options that have no effect beside the others or with a dense prefill of
        questions."""
        return _read(methods()[self.method], self.options, decodes=self.question_prefill != "own")

    @property
    def prefill_options_read(self) -> Options:
        """The options of the document's prefill, without options that have no effect beside the others."""
        return _read(prefills()[self.prefill], self.prefill_options, decodes=False)


def _read(kind: type, options: Options, *, decodes: bool) -> Options:
    """Return the options that a class reads beside the others."""
    return tuple((name, value) for name, value in options if not unread(kind, name, dict(options), decodes=decodes))


LIKELY = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "phi3", "smollm3", "qwen3_next", "falcon_h1")
ROPES = ("linear", "yarn", "qwen-yarn", "llama3", "dynamic", "longrope", "longrope")
LOUD = 0.25
"""Share of cases whose models have large biases of queries and keys."""
LONG = 0.05
"""Share of cases whose documents may have thousands of tokens."""
ENCODINGS = ("utf-16", "utf-16-le", "utf-32", "latin-1", "cp1252", "utf-8-sig")


class Palette:
    """A few shapes of heads and sets of options for the cases of a run, drawn from a number.

    Compiling a kernel for a shape or an option takes seconds. The cases of a palette share the kernels that its first
    cases compile. Without a number there is no limit.
    """

    SHAPES, OPTIONS = 3, 3

    def __init__(self, number: int | None):
        self.number = number
        random, self.shapes = Random(f"shapes {number}"), set[tuple[int, int]]()
        while number is not None and len(self.shapes) < self.SHAPES:
            one = _draw_model(random)
            self.shapes.add((one.group, one.head_dim))

    def shaped(self, random: Random, case: Case) -> Case:
        """Return the case with one of the palette's shapes, and with fewer KV heads if there would be too many."""
        if not self.shapes:
            return case
        group, head_dim = random.choice(sorted(self.shapes))
        kv_heads = min(case.kv_heads, max(1, 1024 // (group * head_dim)), max(1, 16 // group))
        return replace(case, group=group, head_dim=head_dim, kv_heads=kv_heads)

    def options(self, random: Random, case: Case, kind: type, head_dim: int | None = None) -> Options:
        """Return options of a method, an indexer or a prefill: random ones, or those of the case's set in the
        palette."""
        if self.number is not None:
            random = Random(f"{self.number} {kind.__name__} {head_dim} {case.text % self.OPTIONS}")
        return draw_options(random, kind, head_dim=head_dim)


NO_PALETTE = Palette(None)


def draw(seed: int, palette: Palette = NO_PALETTE) -> Case:
    """Return the case of a seed; with a palette, its shapes and options are the palette's."""
    from .deeds import DEEDS  # these take cases
    from .models import WITH_STATES

    random = Random(seed)
    case = palette.shaped(random, _draw_model(random))
    case = _draw_document(random, case)
    case = _draw_index(random, case, palette)
    case = _draw_answers(random, case, palette)
    deed = random.choices(list(DEEDS), [one.weight for one in DEEDS.values()])[0]
    if case.ends and random.random() < 0.4:  # what follows an answer depends on whether the answer ended by itself
        deed = random.choice(["talk", "saved", "append to a talk"])
        case = replace(case, answer=random.choice([3, 6, 12]))
    if case.encoding != UTF_8 and random.random() < 0.5:  # only commands read files
        deed = random.choice(["command", "folder", "append to a talk"])
    if case.prefill != "dense" and random.random() < 0.7:  # a sparse prefill's rows depend on all earlier rows
        deed = random.choice(["edit", "edit", "grow"])
    if case.family in WITH_STATES and deed in ("grow", "saved", "append to a talk"):
        # States of tokens that were prefilled over int8 rows depend on the rows' rounding, which no oracle reproduces.
        case = replace(case, kv_dtype=None)
    threads = random.choice([2, 3]) if random.random() < 0.1 else 1
    case = replace(case, threads=threads, deed=deed, more=random.randint(0, 1_000_000))
    others = Random(f"dense layers {seed}")
    case = replace(case, dense_layers=others.choice([1, case.layers]) if others.random() < 0.1 else 0)
    case = _drawn_longer(Random(f"length {seed}"), case)
    case = replace(case, rounded=random.choice(["int8", "int4"]) if random.random() < 0.2 else None)
    if random.random() >= LOUD:
        return case
    case = replace(case, loud=random.choice([2.0, 5.0, 10.0, 20.0, 50.0]))
    return replace(case, deed="choices") if random.random() < 0.5 else case


def _draw_model(random: Random) -> Case:
    from .models import FAMILIES, ropes_of

    family = random.choice(LIKELY if random.random() < 0.7 else list(FAMILIES))
    kv_heads, group = random.choice([1, 1, 2, 2, 4, 7, 8]), random.choice([1, 1, 2, 2, 3, 4, 7, 8])
    while kv_heads * group > 16:
        kv_heads, group = random.choice([1, 2, 4, 8]), random.choice([1, 2, 4, 7])
    head_dim = random.choice([24, 32, 32, 40, 48, 64, 64, 80, 96, 128, 256])
    while kv_heads * group * head_dim > 1024:
        head_dim = random.choice([24, 32, 64])
    scaled = random.choice(["default", *ropes_of(family, ROPES)])
    rope = scaled if random.random() < 0.4 else "default"
    return Case(
        family=family,
        layers=random.choice([1, 1, 1, 2, 2, 2, 2, 3, 4]),
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        rope=rope,
        window=random.choice([0, 0, 8, 32, 100, 255]),
        softcap=random.choice([0.0, 3.0, 30.0]) if family == "gemma2" else 0.0,
        tied=random.random() < 0.3,
        weights=random.randint(0, 3),
        ends=random.random() < 0.2,
        eos=random.choice([(END,), (END,), (UNUSED,), (UNUSED, PAD), (END, UNUSED)]),
    )


def _draw_document(random: Random, case: Case) -> Case:
    near = random.choice([128, 128, 128, 128, 256, 256, 256, 256, 512, 768])
    tokens = near + random.choice([-2, -1, 0, 0, 0, 1, 2]) if random.random() < 0.5 else random.randint(60, 300)
    # The length from which positions are scaled: near the document's end, before it, or far beyond it.
    original = max(16, random.choice([tokens // 2, tokens - 1, tokens, tokens + 1, tokens + 9, tokens + 30, 2048]))
    return replace(
        case,
        tokens=tokens,
        original=original,
        positions=random.choice([0, 0, 0, 0, tokens + 64]) if case.rope == "default" else 0,
        text=random.randint(0, 1_000_000),
        raw=random.random() < 0.3,
        tokenizer=random.choices(["bytes", "letters", "begins"], [0.8, 0.1, 0.1])[0],
        template=random.choice(["chatml", "chatml", "chatml", "bos", "inst", "trims", "open"]),
        padded=random.random() < 0.15,
        encoding=random.choice(ENCODINGS) if random.random() < 0.1 else UTF_8,
    )


def _draw_index(random: Random, case: Case, palette: Palette) -> Case:
    from .models import WITH_STATES

    tail = random.choice([2, 3, 16, 16, 33, 128])
    sinks = random.choice([1, 2, 4, 4, 10, 17, 64])
    while case.tokens <= sinks + tail + 1:
        sinks, tail = random.choice([1, 4]), random.choice([2, 16])
    sparse = random.random() < 0.3 and case.family not in WITH_STATES
    prefill = random.choice([*prefills()]) if sparse else "dense"
    options = palette.options(random, case, prefills()[prefill])
    if prefill != "dense" and random.random() < 0.7:
        options = (*(one for one in options if one[0] != "prefill_budget"), ("prefill_budget", random.randint(8, 200)))
    chunk = random.choice([64, 64, 128, 256, 100, 255] if prefill != "dense" else [1, 7, 128, 256, 2048])
    if chunk < 64 and case.tokens > 130:
        chunk = 64
    if prefill != "dense" and random.random() < 0.85:  # rows are reused by blocks of 256 tokens and whole chunks
        whole = random.choice([256, 512, 512, 512, 3 * chunk, 4 * chunk]) + random.choice([-1, 0, 0, 0, 0, 0, 0, 40])
        case = replace(case, tokens=max(whole, sinks + tail + 2))
    # With one layer, a sparse prefill has the rows of a dense one. Some models refuse sparse prefills.
    if prefill != "dense":
        layers, rope = max(case.layers, 2), random.choice([case.rope, "default", "default", "default"])
        case = replace(case, layers=layers, rope=rope, positions=0, window=random.choice([0, case.window]))
    names = random.sample([*indexers()], random.choice([1, 1, 1, 2, 2, 3]))
    return replace(
        case,
        sinks=sinks,
        tail=tail,
        chunk_size=chunk,
        prefill=prefill,
        prefill_options=options,
        kv_dtype="int8" if random.random() < 0.15 else None,
        indexers=tuple((name, palette.options(random, case, indexers()[name], case.head_dim)) for name in names),
    )


def _draw_answers(random: Random, case: Case, palette: Palette) -> Case:
    built = [name for name, _ in case.indexers]
    usable = [name for name, method in methods().items() if not method.needs_index or name in built]
    method = random.choice(built) if random.random() < 0.6 else random.choice(usable)
    kind = methods()[method]
    asking = random.random()
    question_prefill = None if asking < 0.6 else "own" if asking < 0.8 else random.choice(usable)
    of_a_method = question_prefill not in (None, "own")
    return replace(
        case,
        method=method,
        options=palette.options(random, case, kind),
        budget=draw_budget(random, case.middle),
        residual=random.random() < 0.2,
        question_prefill=question_prefill,
        prefill_budget=draw_budget(random, case.middle) if of_a_method and random.random() < 0.8 else None,
        placement=random.choice(["device", "device", "device", "host", "disk"]),
        ahead=random.random() < 0.1,
        guard=random.choice([0.01, 0.1, 0.5]) if random.random() < 0.1 else None,
        questions=_draw_questions(random, case),
        answer=random.choice([1, 2, 3, 3, 3, 4, 6, 12]),
    )


def _drawn_longer(random: Random, case: Case) -> Case:
    """Return the case, sometimes without a budget, and rarely with a long document.

    Long documents have several clusters of codes. Their lengths differ so that each kind of default budget occurs.
    """
    if random.random() < 0.1:
        case = replace(case, budget="")
    if random.random() >= LONG or case.prefill != "dense" or case.rope != "default":
        return case
    tokens = random.randint(900, 3000)
    if case.group <= 2 and random.random() < 0.5:  # a plain pass of many heads needs gigabytes
        tokens = random.randint(4600, 5400)
    layers, kv_heads = min(case.layers, 2), min(case.kv_heads, 2 if case.group <= 2 else 1)
    chunk_size = max(case.chunk_size, 256)
    return replace(case, layers=layers, kv_heads=kv_heads, tokens=tokens, positions=tokens + 400, chunk_size=chunk_size)


def _draw_questions(random: Random, case: Case) -> tuple[int, ...]:
    """Return lengths of questions.

    Only without a template can a question be one token, like a decode step's.
    """
    lengths = [random.choice([1, 1, 2, 5, 12, 30, 130]) for _ in range(random.choice([1, 1, 2, 3]))]
    first = [1] if case.raw and random.random() < 0.3 else lengths[:1]
    return (*first, *lengths[1:])


def draw_budget(random: Random, middle: int) -> str:
    """Return a budget as a user writes it: a share, a number, or one that is easily confused with another."""
    clashes = ["1", "1.0", "100%", "2", "0.5", "50%", "0.999"]
    numbers = [str(middle), str(max(1, middle - 1)), str(middle + 1), str(random.randint(1, middle))]
    return random.choice([*clashes, *numbers, f"{random.randint(1, 60)}%", "0.05", "0.1", "0.2"])


def from_options(given: Mapping[str, type], name: str, options: Options) -> Any:
    """Make an instance of a registered class."""
    return given[name](**dict(options))
