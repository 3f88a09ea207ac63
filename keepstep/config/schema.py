"""Every setting of a run, under verl's names where verl has one.

An unknown key is an error. A choice that this trainer does not implement is not in the `Literal`, so it is
refused by name instead of being accepted and ignored. Field documentation is the string under the field.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

EMBEDDED_BUCKET = "keepstep"
"""Bucket of the embedded store."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False)


KlEstimator = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "low_var_kl+", "k3+"]


class KlControlConfig(Section):
    type: Literal["fixed"] = "fixed"
    kl_coef: NonNegativeFloat = 0.001
    """What a nat of the KL estimate takes off the reward."""


class FilterGroupsConfig(Section):
    enable: bool = False
    """Dynamic sampling (DAPO): groups whose rewards are all equal are dropped and refilled with the next prompts."""
    max_num_gen_batches: PositiveInt = 10
    """Batches of prompts that one step may roll out; one that is not full then stops the run."""


class RolloutCorrectionConfig(Section):
    rollout_is: Literal["token", "sequence"] | None = None
    """Weigh each token's loss by trainer / engine probability, of the token or of its response; None: do not."""
    rollout_is_threshold: PositiveFloat = 2.0
    """Its largest value (truncated importance sampling)."""


class AlgorithmConfig(Section):
    adv_estimator: Literal["grpo", "dr_grpo", "rloo", "grpo_passk"] = Field(...)
    """How advantages are estimated. Always stated, never inferred: trainers differ in what they take by default."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide the centred group rewards by their standard deviation (GRPO); False is Dr. GRPO's choice."""
    use_kl_in_reward: bool = False
    """Take the KL estimate against the frozen reference off the rewards, before the advantages."""
    kl_penalty: KlEstimator = "kl"
    """Estimator of the KL in the reward."""
    kl_ctrl: KlControlConfig = KlControlConfig()
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    mask_truncated: bool = False
    """Responses that were cut off at `data.max_response_length` bear no loss; their rewards still count."""


class DataConfig(Section):
    train_files: str | list[str] = Field(...)
    """Parquet files to train on: a path, a list, a glob or s3:// addresses. `made:` files are the quickstart's."""
    val_files: str | list[str] | None = None
    """Parquet files to validate on; none: no validation."""
    prompt_key: str = "prompt"
    """Column that holds the prompt as chat messages (or plain text)."""
    reward_fn_key: str = "data_source"
    """Column handed to the reward function as `data_source`."""
    train_batch_size: PositiveInt = 64
    """Prompts per step, over all ranks."""
    val_batch_size: PositiveInt = 256
    """Prompts per validation batch."""
    max_prompt_length: PositiveInt = 512
    """Tokens of a prompt at most."""
    max_response_length: PositiveInt = 512
    """Tokens generated at most."""
    filter_overlong_prompts: bool = True
    """Drop prompts over `max_prompt_length`; False: refuse the data set."""
    shuffle: bool = True
    """A new permutation of the rows each epoch, a function of (seed, epoch)."""
    train_max_samples: PositiveInt | Literal[-1] = -1
    """Rows to train on at most, drawn by `trainer.seed` with `shuffle`, else the first ones; -1: all."""
    val_max_samples: PositiveInt | Literal[-1] = -1
    """Rows to validate on at most, in the same way."""


