"""What a build keeps, replaces or refuses of the index that is in its folder."""

from collections.abc import Callable
from dataclasses import replace

from sparsekv.formats.checksums import chained_block_hashes, common_prefix_tokens, hash_tokens
from sparsekv.formats.errors import ArtifactError
from sparsekv.formats.hints import add_methods_hint
from sparsekv.formats.schema import TOKENS, Manifest, ModelIdentity
from sparsekv.formats.writer import ArtifactWriter
from sparsekv.indexing.context_files import context_recipe
from sparsekv.indexing.indexers.registry import indexer_of, indexers
from sparsekv.indexing.plan import BuildPlan
from sparsekv.indexing.prefill.interface import prefill_name
from sparsekv.indexing.same_document import LEAST_IN_COMMON, is_cut, share_that_stays

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


def tell_replaced(plan: BuildPlan, model: ModelIdentity, writer: ArtifactWriter, tell: Callable[[str], None]) -> None:
    """Tell how much of an index stays, before any of it is replaced: Ctrl-C then leaves all of it."""
    base = writer.base
    if base is None or plan.growth or _has_same_context(plan, model, base):
        return
    if base.prompt.ids_sha256 == hash_tokens(plan.prompt.input_ids.tolist()):
        tell(f"{writer.folder} was built with {_settings(base)}: what depends on them is made again, its methods too")
        return
    same, number = _same_beginning(plan, base), f"{base.split.tokens:,} tokens"
    told = f"the first {same:,} are those of this one, the others are replaced" if same else "all are replaced"
    if base.prompt.text_sha256 == plan.prompt.text_sha256:
        tell(f"{writer.folder} holds {number} of this text, where {plan.split().tokens:,} are built: {told}")
    else:
        tell(f"{writer.folder} holds {number} of an earlier text: {told}")


def _settings(base: Manifest) -> str:
    """What decides an index's keys and values beside model and text, as the options that it was built with."""
    stored = "" if base.kv_storage is None else f" --kv-dtype {base.kv_storage.dtype}"
    split = f"--sinks {base.split.sinks} --tail {base.split.tail}"
    return f"{split} --dtype {base.dtype} --prefill {base.prefill.kind}{stored}"


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


def with_methods_there(plan: BuildPlan, model: ModelIdentity, base: Manifest | None) -> BuildPlan:
    """The plan, plus those methods of the existing index that would be lost, with their old parameters.

    Where keys and values are replaced all would be; where they stay, those that build from a sample of queries, if the
    plan's methods need another one.
    """
    if base is None or plan.growth or plan.force:
        return plan
    known = indexers()
    there = {name: record for name, record in base.methods.items() if name not in plan.methods and name in known}
    others = {name: indexer_of(known[name], record.parameters) for name, record in there.items()}
    if _has_same_context(plan, model, base):
        sampling = any(indexer.queries_wanted() for indexer in plan.methods.values())
        others = {name: indexer for name, indexer in others.items() if sampling and indexer.queries_wanted()}
    return replace(plan, methods=plan.methods | others)


def _has_same_context(plan: BuildPlan, model: ModelIdentity, base: Manifest) -> bool:
    """Whether a build would make the keys and values that an index has."""
    ids_sha256 = hash_tokens(plan.prompt.input_ids.tolist())
    recipe = context_recipe(model, ids_sha256, plan.split(), plan.dtype, plan.prefill_record, plan.kv_dtype)
    return base.files[TOKENS].recipe == recipe
