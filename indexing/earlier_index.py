"""What a build keeps, replaces or refuses of the index that is in its folder."""

from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from sparsekv.formats.checksums import chained_block_hashes, common_prefix_tokens, hash_tokens
from sparsekv.formats.errors import ArtifactError, UsageError
from sparsekv.formats.hints import add_methods_hint
from sparsekv.formats.kv_storage import AUTO, KVDtype
from sparsekv.formats.manifest import REBUILD
from sparsekv.formats.schema import TOKENS, Manifest, MethodRecord, ModelIdentity, PrefillRecord, Split, layer_file
from sparsekv.formats.writer import ArtifactWriter
from sparsekv.indexing.context_files import context_recipe
from sparsekv.indexing.indexers.registry import indexer_of, indexers
from sparsekv.indexing.plan import BuildJob, BuildPlan
from sparsekv.indexing.prefill.interface import prefill_name
from sparsekv.indexing.same_document import LEAST_IN_COMMON, is_cut, share_that_stays
from sparsekv.indexing.sampling import sample_size, wanted_positions
from sparsekv.indexing.shared_prefix import shared_prefix

WAYS_OUT = "choose another folder with --output, or give --force to replace it"


def keep_what_is_there(plan: BuildPlan, model: ModelIdentity, writer: ArtifactWriter) -> None:
    """Raise ArtifactError if the build would lose what only --force gives up, or append to another index."""
    if plan.growth and (writer.base is None or writer.base.uuid != plan.growth.base):
        raise ArtifactError(f"{writer.folder} was changed meanwhile by another process; run the same command again")
    _keep_others(plan, model, writer)
    _keep_additions(plan, writer)
    _keep_dense(plan, writer)


def _keep_additions(plan: BuildPlan, writer: ArtifactWriter) -> None:
    """Raise ArtifactError if the build would drop appended text without --force."""
    base = writer.base
    if base is None or not base.additions or plan.growth or plan.force:
        return
    if base.prompt.ids_sha256 != hash_tokens(plan.prompt.input_ids.tolist()):
        added = sum(addition.tokens for addition in base.additions)
        lacking = [name for name in plan.methods if name not in base.methods]
        methods = f"add methods to it with {add_methods_hint(writer.folder, lacking)}, " if lacking else ""
        raise ArtifactError(
            f"{writer.folder} holds {added:,} tokens that were appended and that this document lacks; {methods}build "
            "another index with --output, or give --force to replace it by one of this document alone"
        )


def _keep_others(plan: BuildPlan, model: ModelIdentity, writer: ArtifactWriter) -> None:
    """Raise ArtifactError if the build would replace the index of another document or model without --force."""
    base = writer.base
    if base is None or plan.growth or plan.force:
        return
    if base.model.weights_hash != model.weights_hash:
        raise ArtifactError(f"{writer.folder} is an index for another model, {base.model.id}; {WAYS_OUT}")
    if len(base.layers) != plan.num_hidden_layers:
        has = f"{len(base.layers)} layers, and its model {plan.num_hidden_layers}"
        raise ArtifactError(f"the manifest of {writer.folder} contradicts itself: it has {has}; {REBUILD}")
    if base.prompt.text_sha256 == plan.prompt.text_sha256:
        return
    if (share := _share_that_stays(plan, base, writer)) < LEAST_IN_COMMON:
        raise ArtifactError(
            f"{writer.folder} is the index of another document, {base.split.tokens:,} tokens, of whose passages this "
            f"one has {share:.0%}; {WAYS_OUT}"
        )


def _share_that_stays(plan: BuildPlan, base: Manifest, writer: ArtifactWriter) -> float:
    """The share of an index's passages that the text has too: all, where it was cut; what both begin with, where the
    index's tokens are damaged."""
    if not writer.is_whole(base.files[TOKENS]):
        return _same_beginning(plan, base) / base.split.tokens
    before, after = writer.read_base(TOKENS)["input_ids"], plan.prompt.input_ids.cpu()
    return 1.0 if is_cut(before, after) else share_that_stays(before, after)


