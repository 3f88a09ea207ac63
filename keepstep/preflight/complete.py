"""Whether a run has nothing left to do. Light."""

from __future__ import annotations

from typing import Any

from keepstep.checkpoint.verify import verify
from keepstep.config.load import load, resolve_total_steps
from keepstep.config.schema import RunConfig
from keepstep.preflight import contract
from keepstep.run import RunDir, read_json


def complete_result(config: RunConfig) -> dict[str, Any] | None:
    """result.json of a run that has reached what this configuration asks for, else None.

    Anything that the full checks might refuse (other data, another model, a changed setting, a missing last
    checkpoint) is left to them: only the same start again is answered here.
    """
    run = RunDir.at(config.trainer.output_dir)
    if config.trainer.debug or not (run.result.is_file() and run.has_record() and run.config.is_file()):
        return None
    result, record, first = read_json(run.result), read_json(run.record), load(str(run.config))
    if (config.data, config.actor_rollout_ref.model) != (first.data, first.actor_rollout_ref.model):
        return None
    recorded = record["contract"]
    total_steps = resolve_total_steps(config, record["dataset"]["num_rows"])
    terms = contract.terms(
        config,
        model_fingerprint=recorded["model.fingerprint"],
        total_steps=total_steps,
        init_from_fingerprint=recorded.get("init_from.fingerprint", ""),
    )
    if contract.serious(contract.compare(recorded, terms)):
        return None
    # The record may speak of a longer run already, to which a start has agreed that did not get far.
    if {result["final_step"], result["target_step"]} != {total_steps}:
        return None
    if config.s3_enabled and result["uploaded"] != result["final_step"]:
        return None
    there = run.upload(result["final_step"]).is_file() or verify(run.checkpoint(result["final_step"]), quick=True).ok
    return result if there else None
