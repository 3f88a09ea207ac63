"""One FSDP2 rank: the policy, its optimizer, the frozen reference, and what GRPO does with them.

Every method that touches the model is a collective: all ranks call it with their own shard of the same batch.
`snapshot` and `rng` are not: each rank copies what it holds.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from keepstep.actor import lora, shards
from keepstep.actor.base_weights import BaseWeights
from keepstep.actor.batch import Batch, pack
from keepstep.actor.build import build_model
from keepstep.actor.forward import Statistics, token_statistics
from keepstep.actor.gathering import as_array
from keepstep.actor.host_buffer import HostBuffer
from keepstep.actor.layout import Costs
from keepstep.actor.micro_batches import by_count, by_tokens, split_to
from keepstep.actor.objective import Objective, Tokens
from keepstep.actor.rng import restore_rng_states, rng_states, seed_everything
from keepstep.actor.spec import RankSpec
from keepstep.algorithm import losses
from keepstep.algorithm.schedules import lr_factor
from keepstep.checkpoint import layout, reader
from keepstep.errors import CheckpointError, NonFiniteError
from keepstep.run import read_json


@dataclass(frozen=True)
class LoadReport:
    """What a rank took from a checkpoint."""

    optimizer_step: int
    """Updates that AdamW has counted; the most of any parameter."""
    num_without_moments: int
    """Parameters that never got a gradient: no moments were saved, they begin with none."""
    num_saved_streams: int
    """Ranks whose random streams the checkpoint holds."""
    streams_restored: bool
    """Whether this rank's random streams were set; not with another number of ranks."""


