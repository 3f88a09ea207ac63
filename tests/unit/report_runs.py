"""Runs on disk for the report: written by hand, with everything that a report shows, as large as one asks for."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from keepstep.run import RunDir, write_json

BEGIN = datetime(2026, 3, 1, 12, 0, tzinfo=UTC).timestamp()
HOSTILE = "<script>alert('x')</script>\x1b[31m\ud800 \u202e & \"quoted\""
UNBROKEN = "/unbroken" * 40
SECONDS = {"rollout": 4.0, "update": 2.0, "log_probs": 1.0, "weight_sync": 0.4, "reward": 0.1}


def rows(values: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def at(second: float) -> str:
    return datetime.fromtimestamp(BEGIN + second, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def metrics_of(step: int, total: int) -> dict[str, float]:
    """A plausible step of a run that learns."""
    share, wave = step / total, math.sin(step * 12.9898) * 0.04
    found = {
        "actor/entropy": 0.9 - 0.5 * share + wave,
        "actor/kl_loss": 0.1 * share + abs(wave) / 4,
        "actor/pg_loss": wave / 10,
        "actor/grad_norm": 1 + abs(wave) * 20,
        "actor/lr": 5e-4 * min(1.0, step / 10),
        "actor/pg_clipfrac": abs(wave),
        "critic/rewards/mean": min(1.0, 0.3 + 0.6 * share + wave),
        "critic/rewards/zero_std_groups": max(0.0, share / 2 + wave),
        "response_length/mean": 200 + 80 * share + 100 * wave,
        "response_length/clip_ratio": abs(wave) / 4,
        "rollout/logprob_gap_max": 1e-6 * (1 + abs(wave)),
        "made/of_its_own": 3.0,
    }
    found |= {f"timing_s/{act}": seconds * (1 + wave) for act, seconds in SECONDS.items()}
    if step % 20 == 0:
        found |= {"val/reward/mean": min(1.0, 0.4 + 0.5 * share), "timing_s/validation": 2.0}
    return found | {"timing_s/step": sum(SECONDS.values()) * (1 + wave)}


class Story:
    """Tells a run, event by event; `write` puts it on disk."""

    def __init__(self, total: int) -> None:
        self.total, self.clock, self.attempt = total, 0.0, 0
        self.events: list[dict[str, Any]] = []
        self.metrics: list[dict[str, Any]] = []
        self.records: dict[int, dict[str, Any]] = {}

    def say(self, event: str, **fields: Any) -> None:
        self.events.append({"time": at(self.clock), "attempt": self.attempt, "event": event, **fields})

    def start(self, step: int | None = None) -> None:
        self.attempt += 1
        self.say("attempt_started", total_steps=self.total, seed=1, checked={"dataset": "640 rows"})
        self.clock += 30
        if step is not None:
            self.say("resumed", step=step, plan={"step": step})
        self.records[self.attempt] = {
            "attempt": self.attempt,
            "owner": {"host": f"node-{self.attempt % 3}", "pid": 100, "start_time": 1, "boot_id": "a"},
            "heartbeat": BEGIN + self.clock,
            "outcome": None,
            "processes": [{"role": "controller", "rank": None, "pid": 100, "start_time": 1, "host": "node-a"}],
        }

    def steps(self, first: int, last: int, save_freq: int = 20) -> None:
        for step in range(first, last + 1):
            metrics = metrics_of(step, self.total)
            self.clock += metrics["timing_s/step"]
            self.say("step", step=step, total=self.total, reward=metrics["critic/rewards/mean"], seconds=7.5)
            self.metrics.append({"time": at(self.clock), "attempt": self.attempt, "step": step, **metrics})
            if step % save_freq == 0:
                self.save(step)

    def save(self, step: int) -> None:
        self.say("checkpoint_saved", step=step, outcome="published", num_bytes=5_000_000, write_s=0.4)
        self.say("checkpoint_verified", step=step, verify_s=1.0, read_from="disk")
        if step % 100 == 0:
            self.say("checkpoint_uploaded", step=step, upload_s=3.0)
        elif step > 60:
            self.say("checkpoint_pruned", step=step - 60, reason="no rule keeps it")

    def end(self, status: str, **fields: Any) -> None:
        self.say(status, **fields)
        self.records[self.attempt]["outcome"] = {"status": status, **fields}

    def write(self, folder: Path) -> RunDir:
        run = RunDir.at(folder)
        run.root.mkdir(parents=True, exist_ok=True)
        contract = {"code.torch": "2.13.0", "trainer.seed": 1, "actor_rollout_ref.model.path": HOSTILE + UNBROKEN}
        write_json(run.record, {"run_id": "run-a", "created": at(0), "keepstep": "0.2.0", "contract": contract,
                                "model": {"path": "m"}, "dataset": {"num_rows": 640}})  # fmt: skip
        run.config.write_text("s3:\n  endpoint_url: https://me:secret@store.example:9000\n  bucket: b\n")
        run.events.write_text(rows(self.events))
        run.metrics.write_text(rows(self.metrics))
        for number, record in self.records.items():
            write_json(run.attempt(number), record)
        return run


def preempted_often(folder: Path, total: int = 200) -> RunDir:
    """Four attempts: killed without a word, failed with a hostile message, asked to leave, finished."""
    story = Story(total)
    story.start()
    story.steps(1, total // 4 + 7)
    story.clock += 60
    story.start(total // 4 // 20 * 20)
    story.steps(total // 4 // 20 * 20 + 1, total // 2 + 3)
    story.say("worker_lost", role="engine", lost=["engine 0"], reason="engine 0 died")
    story.say("recovered", role="engine", seconds=9.0)
    # Of an attempt that ends: nobody took its place.
    story.say("worker_lost", role="rank", lost=["rank 1"], reason="update: rank 1 died.")
    story.end("failed", **{"class": "worker_died", "message": f"rank 1 died {HOSTILE} {UNBROKEN}", "remedy": "again"})
    story.clock += 600
    story.start(total // 2 // 20 * 20)
    story.say("checkpoint_rejected", step=20, source="local", reason=f"{HOSTILE}: truncated")
    story.steps(total // 2 // 20 * 20 + 1, total * 3 // 4)
    story.end("preempted", **{"class": "preempted", "message": "Asked to leave: saved and verified."})
    story.clock += 3600
    story.start(total * 3 // 4)
    story.steps(total * 3 // 4 + 1, total)
    story.end("finished", step=total, result={})
    run = story.write(folder)
    for step in (total, total - 20):
        run.checkpoint(step).mkdir(parents=True)
    run.text_of(run.latest_link).write_text(f"step_{total}\n")
    write_json(run.upload(total // 100 * 100), {"step": total // 100 * 100})
    return run


def rollouts(run: RunDir, steps: list[int]) -> None:
    """What a trainer keeps of its responses."""
    import pyarrow
    import pyarrow.parquet

    run.rollouts.mkdir()
    for step in steps:
        table = {
            "step": [step] * 16,
            "split": ["train"] * 14 + ["val"] * 2,
            "ground_truth": [str(number + step) for number in range(16)],
            "prompt": [f"{number} + {step} =" for number in range(16)],
            "response": [f"{HOSTILE.replace(chr(0xD800), '')} answer {number} {UNBROKEN}" for number in range(16)],
            "reward": [(number * 5 % 16) / 16 for number in range(16)],
            "advantage": [(number % 2) * 2.0 - 1 for number in range(14)] + [None] * 2,
        }
        pyarrow.parquet.write_table(pyarrow.table(table), run.rollouts / f"step_{step}.parquet")
