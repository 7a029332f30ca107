"""Build more methods into a finished index from its own tokens: its text is not needed, which may be gone or longer."""

from sparsekv.formats.documents.prompt import FixedPrompt
from sparsekv.formats.models.load import LoadedModel
from sparsekv.formats.reader import Artifact
from sparsekv.indexing.append import chunk_size_after, stored_prefill
from sparsekv.indexing.indexers.interface import Indexer
from sparsekv.indexing.plan import BuildPlan, config_of


def adding_plan(
    artifact: Artifact, loaded: LoadedModel, methods: dict[str, Indexer], *, chunk_size: int | None = None
) -> BuildPlan:
    """The plan of a build that adds methods to an index and leaves all else as it is.

    Args:
        chunk_size: tokens per forward pass where queries have to be computed again; None lets the device decide.

    Raises:
        ArtifactError: the index was prefilled by another version, in a way that this one does not know.
    """
    manifest = artifact.manifest
    prompt = manifest.prompt
    return BuildPlan(
        loaded=loaded,
        prompt=FixedPrompt(
            artifact.input_ids(),
            prompt.text_sha256,
            prompt.chat,
            prompt.special_tokens,
            cut=prompt.max_tokens,
            border=prompt.border,
        ),
        config=config_of(manifest, methods, stored_prefill(manifest), chunk_size_after(artifact, chunk_size)),
    )
