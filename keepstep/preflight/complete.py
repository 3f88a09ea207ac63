"""Whether a run has nothing left to do. Light."""

from __future__ import annotations

from typing import Any

from keepstep.config.schema import RunConfig
from keepstep.run import RunDir, read_json


def complete_result(config: RunConfig) -> dict[str, Any] | None:
    """result.json of a run that reached the step this configuration asks for, else None.

    The total may be left to the number of epochs; then what the run recorded counts.
    """
    run = RunDir.at(config.trainer.output_dir)
    if not run.result.is_file():
        return None
    result = read_json(run.result)
    asked = config.trainer.total_training_steps
    if asked is not None and asked != result["target_step"]:
        return None
    uploaded = not config.s3_enabled or result["uploaded"] == result["final_step"]
    return result if result["final_step"] == result["target_step"] and uploaded else None
