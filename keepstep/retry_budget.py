"""What a run has used of its retry budget. It is kept in the run's folder, in the ends of the attempts, so that a flow
run that is run again after a crash goes on with what it had used, and a new one begins with a full budget."""

from __future__ import annotations

from dataclasses import replace

from keepstep.config.schema import RetryConfig
from keepstep.errors import BugError, KeepstepError, classes
from keepstep.events.log import Event, read_jsonl
from keepstep.retry import SILENT_END, AttemptEnd, Decision, Failure, decide, failure_of, failures
from keepstep.run import RunDir, read_json, write_json


class RetryBudget:
    """The failures that count for one flow run, and what follows from them."""

    def __init__(self, run: RunDir, flow_run: str, retry: RetryConfig) -> None:
        """
        Args:
            flow_run: identity of the flow run; the same when it is run again.
        """
        self._run, self._flow_run, self._retry = run, flow_run, retry
        kept = read_json(run.budget) if run.budget.is_file() else {}
        newest = max(run.attempt_numbers(), default=0)
        self._first = kept["first_attempt"] if kept.get("flow_run") == flow_run else newest + 1
        self._counted = newest
        resumed = (event for event in read_jsonl(run.events, b'"resumed"') if event.get("event") == "resumed")
        self._has_resumed = any(event["attempt"] >= self._first for event in resumed)
        ends = attempt_ends(run)
        self._step = next((end.last_step for end in reversed(ends) if end.last_step is not None), 0)
        self._verified = max((end.verified or 0 for end in ends), default=0)
        self._failures = [failure for number, failure in failures(ends) if number >= self._first]

    @property
    def has_resumed(self) -> bool:
        """Whether an attempt of this flow run has taken up a checkpoint: one that was asked for is not gone back to."""
        return self._has_resumed

    @property
    def last(self) -> Failure | None:
        return self._failures[-1] if self._failures else None

    def hear(self, event: Event) -> None:
        """Learn from an attempt's events how far it has come; the first one makes the budget the run's."""
        if event["event"] == "attempt_started" and self._run.has_record():
            write_json(self._run.budget, {"flow_run": self._flow_run, "first_attempt": self._first})
        elif event["event"] == "resumed":
            self._has_resumed = True
        elif event["event"] == "step":
            self._step = event["step"]
        elif event["event"] == "checkpoint_verified":
            self._verified = max(self._verified, event["step"])

    def decide(self) -> Decision | None:
        """Whether to go on after the failures so far; None: there are none."""
        return decide(self._failures, self._retry) if self._failures else None

    def error(self) -> KeepstepError:
        """The last failure as an error."""
        assert self.last is not None
        cls = classes().get(self.last.failure_class, BugError)
        return cls(self.last.message, f"See `keepstep doctor {self._run.root}`.")

    def start_over(self) -> None:
        """The flow run has failed for good: whoever runs it again has mended something, and has a full budget."""
        if self._run.has_record():
            first = max(self._run.attempt_numbers(), default=0) + 1
            write_json(self._run.budget, {"flow_run": self._flow_run, "first_attempt": first})

    def failed(self, error: KeepstepError) -> Decision:
        """Whether to go on after this end of an attempt, too."""
        recorded = [(n, failure) for n, failure in failures(attempt_ends(self._run)) if n > self._counted]
        self._counted = max([self._counted, *(number for number, _ in recorded)])
        if recorded:
            # The record has no numbers of processes in it, as the message of who followed the attempt may have.
            self._failures += [failure for _, failure in recorded]
            if self._failures[-1].message == SILENT_END:
                self._failures[-1] = replace(self._failures[-1], failure_class=error.failure_class)
        else:
            self._failures.append(failure_of(error, self._step, self._verified))
        return decide(self._failures, self._retry)


def attempt_ends(run: RunDir) -> list[AttemptEnd]:
    """How every attempt ended and how far it came, from its record and its events."""
    steps: dict[int, int] = {}
    verified: dict[int, int] = {}
    for event in read_jsonl(run.events):
        number, step = event.get("attempt"), event.get("step")
        if not isinstance(number, int) or not isinstance(step, int):
            continue
        if event.get("event") == "step":
            steps[number] = step
        elif event.get("event") == "checkpoint_verified":
            verified[number] = max(step, verified.get(number, 0))
    return [
        AttemptEnd(number, read_json(run.attempt(number))["outcome"] or {}, steps.get(number), verified.get(number))
        for number in run.attempt_numbers()
    ]
