"""Everything that is checked before a run is touched. A refused start writes nothing into the run.

Order: configuration, store, data, model, contract, checkpoints. The lease comes after, in the trainer.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keepstep.checkpoint.history import uploaded_steps, verified_steps
from keepstep.checkpoint.plan import Rejection, ResumePlan, plan
from keepstep.checkpoint.verify import verify
from keepstep.config.load import resolve_total_steps, validate
from keepstep.config.schema import RunConfig
from keepstep.data import record as dataset_record
from keepstep.data.count import count_rows
from keepstep.data.loader import REWARD_MODEL
from keepstep.data.spec import resolve_files
from keepstep.errors import (
    CheckpointError,
    ConfigError,
    ContractError,
    DataError,
    NoRoomError,
    StorageError,
    StorageRefusedError,
)
from keepstep.platform import servers
from keepstep.preflight import contract
from keepstep.preflight.device import resolve_device
from keepstep.preflight.model import check_model, fingerprint
from keepstep.processes import ProcessRef
from keepstep.quickstart.make import PREFIX, made_path, make_data, make_model
from keepstep.rewards.load import load_reward
from keepstep.run import RunDir, read_json

Record = dict[str, Any]
MIN_FREE_BYTES = 256 * 1024**2


@dataclass
class Start:
    """What the checks found, for whoever goes on."""

    config: RunConfig
    run: RunDir
    total_steps: int
    train_files: list[str]
    val_files: list[str]
    dataset: Record
    terms: dict[str, Any]
    existing: Record | None
    """run.json of the run that stands here or in the store; None: this is its first start."""
    plan: ResumePlan
    """Where it goes on."""
    remote: Any = None
    """The run's folder in the store (`storage.remote.RemoteRun`); None without a store or when it does not answer."""
    waived: list[contract.Drift] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    """For processes that talk to the store."""
    servers: list[ProcessRef] = field(default_factory=list)


def prepare(config: RunConfig) -> Start:
    """All checks, each error naming the thing and the way out; writes nothing into the run."""
    run = RunDir.at(config.trainer.output_dir)
    warnings = validate(config)
    check_room(run)
    check_foreign(run)
    store = open_store(config, run)
    existing, remote, notes = find_record(config, run, store)
    train_files, val_files, dataset = check_dataset(config, run, existing)
    total_steps = resolve_total_steps(config, dataset["num_rows"])
    resolve_device(config.trainer.device)
    load_reward(config.custom_reward_function.name, config.custom_reward_function.path)
    model_fingerprint = check_run_model(config, run, existing)
    terms = contract.terms(config, model_fingerprint=model_fingerprint, total_steps=total_steps)
    waived = []
    if existing is not None:
        drifts = contract.compare(existing["contract"], terms)
        waived = contract.enforce(drifts, config.resume.allow, f"The run in {run.root}", unsaved(run))
    chosen = make_plan(config, run, remote, existing, total_steps)
    if chosen.step is None and config.actor_rollout_ref.model.path.startswith(PREFIX):
        make_again(config, run, model_fingerprint)
    return Start(
        config=config,
        run=run,
        total_steps=total_steps,
        train_files=train_files,
        val_files=val_files,
        dataset=dataset,
        terms=terms,
        existing=existing,
        plan=chosen,
        remote=remote,
        waived=waived,
        warnings=warnings + notes,
        environment=store.env if store else {},
        servers=servers.running(run.platform),
    )


def make_plan(
    config: RunConfig,
    run: RunDir,
    remote: Any,
    existing: Record | None,
    total_steps: int,
    passed_over: Sequence[Rejection] = (),
) -> ResumePlan:
    """Where the run goes on; every candidate that is passed over is verified or named.

    Raises:
        CheckpointError: steps exist and none is usable, or the one that was asked for is not.
    """
    asked = config.trainer.resume_from_checkpoint
    return plan(
        run,
        policy=config.resume.policy,
        prefer_multiple=config.resume.prefer_multiple,
        max_rewind_steps=config.resume.max_rewind_steps,
        remote=remote,
        expected_run_id=existing["run_id"] if existing else None,
        only_step=asked_step(run, asked) if asked else None,
        final_step=total_steps,
        passed_over=passed_over,
    )


def asked_step(run: RunDir, asked: str) -> int:
    """The step that `trainer.resume_from_checkpoint` names: a good checkpoint of this run, nothing else.

    Raises:
        CheckpointError: with what is wrong with it.
    """
    folder = Path(os.path.realpath(asked))
    found = verify(folder)
    reason = found.reasons[0] if found.reasons else ""
    if not reason and folder.parent != Path(os.path.realpath(run.checkpoints)):
        reason = f"it is not one of {run.checkpoints}"
    if reason or not found.resumable or found.step is None:
        raise CheckpointError(
            f"trainer.resume_from_checkpoint: {asked} cannot be resumed from: {reason or found.state}.",
            f"See what can: keepstep plan {run.root}",
        )
    return found.step


