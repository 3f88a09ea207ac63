"""One function per fault: start a run, cause the fault, return the run's folder as the fault leaves it.

Every fault happens: processes are killed, disks filled, checkpoints damaged. No log is written by hand.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet

from keepstep.attempts import newest_record
from keepstep.checkpoint import layout
from keepstep.platform import servers
from keepstep.preflight.model import fingerprint
from keepstep.processes import ProcessRef, hostname
from keepstep.quickstart import arithmetic
from keepstep.run import read_json, write_json
from tests.faults import lab as at
from tests.faults.lab import Lab
from tests.faults.shrink import KEPT, OTHER_HOST
from tests.integration.driver import Driver

Fault = Callable[[Lab], Path]
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")
"""Debian's libfaketime."""


def healthy(lab: Lab) -> Path:
    """Nothing: a run from its first step to its last."""
    run = lab.driver("healthy", steps=12, save_freq=3)
    assert run.run_to_end(at.START_TIMEOUT_S) == 0, run.tail()
    return run.output_dir


def running(lab: Lab) -> Path:
    """Nothing yet: the folder of a run that is at work."""
    run = lab.driver("running", steps=200)
    run.start()
    run.wait_for_verified(4, at.START_TIMEOUT_S)
    seen = lab.folder / "running-as-seen"
    for path in [path for pattern in KEPT for path in run.output_dir.glob(pattern)]:
        (seen / path.relative_to(run.output_dir)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, seen / path.relative_to(run.output_dir))
    at.leave(run)
    return seen


def preempted(lab: Lab) -> Path:
    """SIGTERM in mid-run."""
    run = lab.driver("preempted", steps=200)
    run.start()
    at.wait_for_step(run, 5)
    at.leave(run)
    return run.output_dir


def rank_killed(lab: Lab) -> Path:
    """kill -9 a rank."""
    run = lab.driver("rank_killed", "recovery.in_place=false", steps=200)
    run.start()
    run.wait_for_verified(4, at.START_TIMEOUT_S)
    run.kill("rank", 1)
    at.end(run)
    return run.output_dir


def engine_killed(lab: Lab) -> Path:
    """kill -9 the engine; started again, the run reaches its end."""
    run = lab.driver("engine_killed", "recovery.in_place=false", steps=12)
    run.start()
    run.wait_for_verified(4, at.START_TIMEOUT_S)
    run.kill("engine")
    at.end(run)
    assert run.run_to_end(at.START_TIMEOUT_S) == 0, run.tail()
    return run.output_dir


def rank_hangs(lab: Lab) -> Path:
    """SIGSTOP a rank: its peer waits for it in a collective until the time is up."""
    run = lab.driver("rank_hangs", "timeouts.collective_s=6", "timeouts.step_s=20", steps=200)
    run.start()
    at.wait_for_step(run, 3)
    os.kill(run.processes("rank")[1].pid, signal.SIGSTOP)
    at.end(run)
    return run.output_dir


def writer_hangs(lab: Lab) -> Path:
    """SIGSTOP the writer."""
    run = lab.driver("writer_hangs", "checkpoint.save_timeout_s=4", steps=200)
    run.start()
    run.wait_for_verified(2, at.START_TIMEOUT_S)
    os.kill(run.processes("writer")[0].pid, signal.SIGSTOP)
    at.end(run)
    return run.output_dir


def abandoned(lab: Lab) -> Path:
    """kill -9 everything at once: nobody is left who could record how the attempt ended."""
    run = lab.driver("abandoned", steps=200)
    run.start()
    run.wait_for_verified(4, at.START_TIMEOUT_S)
    at.kill_everything(run)
    return run.output_dir


def rewards_equal(lab: Lab) -> Path:
    """A reward function that says the same of every response."""
    run = lab.driver("rewards_equal", lab.reward("rewards_equal", "return 1.0"))
    assert run.run_to_end(at.START_TIMEOUT_S) == 0, run.tail()
    return run.output_dir


def identical_responses(lab: Lab) -> Path:
    """Sampling so cold that it is greedy."""
    # What the temperature divides, it divides for the comparison of engine and trainer as well.
    cold = ["actor_rollout_ref.rollout.temperature=0.011", "actor_rollout_ref.rollout.logprob_tolerance=10"]
    run = lab.driver("identical_responses", *cold)
    assert run.run_to_end(at.START_TIMEOUT_S) == 0, run.tail()
    return run.output_dir


