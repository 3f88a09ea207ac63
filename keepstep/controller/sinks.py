"""Where metrics are shown beside metrics.jsonl: TensorBoard always, Weights & Biases where `trainer.logger` says so.

Another place is a class with these two methods, and a line in `sinks_of`. What is only shown fails no run and holds
none up: `Reporter` leaves a sink out that raises.
"""

from __future__ import annotations

import threading
from typing import Any

from keepstep.config.schema import RunConfig
from keepstep.controller.reporting import Sink, logger
from keepstep.errors import ConfigError
from keepstep.run import RunDir

INIT_TIMEOUT_S = 30.0
END_TIMEOUT_S, LEAVE_TIMEOUT_S = 60.0, 5.0
"""For the last metrics to arrive: at the end of the run, and of an attempt that leaves in the middle."""
STEP = "training/global_step"


class TensorBoard:
    def __init__(self, run: RunDir) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.tensorboard), flush_secs=30)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self, whole: bool) -> None:
        self._writer.close()


class WeightsAndBiases:
    """One run there for all attempts of a run, under its `run_id`.

    Where W&B does not answer, the attempt's metrics stay in the run's folder until `wandb sync` brings them there.

    Raises:
        ConfigError: it is not installed, or nobody is logged in.
    """

    def __init__(self, run: RunDir, run_id: str, config: RunConfig) -> None:
        wandb = _wandb()
        fields: dict[str, Any] = {
            "project": config.trainer.project_name,
            "name": config.trainer.experiment_name,
            "id": run_id,
            "resume": "allow",
            "config": config.model_dump(mode="json"),
            "dir": str(run.root),
        }
        # Standard output is the flow's, which reads events there.
        quiet = {"console": "off", "silent": True, "init_timeout": INIT_TIMEOUT_S}
        try:
            self._run = wandb.init(**fields, settings=wandb.Settings(**quiet))
        except wandb.errors.UsageError as error:
            raise ConfigError(
                f"trainer.logger has wandb, and W&B does not take us: {error}",
                "Set WANDB_API_KEY, or WANDB_MODE=offline to keep the metrics in the run's folder.",
            ) from error
        except wandb.errors.CommError as error:
            logger.warning("W&B does not answer: %s", error)
            self._run = wandb.init(**fields, settings=wandb.Settings(**quiet, mode="offline"))
        self._where = self._run.settings.sync_dir
        # An axis of our own: W&B refuses a step of its own that lies behind its last one, as after a resume.
        self._run.define_metric("*", step_metric=STEP)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics | {STEP: step})

    def close(self, whole: bool) -> None:
        # It waits for W&B as long as that takes.
        end = threading.Thread(target=self._run.finish, args=(0 if whole else 1,), name="wandb-finish", daemon=True)
        end.start()
        end.join(END_TIMEOUT_S if whole else LEAVE_TIMEOUT_S)
        if end.is_alive():
            logger.warning("W&B has not taken all metrics yet; the rest: wandb sync %s", self._where)


def sinks_of(run: RunDir, run_id: str, config: RunConfig) -> list[Sink]:
    found: list[Sink] = [TensorBoard(run)]
    if "wandb" in config.trainer.logger and not config.trainer.debug:
        found.append(WeightsAndBiases(run, run_id, config))
    return found


def _wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        message = f"trainer.logger has wandb, which is not installed here: {error}"
        raise ConfigError(message, "pip install wandb, on the machine of the controller.") from error
    return wandb
