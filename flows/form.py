"""What a person sets most often, as fields of the form on a deployment's page; `overrides` has everything, and wins."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field, NonNegativeFloat, PositiveInt

SETTINGS = {
    "output_dir": "trainer.output_dir",
    "model_path": "actor_rollout_ref.model.path",
    "train_files": "data.train_files",
    "val_files": "data.val_files",
    "total_training_steps": "trainer.total_training_steps",
    "save_freq": "trainer.save_freq",
    "learning_rate": "actor_rollout_ref.actor.optim.lr",
    "seed": "trainer.seed",
    "s3_bucket": "s3.bucket",
    "s3_prefix": "s3.prefix",
    "resume_policy": "resume.policy",
}
"""Field to setting."""


class TrainingForm(BaseModel, extra="forbid"):
    """Settings of a run; what is left empty is as the configuration has it."""

    output_dir: str | None = Field(None, title="Run folder", description="The same folder goes on with the same run.")
    model_path: str | None = Field(None, title="Model", description="A Hugging Face folder.")
    train_files: list[str] | None = Field(None, title="Training data", description="Parquet: paths, globs, s3://…")
    val_files: list[str] | None = Field(None, title="Validation data")
    total_training_steps: PositiveInt | None = Field(None, title="Steps")
    save_freq: PositiveInt | None = Field(None, title="Steps between checkpoints")
    learning_rate: NonNegativeFloat | None = Field(None, title="Learning rate")
    seed: int | None = Field(None, title="Seed")
    s3_bucket: str | None = Field(None, title="Bucket", description="Where checkpoints go.")
    s3_prefix: str | None = Field(None, title="Key prefix")
    resume_policy: Literal["prefer_multiple", "latest"] | None = Field(
        None, title="Resume from", description="prefer_multiple: milestones first; latest: the newest good checkpoint."
    )

    def to_overrides(self) -> dict[str, Any]:
        """Dotted key to value of what was filled in."""
        return {SETTINGS[field]: value for field, value in self.model_dump(exclude_none=True).items()}
