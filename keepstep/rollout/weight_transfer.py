"""vLLM weight-transfer backend that takes host arrays, for engines that share no GPU fabric with the trainer.

The lifecycle is vLLM's own: start_weight_update, update_weights, finish_weight_update, with its layerwise reload.
The worker processes of a tensor-parallel engine map one memory that the engine's process fills part by part, and take
what is theirs of each tensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from keepstep.actor.gathering import as_tensor, buckets
from keepstep.actor.host_buffer import HostBuffer, SharedMemory, Slot, view

BACKEND = "host"
PART_BYTES = 256 * 2**20
"""Of the weights, what lies in shared memory at a time; a tensor above it lies there alone."""


@dataclass
class HostInitInfo(WeightTransferInitInfo):
    """Nothing to agree on."""


@dataclass
class HostUpdateInfo(WeightTransferUpdateInfo):
    weights: dict[str, np.ndarray] | dict[str, Slot]
    """Checkpoint-format tensors by parameter name (in shared form: where each lies in `memory`)."""
    memory: SharedMemory | None = None
    """Shared form: of the engine's process. None: the arrays are here."""


class HostWeightTransfer(WeightTransferEngine[HostInitInfo, HostUpdateInfo]):
    init_info_cls = HostInitInfo
    update_info_cls = HostUpdateInfo

    def init_transfer_engine(self, init_info: HostInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class synchronises an accelerator afterwards, which a CPU worker does not have.
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def receive_weights(self, update_info: HostUpdateInfo) -> None:
        arrays: dict[str, Any] = update_info.weights
        if update_info.memory is not None:
            memory = update_info.memory.open()
            arrays = {name: view(memory, slot) for name, slot in arrays.items()}
        # `as_tensor` copies: arrays out of a shared object store are read-only, and shared memory is filled anew while
        # layers still wait for the rest of their weights.
        self.model.load_weights((name, as_tensor(array)) for name, array in arrays.items())  # type: ignore[operator]

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        self._repack_tied_heads()

    def _repack_tied_heads(self) -> None:
        # A tied lm_head receives no weights of its own, so the layerwise reload leaves its packed CPU copy as it was:
        # the embedding would be new and the head old.
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        pass


def parts(weights: dict[str, np.ndarray], max_bytes: int) -> Iterator[dict[str, np.ndarray]]:
    """`weights` in order, cut where the next tensor would exceed `max_bytes`. Pure."""
    for names in buckets({name: array.nbytes for name, array in weights.items()}, max_bytes):
        yield {name: weights[name] for name in names}


class SharedParts:
    """Weights for processes on this host, part by part in one memory."""

    def __init__(self) -> None:
        self._buffer = HostBuffer(pinned=False)

    def of(self, weights: dict[str, np.ndarray]) -> Iterator[dict[str, Any]]:
        """Fields of a `HostUpdateInfo` per part. Each is to be received before the next is asked for."""
        for part in parts(weights, PART_BYTES):
            with warnings.catch_warnings():
                # That the arrays are read-only: they are only read.
                warnings.simplefilter("ignore", UserWarning)
                slots = self._buffer.fill({name: torch.from_numpy(array) for name, array in part.items()})
            yield {"weights": slots, "memory": self._buffer.shared()}


def register() -> None:
    """Make the backend known in this process; to be called before `LLM()`."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, HostWeightTransfer)
