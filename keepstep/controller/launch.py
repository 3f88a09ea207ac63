"""Starting the trainer in a process of its own and following it: a plain child, or a Ray job on a cluster.

The trainer's events arrive as lines `KEEPSTEP_EVENT {json}` on its standard output, here and through the job's log, so
that nobody needs to see its disk. Its last event tells how it ended.

Concurrency:
  reader (caller's thread)  consumes the trainer's output until it ends; hands events to `on_event`
  silence watcher           ends a trainer of which nothing was heard for longer than its longest legitimate act
  burier                    of a child that has ended while another process still holds its output: ends what it left
  stop watcher              waits for `stop` or the trainer's end (0.2 s polls); sends SIGTERM, or stops the job
  flow heartbeat            of a job only: says to other hosts that this process, which follows it, lives
  the trainer's stdin       is a pipe that this process holds: it ends within seconds of this process's death
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any, Protocol

from keepstep import attempts, errors
from keepstep.config.schema import RunConfig
from keepstep.events.log import SIGN_OF_LIFE
from keepstep.processes import ProcessRef
from keepstep.run import RunDir

EVENT_PREFIX = "KEEPSTEP_EVENT "
CONFIG_VARIABLE = "KEEPSTEP_CONFIG_JSON"
FLOW_VARIABLE = "KEEPSTEP_FLOW_PROCESS"
TERMINAL_EVENTS = ("finished", "failed", "preempted", "fenced")
POLL_S = 0.2
JOB_POLL_S = 1.0
SILENCE_MARGIN_S = 120.0
WAITS_OF_A_START = 8
"""Ray, GPUs, ranks, two meetings, engines, writers, the load: each may take `timeouts.start_s`, without an event."""
SILENT = "Where something may take longer than its limit in timeouts.*, raise that."
EOF_PATIENCE_S = 20.0
"""How long the output of a trainer that has ended may stay open: the reaper ends within this what would hold it."""
REQUEST_TIMEOUT_S = 30.0
HEAD_PATIENCE_S = 30.0
"""How long a job server that does not answer may come back, before its cluster counts as lost."""

Event = dict[str, Any]
OnEvent = Callable[[Event], None]


def run_trainer(config: RunConfig, on_event: OnEvent, stop: threading.Event) -> Event:
    """Run one attempt in another process; return result.json's content.

    Args:
        on_event: told every event, from this thread.
        stop: set it to have the trainer save and leave.

    Raises:
        KeepstepError: the class and message with which the attempt ended.
    """
    last = _run_job(config, on_event, stop) if config.ray.address else _run_child(config, on_event, stop)
    if last.get("event") == "finished":
        return last["result"]
    raise error_of(last)


def error_of(event: Event) -> errors.KeepstepError:
    """The error that a terminal event speaks of."""
    cls = errors.classes().get(event.get("class", ""), errors.WorkerDiedError)
    return cls(event["message"], event.get("remedy", ""))


def terminal_event(error: errors.KeepstepError) -> Event:
    """What a trainer says last when it failed before it had a run to write into."""
    return {
        "event": "failed",
        "class": error.failure_class,
        "message": error.message,
        "remedy": error.remedy,
        "retry": error.retry,
    }


def _run_child(config: RunConfig, on_event: OnEvent, stop: threading.Event) -> Event:
    environment = os.environ | _variables(config)
    process = subprocess.Popen(
        [sys.executable, "-m", "keepstep.cli.main", "train", "--from-env", "--events-stdout", "--watch-stdin"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
        text=True,
        errors="replace",
    )
    silence = _Silence(config, process)
    heard_out = threading.Event()

    def bury() -> None:
        process.wait()
        if not heard_out.wait(EOF_PATIENCE_S):
            _end_leftovers(config, process.pid)

    for watch in (lambda: _pass_on_stop(process, stop, config.retry.term_grace_s), silence.watch, bury):
        threading.Thread(target=watch, daemon=True).start()
    assert process.stdout is not None and process.stdin is not None
    with process.stdin, process.stdout:
        last, tail = _follow(process.stdout, silence.breaking(on_event))
        heard_out.set()
        status = process.wait(timeout=60)
    _end_leftovers(config, process.pid)
    if silence.too_long:
        message = f"Nothing was heard of the trainer for {silence.limit_s:.0f} s: it was ended."
        return terminal_event(errors.NoProgressError(message, f"{SILENT} It was process {process.pid}."))
    return last or _lost(f"The trainer ended with {status}", tail, f"It was process {process.pid}.")


class _Trainer(Protocol):
    """A trainer that can be looked at and ended."""

    def poll(self) -> int | None: ...
    def kill(self) -> None: ...


class _Silence:
    """Ends a trainer that says nothing for longer than anything it does may take."""

    def __init__(self, config: RunConfig, process: _Trainer) -> None:
        longest = (
            WAITS_OF_A_START * config.timeouts.start_s,
            # Each answer of a worker is a sign of life; between two of them responses may be scored.
            config.timeouts.step_s + config.timeouts.reward_s,
            config.checkpoint.save_timeout_s + config.checkpoint.verify_timeout_s,
            config.s3.final_timeout_s,
        )
        self.limit_s = max(longest) + SILENCE_MARGIN_S
        self.too_long = False
        self._process = process
        self._heard = time.monotonic()

    def breaking(self, on_event: OnEvent) -> OnEvent:
        """`on_event`, with every event counted as a sign of life."""

        def heard(event: Event) -> None:
            self._heard = time.monotonic()
            if event["event"] != SIGN_OF_LIFE:
                on_event(event)

        return heard

    def watch(self) -> None:
        while self._process.poll() is None:
            time.sleep(POLL_S)
            if time.monotonic() - self._heard > self.limit_s:
                self.too_long = True
                self._process.kill()
                return


def _variables(config: RunConfig) -> dict[str, str]:
    """What the trainer must know: its configuration, and whose child it is."""
    flow_run = os.environ.get(attempts.FLOW_RUN_VARIABLE)
    return {
        # Ray kills a stopped job after 3 s unless told otherwise; it needs its grace to save.
        "RAY_JOB_STOP_WAIT_TIME_S": str(int(config.retry.term_grace_s) + 15),
        # Only what was stated: a message about a changed setting says whether it was given or is the default.
        CONFIG_VARIABLE: config.model_dump_json(exclude_unset=True),
        FLOW_VARIABLE: json.dumps(ProcessRef.current("flow").to_record()),
    } | ({attempts.FLOW_RUN_VARIABLE: flow_run} if flow_run else {})


def _pass_on_stop(process: subprocess.Popen[str], stop: threading.Event, grace_s: float) -> None:
    """SIGTERM the trainer when `stop` is set; it has its own grace timer, this one is for a trainer that hangs."""
    while process.poll() is None and not stop.wait(POLL_S):
        pass
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=grace_s + 10)
        except subprocess.TimeoutExpired:
            process.kill()


def _end_leftovers(config: RunConfig, pid: int) -> None:
    """A trainer that was killed leaves Ray's processes behind: end those that its attempt recorded."""
    run = RunDir.at(config.trainer.output_dir)
    record = attempts.newest_record(run)
    if record is not None and record["owner"]["pid"] == pid:
        attempts.end_leftovers(run, before=record["attempt"] + 1)