def check_dataset(config: RunConfig, run: RunDir, existing: Record | None) -> tuple[list[str], list[str], Record]:
    """(train files, validation files, data set record), the rows counted and held against the recorded count.

    Raises:
        DataError: a file is missing, empty, damaged, or not what the run recorded; each difference is named.
    """
    patterns = [config.data.train_files, config.data.val_files or []]
    names = [name for pattern in patterns for name in ([pattern] if isinstance(pattern, str) else pattern)]
    if any(name.startswith(PREFIX) for name in names):
        make_data(run)
    train_files = resolve_files(config.data.train_files, run)
    val_files = resolve_files(config.data.val_files, run) if config.data.val_files else []
    columns = [config.data.prompt_key, config.data.reward_fn_key, REWARD_MODEL]
    counted = count_rows([*train_files, *val_files], columns=columns)
    found = dataset_record.build(counted[: len(train_files)], counted[len(train_files) :])
    if existing is not None:
        differences = dataset_record.compare(existing["dataset"], found)
        if differences:
            raise DataError(
                f"The data set is not the one that {run.root} was started with:\n  " + "\n  ".join(differences),
                "Bring the recorded files back, or give this start a trainer.output_dir of its own." + unsaved(run),
            )
    return train_files, val_files, found


def unsaved(run: RunDir) -> str:
    """What a refused start may do as well when nothing would be lost."""
    if run.steps() or verified_steps(run) or uploaded_steps(run):
        return ""
    return f" Nothing was saved yet: {run.root} may as well be deleted."


def check_run_model(config: RunConfig, run: RunDir, existing: Record | None) -> str:
    """The model's fingerprint. A made model that is gone comes from the run's own checkpoints and is not made again."""
    name = config.actor_rollout_ref.model.path
    folder = made_path(name, run)
    if name.startswith(PREFIX) and not (folder / "config.json").is_file():
        if existing is not None:
            return existing["contract"]["model.fingerprint"]
        make_model(name, run)
    check_model(folder)
    return fingerprint(folder)


def make_again(config: RunConfig, run: RunDir, expected: str) -> None:
    """A made model that is gone before anything was saved is made once more, and must be the same.

    Raises:
        ContractError: another machine or library makes another model.
    """
    name = config.actor_rollout_ref.model.path
    found = fingerprint(make_model(name, run))
    if found != expected:
        raise ContractError(
            f"{name} made here is not the model that {run.root} began with (fingerprint {found[:12]}…, recorded "
            f"{expected[:12]}…).",
            "Nothing was saved yet: start in a new trainer.output_dir.",
        )


def check_room(run: RunDir) -> None:
    """Some room must be left where the run goes; the needs of a save are checked at the save."""
    parent = run.root
    while not parent.exists():
        parent = parent.parent
    try:
        # Asking for permission is not enough: some filesystems permit everything to root and take nothing.
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        raise ConfigError(
            f"trainer.output_dir: {parent} takes no files: {error.strerror}.", "Give another folder."
        ) from None
    free = shutil.disk_usage(parent).free
    if free < MIN_FREE_BYTES:
        raise NoRoomError(
            f"{parent}: {free // 1024**2} MiB free, at least {MIN_FREE_BYTES // 1024**2} MiB are needed.",
            "Free space or move trainer.output_dir.",
        )


def check_foreign(run: RunDir) -> None:
    """A folder that holds something other than a Keepstep run is refused."""
    if run.has_record() or not run.root.exists():
        return
    # What a start leaves that was killed between its lease and its record.
    ours = {run.attempts.name, run.config.name}
    names = {entry.name for entry in run.root.iterdir()} - ours
    strangers = sorted(name for name in names if not name.startswith((f".{run.record.name}.", f".{run.config.name}.")))
    if strangers:
        raise ContractError(
            f"trainer.output_dir: {run.root} holds {', '.join(strangers[:5])} but no run.json: not a Keepstep run.",
            "Give an empty or new folder, or bring run.json back.",
        )


def open_store(config: RunConfig, run: RunDir) -> servers.ServerInfo | None:
    """The embedded object store, started or reused and held by this process; None when another one is configured."""
    if not config.s3.embedded:
        return None
    return servers.object_store(run.platform, ProcessRef.current("controller"))


def find_record(
    config: RunConfig, run: RunDir, store: servers.ServerInfo | None
) -> tuple[Record | None, Any, list[str]]:
    """(run.json here or in the store, the store's side of the run, notes). Local folders win over the store."""
    local = read_json(run.record) if run.has_record() else None
    if not config.s3_enabled:
        return local, None, []
    from keepstep.storage.remote import open_remote

    try:
        remote = open_remote(config.s3, run, store.env if store else {})
        kept = remote.fetch_record()
    except StorageRefusedError:
        raise
    except StorageError as error:
        if local is None or not run.steps():
            # What the store holds of the run cannot be known: never silently step 0.
            raise
        return local, None, [f"The store does not answer ({error.message}): planning from local checkpoints alone."]
    if local is not None and kept is not None and kept["run_id"] != local["run_id"]:
        raise ContractError(
            f"The store's prefix {remote.prefix} holds run {kept['run_id']}, {run.root} is run {local['run_id']}.",
            "Give s3.prefix of its own, or bring the right folder back.",
        )
    return local or kept, remote, []