class OptimConfig(Section):
    lr: NonNegativeFloat = 1e-6
    """Peak learning rate."""
    lr_warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up."""
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"
    """Schedule after the warm-up."""
    min_lr_ratio: NonNegativeFloat = 0.0
    """Cosine only: the last learning rate as a share of `lr`."""
    weight_decay: NonNegativeFloat = 0.01
    """AdamW's decoupled weight decay."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's betas."""


class FsdpConfig(Section):
    param_offload: bool = False
    """Parameters, gradients and AdamW's moments are in host memory, where updates are made; layers go to the GPU."""
    optimizer_offload: bool | None = None
    """The moments are where the parameters are: None, or the same as `param_offload`."""
    model_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision of forward and backward; master weights and reductions are fp32 in either case."""


class RefFsdpConfig(Section):
    param_offload: bool = False
    """The frozen reference is in host memory; each layer goes to the GPU for its own pass."""


class PolicyLossConfig(Section):
    loss_mode: Literal["vanilla", "gspo"] = "vanilla"
    """`vanilla`: a ratio per token; `gspo`: one per response."""


class ActorConfig(Section):
    ppo_mini_batch_size: PositiveInt = 64
    """Prompts per optimizer update (each with all its `rollout.n` responses)."""
    ppo_micro_batch_size_per_gpu: PositiveInt = 64
    """Responses per forward and backward on one rank."""
    use_dynamic_bsz: bool = False
    """Cut micro-batches by tokens instead of by responses, in the update and for old and reference log-probs."""
    ppo_max_token_len_per_gpu: PositiveInt = 16384
    """Their tokens, prompts included; at least those of the longest prompt with its response."""
    use_prefix_grouper: bool = False
    """Train on sequences without padding, each prompt once for all responses to it in a micro-batch."""
    use_torch_compile: bool = False
    """Compile the decoder layers of policy and reference; the first step waits for the compiler."""
    ppo_epochs: PositiveInt = 1
    """Passes over each rollout batch."""
    clip_ratio: PositiveFloat = 0.2
    """PPO clip on the probability ratio."""
    clip_ratio_low: PositiveFloat | None = None
    """Clip below 1, where it is to be another one."""
    clip_ratio_high: PositiveFloat | None = None
    """Clip above 1, where it is to be another one (DAPO's clip-higher)."""
    clip_ratio_c: float | None = Field(default=None, gt=1)
    """Bound of the dual clip, for tokens of negative advantage; None: none."""
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    use_kl_loss: bool = True
    """Add the KL estimate against the frozen reference to the loss."""
    kl_loss_coef: NonNegativeFloat = 0.001
    """Its coefficient."""
    kl_loss_type: KlEstimator = "low_var_kl"
    """KL estimator; `low_var_kl` is verl's name of k3, a `+` takes the gradient of k2."""
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    """How token losses are averaged over the mini-batch; the last divides by `data.max_response_length` (Dr. GRPO)."""
    entropy_coeff: float = 0.0
    """Entropy bonus."""
    grad_clip: PositiveFloat = 1.0
    """Largest global gradient norm."""
    optim: OptimConfig = OptimConfig()
    fsdp_config: FsdpConfig = FsdpConfig()


class RefConfig(Section):
    log_prob_micro_batch_size_per_gpu: PositiveInt = 256
    """Responses per reference (and old-policy) forward on one rank."""
    log_prob_max_token_len_per_gpu: PositiveInt | None = None
    """Tokens of one with `actor.use_dynamic_bsz`; None: as in the update."""
    refresh_freq: int = -1
    """Steps after which the policy of that moment becomes the reference; -1: it stays what the run began with."""
    fsdp_config: RefFsdpConfig = RefFsdpConfig()


class ModelConfig(Section):
    path: str = Field(...)
    """A Hugging Face folder. `made:char-qwen3` is the quickstart's, made on first use."""
    lora_rank: NonNegativeInt = 0
    """Train low-rank adapters of this rank on the frozen model; 0: train the whole model."""
    lora_alpha: PositiveInt = 16
    """The adapters count alpha / rank times."""
    target_modules: str | list[str] = "all-linear"
    """Modules that get one: `all-linear` or names, as [q_proj, v_proj]."""
    use_remove_padding: bool = False
    """Train on sequences that stand behind each other without padding."""
    enable_gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them."""


class ValKwargs(Section):
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature in validation; 0 is greedy."""
    n: PositiveInt = 1
    """Responses to each validation prompt; above 1 pass@n is reported as well."""


class RolloutConfig(Section):
    name: Literal["vllm"] = "vllm"
    n: PositiveInt = 8
    """Responses per prompt: GRPO's group size."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; log-probs and loss use the same."""
    tensor_model_parallel_size: PositiveInt = 1
    """GPUs over which each engine divides the model; on CPU these are processes."""
    num_engines: PositiveInt = 1
    """Engines that share each batch; whatever their number, every response has its own seed."""
    stop: list[str] = []
    """A response ends after any of these texts as well; they stay part of it."""
    port: int = Field(default=20014, gt=0, lt=65536)
    """First port of the engines' range (on the node of this process); it must be free."""
    gpu_memory_utilization: float = Field(default=0.5, gt=0, le=1)
    """Share of a GPU that the engine may take (GPU only)."""
    kv_cache_gib: PositiveInt = 1
    """KV cache of an engine on CPU, in GiB."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the engine."""
    max_num_seqs: PositiveInt = 256
    """Sequences that the engine decodes at once."""
    free_cache_engine: bool = True
    """While the ranks train, the engines beside them give back the GPU memory of weights and KV cache (GPU only)."""
    enable_prefix_caching: bool = True
    """Work out each prompt once for all responses that the engine samples to it in one rollout."""
    logprob_tolerance: PositiveFloat = 1e-3
    """Largest accepted |engine - trainer| log-prob of a sampled token; above it the engine has stale weights."""
    val_kwargs: ValKwargs = ValKwargs()


class OverlongBufferConfig(Section):
    enable: bool = False
    """Soft over-long punishment (DAPO): the last tokens before the limit take from the reward."""
    len: PositiveInt = 1
    """Tokens before `data.max_response_length` over which the punishment grows."""
    penalty_factor: NonNegativeFloat = 1.0
    """What a response at the limit loses."""


class RewardModelConfig(Section):
    on_error: Literal["stop", "zero"] = "stop"
    """When the reward function raises or takes too long for a response: stop the run, or score 0 and count it."""
    timeout_s: PositiveFloat | None = None
    """Longest time for one response; None: `timeouts.reward_s` for all of them is the only limit."""
    num_workers: NonNegativeInt = 0
    """Processes that score; 0: the trainer's own."""
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()


class ActorRolloutRefConfig(Section):
    model: ModelConfig
    hybrid_engine: bool = True
    """Engines share the ranks' GPUs and take turns with them. False: they have GPUs of their own, and the ranks work
    out log-probs of finished responses while others are sampled."""
    actor: ActorConfig = ActorConfig()
    rollout: RolloutConfig = RolloutConfig()
    ref: RefConfig = RefConfig()


class RewardFunctionConfig(Section):
    path: str | None = None
    """A Python file, or None to take `name` as a dotted path."""
    name: str = "keepstep.rewards.exact_match"
    """The function in `path`, or a dotted path to `compute_score`'s module or function."""


class TrainerConfig(Section):
    project_name: str = "keepstep"
    """The project in Weights & Biases."""
    experiment_name: str = "run"
    """What the run is called there, and in the card of an export."""
    logger: list[Literal["console", "tensorboard", "wandb"]] = ["console", "tensorboard"]
    """Where metrics are shown; the first two always are, and metrics.jsonl is always written."""
    nnodes: PositiveInt = 1
    """Nodes of the job."""
    n_gpus_per_node: PositiveInt = 1
    """FSDP2 ranks per node; on CPU these are CPU ranks."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where ranks and engines compute; `auto`: CUDA where its driver is, for a cluster to be said."""
    save_freq: int = 20
    """Steps between checkpoints; -1 saves at the end only."""
    test_freq: int = -1
    """Steps between validations; -1: never."""
    val_before_train: bool = True
    """Validate before the first step as well (only with `test_freq` > 0)."""
    log_val_generations: NonNegativeInt = 16
    """Prompts of a validation that are kept with their responses, in rollouts/step_<step>.parquet."""
    total_epochs: PositiveInt = 1
    """Passes over the data, unless `total_training_steps` says otherwise."""
    total_training_steps: PositiveInt | None = None
    """Steps of the run."""
    output_dir: str = Field(...)
    """The run's folder."""
    resume_from_checkpoint: str | None = None
    """Resume this start's first attempt from exactly this checkpoint of the run."""
    init_from: str | None = None
    """Begin a new run with the weights of this checkpoint, everything else fresh. Never a resume."""
    seed: int = 42
    """The one seed: data order, sampling, initialisation."""
    debug: bool = False
    """One step from the chosen checkpoint, whatever the run's length says; nothing is written into the run."""


class CheckpointConfig(Section):
    layout: Literal["full", "sharded"] = "full"
    """`full`: one file per role. `sharded`: one per role and rank, each written on its rank's own node."""
    keep_last: PositiveInt = 3
    """Newest verified checkpoints that stay on disk."""
    keep_every: PositiveInt = 100
    """Every multiple of this stays as well."""
    keep_best: NonNegativeInt = 1
    """So many of the best by `best_metric` stay as well; `checkpoints/best` points to the first of them."""
    best_metric: str = "val/reward/mean"
    """What "best" is measured by; a checkpoint has it when its very step was validated."""
    best_mode: Literal["max", "min"] = "max"
    """Whether more or less of it is better."""
    max_disk_bytes: PositiveInt | None = None
    """Over this only the newest, the newest multiple, the best, pinned ones and those in use have a claim to stay."""
    on_no_room: Literal["stop", "skip"] = "stop"
    """When there is no room for a save: stop the run, or skip this save and go on; the last one is never skipped."""
    save_timeout_s: PositiveFloat = 1800.0
    """Longest time that writing one checkpoint may take."""
    verify_timeout_s: PositiveFloat = 1800.0
    """Longest time that verifying one may take."""


class S3Config(Section):
    embedded: bool = False
    """Start the S3 server that comes with Keepstep, beside the run (quickstart, tests)."""
    endpoint_url: str | None = None
    """Endpoint; None is AWS."""
    bucket: str | None = None
    """Bucket; None (and not embedded): nothing is uploaded."""
    prefix: str | None = None
    """Key prefix of the run; None: the folder's name and 8 hex digits of the SHA-256 of its absolute path."""
    region: str | None = None
    max_bandwidth: PositiveInt | None = None
    """Bytes per second of uploads and downloads, each on average over a few parts; None: no limit."""
    storage_class: str | None = None
    """S3 storage class of everything that is stored; None: the bucket's default. It must be readable at once."""
    sse: Literal["AES256", "aws:kms", "aws:kms:dsse"] | None = None
    """Server-side encryption of everything that is stored; None: the bucket's default."""
    sse_kms_key_id: str | None = None
    """Key of `aws:kms`; None: the account's default key."""
    keep_remote: Literal["all", "retention"] = "all"
    """`all`: no good checkpoint is ever deleted from the store. `retention`: the rules of the disk hold there too, for
    steps that this run wrote and whose local copies are gone."""
    upload_interval: PositiveInt = 100
    """Steps between uploads: the first save at or after each multiple goes up, and the last one."""
    max_retries: NonNegativeInt = 8
    """Tries after a failed upload before it is left for the end of the run."""
    final_timeout_s: PositiveFloat = 900.0
    """How long the end of the run waits for uploads to be confirmed."""


class ResumeConfig(Section):
    policy: Literal["prefer_multiple", "latest"] = "prefer_multiple"
    """`prefer_multiple`: the newest verified multiple of `prefer_multiple` first; `latest`: the newest verified."""
    prefer_multiple: PositiveInt = 100
    max_rewind_steps: NonNegativeInt | None = None
    """Most steps that preferring a multiple may give up; None: no bound."""
    stage_dir: str | None = None
    """A folder on every node's own disk: a resume copies there what the node's ranks load. None: they load in place."""
    allow: list[str] = []
    """Contract fields whose change is accepted for this start; the waiver is written into the run. Also `scheduler`
    (rebuild a lost one at the global step), `mismatched_sizes` (`trainer.init_from` leaves out tensors of other shapes)
    `probe` (a loaded policy may give other log-probs) and `exactness` (a replayed step may differ)."""


class ExportConfig(Section):
    enable: bool = False
    """The flow ends with an export of the last step into the run's folder, export/step_<step>."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of its weights."""
    timeout_s: PositiveFloat = 3600.0
    """Longest time that it may take."""


class RetryConfig(Section):
    max_retries: NonNegativeInt = 3
    """Failures in a row, without a newly verified step, that are tried again; kills from outside do not count."""
    delays_s: list[NonNegativeFloat] = [2.0, 10.0, 30.0]
    """Wait before each; the last one repeats. After the first of several equal kills there is none."""
    jitter: NonNegativeFloat = 0.3
    """Share by which a wait is lengthened at random."""
    lease_timeout_s: PositiveFloat = 90.0
    """Silence after which an attempt on another host counts as gone."""
    wait_for_holder_s: NonNegativeFloat = 0.0
    """How long a start waits for another attempt that holds the run; 0: it is refused at once."""
    heartbeat_s: PositiveFloat = 2.0
    """Seconds between heartbeats of an attempt."""
    term_grace_s: PositiveFloat = 30.0
    """Seconds after SIGTERM in which the attempt saves and leaves."""


class RecoveryConfig(Section):
    in_place: bool = True
    """Replace a lost rank or engine within the attempt, instead of ending it."""
    max_in_a_row: PositiveInt = 3
    """Replacements without a newly verified step; one more ends the attempt."""
    warm_spare: bool = False
    """Keep a started process that has imported everything for each rank and engine; on the CPU only."""


class TimeoutConfig(Section):
    start_s: PositiveFloat = 600.0
    """Ranks and engines are up within this."""
    step_s: PositiveFloat = 1800.0
    """Longest time without progress inside a step."""
    reward_s: PositiveFloat = 600.0
    """Longest time that scoring the responses of one step, or of one batch of a validation, may take."""
    collective_s: PositiveFloat = 120.0
    """Longest time that one rank waits for the others."""


class RayConfig(Section):
    address: str | None = None
    """None: a local Ray inside a child process. Else the address of a cluster's job server: a Ray job."""
    object_store_bytes: int | None = None
    """Object store of the local Ray; None: Ray's default."""


class RunConfig(Section):
    """The whole configuration of a run."""

    algorithm: AlgorithmConfig
    data: DataConfig
    actor_rollout_ref: ActorRolloutRefConfig
    reward_model: RewardModelConfig = RewardModelConfig()
    custom_reward_function: RewardFunctionConfig = RewardFunctionConfig()
    trainer: TrainerConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    s3: S3Config = S3Config()
    resume: ResumeConfig = ResumeConfig()
    export: ExportConfig = ExportConfig()
    retry: RetryConfig = RetryConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    timeouts: TimeoutConfig = TimeoutConfig()
    ray: RayConfig = RayConfig()

    @property
    def world_size(self) -> int:
        """FSDP2 ranks of the job."""
        return self.trainer.nnodes * self.trainer.n_gpus_per_node

    @property
    def needs_old_log_probs(self) -> bool:
        """Whether log-probs under the policy before a step's updates must be known before the first of them.

        With one update in a step they are those that its own forward pass gives.
        """
        actor = self.actor_rollout_ref.actor
        one_update = actor.ppo_epochs == 1 and actor.ppo_mini_batch_size == self.data.train_batch_size
        return not one_update or self.algorithm.use_kl_in_reward

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs under a frozen reference are needed at all."""
        return self.actor_rollout_ref.actor.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def log_probs_ahead(self) -> bool:
        """Whether ranks start on the log-probs of a batch while the engines still sample the rest of it.

        The rows of a forward pass must be known before their lengths are: neither a budget of tokens nor groups that
        may be dropped allow it.
        """
        asked = self.needs_old_log_probs or self.needs_reference
        fixed = not self.actor_rollout_ref.actor.use_dynamic_bsz and not self.algorithm.filter_groups.enable
        return asked and fixed and not self.actor_rollout_ref.hybrid_engine

    def engines_sleep(self, device: str) -> bool:
        """Whether engines give GPU memory back while ranks train on the same GPUs; `device` is `cpu` or `cuda`."""
        rollout = self.actor_rollout_ref.rollout
        return device == "cuda" and self.actor_rollout_ref.hybrid_engine and rollout.free_cache_engine

    @property
    def has_reference(self) -> bool:
        """Whether a reference is held, and saved, beside the policy; with adapters the policy without them is it."""
        return self.needs_reference and not self.actor_rollout_ref.model.lora_rank

    @property
    def s3_enabled(self) -> bool:
        return self.s3.embedded or self.s3.bucket is not None