@dataclass
class _Job:
    """A Ray job that trains."""

    client: Any
    name: str
    over: threading.Event = field(default_factory=threading.Event)
    """It has ended, or is followed no longer."""

    def poll(self) -> int | None:
        return 0 if self.over.is_set() else None

    def kill(self) -> None:
        self.over.set()
        self.stop()

    def stop(self) -> bool:
        """Whether the cluster was told; one that does not answer is noticed by whoever follows the job."""
        try:
            self.client.stop_job(self.name)
        except (OSError, RuntimeError):
            return False
        return True

    def pass_on(self, stop: threading.Event) -> None:
        """Have the trainer save and leave once `stop` is set."""
        while not self.over.is_set():
            if stop.wait(POLL_S) and (self.stop() or self.over.wait(JOB_POLL_S)):
                return


def _run_job(config: RunConfig, on_event: OnEvent, stop: threading.Event) -> Event:
    from ray.job_submission import JobStatus

    client, name = _submit_job(
        config, "python -m keepstep.cli.main train --from-env --events-stdout", _variables(config)
    )
    job = _Job(client, name)
    silence = _Silence(config, job)
    for watch in (lambda: job.pass_on(stop), silence.watch):
        threading.Thread(target=watch, daemon=True).start()
    # Not in a message, which is compared from attempt to attempt: every job has another name.
    of_job = f"It was Ray job {name}."
    ended: Event | None = None
    try:
        with attempts.FlowHeartbeat(RunDir.at(config.trainer.output_dir), config.retry.heartbeat_s) as heartbeat:

            def heard(event: Event) -> None:
                nonlocal ended
                if event["event"] in TERMINAL_EVENTS:
                    ended = event
                if not config.trainer.debug:
                    heartbeat.heed(event)
                on_event(event)

            last, tail = _follow(_job_lines(client, name, job.over), silence.breaking(heard))
        if silence.too_long:
            message = f"Nothing was heard of the trainer on {config.ray.address} for {silence.limit_s:.0f} s"
            return terminal_event(errors.NoProgressError(f"{message}: its job was stopped.", f"{SILENT} {of_job}"))
        status = client.get_job_status(name)
    except (OSError, RuntimeError) as error:
        if ended is not None:
            # It had said how it ended before its head went.
            return ended
        # The cluster's head is gone, and with it the job's log: another attempt finds it back, or another one.
        what = "forgot its job" if isinstance(error, RuntimeError) else "does not answer"
        return _lost(f"The cluster at {config.ray.address} {what}; the trainer ended", [], of_job)
    finally:
        job.over.set()
    if last is None and status == JobStatus.STOPPED:
        message = "The trainer's Ray job was stopped."
        return {"event": "preempted", "class": "preempted", "message": message, "remedy": of_job, "retry": True}
    return last or _lost(f"The trainer's job on {config.ray.address} ended as {status}", tail, of_job)


