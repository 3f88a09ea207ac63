"""The vLLM engine: samples responses and takes new weights."""

from __future__ import annotations

import multiprocessing
import os
import time
from typing import Any

from vllm import LLM, SamplingParams

from keepstep.config.schema import RolloutConfig
from keepstep.errors import StaleWeightsError
from keepstep.processes import start_time
from keepstep.rollout import parallel, weight_transfer
from keepstep.rollout.types import Request, Response, Sampled

CPU_BLOCK_SIZE = 32
"""Tokens of a block of the KV cache; vLLM's CPU kernels take multiples of this."""
PARALLEL_WORKER = "keepstep.rollout.parallel_worker.ParallelWorker"


class OneUse(SamplingParams):
    """Made for one request. vLLM copies what it is given, which takes as long as sampling a short answer."""

    def clone(self) -> OneUse:
        return self


class VllmEngine:
    """One vLLM engine: in this process, or with tensor parallelism over worker processes below it.

    It starts with dummy weights and samples only after `update_weights`. One that sleeps has given back the GPU memory
    of weights and KV cache, and wakes up for new weights.
    """

    def __init__(
        self, model_dir: str, config: RolloutConfig, *, max_model_len: int, device: str, can_sleep: bool = False
    ) -> None:
        weight_transfer.register()
        num_workers = config.tensor_model_parallel_size
        self._shared = weight_transfer.SharedParts() if num_workers > 1 else None
        watch = parallel.WorkerWatch() if num_workers > 1 else None
        self._version: int | None = None
        self._asleep = False
        self._stop = config.stop
        # Shorter ones fill no block, and to forget what was never shared takes a walk over all blocks.
        self._shares_prompts = config.enable_prefix_caching and max_model_len > CPU_BLOCK_SIZE
        self._ids: list[str] = []
        self._first_id = 0
        """vLLM's names of the requests at work; its own count gives them numbers in a row."""
        self._llm = LLM(
            model=model_dir,
            tensor_parallel_size=num_workers,
            # Left to itself, vLLM inside of a Ray actor starts actors of its own.
            distributed_executor_backend="mp" if num_workers > 1 else None,
            worker_extension_cls=PARALLEL_WORKER if num_workers > 1 else "",
            load_format="dummy",
            dtype=config.dtype,
            enforce_eager=device == "cpu",
            # Seeded requests need the generator's offset when a prefill is split, and CPU generators have none.
            enable_chunked_prefill=device != "cpu",
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=max(2048, max_model_len),
            gpu_memory_utilization=config.gpu_memory_utilization,
            # Each worker holds the keys and values of its own heads.
            kv_cache_memory_bytes=config.kv_cache_gib * 2**30 // num_workers if device == "cpu" else None,
            enable_prefix_caching=self._shares_prompts,
            # A CPU's own default, 128, is longer than most prompts: none would fill a block that can be shared.
            block_size=CPU_BLOCK_SIZE if device == "cpu" else None,
            disable_log_stats=True,
            # Log-probs of the distribution that is sampled from, after the temperature, as the trainer computes them.
            logprobs_mode="processed_logprobs",
            seed=0,
            enable_sleep_mode=can_sleep,
            weight_transfer_config={"backend": weight_transfer.BACKEND},
        )
        self._llm.init_weight_transfer_engine({"init_info": {}})
        if watch is not None:
            parallel.forget_names([os.getpid(), *(pid for pid, _ in self.workers())])
            watch.up()

    def workers(self) -> list[tuple[int, int]]:
        """Process id and start time of each worker process."""
        found = [(child.pid, start_time(child.pid)) for child in multiprocessing.active_children() if child.pid]
        return [(pid, started) for pid, started in found if started is not None]

    def update_weights(self, weights: dict[str, Any], version: int) -> None:
        """Load full, unsharded tensors by parameter name; `version` is the global step they belong to."""
        self._version = None
        self._drop_unfinished()
        if self._asleep:
            # The KV cache comes back when the parts of the weights that are on their way have gone.
            self._llm.wake_up(tags=["weights"])
        self._llm.start_weight_update()
        for info in self._shared.of(weights) if self._shared is not None else [{"weights": weights}]:
            self._llm.update_weights({"update_info": info})
        self._llm.finish_weight_update(weight_version=str(version))
        if self._asleep:
            self._llm.wake_up(tags=["kv_cache"])
            self._asleep = False
        self._version = version

    def sleep(self) -> None:
        """Give the GPU memory back until the next weights come; these are dropped."""
        if self._asleep:
            return
        self._version = None
        self._drop_unfinished()
        self._llm.sleep(level=2)
        self._asleep = True

    def generate(self, requests: list[Request], *, version: int, max_tokens: int, temperature: float) -> list[Response]:
        """One response per request, in order; raises as `begin` does."""
        self.begin(requests, version=version, max_tokens=max_tokens, temperature=temperature)
        return [response for _, response in sorted(self.go_on(None).finished, key=lambda answer: answer[0])]

    def begin(self, requests: list[Request], *, version: int, max_tokens: int, temperature: float) -> None:
        """Take requests on; `go_on` samples the responses. What was left unfinished of others is dropped.

        Raises:
            StaleWeightsError: the engine does not hold the weights of `version`.
        """
        if self._version != version:
            raise StaleWeightsError(
                f"The engine holds weights of step {self._version}, asked to sample with {version}."
            )
        self._drop_unfinished()
        if self._shares_prompts:
            # A rollout is a function of its requests: what earlier ones left would be there in some attempts only.
            self._llm.reset_prefix_cache()
        params = [
            OneUse(
                temperature=temperature,
                max_tokens=max_tokens,
                seed=request.seed,
                logprobs=0,
                stop=self._stop,
                # Only texts to stop at need the text of what is sampled.
                detokenize=bool(self._stop),
            )
            for request in requests
        ]
        prompts: Any = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests]
        self._first_id = self._llm.request_counter.counter
        self._ids = self._llm.enqueue(prompts, params, use_tqdm=False)

    def go_on(self, slice_s: float | None) -> Sampled:
        """Sample a token each until all requests are answered, or for `slice_s` seconds, once in any case."""
        engine, begin = self._llm.llm_engine, time.monotonic()
        finished: list[tuple[int, Response]] = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                finished.append((int(output.request_id) - self._first_id, _response(output.outputs[0])))  # type: ignore[index]
            if slice_s is not None and time.monotonic() - begin >= slice_s:
                break
        return Sampled(finished, not engine.has_unfinished_requests())

    def _drop_unfinished(self) -> None:
        """Of a rollout that was broken off between two slices."""
        if self._llm.llm_engine.has_unfinished_requests():
            self._llm.llm_engine.abort_request(self._ids, internal=True)


def _response(completion: Any) -> Response:
    token_ids = list(completion.token_ids)
    log_probs = [entry[token].logprob for token, entry in zip(token_ids, completion.logprobs, strict=True)]
    return Response(token_ids, log_probs, completion.finish_reason == "stop")
