"""One attempt, from the checks to its outcome. The order is: checks, lease, record, plan, start, train, finish.

run_attempt ── prepare (writes nothing) ── Attempt.acquire ── Session ── execute ── outcome in attempts/<n>.json
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from keepstep.attempts import Attempt
from keepstep.checkpoint.inventory import waiting_steps
from keepstep.checkpoint.publish import sweep_temporaries
from keepstep.config.schema import RunConfig
from keepstep.controller.debugging import scratch
from keepstep.controller.finishing import finish
from keepstep.controller.reporting import logger
from keepstep.controller.session import Record, Session, outcome_of
from keepstep.controller.taking_up import take_up
from keepstep.controller.uploader import Uploader
from keepstep.errors import HeldError, StorageError, StorageRefusedError
from keepstep.events.log import Listener
from keepstep.platform import servers
from keepstep.preflight.lease import wait_until_free
from keepstep.preflight.start import Start, prepare
from keepstep.processes import ProcessRef
from keepstep.run import RunDir

if TYPE_CHECKING:
    from keepstep.controller.trainer import Trainer

MAX_NUMBERS = 10
"""Attempt numbers that a start tries before it leaves the run to the other machines that start at the same time."""


def run_attempt(
    config: RunConfig,
    *,
    flow: ProcessRef | None = None,
    listeners: Sequence[Listener] = (),
    watch_stdin: bool = False,
    on_loop: Callable[[Trainer], None] = lambda _: None,
) -> Record:
    """Train `config`'s run to its end in this process and return result.json's content.

    Args:
        on_loop: given the loop before its first step.

    Raises:
        KeepstepError: how the attempt failed; it stands in attempts/<n>.json as well.
    """
    run = RunDir.at(config.trainer.output_dir)
    start: Start | None = None
    wait_until_free(run, config.retry, logger.warning)
    try:
        start = prepare(config)
        if config.trainer.debug:
            return debug_attempt(start, listeners, watch_stdin)
        attempt = acquire(start, flow)
        session = Session(start, attempt, listeners, watch_stdin)
        session.on_loop = on_loop
        return run_to_outcome(session)
    finally:
        if start is not None and start.remote is not None:
            start.remote.close()
        servers.release(run.platform, ProcessRef.current("controller"))


def debug_attempt(start: Start, listeners: Sequence[Listener], watch_stdin: bool) -> Record:
    """One step, in a folder of its own."""
    retry = start.config.retry
    with scratch(start) as aside:
        attempt = Attempt.acquire(
            aside.run, others=[], lease_timeout_s=retry.lease_timeout_s, heartbeat_s=retry.heartbeat_s
        )
        return run_to_outcome(Session(aside, attempt, listeners, watch_stdin))


def acquire(start: Start, flow: ProcessRef | None) -> Attempt:
    """Take the next attempt number, in the run's folder and then in the store (`storage.lease` says why so)."""
    config, remote = start.config, start.remote
    for _ in range(MAX_NUMBERS):
        attempt = Attempt.acquire(
            start.run,
            others=([flow] if flow else []) + start.servers,
            lease_timeout_s=config.retry.lease_timeout_s,
            heartbeat_s=config.retry.heartbeat_s,
            at_least=(remote.highest_attempt() if remote else 0) + 1,
        )
        try:
            if remote is None or remote.claim_attempt(start.run, attempt.number):
                return attempt
            taken = HeldError(f"Attempt {attempt.number} is taken in the store by another machine.", "Start again.")
        except StorageRefusedError as error:
            attempt.close(outcome_of(error))
            raise
        except StorageError as error:
            start.warnings.append(f"The attempt's number is not in the store yet: {error.message}")
            return attempt
        attempt.close(outcome_of(taken))
    raise taken


def run_to_outcome(session: Session) -> Record:
    """`execute`, with the outcome recorded however it ends and no process left behind."""
    # What stands if even recording the failure fails.
    outcome: Record = {"status": "failed", "class": "bug", "message": "ended without a word", "retry": True}
    try:
        result = execute(session)
        session.leaving.ending = True
        outcome = {"status": "finished", "step": result["final_step"]}
        session.events.emit("finished", step=result["final_step"], result=result)
        return result
    except BaseException as error:
        session.leaving.ending = True
        failure = session.classify(error)
        outcome = outcome_of(failure)
        session.tell(failure, outcome)
        raise failure from error
    finally:
        session.close(outcome)


def execute(session: Session) -> Record:
    """The attempt itself."""
    config, total_steps = session.config, session.start.total_steps
    session.log_start()
    sweep_temporaries(session.run, session.attempt.check)
    chosen = take_up(session)
    if config.s3_enabled and not config.trainer.debug:
        session.uploader = Uploader(session.run, config, session.attempt, session.events, session.start.environment)
        for step in waiting_steps(config, session.run, total_steps):
            session.uploader.add(step)
    if config.trainer.debug or (chosen.step or 0) < total_steps:
        # Ray takes a second to import, and a start that is refused, or has nothing to train, needs none.
        from keepstep.controller.training import train

        train(session, chosen)
    if config.trainer.debug:
        return {"debug": True, "final_step": (chosen.step or 0) + 1}
    session.write_waivers()
    return finish(session)