def reward_raises(lab: Lab) -> Path:
    """A reward function that fails on its two thousandth response."""
    body = "return 1 / 0 if next(calls) == 2000 else right"
    run = lab.driver("reward_raises", lab.reward("reward_raises", body))
    run.start()
    at.end(run)
    return run.output_dir


def reward_infinite(lab: Lab) -> Path:
    """A reward that is no finite number."""
    body = 'return float("inf") if next(calls) == 2000 else right'
    run = lab.driver("reward_infinite", lab.reward("reward_infinite", body))
    run.start()
    at.end(run)
    return run.output_dir


def learning_rate_absurd(lab: Lab) -> Path:
    """A learning rate that carries the weights out of every range with the first update."""
    rate = ["actor_rollout_ref.actor.optim.lr=1e30", "actor_rollout_ref.rollout.logprob_tolerance=1e9"]
    run = lab.driver("learning_rate_absurd", *rate)
    run.start()
    at.end(run)
    return run.output_dir


def engine_precision(lab: Lab) -> Path:
    """An engine in bfloat16 beside float32 ranks, at the tolerance of equal precision."""
    run = lab.driver("engine_precision", "actor_rollout_ref.rollout.dtype=bfloat16")
    run.start()
    at.end(run)
    return run.output_dir


def port_in_use(lab: Lab) -> Path:
    """Between two attempts another process takes the engine's port."""
    run = lab.driver("port_in_use", steps=200)
    run.start()
    at.wait_for_step(run, 3)
    at.leave(run)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", lab.port))
        listener.listen()
        run.start()
        at.end(run, status=2)
    return run.output_dir


def no_room(lab: Lab) -> Path:
    """The disk fills up between two saves."""
    with at.small_disk(lab.folder / "no_room", 400) as disk:
        run = lab.driver("no_room/run", steps=200)
        run.log = lab.folder / "no_room.log"
        run.start()
        run.wait_for_verified(2, at.START_TIMEOUT_S)
        (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - 2_000_000))
        at.end(run)
        return Path(shutil.copytree(run.output_dir, lab.folder / "no_room_as_left", symlinks=True))


def save_skipped(lab: Lab) -> Path:
    """The disk is full for a while, and the configuration says to go on."""
    with at.small_disk(lab.folder / "save_skipped", 400) as disk:
        run = lab.driver("save_skipped/run", "checkpoint.on_no_room=skip", steps=40)
        run.log = lab.folder / "save_skipped.log"
        run.start()
        run.wait_for_verified(2, at.START_TIMEOUT_S)
        filler = disk / "filler"
        filler.write_bytes(bytes(shutil.disk_usage(disk).free - 2_000_000))
        at.wait_for_event(run, "checkpoint_skipped")
        filler.unlink()
        at.end(run, status=0)
        return Path(shutil.copytree(run.output_dir, lab.folder / "save_skipped_as_left", symlinks=True))


def store_refuses(lab: Lab) -> Path:
    """The bucket is deleted while the run is at work."""
    import boto3

    own = replace(lab, folder=own_platform(lab, "store_refuses"))
    run = own.driver("run", "s3.embedded=true", "s3.upload_interval=4", steps=20)
    run.start()
    at.wait_for_event(run, "checkpoint_uploaded", step=4)
    store = servers.running_object_store(run.run.platform)
    assert store is not None
    client = boto3.client(
        "s3", endpoint_url=store.url, region_name="us-east-1",
        aws_access_key_id=store.env["AWS_ACCESS_KEY_ID"], aws_secret_access_key=store.env["AWS_SECRET_ACCESS_KEY"],
    )  # fmt: skip
    for found in client.get_paginator("list_objects_v2").paginate(Bucket="keepstep"):
        for entry in found.get("Contents", []):
            client.delete_object(Bucket="keepstep", Key=entry["Key"])
    client.delete_bucket(Bucket="keepstep")
    at.end(run, status=6)
    return run.output_dir


def store_gone(lab: Lab) -> Path:
    """The store's processes are killed while the run is at work."""
    own = replace(lab, folder=own_platform(lab, "store_gone"))
    patience = ["s3.embedded=true", "s3.upload_interval=4", "s3.max_retries=1", "s3.final_timeout_s=60"]
    run = own.driver("run", *patience, steps=20)
    run.start()
    at.wait_for_event(run, "checkpoint_uploaded", step=4)
    for server in run.processes("object-store"):
        run.kill_process(server)
    at.end(run, status=6)
    return run.output_dir


