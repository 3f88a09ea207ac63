"""Settings of other trainers that this one does not have, each with what to do instead. Pure."""

from __future__ import annotations

import re

_PARALLEL = "this trainer shards by FSDP2 alone and has no such size; leave it out (ranks: trainer.n_gpus_per_node)"
_STATE_DICT = "not implemented; it may change the names in a checkpoint, so it is refused rather than ignored"

_SETTINGS: tuple[tuple[str, str], ...] = (
    (r".*(pipeline|expert|context|virtual_pipeline|expert_tensor)_(model_)?parallel_size", _PARALLEL),
    (r".*ulysses_sequence_parallel_size", _PARALLEL),
    (r".*\bmegatron(\..*)?", "Megatron is not used here: FSDP2 only; leave it out"),
    (r".*\bsglang(\..*)?", "SGLang is not used here: the engine is vLLM (actor_rollout_ref.rollout.name=vllm)"),
    (r"actor_rollout_ref\.(actor|ref)\.strategy", "the strategy is always fsdp2; leave it out"),
    (
        r"actor_rollout_ref\.model\.(use_fused_kernels|use_liger|enable_activation_offload)",
        _STATE_DICT,
    ),
    (
        r"actor_rollout_ref\.(actor|ref)\.fsdp_config\.offload_policy",
        "it is FSDP2's own policy that fsdp_config.param_offload=true turns on; leave it out",
    ),
    (
        r"actor_rollout_ref\.ref\.fsdp_config\.optimizer_offload",
        "the reference is frozen and has no optimizer; leave it out",
    ),
    (
        r"actor_rollout_ref\.(ref|rollout)\.use_torch_compile",
        "actor_rollout_ref.actor.use_torch_compile counts for policy and reference; leave it out",
    ),
    (r"actor_rollout_ref\.model\.lora_.*", "adapters have lora_rank, lora_alpha and target_modules here; leave it out"),
    (
        r"actor_rollout_ref\.rollout\.(mode|enforce_eager|load_format)",
        "the engine sets it; leave it out",
    ),
    (r"algorithm\.(gamma|lam)", "it belongs to PPO with a critic; GRPO has none; leave it out"),
    (
        r"algorithm\.kl_ctrl\..*",
        "the coefficient does not adapt here: there are kl_ctrl.type=fixed and .kl_coef; leave it out",
    ),
    (r"critic(\..*)?", "GRPO has no critic; leave it out"),
    (r"reward_model(\..*)?", "rewards are functions here: custom_reward_function.path and .name"),
    (r"trainer\.default_local_dir", "it is called trainer.output_dir here"),
    (r"trainer\.(resume_mode|auto_resume)", "the same command always goes on; nothing to set"),
    (r"trainer\.resume_from_path", "it is called trainer.resume_from_checkpoint here"),
    (r"trainer\.max_(actor|critic)_ckpt_to_keep", "it is called checkpoint.keep_last here"),
    (r"trainer\.critic_warmup", "GRPO has no critic; leave it out"),
    (r"data\.seed", "there is one seed: trainer.seed"),
)
"""Pattern of the dotted key, sentence. The first that matches is told."""


def elsewhere(key: str) -> str | None:
    """What to do instead of a setting that other trainers have, None for one that nobody has."""
    for pattern, sentence in _SETTINGS:
        if re.fullmatch(pattern, key):
            return sentence
    return None
