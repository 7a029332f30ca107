"""Protect the index in a build's folder: refuse to lose its data, report what is kept, and rebuild methods that would
be lost."""

from dataclasses import replace
from itertools import zip_longest

import torch

from sparsekv.formats.checksums import chained_block_hashes, common_prefix_tokens
from sparsekv.formats.documents.file_order import told_changes
from sparsekv.formats.errors import REBUILD, ArtifactError, UsageError, add_methods_hint
from sparsekv.formats.index.schema import AUTO, TOKENS, KVDtype, Manifest, MethodRecord, PrefillRecord, Split
from sparsekv.formats.index.writer import ArtifactWriter
from sparsekv.indexing.indexers.interface import indexer_of, indexers
from sparsekv.indexing.plan import Build
from sparsekv.indexing.prefill.prefills import prefill_name
from sparsekv.indexing.reuse import ReusePlan, sample_size, shared_tokens

RUN = 16
"""Number of tokens of a passage by which texts are compared. It is so large that texts on one subject have few passages
in common by chance."""
LEAST_IN_COMMON = 1 / 3
"""Minimum share of an index's passages that a text must contain to count as a later version of its document.

An edited text keeps more of the passages, and a continued text keeps all. Another text with the same licence or
headings has few. For example, 0.41 of the passages of this project's README are still in it 400 commits later. Two
pages of its documentation have less than 0.01 of their passages in common.
"""


def share_that_stays(before: torch.Tensor, after: torch.Tensor) -> float:
    """Return the share of an earlier text's passages that are also in a later text; 1 if the earlier text has none.

    Args:
        before, after: token ids [N] int64.
    """
    earlier = _passages(before)
    return float(torch.isin(earlier, _passages(after)).float().mean()) if len(earlier) else 1.0


