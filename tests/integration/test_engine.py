"""The vLLM engine against transformers, after real weight updates: heads, temperatures, one process and two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.config.schema import RolloutConfig
from keepstep.rollout.environment import engine_environment

pytestmark = [pytest.mark.integration, pytest.mark.slow]

# A process of its own: vLLM reads its environment on import and keeps what it starts.
SCRIPT = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
from keepstep.config.schema import RolloutConfig
from keepstep.errors import StaleWeightsError
from keepstep.quickstart.char_qwen3 import build_model, build_tokenizer
from keepstep.rollout import weight_transfer
from keepstep.rollout.types import Request
from keepstep.rollout.vllm_engine import VllmEngine

folder, tied, temperature, size = sys.argv[1], sys.argv[2] == "tied", float(sys.argv[3]), int(sys.argv[4])
# Most tensors of a layer are above it: they come alone.
weight_transfer.PART_BYTES = 100_000
torch.manual_seed(0)
tokenizer = build_tokenizer()
model = build_model(tokenizer)
if not tied:
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.05)
model.save_pretrained(folder)
tokenizer.save_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
names = dict(model.named_parameters()).keys()
stop = [] if tied else ["3"]
config = RolloutConfig(stop=stop, tensor_model_parallel_size=size)
engine = VllmEngine(folder, config, max_model_len=112, device="cpu")
requests = [Request(tokenizer.encode(f"{a}+{b}="), 1000 * a + b) for a in range(4) for b in range(4)]
# Longer than a block of the cache, so that the samples of a group share their prompt.
requests += [Request(tokenizer.encode(f"{a}+{a}=" * 20), 7 * a + sample) for a in (5, 6) for sample in range(4)]

def ask(version, asked=requests):
    return engine.generate(asked, version=version, max_tokens=8, temperature=temperature)

def in_slices(version):
    engine.begin(requests, version=version, max_tokens=8, temperature=temperature)
    slices = [engine.go_on(0.0)]
    while not slices[-1].done:
        slices.append(engine.go_on(0.0))
    assert len(slices) > 3 and len(slices[-1].finished) < len(requests)
    return [response for _, response in sorted(sum((part.finished for part in slices), []), key=lambda one: one[0])]

def refuses(version):
    try:
        ask(version)
    except StaleWeightsError:
        return True
    return False

report = {"num_names": len(names), "refused_without_weights": refuses(0), "gaps": [], "moves": [],
          "alone": True, "stopped": 0}
previous = None
for version in range(3):
    # The engine draws from the same stream as it starts.
    torch.manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    engine.update_weights({name: value.detach().numpy() for name, value in model.named_parameters()}, version)
    answers = ask(version)
    assert ask(version) == answers
    assert in_slices(version) == answers
    # What is broken off between two slices leaves nothing behind.
    engine.begin(requests, version=version, max_tokens=8, temperature=temperature)
    engine.go_on(0.0)
    assert ask(version) == answers
    known = engine._llm.generate([{"prompt_token_ids": list(r.prompt_ids)} for r in requests], use_tqdm=False)
    report["shared"] = [output.num_cached_tokens for output in known]
    shared = ask(version, requests[:5]) + ask(version, requests[5:18]) + ask(version, requests[18:])
    report["alone"] = report["alone"] and [a.token_ids for a in shared] == [a.token_ids for a in answers]
    for answer in answers:
        text = tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        report["stopped"] += "3" in text
        if stop and "3" in text:
            assert text.index("3") == len(text) - 1 and answer.finished, text
    gap = move = 0.0
    for request, answer in zip(requests, answers):
        tokens = torch.tensor([[*request.prompt_ids, *answer.token_ids]])
        with torch.no_grad():
            expected = (model(tokens).logits / temperature).log_softmax(-1)[0]
        for index, (token, log_prob) in enumerate(zip(answer.token_ids, answer.log_probs)):
            gap = max(gap, abs(expected[len(request.prompt_ids) - 1 + index, token].item() - log_prob))
    report["gaps"].append(gap)
    if previous is not None:
        report["moves"].append([a.token_ids for a in answers] != [a.token_ids for a in previous])
    previous = answers
report["refused_stale"] = refuses(99)

# No CPU engine can sleep: this is the order of what is asked of vLLM, not what it does then.
real, asked = engine._llm, []

class Recorder:
    def __getattr__(self, name):
        return getattr(real, name)
    def sleep(self, level):
        asked.append(f"sleep {level}")
    def wake_up(self, tags):
        asked.append(f"wake {tags[0]}")
    def start_weight_update(self):
        asked.append("update")
        real.start_weight_update()

engine._llm = Recorder()
engine.begin(requests, version=2, max_tokens=8, temperature=temperature)
engine.go_on(0.0)
engine.sleep()
engine.sleep()
report["refused_asleep"] = refuses(2) and not real.llm_engine.has_unfinished_requests()
weights = {name: value.detach().numpy() for name, value in model.named_parameters()}
engine.update_weights(weights, 2)
report["same_after_sleep"] = ask(2) == answers
engine.update_weights(weights, 3)
report["asked"] = asked
print("REPORT " + json.dumps(report))
"""


