"""Choose dense attention or a method by the time of a decode step on this machine, measured once and kept in the user's
cache folder. Times of a busy machine are not kept."""

import json
import math
import os
import platform
from dataclasses import asdict, dataclass, replace
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

import torch

from sparsekv.formats.checksums import hash_json
from sparsekv.formats.errors import SparsekvError
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import layer_file
from sparsekv.formats.user.cache import cache_root, read_small, replace_small
from sparsekv.kernels.attention.flash_attention import flash_attention_3
from sparsekv.runtime.attention.config import DecodeConfig, Dense
from sparsekv.runtime.attention.plan import LayerPlan
from sparsekv.runtime.benchmark.clock import clock_for
from sparsekv.runtime.benchmark.layer_timer import SettingTimes
from sparsekv.runtime.benchmark.sources import middle_layer
from sparsekv.runtime.decoding.prepare import residual_source
from sparsekv.runtime.decoding.step import step_sizes
from sparsekv.runtime.decoding.threads import Usage, left_free, usage
from sparsekv.runtime.selection.checked import code_of
from sparsekv.runtime.selection.interface import Budget, MethodSpec

FOLDER, REVISION = "step-times", 2
ROUNDS = 5
"""Number of times that both steps are timed in turn. The fastest round counts, because other load only adds time."""
STEADY = 1.5
"""Times are kept if the measure of other load that `_Compared.measure` returns is at most this large."""
COMPILERS = {"cpu": "numba", "cuda": "triton"}
"""Package that compiles kernels, by device type. Without it torch computes the steps, which takes several times as
long."""
RUNS = {"cpu": 3, "cuda": 10}
"""Number of timed runs per step and round, by device type."""


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of one layer's decode step, by dense attention and by a method: the median of the fastest round.

    `method` is None if the time of one layer does not tell the time of the model's step. That is so if several
    questions cannot share the method's step, or if on a GPU the step cannot be captured as a CUDA graph.
    """

    dense: float
    method: float | None

    @property
    def prefers_method(self) -> bool:
        return self.method is not None and self.method < self.dense


@dataclass(frozen=True)
class Choice:
    """The faster of dense attention and a method.

    Attributes:
        config: the config of the faster one.
        method: the method that dense attention was compared with.
        questions: number of questions that share a step.
        measured: when the times were measured, and whether they are kept, in words.
    """

    config: DecodeConfig
    method: str
    questions: int
    times: StepTimes
    measured: str

    @property
    def told(self) -> str:
        """The choice, both times and their origin, as a line for the user."""
        asked = f"{self.questions} question{'s' * (self.questions != 1)}"
        dense, method = f"{self.times.dense:.3g} ms", self.times.method
        taken = "dense attention" if isinstance(self.config.attention, Dense) else self.method
        if method is None:
            apart = "answers one question at a time" if self.questions > 1 else "has no CUDA graph"
            of_dense = f"{dense} a layer" if taken != self.method else f"dense attention {dense} a layer"
            why = f"{of_dense}; {self.method} {apart}"
        elif self.times.prefers_method:
            why = f"{method:.3g} ms a layer, dense attention {dense}"
        else:
            why = f"{dense} a layer, {self.method} {method:.3g} ms"
        return f"--method auto: {taken} ({asked}: {why}; {self.measured})"

    def record(self) -> dict[str, Any]:
        """Return the choice as a JSON object."""
        return {
            "taken": self.config.attention.name,
            "batch_size": self.questions,
            "dense_ms": self.times.dense,
            "compared_with": self.method,
            "compared_ms": self.times.method,
        }


def choose_faster(
    artifact: Artifact, config: DecodeConfig, questions: int, device: torch.device, dtype: torch.dtype
) -> Choice:
    """Choose a method or dense attention, whichever takes less time for a step of `questions` questions.

    Dense attention is chosen if the times are equal. The times come from the user's cache. Times that are not cached
    are measured, and stored in the cache unless other load may have changed them.

    Args:
        config: a config with a method.
        dtype: dtype of the model.

    Raises:
        SparsekvError: one layer does not fit the device's memory.
        ArtifactError: files of the index are damaged.
    """
    form = config.attention
    if isinstance(form, Dense):
        raise TypeError("dense attention is compared with a method")
    compared = _Compared(artifact, form, config.budget, questions, device, dtype)
    facts = compared.facts()
    key = hash_json(facts)
    file = cache_root() / FOLDER / f"{key[:32]}.json"
    kept = _parsed(read_small(file), key)
    if kept is not None:
        day, times = kept
        measured = f"measured on {day}"
    else:
        times, load = compared.measure()
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the size of a batch follows from the memory that is free
        measured = (
            "measured now and kept" if load <= STEADY else "measured now on a busy machine, so the times are not kept"
        )
        if load <= STEADY:
            found = {"of": facts, "day": f"{date.today()}", "dense_ms": times.dense, "method_ms": times.method}
            replace_small(file, json.dumps(found) + "\n")
    if not times.prefers_method:
        config = config.densely()
    return Choice(config, form.name, questions, times, measured)


def choose_for_numbers(
    artifact: Artifact, config: DecodeConfig, slots: int, device: torch.device, dtype: torch.dtype
) -> tuple[DecodeConfig, list[Choice]]:
    """Find the number of answers from which on a shared step attends densely; `slots` is the largest number of answers.

    The numbers of `step_sizes` are tried by `choose_faster`, the largest first, until the method is faster, or until
    the time of its step is not known (`StepTimes`).

    Returns:
        The config with `dense_from`, or the config of dense attention if that is faster for one answer, too; and the
        choice for each number that was timed. Raises the errors of `choose_faster`.
    """
    choices, found = list[Choice](), config
    for size in step_sizes(slots):
        choices.append(choose_faster(artifact, config, size, device, dtype))
        times = choices[-1].times
        if times.method is None or times.prefers_method:
            choices[-1] = replace(choices[-1], config=config)
            break
        found = replace(config, dense_from=size) if size > 1 else choices[-1].config
    return found, choices


@dataclass(frozen=True)
class _Compared:
    """The steps whose times are compared: those of `questions` questions over an index, by a method and densely."""

    artifact: Artifact
    form: MethodSpec
    budget: Budget
    questions: int
    device: torch.device
    dtype: torch.dtype

    def facts(self) -> dict[str, Any]:
        """Return everything that the times depend on, as a JSON object.

        The number of tokens is rounded to an eighth of an octave. A CPU is named by its machine, because not every
        system reports the name of the processor.
        """
        manifest, layer = self.artifact.manifest, middle_layer(self.artifact)
        kv_heads, channels = self.artifact.heads_and_channels(layer)
        record, on_gpu = manifest.methods.get(self.form.name), self.device.type == "cuda"
        source, attention = self._residual_source(), manifest.attending[layer]
        return {
            "revision": REVISION,
            "sparsekv": version("sparsekv"),
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(self.device) if on_gpu else platform.node(),
            "threads": None if on_gpu else torch.get_num_threads(),
            "compiler": _version_of(COMPILERS[self.device.type]),
            "flash_attention": getattr(flash_attention_3(), "__name__", None) if on_gpu else None,
            "query_heads": manifest.files[layer_file("queries", layer)].tensors["tail"].shape[0],
            "kv_heads": kv_heads,
            "channels": channels,
            "softcap": attention.softcap is not None,
            "attention_sinks": attention.attention_sinks,
            "dtype": str(self.dtype),
            "kv_storage": None if manifest.kv_storage is None else manifest.kv_storage.dtype,
            "tokens": round(2 ** (round(8 * math.log2(manifest.split.tokens)) / 8)),
            "exact_tokens": manifest.split.sinks + manifest.split.tail,
            "questions": self.questions,
            "method": self.form.name,
            "parameters": asdict(self.form.method),
            "residual": None if source is None else [source, manifest.methods[source].parameters],
            "built": None if record is None else record.parameters,
            "code": code_of(type(self.form.method)),
            "budget": self.budget.value,
        }

    def _residual_source(self) -> str | None:
        """Return the method whose centroids a residual reads in each step; None without a residual."""
        replaces = self.form.method.replaces()
        return residual_source(self.artifact) if self.form.residual and not replaces else None

    @torch.inference_mode()
    def measure(self) -> tuple[StepTimes, float]:
        """Time both steps over the index's middle layer.

        The second result measures other load on the machine: the median round's time, divided by the fastest round's.
        It is about 1 without other load. The median is used, because a process's first round is always slow. On a CPU
        the second result is at least `crowding`, because steady load slows all rounds equally.

        Raises:
            SparsekvError: the device's memory is too small.
        """
        clock = clock_for(self.device, RUNS[self.device.type], cold=True)
        try:
            layer = SettingTimes(self.artifact, clock, self.questions, self.dtype)
            sparse, plan = layer.sparse_step(self.form, self.budget)
            comparable = self._is_comparable(plan)
            steps = [(layer.dense_step(), 1), *([(sparse, self.form.method.cycle())] if comparable else [])]
            before = usage() if self.device.type == "cpu" else None
            rounds = [[clock.time(step, cycle).median for step, cycle in steps] for _ in range(ROUNDS)]
        except torch.OutOfMemoryError:
            raise SparsekvError(
                f"--method auto: keys and values of one layer do not fit the memory of {self.device}; name a method "
                "with --method, and give --placement host"
            ) from None
        by_step = [*zip(*rounds, strict=True)]
        fastest = [min(one) for one in by_step]
        scatter = max(median(one) / min(one) for one in by_step)
        return StepTimes(fastest[0], fastest[1] if comparable else None), max(scatter, crowding(before))

    def _is_comparable(self, plan: LayerPlan) -> bool:
        if self.questions > 1:
            return self.form.method.can_unite() and plan.shareable
        return self.device.type == "cpu" or plan.graph_state() is not None


def _version_of(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def crowding(before: Usage | None) -> float:
    """Return the number of cores that torch's threads use, divided by the number that other processes left free since
    `before`; 1 if the use of cores is not known."""
    if before is None or (now := usage()) is None:
        return 1.0
    cores = len(os.sched_getaffinity(0))
    return min(torch.get_num_threads(), cores) / max(left_free(before, now, cores), 0.1)


def _parsed(text: str, key: str) -> tuple[date, StepTimes] | None:
    """Parse the day and the times in a cache file's text; None if it is damaged, or has the times of another key."""
    try:
        found = json.loads(text)
        if hash_json(found["of"]) != key:
            return None
        method = found["method_ms"]
        times = StepTimes(_milliseconds(found["dense_ms"]), None if method is None else _milliseconds(method))
        return date.fromisoformat(found["day"]), times
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _milliseconds(value: Any) -> float:
    if type(value) is not float or not 0 < value < math.inf:
        raise ValueError("no time")
    return value