class Rank:
    """State of one rank. Build, `connect`, load weights, then `log_probs`, `update`, `full_weights` per step."""

    def __init__(self, spec: RankSpec) -> None:
        self.spec = spec
        self.objective = Objective(spec.actor, spec.correction, spec.max_response_length)
        if spec.device == "cpu":
            torch.set_num_threads(1)
        else:
            # Where a kernel has no deterministic form torch warns, and exact bytes are not to be had.
            torch.use_deterministic_algorithms(True, warn_only=True)
        seed_everything(spec.seed + spec.rank)
        self.host_buffer = HostBuffer(pinned=spec.device == "cuda")
        self.store: dist.TCPStore | None = None

    def listen(self, host: str) -> int:
        """Open the meeting place of the process group on a free port of this host, by rank 0; the port."""
        self.store = dist.TCPStore(host, 0, self.spec.world_size, is_master=True, wait_for_workers=False)
        return int(self.store.port)

    def connect(self, host: str, port: int) -> None:
        """Join the process group at host:port and build the sharded models without weights."""
        spec = self.spec
        timeout = datetime.timedelta(seconds=spec.collective_timeout_s)
        # Rank 0 listens already where it was asked to: a port that is only looked up may be taken before it is used.
        store = self.store or dist.TCPStore(host, port, spec.world_size, is_master=spec.rank == 0, timeout=timeout)
        if spec.device == "cuda":
            torch.cuda.set_device(0)
        # The backends' own time-outs are half an hour: a hung rank would be noticed far too late.
        dist.init_process_group(
            spec.backend,
            store=store,
            rank=spec.rank,
            world_size=spec.world_size,
            timeout=timeout,
        )
        self.model = self._build(spec.actor.fsdp_config.param_offload)
        # Without its adapters the policy is the reference.
        apart = spec.needs_reference and not spec.model.lora_rank
        reference = self._build(spec.ref.fsdp_config.param_offload) if apart else None
        self.reference = reference.requires_grad_(False).eval() if reference else None
        optim = spec.actor.optim
        self.optimizer = torch.optim.AdamW(
            shards.trained(self.model).values(),
            lr=optim.lr,
            betas=optim.betas,
            weight_decay=optim.weight_decay,
            # One kernel in place of a dozen per tensor; on a GPU torch's own choice does as much.
            fused=True if spec.device == "cpu" else None,
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._lr_factor)

    def load_initial(self, model_dir: str) -> None:
        """Policy and reference from the same base weights (safetensors of a Hugging Face folder)."""
        spec, weights = self.spec, BaseWeights(Path(model_dir))
        for model in filter(None, (self.model, self.reference)):
            weights.fill(lora.base_parameters(model), spec.rank, spec.world_size)
        lora.initialise(self.model, spec.seed, spec.rank, spec.world_size)

    def load_checkpoint(
        self, folder: str, staged: str | None = None, rebuild_scheduler_at: int | None = None
    ) -> LoadReport:
        """Everything from a verified checkpoint of either layout, the reference from its own weights.

        Args:
            staged: this node's own copy of the tensors that its ranks hold.
            rebuild_scheduler_at: the checkpoint's scheduler is lost: set it to this global step instead.
        """
        path, own = Path(folder), Path(staged) if staged else None
        if self.spec.model.lora_rank:
            self.load_initial(self.spec.base_dir)
        self._load(self.model, reader.read_role(path, reader.ACTOR, own))
        if self.reference is not None:
            self._load(self.reference, reader.read_role(path, reader.REF, own))
        moments = reader.read_role(path, reader.OPTIMIZER, own)
        targets = shards.optimizer_targets(self.model, self.optimizer, moments.names())
        moments.fill(targets, self.spec.rank, self.spec.world_size)
        shards.restore_param_groups(self.optimizer, reader.read_param_groups(path))
        if rebuild_scheduler_at is None:
            self.scheduler.load_state_dict(reader.read_file(path / layout.SCHEDULER))
        else:
            self._rebuild_scheduler(rebuild_scheduler_at)
        per_rank = read_json(path / layout.TRAINER_STATE)["rng_states"]["per_rank"]
        same_ranks = len(per_rank) == self.spec.world_size
        if same_ranks:
            restore_rng_states(per_rank[self.spec.rank])
        steps = [float(state["step"]) for state in self.optimizer.state.values()]
        num_params = len(shards.trained(self.model))
        return LoadReport(int(max(steps, default=0)), num_params - len(steps), len(per_rank), same_ranks)

    def load_weights(self, folder: str, skip_mismatched: bool) -> list[str]:
        """Policy and reference from a checkpoint's policy, over the base weights; all else stays fresh.

        Args:
            skip_mismatched: leave out tensors of other shapes or names instead of refusing.

        Returns:
            the names of this model's tensors that were left as they were.

        Raises:
            CheckpointError: names or shapes differ and nothing may be left out.
        """
        source = reader.read_role(Path(folder), reader.ACTOR)
        params = shards.trained(self.model)
        shapes = source.shapes()
        fitting = {name for name, param in params.items() if shapes.get(name) == tuple(param.shape)}
        left = sorted(params.keys() - fitting)
        if left and not skip_mismatched:
            raise CheckpointError(
                f"trainer.init_from: {folder} does not fit the model: {len(left)} of {len(params)} tensors differ in "
                f"name or shape ({', '.join(left[:3])}).",
                "Give the model that it was trained from, or leave them out knowingly: "
                "resume.allow=[mismatched_sizes] (--ignore_mismatched_sizes).",
            )
        for model in filter(None, (self.model, self.reference)):
            wanted: dict[str, torch.Tensor] = {n: param for n, param in model.named_parameters() if n in fitting}
            source.fill(wanted, self.spec.rank, self.spec.world_size)
        return left

    def probe(self, prompts: list[list[int]]) -> list[list[float]]:
        """Log-probs of each prompt's own tokens but the first under the policy; all ranks compute the same."""
        batch = pack(prompts, [[] for _ in prompts], [[] for _ in prompts], pad_id=0)
        own = np.arange(1, batch.tokens.shape[1]) < batch.lengths[:, None]
        found = self._log_probs(self.model, batch.with_mask(own.astype(np.float32)))
        return [[float(value) for value in row[: len(ids) - 1]] for ids, row in zip(prompts, found, strict=True)]

    def log_probs(self, batch: Batch) -> dict[str, np.ndarray]:
        """Log-probs of the batch's tokens before the update: {"old": [B, L-1], "ref": [B, L-1]}, as far as needed."""
        found = {"old": self._log_probs(self.model, batch)} if self.spec.needs_old_log_probs else {}
        if self.reference is not None:
            found["ref"] = self._log_probs(self.reference, batch)
        elif self.spec.needs_reference:
            with lora.adapters_off(self.model):
                found["ref"] = self._log_probs(self.model, batch)
        return found

    def update(
        self, batch: Batch, log_probs: dict[str, np.ndarray], mini_batches: list[list[int]]
    ) -> tuple[dict[str, float], np.ndarray | None]:
        """All optimizer updates of one step on this rank's rows.

        Returns:
            (means over the step, equal on all ranks; the old log-probs, [B, L-1], if `log_probs` did not give them)
        """
        sums: dict[str, torch.Tensor] = {}
        log_probs = {"old": np.zeros_like(batch.mask)} | log_probs
        norms: list[float] = []
        for _ in range(self.spec.actor.ppo_epochs):
            for rows in mini_batches:
                norms.append(self._update_mini_batch(batch, log_probs, rows, sums))
        lr = self.learning_rate()
        self.scheduler.step()
        totals = self._all_reduce([sums[key] for key in sorted(sums)])
        means = dict(zip(sorted(sums), totals, strict=True))
        num_tokens = max(means.pop("num_tokens"), 1.0)
        metrics = {f"actor/{key}": value / num_tokens for key, value in means.items()}
        metrics |= {"actor/grad_norm": float(np.mean(norms)), "actor/lr": lr}
        return metrics, None if self.spec.needs_old_log_probs else log_probs["old"]

    def refresh_reference(self) -> None:
        """The policy as it is now becomes the reference."""
        if self.reference is not None:
            policy = shards.trained(self.model)
            for name, target in self.reference.named_parameters():
                shards.local(target).copy_(shards.local(policy[name]))

    def full_weights(self, dtype: str) -> dict[str, np.ndarray] | None:
        """The whole policy by parameter name on rank 0, None elsewhere.

        Args:
            dtype: float32, or bfloat16 (as `gathering.as_array` has it), which an engine of that precision would round
                to itself: half as much is to be copied.
        """
        kind = getattr(torch, dtype)
        weights = {name: as_array(full.to(kind)) for name, full in lora.merged(self.model)}
        if self.spec.engines_sleep:
            torch.cuda.empty_cache()
        return weights if self.spec.rank == 0 else None

    def snapshot(self, shared: bool) -> shards.RankSnapshot:
        """Host copy of what this rank holds of policy, optimizer, scheduler and random streams.

        Args:
            shared: the reader is on this host and maps the memory; else the arrays come along.
        """
        found = shards.take_snapshot(
            self.spec.rank,
            self.model,
            self.optimizer,
            self.host_buffer,
            scheduler=self.scheduler.state_dict() | {"lr_lambdas": [None]},
            rng=rng_states(),
        )
        return found if shared else shards.open_snapshot(found)

    def snapshot_reference(self) -> shards.ReferenceSnapshot | None:
        """Host copy of this rank's shards of the reference; None without one."""
        return None if self.reference is None else shards.reference_snapshot(self.reference)

    def learning_rate(self) -> float:
        """The learning rate that the next step will use."""
        return float(self.scheduler.get_last_lr()[0])

    def _rebuild_scheduler(self, step: int) -> None:
        """What the scheduler holds after `step` steps; the schedule is a function of the step."""
        rates = [base * self._lr_factor(step) for base in self.scheduler.base_lrs]
        self.scheduler.load_state_dict(
            self.scheduler.state_dict()
            | {"last_epoch": step, "_step_count": step + 1, "_last_lr": rates, "lr_lambdas": [None]}
        )
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _load(self, model: torch.nn.Module, source: reader.Source) -> None:
        params = shards.trained(model)
        shards.check_names(params, source.names())
        source.fill(params, self.spec.rank, self.spec.world_size)

    def _build(self, offloaded: bool) -> torch.nn.Module:
        spec, packed, compiled = self.spec, self.spec.layout != "padded", self.spec.actor.use_torch_compile
        return build_model(
            spec.model_dir, spec.model, spec.actor.fsdp_config, spec.device, spec.world_size,
            packed=packed, compiled=compiled, offloaded=offloaded,
        )  # fmt: skip

    def _lr_factor(self, update: int) -> float:
        optim = self.spec.actor.optim
        return lr_factor(
            update,
            num_warmup=optim.lr_warmup_steps,
            num_total=self.spec.total_steps,
            kind=optim.lr_scheduler_type,
            min_ratio=optim.min_lr_ratio,
        )

    def _statistics(self, model: torch.nn.Module, part: Batch, with_entropy: bool) -> Statistics:
        """Log-probs and entropies of a trimmed micro-batch, [B, L-1] each."""
        spec = self.spec
        return token_statistics(
            model,
            part,
            temperature=spec.temperature,
            layout=spec.layout,
            device=spec.device,
            with_entropy=with_entropy,
        )

    @torch.no_grad()
    def _log_probs(self, model: torch.nn.Module, batch: Batch) -> np.ndarray:
        found = np.zeros(batch.mask.shape, dtype=np.float32)
        ref, actor = self.spec.ref, self.spec.actor
        budget = ref.log_prob_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu
        for rows in self._cut(batch, list(range(len(batch))), ref.log_prob_micro_batch_size_per_gpu, budget):
            part = batch.rows(rows).trimmed()
            found[rows, : part.mask.shape[1]] = self._statistics(model, part, with_entropy=False)[0].cpu().numpy()
        # FSDP2 leaves the root's parameters gathered after a forward without backward: no longer shards to copy.
        model.reshard()  # type: ignore[operator]
        return found

    def _cut(self, batch: Batch, rows: list[int], size: int, budget: int) -> list[list[int]]:
        """Micro-batches of these rows, as many on every rank."""
        if not self.spec.actor.use_dynamic_bsz:
            return by_count(rows, size)
        costs = Costs.of(batch, self.spec.layout)
        parts = by_tokens(rows, costs, budget)
        most = torch.tensor(len(parts), device=self.spec.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return split_to(parts, costs, int(most))

    def _update_mini_batch(
        self, batch: Batch, log_probs: dict[str, np.ndarray], rows: list[int], sums: dict[str, torch.Tensor]
    ) -> float:
        """One optimizer update; adds this rank's metric sums to `sums`, returns the gradient norm before clipping."""
        denominator = self._all_reduce([self.objective.denominator(torch.from_numpy(batch.mask[rows]))])[0]
        actor = self.spec.actor
        for part in self._cut(batch, rows, actor.ppo_micro_batch_size_per_gpu, actor.ppo_max_token_len_per_gpu):
            self._backward(batch, log_probs, part, denominator, sums)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.actor.grad_clip)
        norm_value = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if not np.isfinite(norm_value):
            raise NonFiniteError(
                f"The gradient norm is {norm_value} (mini-batch of {len(rows)} responses on rank {self.spec.rank}).",
                "Lower actor.optim.lr or look at the rewards of this step.",
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm_value

    def _backward(
        self,
        batch: Batch,
        log_probs: dict[str, np.ndarray],
        rows: list[int],
        denominator: float,
        sums: dict[str, torch.Tensor],
    ) -> None:
        part = batch.rows(rows).trimmed()
        mask, width = self._tensor(part.mask), part.mask.shape[1]
        new, entropy = self._statistics(self.model, part, with_entropy=True)
        if not self.spec.needs_old_log_probs:
            # The only update of the step: until it is made the policy is the old one.
            log_probs["old"][rows, :width] = new.detach().cpu().numpy()
        tokens = Tokens(
            mask=mask,
            old=self._tensor(log_probs["old"][rows, :width]),
            engine=self._tensor(part.engine_log_probs),
            ref=self._tensor(log_probs["ref"][rows, :width]) if "ref" in log_probs else None,
            advantages=self._tensor(part.advantages).unsqueeze(1),
        )
        loss, terms = self.objective(new, entropy, tokens)
        # FSDP averages gradients over the ranks; the mean is over the whole mini-batch.
        (loss * (self.spec.world_size / max(denominator, 1.0))).backward()
        totals = {name: losses.masked_sum(values, mask) for name, values in terms.items()}
        for name, total in (totals | {"num_tokens": mask.sum()}).items():
            # Added up where they are: to ask a GPU for a number is to wait for all that it has still to do.
            sums[name] = sums.get(name, 0.0) + total.detach().double()

    def _all_reduce(self, values: Sequence[float | torch.Tensor]) -> list[float]:
        tensor = torch.stack([torch.as_tensor(value, dtype=torch.float64, device=self.spec.device) for value in values])
        dist.all_reduce(tensor)
        return tensor.tolist()

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.tensor(array, device=self.spec.device)
