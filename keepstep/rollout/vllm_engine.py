"""The vLLM engine: samples responses and takes new weights."""

from __future__ import annotations

from typing import Any

from vllm import LLM, SamplingParams

from keepstep.config.schema import RolloutConfig
from keepstep.errors import StaleWeightsError
from keepstep.rollout import weight_transfer
from keepstep.rollout.types import Request, Response

CPU_BLOCK_SIZE = 32
"""Tokens of a block of the KV cache; vLLM's CPU kernels take multiples of this."""


class VllmEngine:
    """One in-process vLLM engine. It starts with dummy weights and samples only after `update_weights`."""

    def __init__(self, model_dir: str, config: RolloutConfig, *, max_model_len: int, device: str) -> None:
        weight_transfer.register()
        self._version: int | None = None
        self._stop = config.stop
        self._llm = LLM(
            model=model_dir,
            load_format="dummy",
            dtype=config.dtype,
            enforce_eager=device == "cpu",
            # Seeded requests need the generator's offset when a prefill is split, and CPU generators have none.
            enable_chunked_prefill=device != "cpu",
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=max(2048, max_model_len),
            gpu_memory_utilization=config.gpu_memory_utilization,
            enable_prefix_caching=config.enable_prefix_caching,
            # A CPU's own default, 128, is longer than most prompts: none would fill a block that can be shared.
            block_size=CPU_BLOCK_SIZE if device == "cpu" else None,
            disable_log_stats=True,
            # Log-probs of the distribution that is sampled from, after the temperature, as the trainer computes them.
            logprobs_mode="processed_logprobs",
            seed=0,
            weight_transfer_config={"backend": weight_transfer.BACKEND},
        )
        self._llm.init_weight_transfer_engine({"init_info": {}})

    def update_weights(self, weights: dict[str, Any], version: int) -> None:
        """Load full, unsharded tensors by parameter name; `version` is the global step they belong to."""
        self._version = None
        self._llm.start_weight_update()
        self._llm.update_weights({"update_info": {"weights": weights}})
        self._llm.finish_weight_update(weight_version=str(version))
        self._version = version

    def generate(self, requests: list[Request], *, version: int, max_tokens: int, temperature: float) -> list[Response]:
        """One response per request, in order.

        Raises:
            StaleWeightsError: the engine does not hold the weights of `version`.
        """
        if self._version != version:
            raise StaleWeightsError(
                f"The engine holds weights of step {self._version}, asked to sample with {version}."
            )
        # A rollout is a function of its requests: what earlier ones left would be there in some attempts only.
        self._llm.reset_prefix_cache()
        params = [
            SamplingParams(
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
        return [_response(output.outputs[0]) for output in self._llm.generate(prompts, params, use_tqdm=False)]


def _response(completion: Any) -> Response:
    token_ids = list(completion.token_ids)
    log_probs = [entry[token].logprob for token, entry in zip(token_ids, completion.logprobs, strict=True)]
    return Response(token_ids, log_probs, completion.finish_reason == "stop")