def job_output(config: RunConfig, entrypoint: str, environment: dict[str, str], timeout_s: float) -> list[str]:
    """Every line that a short job on the cluster of `ray.address` printed, once it has ended.

    Raises:
        NoProgressError: it did not end within `timeout_s`; it is stopped.
    """
    client, job = _submit_job(config, entrypoint, environment)
    deadline = time.monotonic() + timeout_s
    while not client.get_job_status(job).is_terminal():
        if time.monotonic() > deadline:
            client.stop_job(job)
            raise errors.NoProgressError(
                f"A job on {config.ray.address} did not end within {timeout_s:.0f} s.",
                "See whether its cluster is full.",
            )
        time.sleep(JOB_POLL_S)
    return list(_job_lines(client, job, threading.Event()))


def _submit_job(config: RunConfig, entrypoint: str, environment: dict[str, str]) -> tuple[Any, str]:
    """(client, job id) once the cluster takes the job: one that has just started has no agent for it yet.

    Raises:
        NoProgressError: the cluster did not take it within `timeouts.start_s`.
    """
    address = config.ray.address
    assert address is not None
    job = f"keepstep-{uuid.uuid4().hex[:16]}"
    deadline = time.monotonic() + config.timeouts.start_s
    while True:
        try:
            client = _job_client(address)
            if not _has(client, job):
                client.submit_job(entrypoint=entrypoint, submission_id=job, runtime_env={"env_vars": environment})
            return client, job
        except (OSError, RuntimeError) as error:
            if time.monotonic() > deadline:
                reason = errors.last_line(error)
                raise errors.NoProgressError(
                    f"ray.address={address} took no job within {config.timeouts.start_s:.0f} s: {reason}",
                    "Give the address of the cluster's job server (http://head:8265), or leave ray.address out.",
                ) from error
            time.sleep(JOB_POLL_S)


def _job_client(address: str) -> Any:
    """Ray's client, each of whose requests has a time limit: a head that vanishes would be waited for without end."""
    from ray.job_submission import JobSubmissionClient

    class Client(JobSubmissionClient):
        def _do_request(self, *args: Any, **settings: Any) -> Any:
            return super()._do_request(*args, **({"timeout": REQUEST_TIMEOUT_S} | settings))

    return Client(address)


def _has(client: Any, job: str) -> bool:
    """Whether the cluster knows the job, whose submission may have been taken without an answer."""
    try:
        client.get_job_status(job)
    except RuntimeError:
        return False
    return True


def _job_lines(client: Any, job: str, given_up: threading.Event) -> Iterator[str]:
    """Lines of a job's log as they come. The client's own tail is a coroutine; polling its text needs no event loop.

    Raises:
        OSError, RuntimeError: the cluster has not answered for `HEAD_PATIENCE_S`, or does not know the job.
    """
    position = 0
    answered = time.monotonic()
    while not given_up.is_set():
        try:
            over = client.get_job_status(job).is_terminal()
            text = client.get_job_logs(job)
        except (OSError, RuntimeError) as error:
            if "status code 404" in str(error) or time.monotonic() - answered > HEAD_PATIENCE_S:
                raise
            time.sleep(JOB_POLL_S)
            continue
        answered = time.monotonic()
        end = len(text) if over else text.rfind("\n") + 1
        yield from text[position:end].splitlines()
        position = end
        if over:
            return
        time.sleep(JOB_POLL_S)


def _follow(lines: Iterable[str] | IO[str], on_event: OnEvent) -> tuple[Event | None, list[str]]:
    """(terminal event or None, last lines that were no events) of a trainer's output."""
    last: Event | None = None
    tail: list[str] = []
    for line in lines:
        # Somebody's print without a line end may stand before an event on its line.
        before, prefix, text = line.partition(EVENT_PREFIX)
        try:
            event = json.loads(text) if prefix else None
        except ValueError:
            # The trainer was killed in the middle of the line.
            before, event = line, None
        if before.strip():
            tail = [*tail[-19:], before.rstrip()]
        if event is None:
            continue
        on_event(event)
        if event["event"] in TERMINAL_EVENTS:
            last = event
    return last, tail


def _lost(what: str, tail: list[str], of_whom: str) -> Event:
    """Numbers, names and what it printed differ from attempt to attempt, and messages are compared: the same end at the
    same step again and again must be known as such."""
    remedy = "\n  ".join([f"{of_whom} Its last lines:", *tail[-5:]]) if tail else of_whom
    return terminal_event(errors.WorkerDiedError(f"{what} without a word.", remedy))
