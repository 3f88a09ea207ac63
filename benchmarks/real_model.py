"""SmolLM2-135M on GSM8K, the way of docs/smollm2.md as one proof: trained, killed, resumed, exported, asked.

    make smollm2-proof GSM8K=folder     (train.parquet and test.parquet in verl's columns)

Two runs of the packaged config of four steps, saved every second one. One is left alone; the other loses everything
that runs in its third step, command included, and is started again. Both must end in the same bytes. What it ends with
is exported, served by vLLM, and asked a question of the test set.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from keepstep.events.log import last_step_rows
from keepstep.platform import servers
from tests.integration.compare import differences, num_tensors
from tests.integration.driver import Driver, clean_environment, wait_until_gone

RESULTS = Path(__file__).parent / "results" / "smollm2.json"
CONFIG = "smollm2-135m-gsm8k-cpu"
NUM_STEPS = 4
MODEL = Path("build/smollm2/model").absolute()
RUN_S, SERVE_S = 2400.0, 300.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gsm8k", type=Path, required=True, help="folder of train.parquet and test.parquet")
    data = parser.parse_args().gsm8k.absolute()
    folder = Path(tempfile.mkdtemp(prefix="ks-smollm2-", dir="/tmp"))
    settings = [
        f"data.train_files={data / 'train.parquet'}",
        f"data.val_files={data / 'test.parquet'}",
        f"actor_rollout_ref.model.path={MODEL}",
        f"trainer.total_training_steps={NUM_STEPS}",
    ]
    alone, hit = (Driver(folder / name, settings, config=CONFIG) for name in ("alone", "hit"))
    assert alone.run_to_end(RUN_S) == 0, alone.tail()
    lose_everything(hit)
    assert hit.run_to_end(RUN_S) == 0, hit.tail()
    resumed = [event["step"] for event in hit.events() if event["event"] == "resumed"]
    final, expected = (driver.run.checkpoint(NUM_STEPS) for driver in (hit, alone))
    differing = differences(final, expected)
    assert resumed == [2] and not differing, (resumed, differing)
    assert hit.rewards() == alone.rewards()
    out = folder / "export"
    begin = time.monotonic()
    subprocess.run([sys.executable, "-m", "keepstep.cli.main", "export", str(final), str(out)], check=True)
    export_s = time.monotonic() - begin
    question = pq.read_table(data / "test.parquet").slice(0, 1).to_pylist()[0]
    rows = last_step_rows(alone.run.events)
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip(),
        "machine": {"cores": os.cpu_count(), "load_at_end": os.getloadavg()[0]},
        "rewards": [rows[step]["reward"] for step in sorted(rows)],
        "step_s": [round(rows[step]["seconds"], 1) for step in sorted(rows)],
        "killed_in_step": 3,
        "resumed_at": resumed[0],
        "num_tensors_equal": num_tensors(final),
        "checkpoint_bytes": sum(path.stat().st_size for path in final.rglob("*") if path.is_file()),
        "export_s": round(export_s, 1),
        "export_bytes": sum(path.stat().st_size for path in out.rglob("*") if path.is_file()),
        "question": question["prompt"][-1]["content"],
        "answer": served_answer(out, question["prompt"]),
    }
    RESULTS.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))
    return 0


def lose_everything(driver: Driver) -> None:
    """Start, and SIGKILL the command and all that it started in the third step."""
    driver.start()
    driver.wait_for_verified(2, timeout_s=RUN_S)
    driver.wait_for_step(2, timeout_s=RUN_S)
    others = [ref for ref in driver.processes() if ref.role not in servers.ROLES]
    driver.kill_command()
    for ref in others:
        driver.kill_process(ref)
    assert wait_until_gone(others) == []
    assert max(event["step"] for event in driver.events() if event["event"] == "step") == 2


def served_answer(model: Path, messages: list[dict[str, str]]) -> str:
    """The greedy answer of `keepstep serve`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "keepstep.cli.main", "serve", str(model), "--port", str(port)]
    command += ["--", "--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "1"]
    with (model.parent / "serve.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=clean_environment())
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + SERVE_S
        while not answers(f"{url}/health"):
            assert process.poll() is None and time.monotonic() < deadline, Path(log.name).read_text()[-3000:]
            time.sleep(0.5)
        name = ask(f"{url}/v1/models")["data"][0]["id"]
        body = {"model": name, "messages": messages, "max_tokens": 96, "temperature": 0.0}
        return str(ask(f"{url}/v1/chat/completions", body)["choices"][0]["message"]["content"])
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def answers(url: str) -> bool:
    try:
        ask(url)
    except (OSError, urllib.error.URLError):
        return False
    return True


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=SERVE_S) as answer:
        text = answer.read()
    return json.loads(text) if text else None


if __name__ == "__main__":
    sys.exit(main())
