"""Deeds (operations of a case that are checked) that build onto an index, compared with a build from nothing."""

import re
import shutil
from contextlib import suppress
from pathlib import Path
from random import Random

import torch
from support.small_index import with_changes

from sparsekv.formats.errors import ArtifactError
from sparsekv.formats.index.reader import Artifact
from sparsekv.indexing.append import adding_plan, encode_addition, growing_plan
from sparsekv.indexing.build import build_index
from sparsekv.indexing.convert import convert_index
from sparsekv.indexing.indexers.interface import indexer_of, indexers
from sparsekv.indexing.plan import BuildPlan, stored_checkpoints
from sparsekv.indexing.prefill.prefills import prefills
from sparsekv.runtime.decoding.open import OpenIndex

from .case import from_options
from .deeds import deed
from .options import draw_options
from .oracles import ROUNDING, error_of, expect
from .questions import AFTER_8_BITS, Checks
from .rounding import Rounding
from .world import World, files_of, stored_rows


@deed("grow", 14, asks=False)
def grow(world: World, index: OpenIndex) -> None:
    """Check that text that is appended, once or twice, gives the rows of a build of the whole text."""
    random, folder = Random(world.case.more), world.folder / "index.skv"
    for _ in range(random.choice([1, 1, 2])):
        artifact = Artifact(folder)
        letters = random.choice([1, 2, 17, 64, 128, 254, 255, 256, 300])
        text = world.some_text(letters, random.randint(0, 10**6))
        prompt = artifact.manifest.prompt
        addition = encode_addition(world.tokenizer, text, prompt.chat, prompt.border)
        plan = growing_plan(artifact, world.loaded, addition, chunk_size=_chunk(world, random))
        build_index(plan, folder)
    # Methods that appended the tokens keep what they learned from the old text, so only the context is compared.
    same_as_fresh(world, folder, with_changes(plan, growth=None, base=None), methods=False)
    grown = world.open("index.skv")
    Checks(world, grown).after_growth()


def _chunk(world: World, random: Random) -> int | None:
    return None if world.case.prefill != "dense" else random.choice([None, 64, 100, 256])


