"""What an attempt does by its plan before it loads anything: damaged steps are set aside, the chosen one made whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keepstep.checkpoint import layout
from keepstep.checkpoint.digest import FileDigest
from keepstep.checkpoint.manifest import parse
from keepstep.checkpoint.plan import Rejection, ResumePlan
from keepstep.checkpoint.publish import point, quarantine, sweep_temporaries
from keepstep.checkpoint.repair import Fetch, from_disk, from_model, mend_reference
from keepstep.checkpoint.verify import verify
from keepstep.config.load import without_asked_checkpoint
from keepstep.controller.reporting import logger
from keepstep.controller.session import Session
from keepstep.errors import CheckpointError, StorageError
from keepstep.preflight.model import model_folder
from keepstep.preflight.resume import make_plan
from keepstep.storage.protocol import DamagedObjectError
from keepstep.storage.remote import object_key, sweep_downloads

NO_REFERENCE = "its reference is damaged, and neither this disk, nor the model, nor the store has it whole"


def take_up(session: Session) -> ResumePlan:
    """Act on the plan: set aside what failed its verification, fetch the choice from the store if need be."""
    # Aside first: the store's copy of a damaged step goes where that one stands.
    set_aside(session, session.start.plan.rejections)
    chosen = make_ready(session, session.start.plan)
    set_aside(session, chosen.rejections[len(session.start.plan.rejections) :])
    session.attempt.check()
    sweep_downloads(session.run)
    for sentence in chosen.describe():
        logger.info(sentence)
    if chosen.step is not None:
        if not chosen.rebuild_scheduler:
            session.events.emit("checkpoint_verified", step=chosen.step)
        if not session.run.latest_link.exists() and not chosen.rebuild_scheduler:
            point(session.run.latest_link, session.run, chosen.step, session.attempt.check)
        folder = session.run.checkpoint(chosen.step)
        session.events.emit("resumed", step=chosen.step, checkpoint=str(folder), plan=chosen.to_record())
    return chosen


def take_up_again(session: Session) -> ResumePlan:
    """Plan anew within the attempt, whose ranks were lost, and act on it."""
    sweep_temporaries(session.run, session.attempt.check)
    # One checkpoint is asked for at the beginning of a start, not for what follows from it.
    session.config = without_asked_checkpoint(session.config)
    session.start.plan = plan_again(session, [])
    return take_up(session)


def set_aside(session: Session, rejections: Sequence[Rejection]) -> None:
    for rejection in rejections:
        session.events.emit(
            "checkpoint_rejected", step=rejection.step, source=rejection.source, reason=rejection.reason
        )
        folder = session.run.checkpoint(rejection.step)
        if rejection.source == "local" and folder.exists():
            quarantine(session.run, folder, rejection.step, "failed-verification", session.attempt.check)


def make_ready(session: Session, chosen: ResumePlan) -> ResumePlan:
    """Have the choice whole on disk; one that cannot be is passed over for the next best."""
    while chosen.step is not None and (problem := obstacle(session, chosen, chosen.step)):
        passed_over = [*chosen.rejections, Rejection(chosen.step, chosen.source or "local", problem)]
        chosen = plan_again(session, passed_over)
    return chosen


def obstacle(session: Session, chosen: ResumePlan, step: int) -> str:
    """Fetch or mend what was chosen; why that did not succeed, or nothing."""
    if chosen.repair:
        return "" if mend(session, step) else NO_REFERENCE
    if chosen.source == "s3":
        try:
            session.start.remote.download(
                step, session.run, session.attempt.check, lambda _: session.events.sign_of_life()
            )
        except (CheckpointError, DamagedObjectError) as error:
            return error.message
        session.events.emit("checkpoint_downloaded", step=step)
    return ""


def mend(session: Session, step: int) -> bool:
    """Mend the reference of a step that is whole otherwise; whether it verifies now."""
    manifest = parse((session.run.checkpoint(step) / layout.MANIFEST).read_bytes())
    model_dir = model_folder(session.config.actor_rollout_ref.model.path, session.run)
    sources = {"disk": from_disk(session.run), "model": from_model(model_dir, manifest)}
    if session.start.remote is not None:
        sources["store"] = from_store(session, step)
    mended = mend_reference(session.run, manifest, sources, session.attempt.check)
    for name, source in mended.items():
        session.events.emit("reference_mended", step=step, file=name, source=source)
    return verify(session.run.checkpoint(step), expected_run_id=manifest.run_id, expected_step=step).resumable


def from_store(session: Session, step: int) -> Fetch:
    def fetch(name: str, digest: FileDigest, target: Path) -> bool:
        try:
            session.start.remote.store.get_file(object_key(step, name, digest), target, digest)
        except StorageError as error:
            logger.warning("%s is not to be had from the store: %s", name, error.message)
            return False
        return True

    return fetch


def plan_again(session: Session, passed_over: Sequence[Rejection]) -> ResumePlan:
    """Once more, without the steps that were passed over; without a store that does not answer."""
    start = session.start

    def planned(remote: Any) -> ResumePlan:
        return make_plan(session.config, session.run, remote, session.record, start.total_steps, passed_over)

    try:
        return planned(start.remote)
    except StorageError as error:
        if not error.retry or not session.run.steps():
            raise
        logger.warning("the store does not answer (%s): planning from local checkpoints alone", error.message)
        try:
            return planned(None)
        except CheckpointError:
            # That there is none here says nothing of the store: it is waited for.
            raise error from None