def fails_again(lab: Lab) -> Path:
    """A bug that strikes at the same step whenever it is reached; the flow tries twice and stops."""
    bug = lab.reward("fails_again", 'sys.exit("cannot reach the judge") if next(calls) == 1600 else None; return right')
    run = lab.driver("fails_again", bug, command="run", save_freq=20)
    run.start()
    at.end(run)
    return run.output_dir


def budget_gone(lab: Lab) -> Path:
    """Failures that are all different, until no retry is left."""
    body = 'sys.exit(f"judge {id(calls)} is away") if next(calls) == 1600 else None; return right'
    run = lab.driver("budget_gone", lab.reward("budget_gone", body), "retry.max_retries=1", command="run", save_freq=20)
    run.start()
    at.wait_for_event(run, "failed", attempt=2)
    at.end(run)
    failures = [event["message"] for event in run.events() if event["event"] == "failed"]
    assert len(failures) == 2 and all("judge" in message for message in failures), failures
    return run.output_dir


def few_rows(lab: Lab) -> Path:
    """Fewer rows than a batch takes."""
    run = lab.driver("few_rows", f"data.train_files={rows(lab, 20)}")
    assert run.run_to_end(at.START_TIMEOUT_S) == 0, run.tail()
    return run.output_dir


def no_row_left(lab: Lab) -> Path:
    """Every prompt is over the limit."""
    run = lab.driver("no_row_left", "data.max_prompt_length=2")
    run.start()
    at.end(run, status=4)
    return run.output_dir