def is_cut(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether the later text was cut: without its last RUN tokens, it is the beginning of the earlier text."""
    kept = len(after) - RUN
    return 0 < kept < len(before) and torch.equal(before[:kept], after[:kept])


def _passages(ids: torch.Tensor) -> torch.Tensor:
    """Hash each run of RUN tokens to [N - RUN + 1] int64; different runs hardly ever get equal hashes."""
    runs = len(ids) - RUN + 1
    if runs < 1:
        return ids[:0]
    # Multiplication by an odd factor loses no bit of a token. Overflow of int64 does no harm in a hash.
    factors = torch.randint(2**62, (RUN,), generator=torch.Generator().manual_seed(0)) * 2 + 1
    numbers = torch.zeros(runs, dtype=torch.int64)
    for place, factor in enumerate(factors):
        numbers += ids[place : place + runs] * factor
    return numbers


WAYS_OUT = "choose another folder with --output, or give --force to replace it"


def refuse_what_is_lost(build: Build) -> None:
    """Raise ArtifactError if the build would lose data without --force, or extend another index than its plan names."""
    growth, base, extended = build.plan.growth, build.writer.base, build.plan.base
    if extended is not None and (base is None or base.uuid != extended):
        raise ArtifactError(
            f"another process changed {build.writer.folder} while this command ran; run the same command again"
        )
    if base is None or growth or build.plan.config.force:
        return
    _keep_others(build, base)
    _keep_additions(build, base)
    _keep_dense(build, base)


def _keep_additions(build: Build, base: Manifest) -> None:
    """Raise ArtifactError if the build would drop appended text without --force."""
    folder = build.writer.folder
    if base.additions and base.prompt.ids_sha256 != build.ids_sha256:
        added = sum(addition.tokens for addition in base.additions)
        lacking = [name for name in build.plan.config.methods if name not in base.methods]
        methods = f"add methods to it with {add_methods_hint(folder, lacking)}, " if lacking else ""
        raise ArtifactError(
            f"{folder} holds {added:,} appended tokens, which this document does not have; {methods}build "
            "another index with --output, or give --force to replace it by an index of this document alone"
        )


def _keep_others(build: Build, base: Manifest) -> None:
    """Raise ArtifactError if the build would replace the index of another document or model without --force."""
    plan, folder = build.plan, build.writer.folder
    if base.model.weights_hash != build.model.weights_hash:
        raise ArtifactError(f"{folder} is an index for another model, {base.model.id}; {WAYS_OUT}")
    if len(base.layers) != plan.kinds.layers:
        has = f"{len(base.layers)} layers, and its model {plan.kinds.layers}"
        raise ArtifactError(f"the manifest of {folder} contradicts itself: it has {has}; {REBUILD}")
    if base.prompt.text_sha256 == plan.prompt.text_sha256:
        return
    if (share := _share_that_stays(build, base)) < LEAST_IN_COMMON:
        raise ArtifactError(
            f"{folder} is the index of another document ({base.split.tokens:,} tokens): this document has "
            f"only {share:.0%} of its passages; {WAYS_OUT}"
        )


def _share_that_stays(build: Build, base: Manifest) -> float:
    """Return the share of an index's passages that are also in the text to build.

    The share is 1 if the text is the beginning of the index's text. If the file of the index's tokens is damaged, the
    result is the share of the index's tokens that both texts begin with.
    """
    writer, input_ids = build.writer, build.plan.prompt.input_ids
    if not writer.is_whole(base.files[TOKENS]):
        same = common_prefix_tokens(base.prompt.block_hashes, chained_block_hashes(input_ids.tolist()))
        return same / base.split.tokens
    before, after = writer.read_base(TOKENS)["input_ids"], input_ids.cpu()
    return 1.0 if is_cut(before, after) else share_that_stays(before, after)


def tell_what_is_there(build: Build, reuse: ReusePlan) -> None:
    """Report what an unfinished build has left, and how much of the index is kept.

    This comes before anything is replaced, so that Ctrl-C at this point leaves the index unchanged.
    """
    plan, writer, tell, base = build.plan, build.writer, build.tell, build.writer.base
    tell_damaged(build)
    if writer.unfinished:
        left = f"{writer.unfinished} file{'s' * (writer.unfinished != 1)}"
        tell(f"an unfinished build has left {left}; those that fit this build are reused")
    if base is None or plan.growth:
        return
    if plan.config.force:
        lost = [name for name in base.methods if name not in plan.config.methods]
        tell(
            f"{writer.folder} is replaced completely{', and is then without ' * bool(lost)}{', '.join(lost)} (--force)"
        )
    elif base.prompt.ids_sha256 != build.ids_sha256:
        same, text = reuse.prefix_tokens, base.prompt.text_sha256 == plan.prompt.text_sha256
        of = f"this text (this call indexes {build.split.tokens:,})" if text else "another text"
        settings = [*_other_prompt(build, base), *_other_settings(build, base)]
        if not settings and (changed := _changed_files(build, base)):
            tell(f"{writer.folder}: kept {same:,} of {base.split.tokens:,} tokens: {changed}")
            return
        if settings:
            of += f", and was built with {', '.join(settings)}, which this call does not give"
        told = f"the first {same:,} are kept, the others are replaced" if same else "all are replaced"
        tell(f"{writer.folder} holds {base.split.tokens:,} tokens of {of}: {told}")
    elif base.files[TOKENS].recipe != build.context_recipe:
        changed = ", ".join(_other_settings(build, base)) or "another configuration of the model"
        again = "keys, values and methods that depend on this are made again"
        tell(f"{writer.folder} was built with {changed}, unlike this call: {again}")


def _changed_files(build: Build, base: Manifest) -> str:
    """Describe the changes in the files of a document of several files; empty if the document is one text.

    Also empty if the document is cut elsewhere than before, which adds and removes files, too.
    """
    now, before = build.plan.prompt, base.prompt
    if now.files is None or before.files is None or build.earlier is None or now.cut != before.max_tokens:
        return ""
    return told_changes(before.files, now.files, shared_tokens(build.earlier, now.input_ids))


def tell_damaged(build: Build) -> None:
    """Report the files of the existing index that were found missing or damaged since the last report."""
    if damaged := build.writer.newly_damaged():
        more = f" and {len(damaged) - 1:,} more" if len(damaged) > 1 else ""
        are = "are" if more else "is"
        build.tell(f"{damaged[0]}{more} of {build.writer.folder} {are} missing or damaged: made again")


def _other_settings(build: Build, base: Manifest) -> list[str]:
    """List the index's options that determine the files of a context and that differ from the build's.

    Model and text are left out.
    """
    plan, stored = build.plan, None if base.kv_storage is None else base.kv_storage.dtype
    before = _settings(base.split, base.dtype, base.prefill, stored)
    now = _settings(build.split, plan.dtype, plan.prefill_record, plan.config.kv_dtype)
    before["--weights"], now["--weights"] = base.model.weights or AUTO, build.model.weights or AUTO
    before["--rope-scaling"], now["--rope-scaling"] = base.rope.scaling, plan.config.rope_scaling
    found = [f"{option} {value or 'none'}" for option, value in before.items() if value != now[option]]
    earlier = base.prefill.kind == plan.prefill_record.kind and base.prefill.revision != plan.prefill_record.revision
    return [*found, f"another revision of the {base.prefill.kind} prefill"] if earlier else found


def _other_prompt(build: Build, base: Manifest) -> list[str]:
    """List the reasons, apart from the document's text, why an index has other token ids than a build."""
    now, before = build.plan.prompt, base.prompt
    reasons = {
        "--raw": before.chat is None and now.chat is not None,
        "a chat template": before.chat is not None and now.chat is None,
        "--special-tokens": before.special_tokens and not now.special_tokens,
        "special tokens as plain text": now.special_tokens and not before.special_tokens,
        "another tokenizer": base.tokenizer.tokenizer_hash != build.tokenizer.tokenizer_hash,
        "another chat template": base.tokenizer.chat_template_hash != build.tokenizer.chat_template_hash,
    }
    found = [reason for reason, differs in reasons.items() if differs]
    if not found and before.chat is not None and now.chat is not None and before.chat.before != now.chat.before:
        has, gives = first_difference(before.chat.before, now.chat.before)
        found.append(f"{has!r} in the chat template's text before the document, instead of {gives!r}")
    return found


def first_difference(before: str, after: str) -> tuple[str, str]:
    """Return the first pair of lines in which two texts differ. A line that a text lacks is empty.

    Both lines are empty if the texts have the same lines.
    """
    pairs = zip_longest(before.splitlines(), after.splitlines(), fillvalue="")
    return next(((one, other) for one, other in pairs if one != other), ("", ""))


def _settings(split: Split, dtype: str, prefill: PrefillRecord, kv_dtype: KVDtype | None) -> dict[str, object]:
    of_rows = {"--dtype": dtype, "--prefill": str(prefill), "--kv-dtype": kv_dtype or AUTO}
    return {"--sinks": split.sinks, "--tail": split.tail, **of_rows}


def _keep_dense(build: Build, base: Manifest) -> None:
    """Raise ArtifactError if a sparse prefill would replace a dense one without --force."""
    prefill = build.plan.config.prefill
    if base.prefill.exact and not prefill.exact:
        raise ArtifactError(
            f"{build.writer.folder} was prefilled densely, and this build would replace that by a "
            f"{prefill_name(prefill)} prefill, which is not exact; {WAYS_OUT}"
        )


def with_lost_methods(build: Build) -> Build:
    """Add to a build those methods of the existing index that would be lost, with their old parameters.

    A build that replaces keys and values would lose all methods of the index. A build that keeps keys and values would
    lose the methods with a missing file. All methods of an index share one sample of queries. So a build whose own
    methods need a sample would also lose the methods that were built from the old sample. Methods that are not
    installed are not added, and nothing is added with `force` or in an append.

    Raises:
        ArtifactError: this version cannot build one of the methods with its old parameters.
    """
    plan, writer, earlier = build.plan, build.writer, build.earlier
    if earlier is None or plan.growth or plan.config.force:
        return build
    base, tell = earlier.manifest, build.tell
    there = [name for name in base.methods if name not in plan.config.methods and name in indexers()]
    if base.files[TOKENS].recipe != build.context_recipe:
        return _with(build, there, base)
    lacking = [name for name in there if not _has_its_files(name, writer, base)]
    if lacking:
        tell(f"{', '.join(lacking)} of {writer.folder}: built again, because files are missing")
    built_from = {name: base.methods[name].built_from for name in there} if sample_size(plan) else {}
    sampling = [name for name, paths in built_from.items() if any(path.startswith("samples/") for path in paths)]
    together = _with(build, list(dict.fromkeys([*lacking, *sampling])), base)
    if sampling and sample_size(together.plan) != earlier.sample_size():
        tell(f"{', '.join(sampling)} of {writer.folder}: built again, from a larger sample of the document's queries")
    return together


def _with(build: Build, names: list[str], base: Manifest) -> Build:
    """Add an index's methods, with their parameters, to a build.

    Raises ArtifactError if this version cannot build one of these methods.
    """
    try:
        others = {name: indexer_of(indexers()[name], base.methods[name].parameters) for name in names}
        config = replace(build.plan.config, methods=build.plan.config.methods | others)
        return replace(build, plan=replace(build.plan, config=config))
    except (TypeError, ValueError, UsageError) as error:
        raise ArtifactError(
            f"methods of {build.writer.folder} cannot be built again with their old parameters: {error}; name "
            "all methods that you want with --method, or give --force to drop the others"
        ) from None


def _has_its_files(name: str, writer: ArtifactWriter, base: Manifest) -> bool:
    """Whether a method's files and the files that it was built from exist with their sizes; contents are not read."""
    files = [*base.methods[name].built_from, *(path for path in base.files if path.startswith(f"{name}/"))]
    return all(path in base.files and writer.is_there(base.files[path]) for path in files)


def in_order(methods: dict[str, MethodRecord], writer: ArtifactWriter) -> dict[str, MethodRecord]:
    """Order methods as in the earlier index, then new methods; `generate` uses the first method by default.

    With `force`, the order of the earlier index does not count.
    """
    base = None if writer.force else writer.base
    before = [] if base is None else [name for name in base.methods if name in methods]
    return {name: methods[name] for name in dict.fromkeys([*before, *methods])}
