"""`keepstep serve` on a checkpoint: exported, served by vLLM, answering with the policy's own log-probs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.quickstart.char_qwen3 import build_model, build_tokenizer
from tests.integration.driver import clean_environment
from tests.unit import export_builder

pytestmark = [pytest.mark.integration, pytest.mark.slow]

START_S = 420.0
"""On a machine that is busy with other things as well; some 25 s when it is not."""


@dataclass
class Served:
    url: str
    process: subprocess.Popen[str]
    run: Path
    policy: Any

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, {"Content-Type": "application/json"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=120) as answer:
            text = answer.read()
        return json.loads(text) if text else None


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The quickstart's kind of model as a checkpoint, behind a server; ended by SIGTERM."""
    folder = tmp_path_factory.mktemp("served")
    tokenizer = build_tokenizer()
    torch.manual_seed(5)
    policy = build_model(tokenizer).eval()
    base = export_builder.write_base(folder / "base", policy, generation=None)
    checkpoint = export_builder.write_checkpoint(folder, policy, base)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "keepstep.cli.main", "serve", str(checkpoint), "--port", str(port)]
    # vLLM itself would round float32 weights to bfloat16.
    command += ["--", "--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "64", "--max-num-seqs", "4"]
    log = folder / "serve.log"
    environment = clean_environment() | {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment)
    found = Served(f"http://127.0.0.1:{port}", process, checkpoint.parent.parent, policy)
    try:
        _wait_until_up(found, log)
        yield found
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_up(served: Served, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert served.process.poll() is None, log.read_text()[-4000:]
        try:
            served.ask("/health")
            return
        except (OSError, urllib.error.URLError):
            time.sleep(0.5)
    raise AssertionError(f"no answer within {START_S:.0f} s\n{log.read_text()[-4000:]}")


def test_the_server_answers_under_the_runs_name_from_an_export_of_its_own(served: Served):
    (model,) = served.ask("/v1/models")["data"]
    assert model["id"] == "run-step_20" and model["root"] == str(served.run / "export" / "step_20")
    question = {"model": model["id"], "messages": [{"role": "user", "content": "1+2"}], "max_tokens": 4}
    (answer,) = served.ask("/v1/chat/completions", question)["choices"]
    assert answer["message"]["role"] == "assistant" and answer["finish_reason"] in ("stop", "length")


def test_log_probs_of_the_server_are_the_policys(served: Served):
    """Sampled with a seed, which crashed a CPU engine that split its prefills."""
    tokenizer = build_tokenizer()
    for number, text in enumerate(("1+2=", "9+9=", "3+4=")):
        prompt = tokenizer.encode(text)
        body = {
            "model": "run-step_20", "prompt": prompt, "max_tokens": 8, "temperature": 1.0, "seed": number,
            "logprobs": 1, "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        (choice,) = served.ask("/v1/completions", body)["choices"]
        sampled = choice["token_ids"]
        assert len(sampled) == 8
        with torch.no_grad():
            expected = served.policy(torch.tensor([[*prompt, *sampled]])).logits[0].log_softmax(-1)
        for index, (token, log_prob) in enumerate(zip(sampled, choice["logprobs"]["token_logprobs"], strict=True)):
            # float32 rounding; weights of another step would differ by 1e-1 and more.
            assert abs(expected[len(prompt) - 1 + index, token].item() - log_prob) < 2e-5


def test_the_export_was_made_once_for_these_bytes(served: Served):
    record = json.loads((served.run / "export" / "step_20" / "keepstep_export.json").read_text())
    manifest = json.loads((served.run / "checkpoints" / "step_20" / "manifest.json").read_text())
    assert record["checkpoint"] == manifest["self"]
    assert os.listdir(served.run / "export") == ["step_20"]
