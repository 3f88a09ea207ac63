"""Bringing up ranks, engines and writer for one attempt, training, and taking them down."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keepstep.actor.spec import RankSpec
from keepstep.checkpoint import layout
from keepstep.config.load import to_yaml
from keepstep.controller import resume_probe
from keepstep.controller.cluster import Cluster
from keepstep.controller.draining import DrainWatch
from keepstep.controller.groups import EngineGroup, RankGroup
from keepstep.controller.leaving import StepDropped
from keepstep.controller.recovery import Recovery
from keepstep.controller.reporting import Reporter, logger
from keepstep.controller.resuming import load_state
from keepstep.controller.samples import write_samples
from keepstep.controller.saver import SaveContext, Saver, Writers
from keepstep.controller.session import Session
from keepstep.controller.sinks import sinks_of
from keepstep.controller.state import TrainState
from keepstep.controller.supervision import Supervisor
from keepstep.controller.taking_up import take_up_again
from keepstep.controller.workforce import Workforce
from keepstep.controller.writers import FullWriter, ShardWriters
from keepstep.errors import (
    ConfigError,
    DataError,
    NoProgressError,
    NoRoomError,
    Preempted,
    StorageError,
    WorkerDiedError,
)
from keepstep.preflight import node
from keepstep.preflight.checks import FAIL
from keepstep.preflight.device import resolve_device
from keepstep.preflight.port import check_port
from keepstep.rewards.load import load_reward
from keepstep.rewards.scoring import Scorer
from keepstep.rollout.environment import engine_port
from keepstep.run import write_json

if TYPE_CHECKING:
    from keepstep.checkpoint.plan import ResumePlan
    from keepstep.controller.trainer import Parts, Trainer


LOADER_PATIENCE_S = 20.0
LAST_WORDS_S = 5.0
"""Of the grace, for ending the processes and recording the end."""


@dataclass
class Crew:
    """The workers of an attempt, and who starts more of them."""

    ranks: RankGroup
    engines: EngineGroup
    saver: Saver
    workforce: Workforce


def train(session: Session, chosen: ResumePlan) -> None:
    """Train from `chosen` to the last step; returns when the last save is verified.

    Raises:
        Preempted: asked to leave; the finished step is saved and verified.
    """
    device = resolve_device(session.config)
    rollout = session.config.actor_rollout_ref.rollout
    for index in range(rollout.num_engines):
        check_port(engine_port(rollout, index), node.PORT_KEY)
    cluster = Cluster(session.config, session.run, session.attempt, device)
    drains = DrainWatch(cluster, session.leaving, session.events)
    saver: Saver | None = None
    reporter: Reporter | None = None
    whole = False
    try:
        # The data set and the tokenizer load while the workers import.
        with Loading(session, session.model_files(chosen.step)) as loading:
            cluster.start()
            if session.config.ray.address:
                check_nodes(session)
                drains.start()
            session.leaving.take_signals()
            supervisor = Supervisor(session.leaving.check)
            supervisor.answered = session.events.sign_of_life
            crew = start_workers(session, chosen, cluster, supervisor, device)
            saver = crew.saver
            train_set, val_set, tokenizer = loading.result()
        num_rows = len(train_set)
        state = load_state(session, chosen, crew.ranks, supervisor, num_rows)
        saver.context.num_rows = num_rows
        sinks = sinks_of(session.run, session.record["run_id"], session.config)
        reporter = Reporter(session.run, session.events, session.start.total_steps, sinks)
        parts = build_parts(session, crew, (train_set, val_set, tokenizer), reporter)

        def load_again() -> TrainState:
            return load_state(session, take_up_again(session), crew.ranks, supervisor, num_rows)

        recovery = Recovery(session, crew.workforce, crew.ranks, load_again, session.config.engines_sleep(device))
        crew.engines.recovery, supervisor.see = recovery, recovery.see
        if session.config.recovery.warm_spare:
            crew.workforce.stand_by()
        fit(session, parts, state, recovery)
        whole = True
    finally:
        if saver is not None:
            saver.close()
        drains.stop()
        cluster.stop()
        if reporter is not None:
            reporter.close(whole)


def check_nodes(session: Session) -> None:
    """Shared folder, clock and compiler on every node of a cluster, before a rank starts; ports and memory are told.

    Raises:
        ConfigError: what a node says, with its name.
    """
    from keepstep.controller.nodes import on_each_node

    checks = on_each_node(node.request(session.config, session.run))
    session.events.emit("nodes_checked", checks=[check.to_record() for check in checks])
    for check in checks:
        if check.status == FAIL and check.id in ("shared_folder", "clock", "node_clock", "compiler"):
            raise ConfigError(f"{check.node}: {check.sentence}", check.remedy)
        if check.status == FAIL:
            # Perhaps what a killed attempt left there is still dying, or no worker of ours will stand there.
            logger.warning("%s: %s", check.node, check.sentence)


def fit(session: Session, parts: Parts, state: TrainState, recovery: Recovery) -> None:
    """Train to the end, over the loss of ranks as often as they may be replaced.

    Raises:
        Preempted: asked to leave; what could be saved in the grace is saved and verified.
    """
    from keepstep.controller.trainer import Trainer

    trainer = Trainer(session.config, parts, state, session.start.total_steps)
    leaving = session.leaving
    # What a save takes is not known before the first: half of the grace is kept for it.
    leaving.drops = lambda remaining_s: trainer.pace.drops(remaining_s, parts.saver.lasted_s or leaving.grace_s / 2)
    leaving.training = True
    session.on_loop(trainer)
    try:
        while True:
            try:
                train_to_end(session, trainer, parts)
                return
            except (WorkerDiedError, NoProgressError) as error:
                if leaving.heed():
                    # The machines are being taken: what was lost now is not waited for.
                    raise Preempted(
                        f"Asked to leave, and then: {error.message}", "The same command goes on."
                    ) from error
                trainer.state = recovery.replace_ranks(parts.saver, error)
    finally:
        leaving.training = False
        parts.scorer.close()


def train_to_end(session: Session, trainer: Trainer, parts: Parts) -> None:
    """The loop, then the saves that are owed; with `trainer.debug` one step and no save."""
    # Of a step that was broken off: it comes again, and counts once.
    parts.scorer.take_metrics()
    trainer.pace.begin_again()
    trainer.sync_weights()
    logger.info("engine: weight version %d", trainer.state.global_step)
    if session.config.trainer.debug:
        trainer.step()
        return
    try:
        trainer.fit()
    except StepDropped:
        remaining_s = session.leaving.remaining_s()
        logger.info("what runs is dropped, %.0f s of the grace are left: saving what stands", remaining_s)
        if trainer.state.global_step == session.start.total_steps:
            # Saved now, the run would count as done without its last validation.
            raise Preempted("Asked to leave in the last validation.", "The same command trains it again.") from None
    state = trainer.state
    if parts.saver.last_saved != state.global_step:
        trainer.save()
    parts.saver.wait()
    while parts.saver.wanted:
        # The last save failed its verification; the saver gives up by itself after two in a row.
        trainer.save()
        parts.saver.wait()
    if parts.saver.last_saved != state.global_step:
        if state.global_step < session.start.total_steps:
            # Asked to leave, with checkpoint.on_no_room=skip: what was saved before is gone on from.
            message = f"Asked to leave: step {state.global_step} could not be saved, there is no room."
            raise Preempted(message, "The same command goes on from the last step that was.")
        raise NoRoomError(f"Step {state.global_step} could not be saved: no room.", "Free space, start again.")
    if state.global_step < session.start.total_steps:
        upload_if_it_fits(session, state.global_step)
        raise Preempted(f"Asked to leave: step {state.global_step} is saved and verified.", "The same command goes on.")


def upload_if_it_fits(session: Session, step: int) -> None:
    """Bring the step that was saved on the way out into the store, if the grace allows: the disk may not stay."""
    remaining_s = session.leaving.remaining_s() - LAST_WORDS_S
    if session.uploader is None or remaining_s <= 0:
        return
    session.uploader.add(step)
    try:
        session.uploader.drain(remaining_s)
    except StorageError as error:
        logger.warning("step %d is saved here, but not in the store: %s", step, error.message)


def start_workers(session: Session, chosen: ResumePlan, cluster: Cluster, supervisor: Supervisor, device: str) -> Crew:
    """Start all processes and record them; they import side by side, the writers once the ranks have."""
    config = session.config
    model_dir = session.model_files(chosen.step)
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    engines_sleep = config.engines_sleep(device)
    specs = [
        RankSpec(
            rank=rank,
            world_size=config.world_size,
            device=device,
            model_dir=model_dir,
            base_dir=session.model_files(None) if config.actor_rollout_ref.model.lora_rank else model_dir,
            model=config.actor_rollout_ref.model,
            actor=actor,
            ref=config.actor_rollout_ref.ref,
            temperature=rollout.temperature,
            total_steps=session.start.total_steps,
            seed=config.trainer.seed,
            collective_timeout_s=config.timeouts.collective_s,
            correction=config.algorithm.rollout_correction,
            max_response_length=config.data.max_response_length,
            needs_reference=config.needs_reference,
            needs_old_log_probs=config.needs_old_log_probs,
            engines_sleep=engines_sleep,
        )
        for rank in range(config.world_size)
    ]
    workforce = Workforce(
        cluster,
        supervisor,
        specs=specs,
        model_dir=model_dir,
        max_model_len=config.data.max_prompt_length + config.data.max_response_length,
        num_engines=rollout.num_engines,
        engines_sleep=engines_sleep,
        timeout_s=config.timeouts.start_s,
    )
    for index in range(rollout.num_engines):
        workforce.start_engine(index)
    workforce.start_ranks()
    ranks = RankGroup(*workforce.ranks(), supervisor, config.timeouts)
    # The saver's thread writes on while the loop is asked to leave: that save is what stays.
    saving = Supervisor(session.leaving.check_fence)
    await_writers = start_writers(session, cluster, ranks, saving)
    ranks.connect()
    actors = [workforce.engine(index) for index in range(rollout.num_engines)]
    # Last: they import behind the others, and nothing is saved before the first step.
    writers = await_writers(supervisor)
    saver = make_saver(session, chosen, lambda: start_writers(session, cluster, ranks, saving)(saving), writers)
    cluster.record_services()
    engines = EngineGroup(actors, supervisor, config.timeouts, sleep=engines_sleep)
    return Crew(ranks, engines, saver, workforce)


def start_writers(
    session: Session, cluster: Cluster, ranks: RankGroup, saving: Supervisor
) -> Callable[[Supervisor], Writers]:
    """Start the processes that write checkpoints; what comes back waits for them, by whose waits it is given, and
    records them.

    Args:
        saving: how their saves are waited for.
    """
    start_s = session.config.timeouts.start_s
    sharded = session.config.checkpoint.layout == layout.SHARDED
    nodes = [identity["node_id"] for identity in ranks.identities] if sharded else [cluster.own_node_id()]
    actors = [cluster.writer(node_id) for node_id in nodes]
    calls = [(f"writer {index}", actor.identity.remote()) for index, actor in enumerate(actors)]

    def await_writers(waiting: Supervisor) -> Writers:
        identities = waiting.gather(calls, start_s, "starting the writers")
        for index, identity in enumerate(identities):
            cluster.record("writer", index, identity)
        if sharded:
            return ShardWriters(actors, saving, start_s)
        return FullWriter(actors[0], identities[0]["host"], saving)

    return await_writers


def make_saver(session: Session, chosen: ResumePlan, start_again: Callable[[], Writers], writers: Writers) -> Saver:
    """The saver; `start_again` starts writers in the place of lost ones and waits for them."""
    context = SaveContext(
        run=session.run,
        run_id=session.record["run_id"],
        config=session.config,
        config_yaml=to_yaml(session.config),
        model_files=session.model_files(chosen.step),
        num_rows=0,
        has_reference=session.config.has_reference,
        total_steps=session.start.total_steps,
        resumed_step=chosen.step,
        waive_exactness=session.waive_exactness(),
    )
    return Saver(context, session.attempt, session.events, session.uploader, start_again, writers)


class Loading:
    """Data sets and tokenizer, loaded by a thread. Use as a context manager.

    Concurrency: one daemon thread, which waits for nothing of ours. Who leaves the context waits for it for a moment:
    the interpreter does not like to end in the middle of an import.
    """

    def __init__(self, session: Session, model_files: str) -> None:
        self._timeout_s = session.config.timeouts.start_s
        self._loaded: Future[tuple[Any, Any, Any]] = Future()
        self._thread = threading.Thread(target=self._load, args=(session, model_files), name="data", daemon=True)

    def __enter__(self) -> Loading:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(timeout=LOADER_PATIENCE_S)

    def result(self) -> tuple[Any, Any, Any]:
        """(training set, validation set or None, tokenizer).

        Raises:
            KeepstepError: what `check_export` and `load_data` raise.
            NoProgressError: it takes too long.
        """
        if not wait_for_futures([self._loaded], self._timeout_s).done:
            raise NoProgressError(
                f"The data set and the tokenizer did not load within {self._timeout_s:.0f} s.",
                "See whether their filesystem answers; or raise timeouts.start_s.",
            )
        return self._loaded.result()

    def _load(self, session: Session, model_files: str) -> None:
        try:
            check_export(session, model_files)
            self._loaded.set_result(load_data(session, model_files))
        except BaseException as error:
            self._loaded.set_exception(error)


def check_export(session: Session, model_files: str) -> None:
    """Config, generation config and tokenizer can be written out: at the end of the run it would be too late to know.

    Raises:
        ConfigError: what transformers says against it.
    """
    from keepstep.export import dry_run

    if problem := dry_run.problem(model_files):
        remedy = "Mend the model's folder first."
        if not session.run.steps():
            # The run's record holds the model's files as they are.
            remedy = f"Mend the model's folder, and remove {session.run.root}: nothing was saved yet."
        raise ConfigError(f"An export of {model_files} would fail: {problem}", remedy)


def load_data(session: Session, model_files: str) -> tuple[Any, Any, Any]:
    """(training set, validation set, tokenizer); the counts go to the log.

    What is used of the files goes into run.json at the first start, and is held against it at every later one.

    Raises:
        DataError: other rows than those the run recorded.
    """
    from transformers import AutoTokenizer

    from keepstep.data.loader import Dataset, Split
    from keepstep.data.record import compare_usage

    tokenizer = AutoTokenizer.from_pretrained(model_files, trust_remote_code=False)
    data, seed = session.config.data, session.config.trainer.seed

    def load(split: Split, files: list[str]) -> Dataset:
        found = Dataset.load(files, data, tokenizer, split=split, seed=seed)
        logger.info("Loaded %s dataset: %d rows", split, found.num_raw_rows)
        logger.info("%s dataset after filtering: %d rows", split.capitalize(), len(found))
        return found

    train_set = load("train", session.start.train_files)
    val_set = load("val", session.start.val_files) if session.start.val_files else None
    used = {"train": train_set.usage()} | ({"val": val_set.usage()} if val_set else {})
    recorded = session.record["dataset"].setdefault("used", {})
    differences = compare_usage(recorded, used)
    if differences:
        raise DataError(
            f"The rows are not those that {session.run.root} has trained on:\n  " + "\n  ".join(differences),
            "Set it back as it was, or give this start a trainer.output_dir of its own.",
        )
    if recorded != used:
        # Of the first start, or of a run that an older release began.
        recorded |= used
        session.attempt.check()
        write_json(session.run.record, session.record)
    return train_set, val_set, tokenizer


def build_parts(session: Session, crew: Crew, data: tuple[Any, Any, Any], reporter: Reporter) -> Parts:
    from keepstep.controller.trainer import Parts

    train_set, val_set, tokenizer = data
    reward = session.config.custom_reward_function

    def report(step: int, metrics: dict[str, float]) -> None:
        reporter(step, metrics)
        crew.saver.raise_if_failed()

    return Parts(
        ranks=crew.ranks,
        engines=crew.engines,
        saver=crew.saver,
        train_set=train_set,
        val_set=val_set,
        scorer=Scorer(load_reward(reward.name, reward.path), session.config.reward_model, reward),
        probe_prompts=resume_probe.choose_prompts([row.prompt_ids for row in (val_set or train_set).rows]),
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        pad_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0,
        report=report,
        report_validation=reporter.validated,
        keep=lambda step, samples: write_samples(session.run.rollouts, step, samples),
        leaving=session.leaving,
    )
