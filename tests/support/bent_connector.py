"""A faulty connector of vLLM: it moves the channels of the keys of bent.skv by one, as if they had another layout."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from sparsekv.runtime.vllm.connector import SparseKVConnector, Transfer, WorkerSide
from sparsekv.runtime.vllm.paged import PagedLayer


class BentConnector(SparseKVConnector):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.WORKER:
            self._worker.__class__ = BentWorker


class BentWorker(WorkerSide):
    def load(self, transfer: Transfer) -> None:
        straight = self._layers
        for rows in transfer.loads:
            if Path(rows.index).name == "bent.skv":
                self._layers = {number: bent(layer) for number, layer in straight.items()}
            super().load(Transfer([rows]))
            self._layers = straight


def bent(layer: PagedLayer) -> PagedLayer:
    def write(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        layer.write(keys.roll(1, 2), values, cache, slots)

    return replace(layer, write=write)