def clock_skew(lab: Lab) -> Path:
    """The second attempt runs where the clock is ten minutes behind; takes Debian's libfaketime.

    Ray does not start under it, so that attempt ends before its first step, and a third one goes on.
    """
    assert FAKETIME.is_file(), "apt-get install libfaketime"
    run = lab.driver("clock_skew", steps=12)
    run.start()
    at.wait_for_step(run, 5)
    at.leave(run)
    behind = {"LD_PRELOAD": str(FAKETIME), "FAKETIME": "-600", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    at.start_as(run, [], behind)
    at.wait_for_event(run, "resumed", attempt=2)
    at.kill_everything(run)
    assert run.run_to_end(at.START_TIMEOUT_S) == 0, run.tail()
    return run.output_dir


def fenced(lab: Lab) -> Path:
    """An attempt of another host is suspended, taken for dead, and wakes up when the run has gone on without it."""
    quick = ["retry.lease_timeout_s=4", "retry.heartbeat_s=0.5"]
    stale = lab.driver("fenced", *quick, steps=20)
    at.start_as(stale, ["unshare", "--uts", "sh", "-c", f'hostname {OTHER_HOST} && exec "$@"', "sh"])
    stale.wait_for_verified(4, at.START_TIMEOUT_S)
    processes = [replace(ref, host=hostname()) for ref in stale.processes()]
    signal_all(processes, signal.SIGSTOP)
    try:
        time.sleep(5)
        fresh = replace(lab, port=lab.port + 200).driver("fenced", *quick, steps=20)
        fresh.log = lab.folder / "fenced-fresh.log"
        fresh.start()
        at.wait_for_step(fresh, 6, attempt=2)
        signal_all(processes, signal.SIGCONT)
        stale.wait(120)
        fresh.wait(at.START_TIMEOUT_S)
    finally:
        signal_all(processes, signal.SIGKILL)
    return fresh.output_dir


def damaged_checkpoint(lab: Lab) -> Path:
    """A byte of the newest checkpoint flips between two attempts."""
    run = lab.driver("damaged_checkpoint", steps=12)
    stop_after(run, 6)
    at.flip_byte(run.run.checkpoint(run.run.steps()[-1]) / layout.ACTOR)
    assert run.run_to_end(at.START_TIMEOUT_S) == 0, run.tail()
    return run.output_dir


def learning_rate_jumps(lab: Lab) -> Path:
    """The scheduler that comes back is not the one that was saved: twenty times the learning rate.

    The first attempt leaves in order, so no step is trained twice that could be compared.
    """
    run = lab.driver("learning_rate_jumps", steps=30)
    run.start()
    at.wait_for_step(run, 14)
    at.leave(run)
    at.rewrite(run.run, run.run.steps()[-1], layout.SCHEDULER, at.scale_learning_rate(20))
    assert run.run_to_end(at.START_TIMEOUT_S) == 0, run.tail()
    return run.output_dir


def optimizer_lost(lab: Lab) -> Path:
    """The optimizer's second moments do not come back."""
    run = lab.driver("optimizer_lost", steps=30)
    stop_after(run, 14)
    at.rewrite(run.run, run.run.steps()[-1], layout.OPTIMIZER, at.forget_second_moments)
    assert run.run_to_end(at.START_TIMEOUT_S) == 0, run.tail()
    return run.output_dir


def other_weights(lab: Lab) -> Path:
    """The weights that come back are noisy copies of those that were saved, under digests that fit them."""
    import torch

    def blur(state: dict[str, Any]) -> None:
        generator = torch.Generator().manual_seed(1)
        for tensor in state.values():
            tensor += 0.3 * tensor.std() * torch.randn(tensor.shape, generator=generator)

    run = lab.driver("other_weights", steps=30)
    stop_after(run, 14)
    at.rewrite(run.run, run.run.steps()[-1], layout.ACTOR, blur)
    run.start()
    at.end(run)
    return run.output_dir


def replay_differs(lab: Lab) -> Path:
    """Steps are trained again from an older checkpoint whose optimizer was changed: the standing one of the next
    save says otherwise."""
    run = lab.driver("replay_differs", steps=40)
    stop_after(run, 10)
    older = run.run.steps()[-3]
    at.rewrite(run.run, older, layout.OPTIMIZER, at.forget_second_moments)
    run.overrides.append(f"trainer.resume_from_checkpoint={run.run.checkpoint(older)}")
    run.start()
    at.end(run, status=3)
    return run.output_dir


def keys_do_not_match(lab: Lab) -> Path:
    """The model's embeddings are tied in the second attempt as they were not in the first, under the old identity."""
    own = replace(lab, folder=own_platform(lab, "keys_do_not_match"))
    run = own.driver("run", steps=30)
    stop_after(run, 6)
    model = run.run.platform / "made" / "char-qwen3"
    config = read_json(model / "config.json")
    write_json(model / "config.json", config | {"tie_word_embeddings": not config["tie_word_embeddings"]})
    at.set_term(run.run, "model.fingerprint", fingerprint(model))
    run.start()
    at.end(run)
    return run.output_dir


def out_of_memory_on_resume(lab: Lab) -> Path:
    """The second attempt's ranks may not take more memory than they hold when they are about to load."""
    run = lab.driver("out_of_memory_on_resume", steps=200)
    stop_after(run, 6)
    run.start()
    run.wait_for("engine", lambda _: newest_number(run) == 2 and run.processes("engine"), at.START_TIMEOUT_S)
    for rank in run.processes("rank"):
        resource.prlimit(rank.pid, resource.RLIMIT_AS, (memory_of(rank), resource.RLIM_INFINITY))
    at.end(run)
    return run.output_dir


def stop_after(run: Driver, step: int) -> None:
    """Train up to a saved step, some steps on, and die."""
    run.start()
    run.wait_for_verified(step, at.START_TIMEOUT_S)
    at.kill_everything(run)


def newest_number(run: Driver) -> int:
    record = newest_record(run.run)
    return record["attempt"] if record else 0


def memory_of(process: ProcessRef) -> int:
    """Bytes of address space that a process has taken."""
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def own_platform(lab: Lab, name: str) -> Path:
    """A folder with a platform folder of its own, the model and the data copied from the lab's if they are there."""
    folder = lab.folder / name
    if (lab.folder / ".keepstep" / "made").is_dir():
        shutil.copytree(lab.folder / ".keepstep" / "made", folder / ".keepstep" / "made")
    folder.mkdir(exist_ok=True)
    return folder


def rows(lab: Lab, count: int) -> Path:
    """A parquet file with the first rows of the quickstart's."""
    folder = lab.folder / f"rows_{count}"
    arithmetic.write(folder)
    path = folder / "few.parquet"
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(folder / "train.parquet").slice(0, count), path)
    return path


def signal_all(processes: list[ProcessRef], number: int) -> None:
    for process in processes:
        if process.alive():
            os.kill(process.pid, number)


FAULTS: tuple[Fault, ...] = (
    healthy, running, preempted, rank_killed, engine_killed, rank_hangs, writer_hangs, abandoned, rewards_equal,
    identical_responses, reward_raises, reward_infinite, learning_rate_absurd, engine_precision, port_in_use, no_room,
    save_skipped, store_refuses, store_gone, fails_again, budget_gone, few_rows, no_row_left, clock_skew, fenced,
    damaged_checkpoint, learning_rate_jumps, optimizer_lost, other_weights, replay_differs, keys_do_not_match,
    out_of_memory_on_resume,
)  # fmt: skip
