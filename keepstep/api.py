"""Keepstep as a library: the trainer in the calling process, with callbacks.

    from keepstep.api import Callback, CheckpointPolicy, Trainer, save_pretrained

    trainer = Trainer("quickstart", checkpoint=CheckpointPolicy(save_dir="runs/mine", save_freq=10))
    trainer.fit()
    save_pretrained(model=trainer.actor, save_path="mine")

It is `keepstep train`: the same run folder, the same checks, the same exact resume; whoever calls `fit` again goes on.
Retries and schedules are the flow's (`keepstep run`). Everything but this module's own import happens in `fit`.

Concurrency: `fit` runs the loop in the calling thread, which must be the main one (it takes SIGTERM and SIGINT), and
calls `on_step` and `on_validation` there. `on_save` and `on_verified` are called from the saver's thread.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepstep.config.load import load, validate
from keepstep.config.schema import RunConfig
from keepstep.errors import ConfigError
from keepstep.preflight.model import model_folder
from keepstep.run import RunDir

if TYPE_CHECKING:
    import torch

    from keepstep.controller.trainer import Trainer as Loop

Metrics = dict[str, float]


class Callback:
    """What a caller wants to hear of. One that raises in the loop's thread ends the attempt, as any bug does."""

    def on_step(self, trainer: Trainer, step: int, metrics: Metrics) -> None:
        """A step is finished; `metrics` are those of metrics.jsonl."""

    def on_validation(self, trainer: Trainer, step: int, metrics: Metrics) -> None:
        """A step's validation is finished; `metrics` are those that begin with `val/`."""

    def on_save(self, trainer: Trainer, step: int) -> None:
        """A checkpoint is written and published, not yet read back."""

    def on_verified(self, trainer: Trainer, step: int) -> None:
        """A checkpoint is verified: a start may go on from it."""

    def on_end(self, trainer: Trainer, result: dict[str, Any]) -> None:
        """The last step is reached, saved and verified; `result` is result.json."""


@dataclass(frozen=True)
class CheckpointPolicy:
    """When and where checkpoints are kept, under the names that verl's guides use. None: the configuration's own."""

    save_dir: str | os.PathLike[str] | None = None
    """The run's folder: `trainer.output_dir`."""
    save_freq: int | None = None
    """Steps between checkpoints: `trainer.save_freq`."""
    keep_last_n: int | None = None
    """`checkpoint.keep_last`."""
    keep_every_n: int | None = None
    """`checkpoint.keep_every`."""
    keep_best_n: int | None = None
    """`checkpoint.keep_best`."""
    best_metric: str | None = None
    """`checkpoint.best_metric`."""

    def overrides(self) -> list[str]:
        """The settings that it stands for."""
        keys = {
            "save_dir": "trainer.output_dir",
            "save_freq": "trainer.save_freq",
            "keep_last_n": "checkpoint.keep_last",
            "keep_every_n": "checkpoint.keep_every",
            "keep_best_n": "checkpoint.keep_best",
            "best_metric": "checkpoint.best_metric",
        }
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return [f"{keys[name]}={value}" for name, value in given.items() if value is not None]


