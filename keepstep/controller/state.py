"""The counters of a run. With the tensors, the random streams and the configuration they are the whole state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from keepstep.data.order import epoch_of


@dataclass
class TrainState:
    """Counters since the run began; the same after any number of resumes."""

    global_step: int = 0
    train_dataset_offset: int = 0
    """Rows of the training set handed out, over all ranks and epochs."""
    val_dataset_offset: int = 0
    """Rows of the validation set handed out, over all validations."""
    num_gen_batches: int = 0
    """Batches of prompts rolled out: one a step, more with dynamic sampling."""
    num_updates: int = 0
    """Optimizer updates."""
    num_response_tokens: int = 0
    """Tokens trained on."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the last step, with its validation if it had one; nothing that depends on time."""
    probe: dict[str, Any] | None = None
    """Log-probs of a few prompts under the policy at the save (`controller.resume_probe`)."""

    def to_record(self, num_rows: int) -> dict[str, Any]:
        """trainer_state.json without the random streams; `epoch` is that of the next row, from 1."""
        return {
            "global_step": self.global_step,
            "epoch": epoch_of(self.train_dataset_offset, num_rows),
            "dataloader_state": {
                "train_dataset_offset": self.train_dataset_offset,
                "val_dataset_offset": self.val_dataset_offset,
            },
            "num_train_rows": num_rows,
            "num_gen_batches": self.num_gen_batches,
            "num_updates": self.num_updates,
            "num_response_tokens": self.num_response_tokens,
            "metrics": self.metrics,
            **({"probe": self.probe} if self.probe is not None else {}),
        }

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> TrainState:
        return cls(
            global_step=record["global_step"],
            train_dataset_offset=record["dataloader_state"]["train_dataset_offset"],
            val_dataset_offset=record["dataloader_state"]["val_dataset_offset"],
            # Older checkpoints do not have it, nor dynamic sampling.
            num_gen_batches=record.get("num_gen_batches", record["global_step"]),
            num_updates=record["num_updates"],
            num_response_tokens=record["num_response_tokens"],
            metrics=dict(record["metrics"]),
        )