def _same_beginning(plan: BuildPlan, base: Manifest) -> int:
    """Tokens, in whole blocks, that both texts begin with."""
    return common_prefix_tokens(base.prompt.block_hashes, chained_block_hashes(plan.prompt.input_ids.tolist()))


def tell_what_is_there(job: BuildJob) -> None:
    """Tell what an unfinished build has left, and how much of an index stays, before any of it is replaced: Ctrl-C then
    leaves all of it."""
    plan, writer, tell, base = job.plan, job.writer, job.tell, job.writer.base
    if writer.unfinished:
        left = f"{writer.unfinished} file{'s' * (writer.unfinished != 1)}"
        tell(f"an unfinished build has left {left}; what fits this one is not made again")
    if base is None or plan.growth:
        return
    if plan.force:
        lost = [name for name in base.methods if name not in plan.methods]
        tell(
            f"{writer.folder} is replaced as a whole{', and is then without ' * bool(lost)}{', '.join(lost)} (--force)"
        )
    elif base.prompt.ids_sha256 != hash_tokens(plan.prompt.input_ids.tolist()):
        same, text = shared_prefix(job, wanted_positions(job)), base.prompt.text_sha256 == plan.prompt.text_sha256
        of = f"this text, where {plan.split().tokens:,} are built" if text else "an earlier text"
        if settings := [*_other_prompt(job, base), *_other_settings(plan, base)]:
            of += f", and was built with {', '.join(settings)}, which this call does not give"
        told = f"the first {same:,} are those of this one, the others are replaced" if same else "all are replaced"
        tell(f"{writer.folder} holds {base.split.tokens:,} tokens of {of}: {told}")
    elif not _has_same_context(plan, job.model, base):
        changed = ", ".join(_other_settings(plan, base)) or "another configuration of the model"
        again = "what depends on that is made again, its methods too"
        tell(f"{writer.folder} was built with {changed}, unlike this call: {again}")


def _other_settings(plan: BuildPlan, base: Manifest) -> list[str]:
    """The options that decide keys and values, beside model and text, as an index was built where a build differs."""
    stored = None if base.kv_storage is None else base.kv_storage.dtype
    before = _settings(base.split, base.dtype, base.prefill, stored)
    now = _settings(plan.split(), plan.dtype, plan.prefill_record, plan.kv_dtype)
    before["--rope-scaling"], now["--rope-scaling"] = base.rope.scaling, plan.rope_scaling
    found = [f"{option} {value or 'none'}" for option, value in before.items() if value != now[option]]
    earlier = base.prefill.kind == plan.prefill_record.kind and base.prefill.revision != plan.prefill_record.revision
    return [*found, f"another revision of the {base.prefill.kind} prefill"] if earlier else found


def _other_prompt(job: BuildJob, base: Manifest) -> list[str]:
    """The reasons, beside the text, why an index has other token ids than a build."""
    now, before = job.plan.prompt, base.prompt
    reasons = {
        "--raw": before.chat is None and now.chat is not None,
        "a chat template": before.chat is not None and now.chat is None,
        "--special-tokens": before.special_tokens and not now.special_tokens,
        "special tokens as plain text": now.special_tokens and not before.special_tokens,
        "another tokenizer": base.tokenizer.tokenizer_hash != job.tokenizer.tokenizer_hash,
        "another chat template": base.tokenizer.chat_template_hash != job.tokenizer.chat_template_hash,
    }
    found = [reason for reason, differs in reasons.items() if differs]
    if not found and before.chat is not None and now.chat is not None and before.chat.before != now.chat.before:
        has, gives = first_difference(before.chat.before, now.chat.before)
        found.append(f"{has!r} in the chat template's head where it now has {gives!r}")
    return found


def first_difference(before: str, after: str) -> tuple[str, str]:
    """The first line of each of two texts in which they differ; empty where one text has no such line."""
    pairs = zip_longest(before.splitlines(), after.splitlines(), fillvalue="")
    return next(((one, other) for one, other in pairs if one != other), ("", ""))


