"""vLLM weight-transfer backend that takes host arrays, for engines that share no GPU fabric with the trainer.

The lifecycle is vLLM's own: start_weight_update, update_weights, finish_weight_update, with its layerwise reload.
"""

from __future__ import annotations

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

BACKEND = "host"


@dataclass
class HostInitInfo(WeightTransferInitInfo):
    """Nothing to agree on."""


@dataclass
class HostUpdateInfo(WeightTransferUpdateInfo):
    weights: dict[str, np.ndarray]
    """Checkpoint-format tensors by parameter name."""


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
        # torch.tensor copies: arrays out of a shared object store are read-only.
        self.model.load_weights((name, torch.tensor(array)) for name, array in update_info.weights.items())  # type: ignore[operator]

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


def register() -> None:
    """Make the backend known in this process; to be called before `LLM()`."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, HostWeightTransfer)