@deed("edit", 16, asks=False)
def edit(world: World, index: OpenIndex) -> None:
    """Check that the index of an edited text, or with other settings, equals that of a build from nothing."""
    case, random, text = world.case, Random(world.case.more), world.document
    plan = world.plan()
    known = ["edit", "longer", "shorter", "sinks", "tail", "methods", "same", "int8", "prefill"]
    kinds = random.sample(known, random.choice([1, 1, 2]))
    # Rows of a sparse prefill depend on more settings than rows of a dense prefill. In int8 no such row is reused.
    if not plan.config.prefill.exact and random.random() < 0.8:
        kinds = random.sample(["edit", "longer", "tail", "methods", "same"], random.choice([1, 1, 2]))
        kinds.append(random.choice(["sinks", "sinks", "sinks", "prefill", "longer"]))
        if random.random() < 0.4:
            kinds = ["longer"]  # all rows are reused, except those that the old end of the text has affected

    if "edit" in kinds:
        place = random.randint(len(text) // 2, len(text) - 1)
        text = (
            text[:place] + world.some_text(random.choice([1, 9, 40]), place) + text[place + random.choice([0, 1, 20]) :]
        )
    if "longer" in kinds:
        text += world.some_text(random.choice([1, 64, 255, 256, 256]), 5)
    if "shorter" in kinds:
        text = text[: max(len(text) * 2 // 3, case.sinks + case.tail + 20)]
    if "sinks" in kinds:
        plan = with_changes(plan, sinks=random.choice([one for one in (1, 2, 5, 11, 30) if one != plan.config.sinks]))
    if "tail" in kinds:
        plan = with_changes(plan, tail=random.choice([2, 5, 20, 40]))
    if "prefill" in kinds and not plan.config.prefill.exact:
        kind = random.choice([*prefills()])
        plan = with_changes(plan, prefill=from_options(prefills(), kind, draw_options(random, prefills()[kind])))
    if "int8" in kinds:
        plan = with_changes(plan, kv_dtype=None if plan.config.kv_dtype else "int8")
    plan = with_changes(plan, prompt=world.prompt(text), chunk_size=_again(plan, random))
    if "methods" in kinds:
        name = random.choice([*indexers()])
        made = from_options(indexers(), name, draw_options(random, indexers()[name], head_dim=case.head_dim))
        plan = with_changes(plan, methods={name: made})
    folder = world.folder / "index.skv"
    try:
        build_index(plan, folder)
    except ArtifactError as error:
        expect("is the index of another document" in str(error), "refused", str(error))
        plan = with_changes(plan, force=True)
        build_index(plan, folder)
    else:
        there = Artifact(folder).manifest.methods
        kept = {
            name: one
            for name, one in world.plan().config.methods.items()
            if name not in plan.config.methods and name in there
        }
        plan = with_changes(plan, methods=plan.config.methods | kept)
    same_as_fresh(world, folder, plan, methods=True)
    if not plan.config.prefill.exact:
        _with_other_sinks(world, folder, with_changes(plan, force=False), random)
    elif random.random() < 0.3:
        _without_a_file(world, folder, with_changes(plan, force=False), random)
    world.open("index.skv")


def _without_a_file(world: World, folder: Path, plan: BuildPlan, random: Random) -> None:
    """Check that a deleted file is built again, and fits the files that stay."""
    files = Artifact(folder).manifest.files
    (folder / files[random.choice(sorted(files))].path).unlink()
    build_index(plan, folder)
    same_as_fresh(world, folder, plan, methods=True, fresh=world.folder / "fresh.skv")


def _with_other_sinks(world: World, folder: Path, plan: BuildPlan, random: Random) -> None:
    """Check that a sparse prefill of the same text with other sinks reuses no row."""
    plan = with_changes(plan, sinks=random.choice([one for one in (1, 2, 5, 11, 30) if one != plan.config.sinks]))
    build_index(plan, folder)
    shutil.rmtree(world.folder / "fresh.skv")
    same_as_fresh(world, folder, plan, methods=True)


def _again(plan: BuildPlan, random: Random) -> int:
    return random.choice([plan.chunk_size, 64, 200]) if plan.config.prefill.exact else plan.chunk_size


@deed("more methods", 4, asks=False)
def more_methods(world: World, index: OpenIndex) -> None:
    """Check that methods that are added to an index equal those of a build with all of them."""
    random, folder = Random(world.case.more), world.folder / "index.skv"
    name = random.choice([*indexers()])
    made = from_options(indexers(), name, draw_options(random, indexers()[name], head_dim=world.case.head_dim))
    build_index(adding_plan(Artifact(folder), world.loaded, {name: made}), folder)
    plan = world.plan()
    same_as_fresh(world, folder, with_changes(plan, methods=plan.config.methods | {name: made}), methods=True)
    world.open("index.skv")


@deed("convert", 4, asks=False)
def convert(world: World, index: OpenIndex) -> None:
    """Check that the int8 copy of an index equals a build in int8, also after an edit of the text.

    Text may have been appended to the copied index.
    """
    random, exact, folder = Random(world.case.more), world.folder / "exact.skv", world.folder / "int8.skv"
    plan, text, grows = world.plan(kv_dtype=None), world.document, random.random() < 0.3
    build_index(plan, exact)
    if grows:
        grown = _growing(world, exact, random)
        build_index(grown, exact)
        plan = with_changes(grown, growth=None, base=None)
    convert_index(Artifact(exact), "int8", folder, world.model.device, lambda stage, done, of: None)
    plan = with_changes(plan, kv_dtype="int8")
    same_as_fresh(world, folder, plan, methods=True)
    if not grows and world.device == "cpu":
        ours, theirs = files_of(folder), files_of(world.folder / "fresh.skv")
        others = [name for name in ours for kind, one in ours[name].items() if not torch.equal(one, theirs[name][kind])]
        expect(not others, "converted", f"{others} are not those of a build")
    if not grows and random.random() < 0.5:
        place = random.randint(len(text) // 2, len(text) - 1)
        plan = with_changes(plan, prompt=world.prompt(text[:place] + world.some_text(9, place) + text[place:]))
        build_index(plan, folder)
        shutil.rmtree(world.folder / "fresh.skv")
        same_as_fresh(world, folder, plan, methods=True)
    world.open("int8.skv")


class _Stopped(Exception):
    """A build was stopped on purpose."""


def _keeps_chunks(plan: BuildPlan) -> bool:
    """Whether an interrupted prefill of a plan continues after its last whole chunk."""
    return plan.config.kv_dtype is None and not plan.kinds.keeping


@deed("interrupted", 5, asks=False)
def interrupted(world: World, index: OpenIndex) -> None:
    """Check that a build that is stopped anywhere, and runs again, gives the index of an uninterrupted build."""
    random, folder = Random(world.case.more), world.folder / "again.skv"
    left = random.randint(1, 12)

    def stop(stage: str, done: int, of: int) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise _Stopped

    prefilled = 0

    def stop_after(stage: str, done: int, of: int) -> None:
        nonlocal prefilled
        prefilled = done if stage == "prefill" and done < of else prefilled
        stop(stage, done, of)

    def goes_on(stage: str, done: int, of: int) -> None:
        nonlocal first
        first = done if stage == "prefill" and first is None else first

    first: int | None = None
    try:
        build_index(world.plan(), folder, stop_after)
    except _Stopped:
        plan = world.plan(chunk_size=_again(world.plan(), random))
        build_index(plan, folder, goes_on)
        if first is not None and _keeps_chunks(plan):
            expect(first >= prefilled, "interrupted", f"after {prefilled} tokens, it went on after {first}")
    same_as_fresh(world, folder, world.plan(), methods=True, fresh=world.folder / "index.skv")
    world.open("again.skv")


@deed("one after another", 5, asks=False)
def one_after_another(world: World, index: OpenIndex) -> None:
    """Check that several builds and appends with changes, some of them stopped anywhere, end in the last build's index.

    A build that is refused, such as one without the appended text, runs again with force.
    """
    random, folder, plan, text = Random(world.case.more), world.folder / "index.skv", world.plan(), world.document
    distance: int | None = None  # blocks between the index's stored states; later builds keep it
    known = True
    for more in reversed(range(random.choice([2, 3, 4]))):
        if random.random() < 0.2:
            _stopped(_growing(world, folder, random), folder, random)
        plan, text = _changed(world, plan, text, random)
        stopped = False
        try:
            if more and random.random() < 0.7:
                stopped = _stopped(plan, folder, random)
            else:
                build_index(plan, folder)
        except ArtifactError as error:
            expect("--force" in str(error), "refused", str(error))
            plan = with_changes(plan, force=True)
            build_index(plan, folder)
        if stopped:
            known = known and not plan.config.force
            plan = with_changes(plan, force=False)
            continue
        distance = plan.config.checkpoints or (None if plan.config.force else distance)
        plan = with_changes(plan, force=False, checkpoints=None)
    manifest = Artifact(folder).manifest
    stored = {name: indexer_of(indexers()[name], record.parameters) for name, record in manifest.methods.items()}
    expect(stored | plan.config.methods == stored, "one after another", f"the methods are {stored}")
    if known:
        expect(stored_checkpoints(manifest) == distance, "one after another", f"checkpoints are not {distance} apart")
    plan = with_changes(plan, methods=stored, checkpoints=stored_checkpoints(manifest))
    same_as_fresh(world, folder, plan, methods=True)
    fresh = Artifact(world.folder / "fresh.skv").manifest
    for field in ("model", "prompt", "split", "layers", "rope", "dtype", "additions", "file_history"):
        expect(getattr(manifest, field) == getattr(fresh, field), "one after another", f"other {field} than anew")
    world.open("index.skv")


def _growing(world: World, folder: Path, random: Random) -> BuildPlan:
    """Return a plan that appends a text to an index."""
    artifact = Artifact(folder)
    prompt, text = artifact.manifest.prompt, world.some_text(random.choice([1, 64, 255]), random.randint(0, 10**6))
    addition = encode_addition(world.tokenizer, text, prompt.chat, prompt.border)
    return growing_plan(artifact, world.loaded, addition, chunk_size=_chunk(world, random))


def _stopped(plan: BuildPlan, folder: Path, random: Random) -> bool:
    """Build, and stop three builds in four at a random step; return whether the build was stopped."""
    left = random.randint(1, 25) if random.random() < 0.75 else 0

    def stop(stage: str, done: int, of: int) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise _Stopped

    with suppress(_Stopped):
        build_index(plan, folder, stop)
        return False
    return True


def _changed(world: World, plan: BuildPlan, text: str, random: Random) -> tuple[BuildPlan, str]:
    """Return a plan with a changed text and other settings, and the text."""
    known = ["edit", "longer", "sinks", "tail", "methods", "same", "int8", "force"]
    known += ["checkpoints"] * bool(plan.kinds.keeping)
    kinds = random.sample(known, random.choice([1, 1, 2]))
    place = random.randint(len(text) // 3, len(text) - 1)
    if "edit" in kinds:
        text = text[:place] + world.some_text(random.choice([1, 9, 40]), place) + text[place + 9 :]
    if "longer" in kinds:
        text += world.some_text(random.choice([1, 64, 256]), place)
    if "sinks" in kinds:
        plan = with_changes(plan, sinks=random.choice([1, 2, 5, 11]))
    if "tail" in kinds:
        plan = with_changes(plan, tail=random.choice([2, 5, 20]))
    if "int8" in kinds:
        plan = with_changes(plan, kv_dtype=None if plan.config.kv_dtype else "int8")
    if "checkpoints" in kinds:
        plan = with_changes(plan, checkpoints=random.choice([1, 2]))
    if "methods" in kinds:
        name = random.choice([*indexers()])
        options = draw_options(random, indexers()[name], head_dim=world.case.head_dim)
        plan = with_changes(plan, methods={name: from_options(indexers(), name, options)})
    changes = {"prompt": world.prompt(text), "chunk_size": _again(plan, random), "force": "force" in kinds}
    return with_changes(plan, **changes), text


def same_as_fresh(world: World, folder: Path, plan: BuildPlan, *, methods: bool, fresh: Path | None = None) -> None:
    """Check that an index's tensors equal, up to rounding, those of a build of the plan in an empty folder.

    With `methods`, the methods' tensors are checked too, if the rows that they are built from are equal bit for bit.
    """
    if fresh is None:
        fresh = world.folder / "fresh.skv"
        build_index(with_changes(plan, force=False), fresh)
    most, in_8_bits = ROUNDING, plan.config.kv_dtype is not None
    if in_8_bits:
        most = AFTER_8_BITS
    built, made = (stored_rows(one, world.case.layers) for one in (folder, fresh))
    rounding = Rounding(world, plan.prompt.input_ids)
    rounding.expect_rows(built, made, most, "built onto:", "a build's from nothing")
    ours, theirs = files_of(folder), files_of(fresh)
    if methods:
        expect(ours.keys() == theirs.keys(), "built onto: files", f"{sorted(ours)}, not {sorted(theirs)}")
    exact = _exact(ours, theirs)
    for name in sorted(ours.keys() & theirs.keys()):
        of_context = name.startswith(("queries/", "samples/", "tokens", "states/"))
        if name.startswith("context/") or not (of_context or (methods and exact)):
            continue
        for tensor, one in ours[name].items():
            apart = error_of(one, theirs[name][tensor]) if one.numel() else 0.0
            # On a GPU sums have no fixed order, and of equal scores another key may be listed.
            limit = 10 * most if in_8_bits or world.device != "cpu" else most
            rounded = of_context and one.is_floating_point()
            right = apart <= limit or (rounded and apart <= rounding.layer(_layer(name)))
            expect(right, f"built onto: {name.partition('/')[0]} {tensor}", f"{name}: {apart:.2e} from a build's")


def _layer(name: str) -> int | None:
    """Return the number of the layer in a file's name."""
    number = re.search(r"layer_(\d+)", name)
    return int(number[1]) if number else None


def _exact(ours: dict[str, dict[str, torch.Tensor]], theirs: dict[str, dict[str, torch.Tensor]]) -> bool:
    """Whether all inputs of the methods' tensors are equal bit for bit."""
    return all(
        torch.equal(tensor, theirs[name][kind])
        for name in ours
        if name.startswith(("context/", "samples/", "queries/")) and name in theirs
        for kind, tensor in ours[name].items()
        if kind in theirs[name]
    )
