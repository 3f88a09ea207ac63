"""The state of a run into fresh ranks: from a checkpoint, from the weights of another run, or from the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keepstep import waivers
from keepstep.checkpoint import layout
from keepstep.controller import resume_probe, statement
from keepstep.controller.groups import RankGroup
from keepstep.controller.reporting import logger
from keepstep.controller.session import Session
from keepstep.controller.staging import staged
from keepstep.controller.state import TrainState
from keepstep.controller.supervision import Supervisor
from keepstep.errors import CheckpointError
from keepstep.preflight.device import resolve_device
from keepstep.run import read_json

if TYPE_CHECKING:
    from keepstep.checkpoint.plan import ResumePlan


def load_state(
    session: Session, chosen: ResumePlan, ranks: RankGroup, supervisor: Supervisor, num_rows: int
) -> TrainState:
    """Weights, optimizer, scheduler and random streams into the ranks; the counters come back; all of it is said.

    Raises:
        CheckpointError: what was loaded is not of one save.
        ProbeError: it is not the policy that was saved.
    """
    if chosen.step is None:
        return begin_state(session, ranks)
    folder, config = session.run.checkpoint(chosen.step), session.config
    if config.trainer.debug:
        # There it is a link into the run.
        folder = folder.resolve()
    # What is lost cannot be staged.
    stage_dir = None if chosen.rebuild_scheduler else config.resume.stage_dir
    run_id, timeout_s = session.record["run_id"], config.timeouts.start_s
    with staged(folder, stage_dir, run_id, ranks, supervisor, timeout_s) as copies:
        reports = ranks.load_checkpoint(str(folder), copies, chosen.step if chosen.rebuild_scheduler else None)
    record = read_json(folder / layout.TRAINER_STATE)
    state = TrainState.from_record(record)
    if reports[0].optimizer_step != state.num_updates:
        raise CheckpointError(
            f"{folder}: its optimizer has counted {reports[0].optimizer_step} updates, its trainer state "
            f"{state.num_updates}: they are not of one save.",
            f"Take another one: keepstep plan {session.run.root}",
        )
    facts = statement.Facts(
        total_steps=session.start.total_steps,
        step=state.global_step,
        folder=str(folder),
        epoch=record["epoch"],
        num_rows=num_rows,
        next_row=state.train_dataset_offset,
        lr_last=state.metrics.get("actor/lr"),
        lr_next=ranks.learning_rate(),
        optimizer_step=reports[0].optimizer_step,
        num_without_moments=reports[0].num_without_moments,
        num_ranks=len(reports),
        num_saved_streams=reports[0].num_saved_streams,
        streams_restored=all(report.streams_restored for report in reports),
        has_cuda=resolve_device(config) == "cuda",
        probe_gap=probe_gap(session, record, ranks, str(folder)),
    )
    tolerance = resume_probe.tolerance(config.actor_rollout_ref.actor.fsdp_config.model_dtype)
    used = [waivers.SCHEDULER] if chosen.rebuild_scheduler else []
    used += [waivers.PROBE] if facts.probe_gap is not None and not facts.probe_gap <= tolerance else []
    session.write_waivers(*used)
    say_start(session, facts, chosen)
    return state


def begin_state(session: Session, ranks: RankGroup) -> TrainState:
    """The model's own weights, or those of `trainer.init_from`; everything else fresh."""
    ranks.load_initial(session.model_files(None))
    source = session.start.init_from
    if source is not None:
        left = ranks.load_weights(str(source), waivers.MISMATCHED_SIZES in session.config.resume.allow)
        logger.info("weights of %s; optimizer, schedule, data and counters begin anew", source)
        for name in left:
            logger.warning("%s of the checkpoint does not fit and is left out: the model's own stays", name)
        session.events.emit("initialised", source=str(source), left_out=left)
        session.write_waivers(*([waivers.MISMATCHED_SIZES] if left else []))
    lr = ranks.learning_rate()
    logger.info("starting at step 0 of %s, learning rate %g", f"{session.start.total_steps:,}", lr)
    return TrainState()


def probe_gap(session: Session, record: dict[str, Any], ranks: RankGroup, where: str) -> float | None:
    """How far the loaded policy's log-probs are from those of the save; None where nothing was stored.

    Raises:
        ProbeError: too far, and the start has not accepted that.
    """
    stored = record.get("probe")
    if stored is None:
        return None
    now = ranks.probe(stored["prompts"])
    if waivers.PROBE in session.config.resume.allow:
        return resume_probe.largest_gap(stored["log_probs"], now)
    precision = session.config.actor_rollout_ref.actor.fsdp_config.model_dtype
    return resume_probe.check(stored, now, precision=precision, where=where)


def say_start(session: Session, facts: statement.Facts, chosen: ResumePlan) -> None:
    lines = statement.sentences(facts, chosen)
    if session.config.trainer.debug:
        lines = [*statement.debug_lines(facts), *lines]
    for line in lines:
        logger.info(line)
    session.events.emit("state_loaded", **facts.to_record(), sentences=lines)