@pytest.mark.parametrize(("head", "temperature", "size"), [("tied", 1.0, 1), ("untied", 0.7, 1), ("tied", 0.7, 2)])
def test_engine_samples_from_the_weights_it_was_given(tmp_path: Path, head: str, temperature: float, size: int):
    """C109: no rollout without confirmed weights; after an update every log-prob is the trainer's, the head's too.

    Tensor parallel as well: each worker has its part of every tensor, of a head that is tied also.
    """
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "model"), head, str(temperature), str(size)],
        capture_output=True, text=True, timeout=300, env=os.environ | engine_environment(RolloutConfig(), "cpu", 0),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    report = json.loads(line.removeprefix("REPORT "))
    assert report["num_names"] == (24 if head == "tied" else 25)
    assert report["refused_without_weights"] and report["refused_stale"]
    # Stale weights show as 1e-1 and more; float32 rounding stays below 1e-5.
    assert max(report["gaps"]) < 2e-5
    assert all(report["moves"])
    assert report["alone"], "two engines that share a batch sample the same tokens as one"
    assert report["shared"] == [0] * 16 + [64] * 8, "two blocks of each long prompt are there from the rollout"
    assert report["refused_asleep"] and report["same_after_sleep"]
    assert report["asked"] == ["sleep 2", "wake weights", "update", "wake kv_cache", "update"]
    assert report["stopped"] > 5, "some responses have a text to stop at"


HALF = """
import sys
import torch
from keepstep.actor.gathering import as_array
from keepstep.config.schema import RolloutConfig
from keepstep.quickstart.char_qwen3 import build_model, build_tokenizer
from keepstep.rollout.types import Request
from keepstep.rollout.vllm_engine import VllmEngine

torch.manual_seed(0)
tokenizer, model = build_tokenizer(), build_model(build_tokenizer())
model.save_pretrained(sys.argv[1])
tokenizer.save_pretrained(sys.argv[1])
size = int(sys.argv[2])
config = RolloutConfig(dtype="bfloat16", tensor_model_parallel_size=size)
engine = VllmEngine(sys.argv[1], config, max_model_len=112, device="cpu")
requests = [Request(tokenizer.encode(f"{a}+{b}="), 10 * a + b) for a in range(4) for b in range(4)]
policy = {name: value.detach() for name, value in model.named_parameters()}

def sampled(weights, version):
    engine.update_weights({name: as_array(value) for name, value in weights.items()}, version)
    return engine.generate(requests, version=version, max_tokens=8, temperature=1.0)

whole = sampled(policy, 1)
other = sampled({name: value + 0.05 * torch.randn_like(value) for name, value in policy.items()}, 2)
half = sampled({name: value.bfloat16() for name, value in policy.items()}, 3)
assert half == whole != other
print("EQUAL")
"""


@pytest.mark.parametrize("size", [1, 2])
def test_weights_in_the_engines_own_precision_are_what_it_would_round_them_to(tmp_path: Path, size: int):
    done = subprocess.run(
        [sys.executable, "-c", HALF, str(tmp_path / "model"), str(size)],
        capture_output=True, text=True, timeout=300, env=os.environ | engine_environment(RolloutConfig(), "cpu", 0),
    )  # fmt: skip
    assert done.returncode == 0 and "EQUAL" in done.stdout, done.stderr[-3000:]