def _settings(split: Split, dtype: str, prefill: PrefillRecord, kv_dtype: KVDtype | None) -> dict[str, object]:
    of_rows = {"--dtype": dtype, "--prefill": str(prefill), "--kv-dtype": kv_dtype or AUTO}
    return {"--sinks": split.sinks, "--tail": split.tail, **of_rows}


def _keep_dense(plan: BuildPlan, writer: ArtifactWriter) -> None:
    """Raise ArtifactError if a sparse prefill would replace a dense one without --force."""
    base = writer.base
    if base is None or plan.growth or plan.force:
        return
    if base.prefill.exact and not plan.prefill.exact:
        raise ArtifactError(
            f"{writer.folder} was prefilled densely, and a {prefill_name(plan.prefill)} prefill would replace that; "
            f"{WAYS_OUT}"
        )


def with_methods_there(
    plan: BuildPlan, model: ModelIdentity, writer: ArtifactWriter, tell: Callable[[str], None]
) -> BuildPlan:
    """The plan, plus those methods of the existing index that would be lost, with their old parameters.

    Where keys and values are replaced all would be; where they stay, those with a missing file, and those that build
    from a sample of queries, if the plan's methods need another one.

    Raises:
        ArtifactError: this version cannot build one of them as it was.
    """
    base = writer.base
    if base is None or plan.growth or plan.force:
        return plan
    there = [name for name in base.methods if name not in plan.methods and name in indexers()]
    if not _has_same_context(plan, model, base):
        return _with(plan, there, writer.folder, base)
    lacking = [name for name in there if not _has_its_files(name, writer, base)]
    if lacking:
        tell(f"{', '.join(lacking)} of {writer.folder}: built again, as files are missing")
    sampling = [name for name in there if _sampled(base.methods[name])] if sample_size(plan) else []
    together = _with(plan, list(dict.fromkeys([*lacking, *sampling])), writer.folder, base)
    if sampling and sample_size(together) != _stored_sample_size(base):
        tell(f"{', '.join(sampling)} of {writer.folder}: built again, from a larger sample of the document's queries")
    return together


def _with(plan: BuildPlan, names: list[str], folder: Path, base: Manifest) -> BuildPlan:
    """The plan, plus methods of an index as they were; raises ArtifactError where this version cannot build one."""
    try:
        others = {name: indexer_of(indexers()[name], base.methods[name].parameters) for name in names}
        return replace(plan, methods=plan.methods | others)
    except (TypeError, ValueError, UsageError) as error:
        raise ArtifactError(
            f"methods of {folder} cannot be built again as they were: {error}; name all that are wanted with --method, "
            "or give --force to do without them"
        ) from None


def _has_its_files(name: str, writer: ArtifactWriter, base: Manifest) -> bool:
    """Whether a method's files and those that it was built from are there; only sizes are looked at."""
    files = [*base.methods[name].built_from, *(path for path in base.files if path.startswith(f"{name}/"))]
    return all(path in base.files and writer.is_there(base.files[path]) for path in files)


def _sampled(method: MethodRecord) -> bool:
    return any(path.startswith("samples/") for path in method.built_from)


def _stored_sample_size(base: Manifest) -> int:
    stored = base.files.get(layer_file("samples", base.indexed_layers[0]))
    return 0 if stored is None else stored.tensors["positions"].shape[0]


def in_order(methods: dict[str, MethodRecord], base: Manifest | None) -> dict[str, MethodRecord]:
    """Methods as an index had them, then new ones: the first is what `generate` asks where none is named."""
    before = [] if base is None else [name for name in base.methods if name in methods]
    return {name: methods[name] for name in dict.fromkeys([*before, *methods])}


def _has_same_context(plan: BuildPlan, model: ModelIdentity, base: Manifest) -> bool:
    """Whether a build would make the keys and values that an index has."""
    ids_sha256 = hash_tokens(plan.prompt.input_ids.tolist())
    recipe = context_recipe(model, ids_sha256, plan.split(), plan.dtype, plan.prefill_record, plan.kv_dtype)
    return base.files[TOKENS].recipe == recipe
