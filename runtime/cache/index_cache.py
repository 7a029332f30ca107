"""The KV cache of a model that decodes over a stored context, made of dense and sparse layers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sparsekv.formats.errors import IdentityError, SparsekvError
from sparsekv.formats.index.schema import LayerFacts
from sparsekv.kernels.common.given_rows import CalledCache
from sparsekv.kernels.common.hook import AttentionCall
from sparsekv.runtime.cache.buffers import ModelGraph, read_share, total_read
from sparsekv.runtime.cache.stored_layer import DynamicSlot, StoredLayer


class BuiltLayers:
    """Compares each layer's first attention call with the layer's facts in the manifest.

    The probe cannot make this check, because it runs the model's own attention. Our attention gets a layer's scale,
    soft cap, window and sinks from transformers. Another version of transformers may pass them on differently than the
    version that the index was built with.
    """

    def __init__(self, layers: Sequence[LayerFacts] = ()):
        self._left = dict(enumerate(layers))

    def check(self, call: AttentionCall) -> None:
        """Raise IdentityError if the layer's first call differs from its facts; a later call is only a dict look-up."""
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


@dataclass(frozen=True)
class LayerStats:
    """One layer's missed-mass figures since counting began.

    `missed` is the estimated missed share, a mean over heads and queries. `raised` and `dense` are the shares of heads
    for which a guard raised the budget or fell back to dense attention.
    """

    layer: int
    missed: float
    raised: float
    dense: float


class IndexCache(CalledCache):
    """A transformers cache of stored layers; `attend` is the attention function to route a model's calls to.

    Between `reserve` and `release` each layer appends one row per step, so that the step can be captured as a CUDA
    graph. A `DynamicSlot` on the device has the index of that row. `graph` is the last captured graph; `capturing` is
    False once a capture has failed. `rewinds` counts calls of `rewind`, so that a `Batch` that shares the rows notices
    when another question was asked.
    """

    def __init__(self, layers: list[StoredLayer], built: BuiltLayers | None = None):
        super().__init__(layers=list(layers))
        self.built = built or BuiltLayers()
        self.stored_layers = layers
        self.graph: ModelGraph | None = None
        self.capturing = True
        self.rewinds = 0
        self.rows = torch.zeros(len(layers), dtype=torch.int64, device=layers[0].keys.device)
        self.counts = torch.zeros_like(self.rows, dtype=torch.int32)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Append a layer's new rows and attend to stored and new rows; return [Hq, Q, D].

        Raises:
            IdentityError: the layer attends differently than when the index was built.
        """
        self.built.check(call)
        layer = self.stored_layers[call.layer]
        layer.update(call.keys[None], call.values[None])
        return layer.attend(call)

    @property
    def capturable(self) -> bool:
        """Whether a captured decode step can be replayed for all that follow."""
        return self.capturing and all(layer.capturable for layer in self.stored_layers)

    def reserve(self, tokens: int) -> None:
        """Switch to appending one row per step, with capacity for `tokens` rows; may reallocate the buffers."""
        for number, layer in enumerate(self.stored_layers):
            one = slice(number, number + 1)
            layer.reserve(DynamicSlot(self.rows[one], self.counts[one]), tokens)
        used = torch.tensor([layer.used for layer in self.stored_layers])
        self.rows.copy_(used)
        self.counts.copy_(used + 1)

    def room_left(self) -> int:
        """Return the number of rows that still fit into the buffers of every layer."""
        return min(layer.room_left() for layer in self.stored_layers)

    def advance_on_device(self) -> None:
        """Increment each layer's `DynamicSlot` on the device, at the end of a step; captured with the step."""
        self.rows += 1
        self.counts += 1

    def advance(self) -> None:
        """Count one more row in each layer on the host, at the end of a step; needed after a replay too."""
        for layer in self.stored_layers:
            layer.advance()

    def release(self) -> None:
        """Switch back to appending any number of rows per step."""
        for layer in self.stored_layers:
            layer.release()

    def counters(self) -> list[torch.Tensor]:
        """Return the device tensors that a step changes, except the buffers that it writes its row to."""
        read = [one for layer in self.stored_layers if layer.read is not None for one in layer.read.counters()]
        return [self.rows, self.counts, *read]

    def buffers(self) -> tuple[int, ...]:
        """Return a fingerprint of all buffers; a captured step is valid as long as it does not change."""
        return tuple(number for layer in self.stored_layers for number in layer.buffers())

    @torch.inference_mode()
    def rewind(self) -> None:
        """Restore the stored context for the next question; works after a failed question too."""
        self.rewinds += 1
        self.release()
        for layer in self.stored_layers:
            layer.rewind()

    def check_length(self, tokens: int) -> None:
        """Raise SparsekvError unless every layer has `tokens` tokens, or every layer has one token less.

        Without this check transformers would prefill the tokens that it considers missing, possibly the whole document,
        and append rows that the cache already has.
        """
        lengths = {layer.get_seq_length() for layer in self.stored_layers}
        if len(lengths) > 1 or not lengths <= {tokens, tokens - 1}:
            found = " and ".join(f"{length:,}" for length in sorted(lengths))
            raise SparsekvError(
                f"the cache has {found} tokens where the question follows {tokens:,}: something else wrote to it; ask "
                "with a new asker"
            )

    def expect_prompt(self, tokens: int) -> None:
        """Prepare for an answer after a prompt of `tokens` tokens, stored tokens included.

        The prompt tokens that the cache lacks are prefilled, in calls of any length. Each later token is a decode step.
        The counts of rows read and of missed mass are reset. After `rewind` no prompt is expected.
        """
        for layer in self.stored_layers:
            layer.expect_prompt(tokens)
            layer.start_counting()

    def kv_fraction(self) -> float:
        """Return the rows read for the middle divided by those that dense attention reads, over all decode steps.

        Returns 1 if all layers are dense, because dense layers count nothing. Needs one sync.
        """
        counts = [layer.read for layer in self.stored_layers if layer.read is not None]
        dense = sum(count.dense for count in counts)
        return read_share(total_read(counts), dense, counted=bool(counts))

    def stats(self) -> list[LayerStats]:
        """Return the missed-mass figures of each layer that has measured any; one sync per layer."""
        measured = ((number, layer.missed()) for number, layer in enumerate(self.stored_layers))
        return [LayerStats(number, *shares) for number, shares in measured if shares is not None]
