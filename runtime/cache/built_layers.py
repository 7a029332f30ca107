"""Whether each layer attends as it did when an index was built."""

import math
from collections.abc import Sequence

from sparsekv.formats.errors import IdentityError
from sparsekv.formats.schema import LayerFacts
from sparsekv.kernels.common.hook import AttentionCall


class BuiltLayers:
    """Compares the first call of each layer with the facts of the layer in the manifest.

    The probe runs the model's own attention. Ours gets a layer's scale, soft cap, window and sinks from transformers
    and cannot know if a version of it passes them on otherwise than the version that the index was built with.
    """

    def __init__(self, layers: Sequence[LayerFacts] = ()):
        self._left = dict(enumerate(layers))

    def check(self, call: AttentionCall) -> None:
        """Raise IdentityError where the layer's first call differs; each later call costs a look-up."""
        if (facts := self._left.pop(call.layer, None)) is None:
            return
        same_scale = math.isclose(facts.softmax_scale, call.softmax_scale, rel_tol=1e-6)
        compared: tuple[tuple[str, object, object], ...] = (
            ("softmax scale", facts.softmax_scale, facts.softmax_scale if same_scale else call.softmax_scale),
            ("soft cap", facts.softcap, call.softcap),
            ("sliding window", facts.sliding_window, call.window),
            ("attention sinks", facts.attention_sinks, call.sink_logits is not None),
        )
        for what, built, found in compared:
            if built != found:
                raise IdentityError(
                    f"{what} of layer {call.layer}",
                    built,
                    found,
                    "use the versions of transformers and sparsekv that it was built with, or build it again, with "
                    "--force",
                )