class Trainer:
    """One run, trained in this process."""

    def __init__(
        self,
        config: str | os.PathLike[str],
        overrides: Sequence[str] = (),
        *,
        callbacks: Sequence[Callback] = (),
        checkpoint: CheckpointPolicy | None = None,
        resume_from_checkpoint: str | os.PathLike[str] | None = None,
    ) -> None:
        """
        Args:
            config: name of a packaged configuration, or path of a YAML file.
            overrides: `dotted.key=value`, as on the command line.
            resume_from_checkpoint: exactly this checkpoint of the run; None: the best verified one, or a new run.

        Raises:
            ConfigError: settings that are unknown or do not go together.
        """
        given = [*overrides, *(checkpoint.overrides() if checkpoint else [])]
        if resume_from_checkpoint is not None:
            given.append(f"trainer.resume_from_checkpoint={os.fspath(resume_from_checkpoint)}")
        self.config: RunConfig = load(os.fspath(config), given)
        validate(self.config)
        if self.config.ray.address is not None:
            raise ConfigError(
                f"ray.address={self.config.ray.address}: as a library the trainer runs in this process.",
                "Leave it out, or submit the run to the cluster: keepstep run.",
            )
        self.run = RunDir.at(self.config.trainer.output_dir)
        self.scheduler = Scheduler(self)
        self.actor = Actor(self)
        self._callbacks = list(callbacks)
        self._loop: Loop | None = None

    def fit(self) -> dict[str, Any]:
        """Train to the last step, or go on with it; returns result.json's content.

        Raises:
            KeepstepError: how the attempt failed. `Preempted` after SIGTERM or Ctrl-C: what was done is saved.
        """
        from keepstep.controller.attempt import run_attempt
        from keepstep.preflight.complete import complete_result

        result = complete_result(self.config)
        if result is None:
            try:
                result = run_attempt(self.config, listeners=[self._hear], on_loop=self._observe)
            finally:
                self._loop = None
        for callback in self._callbacks:
            callback.on_end(self, result)
        return result

    @property
    def global_step(self) -> int:
        """Finished steps: of the loop while it runs, else of the newest checkpoint."""
        return self._loop.state.global_step if self._loop else max(self.run.steps(), default=0)

    def save_checkpoint(self) -> None:
        """Save at the end of the running step; from a callback.

        Raises:
            ConfigError: nothing is being trained; what was trained is saved already.
        """
        self.loop.parts.saver.wanted = True

    @property
    def loop(self) -> Loop:
        """The loop itself (`keepstep/controller/trainer.py`).

        Raises:
            ConfigError: it does not run.
        """
        if self._loop is None:
            raise ConfigError("The trainer does not run: this works in callbacks, while `fit` does.")
        return self._loop

    def newest_checkpoint(self) -> Path:
        """
        Raises:
            ConfigError: there is none yet.
        """
        steps = self.run.steps()
        if not steps:
            raise ConfigError(f"{self.run.root} has no checkpoint yet.", "Call fit() first.")
        return self.run.checkpoint(max(steps))

    @property
    def running(self) -> bool:
        return self._loop is not None

    def _observe(self, loop: Loop) -> None:
        """The loop is about to begin."""
        self._loop = loop
        report, report_validation = loop.parts.report, loop.parts.report_validation

        def told(step: int, metrics: Metrics) -> None:
            report(step, metrics)
            for callback in self._callbacks:
                callback.on_step(self, step, metrics)
                self._validated(callback, step, metrics)

        def told_validation(step: int, metrics: Metrics) -> None:
            report_validation(step, metrics)
            for callback in self._callbacks:
                self._validated(callback, step, metrics)

        loop.parts.report, loop.parts.report_validation = told, told_validation

    def _validated(self, callback: Callback, step: int, metrics: Metrics) -> None:
        validation = {name: value for name, value in metrics.items() if name.startswith("val/")}
        if validation:
            callback.on_validation(self, step, validation)

    def _hear(self, event: dict[str, Any]) -> None:
        if self._loop is None:
            # What a start verifies before it goes on is no news.
            return
        for callback in self._callbacks:
            if event["event"] == "checkpoint_saved":
                callback.on_save(self, event["step"])
            elif event["event"] == "checkpoint_verified":
                callback.on_verified(self, event["step"])


@dataclass(frozen=True)
class Scheduler:
    """The learning-rate schedule of a trainer."""

    trainer: Trainer

    def get_last_lr(self) -> list[float]:
        """The rate that the next step uses, as torch's schedulers say it."""
        if self.trainer.running:
            return [self.trainer.loop.parts.ranks.learning_rate()]
        from keepstep.checkpoint import layout, reader

        state = reader.read_file(self.trainer.newest_checkpoint() / layout.SCHEDULER)
        return [float(rate) for rate in state["_last_lr"]]


@dataclass(frozen=True)
class Actor:
    """The policy of a trainer."""

    trainer: Trainer

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Full float32 tensors by the base model's names, as they are now or as the newest checkpoint has them."""
        if self.trainer.running:
            import torch

            weights = self.trainer.loop.parts.ranks.fetch_weights()
            return {name: torch.tensor(value) for name, value in weights.items()}
        from keepstep.export.hugging_face import whole_policy

        found = whole_policy(self.trainer.newest_checkpoint()).weights
        return {name: found.read(name) for name in found.shapes()}


def save_pretrained(model: Actor, save_path: str | os.PathLike[str], dtype: str = "float32") -> Path:
    """A Hugging Face folder with the policy's weights, its config and tokenizer.

    Returns:
        the folder.

    Raises:
        ConfigError: the folder exists.
        CheckpointError: the newest checkpoint does not verify.
    """
    from keepstep.export import hugging_face
    from keepstep.export.weights import Held

    target, trainer = Path(save_path), model.trainer
    if not trainer.running:
        hugging_face.export(trainer.newest_checkpoint(), target, dtype)
        return target
    hugging_face.export_weights(
        Held(model.state_dict()), model_folder(trainer.config.actor_rollout_ref.model.path, trainer.run), target, dtype
    )
    return target
