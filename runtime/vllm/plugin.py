"""The entry point by which vLLM loads the attention backend of sparse decode steps."""

from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend


def register() -> None:
    """Replace vLLM's attention on CPUs by `SparseCPUBackend`, which attends in the same way unless a connector has
    prepared a method."""
    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, "sparsekv.runtime.vllm.cpu_attention.SparseCPUBackend")
