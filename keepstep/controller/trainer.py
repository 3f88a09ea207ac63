"""The GRPO loop. `Trainer.fit` and `Trainer.step` are the algorithm; everything else here is one act of it.

Single controller (HybridFlow, arXiv:2409.19256): this process decides, ranks and engines compute.

Concurrency, as seen from here:
  the loop          consumes prompts, produces steps; waits for ranks and engines (timeouts.step_s); woken by Ray
  the saver         consumes snapshots that the loop hands over; the loop waits for it only when a save is in flight
  the uploader      consumes verified steps from the saver; the loop never waits for it before the end
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from keepstep.actor.batch import Batch, deal, pack
from keepstep.algorithm.advantages import estimate_advantages
from keepstep.algorithm.losses import kl_penalty
from keepstep.algorithm.mismatch import mismatch_metrics
from keepstep.algorithm.shaping import kl_in_reward, mask_truncated, overlong_penalty
from keepstep.checkpoint.cadence import due
from keepstep.config.schema import RunConfig
from keepstep.controller import resume_probe
from keepstep.controller.ahead import LogProbs, LogProbsAhead
from keepstep.controller.groups import EngineGroup, RankGroup
from keepstep.controller.leaving import Leaving
from keepstep.controller.pace import Pace
from keepstep.controller.rollouts import Questions, Rollouts
from keepstep.controller.samples import Sample
from keepstep.controller.saver import Saver
from keepstep.controller.state import TrainState
from keepstep.controller.validation import MEAN, validate
from keepstep.data.loader import Dataset, Row
from keepstep.data.order import rows_at, sample_seed
from keepstep.errors import NonFiniteError, NoProgressError, NoSignalError, StaleWeightsError
from keepstep.rewards.scoring import Question, Scorer
from keepstep.rollout.types import Request, Response

Metrics = dict[str, float]


@dataclass
class Parts:
    """What the loop works with."""

    ranks: RankGroup
    engines: EngineGroup
    saver: Saver
    train_set: Dataset
    val_set: Dataset | None
    scorer: Scorer
    decode: Callable[[list[int]], str]
    pad_id: int
    probe_prompts: list[list[int]]
    """Held-out prompts whose log-probs are stored with every checkpoint."""
    report: Callable[[int, Metrics], None]
    """Told every finished step."""
    report_validation: Callable[[int, Metrics], None]
    """Told a validation that is no part of a step that was just taken, with all that is known of its step."""
    keep: Callable[[int, list[Sample]], None]
    """Given a step and some of its rollouts, to be read by people."""
    leaving: Leaving
    """Whether and how fast the attempt should end."""


class Trainer:
    """One attempt's training, from `state` to `total_steps`."""

    def __init__(self, config: RunConfig, parts: Parts, state: TrainState, total_steps: int) -> None:
        self.config = config
        self.parts = parts
        self.state = state
        self.total_steps = total_steps
        self.pace = Pace()
        self._num_gen_batches = 0
        """Batches of prompts that the running step has rolled out."""
        self._ahead: LogProbsAhead | None = None
        """What the ranks work at while the running step is rolled out."""

    @property
    def group_size(self) -> int:
        """Responses to each prompt."""
        return self.config.actor_rollout_ref.rollout.n

    def fit(self) -> None:
        """Train to the last step, or to the end of the step in which the attempt is asked to leave.

        The engines hold the policy's weights already.

        Raises:
            StepDropped: asked to leave, and the running step or validation would not end in time. The ranks hold the
                state of the last finished step.
        """
        if self.validation_owed() and self.validate():
            self.parts.report_validation(self.state.global_step, dict(self.state.metrics))
        while self.state.global_step < self.total_steps:
            self.step()
            if self.save_due():
                self.save()
            if self.parts.leaving.heed():
                break

    def step(self) -> None:
        """One step of GRPO: roll out, score, update, hand the new weights to the engines."""
        begin = time.monotonic()
        rollouts = self.roll_out()
        self.parts.engines.sleep()
        batch = self.pack(rollouts)
        log_probs = self.log_probs(batch)
        rewards = self.rewards(rollouts, batch, log_probs)
        advantages = self.advantages(rewards)
        batch = batch.with_advantages(advantages)
        metrics = self.update(batch, log_probs)
        self.advance(rollouts, batch, rewards, metrics)
        if self._due(self.config.actor_rollout_ref.ref.refresh_freq):
            self.parts.ranks.refresh_reference()
        self.sync_weights()
        try:
            if self._due(self.config.trainer.test_freq):
                metrics |= self.validate(self.samples(rollouts, rewards, advantages))
        finally:
            # The step is finished, whatever becomes of its validation.
            self.report(metrics, begin)

    def roll_out(self) -> Rollouts:
        """Prompts, responses and scores; with dynamic sampling from as many batches as it takes to fill one.

        Raises:
            NoSignalError: too many batches were needed.
        """
        sampling, wanted = self.config.algorithm.filter_groups, self.config.data.train_batch_size
        found: Rollouts | None = None
        for number in range(sampling.max_num_gen_batches if sampling.enable else 1):
            new = self.roll_out_batch(number)
            self._num_gen_batches = number + 1
            if not sampling.enable:
                return new
            found = found + new.with_signal() if found else new.with_signal()
            if len(found) >= wanted:
                return found.first(wanted)
        assert found is not None
        raise NoSignalError(
            f"Step {self.state.global_step + 1}: {self._num_gen_batches} batches of {wanted} prompts gave "
            f"{len(found)} groups whose rewards differ; {wanted} are needed (algorithm.filter_groups).",
            "Look at the rewards: the data may be too hard or too easy. Or raise max_num_gen_batches.",
        )

    def roll_out_batch(self, number: int) -> Rollouts:
        """The step's `number`-th batch of prompts, rolled out and scored.

        While others are still sampled, finished responses are scored by a pool, and their log-probs are worked out by
        ranks whose GPUs are their own.
        """
        rows = self.next_prompts(number)
        scorer, questions = self.parts.scorer, Questions(rows, self.group_size, self.parts.decode)
        self._ahead = self._log_probs_ahead(rows) if self.config.log_probs_ahead else None

        def finished(new: dict[int, Response]) -> None:
            if scorer.in_background:
                scorer.begin(questions.add(new))
            if self._ahead is not None:
                self._ahead.add(new)

        told = finished if scorer.in_background or self._ahead is not None else None
        responses = self.generate(rows, number, told)
        return Rollouts(rows, responses, self.score(questions.of(responses)))

    def next_prompts(self, number: int) -> list[Row]:
        """The next rows in the run's order; that order is a function of (seed, offset) alone."""
        data, trainer = self.config.data, self.config.trainer
        indices = rows_at(
            self.state.train_dataset_offset + number * data.train_batch_size,
            data.train_batch_size,
            num_rows=len(self.parts.train_set),
            seed=trainer.seed,
            shuffle=data.shuffle,
        )
        return [self.parts.train_set[index] for index in indices]

    def generate(
        self, rows: list[Row], number: int, finished: Callable[[dict[int, Response]], None] | None
    ) -> list[Response]:
        """`rollout.n` responses to each prompt, in order of prompts; `finished` as in `EngineGroup.generate`."""
        rollout, step = self.config.actor_rollout_ref.rollout, self.state.global_step + 1
        first = number * self.config.data.train_batch_size
        requests = [
            Request(row.prompt_ids, sample_seed(self.config.trainer.seed, step, first + prompt, sample))
            for prompt, row in enumerate(rows)
            for sample in range(rollout.n)
        ]
        with self.pace.act("rollout"):
            return self.parts.engines.generate(
                requests,
                version=self.state.global_step,
                max_tokens=self.config.data.max_response_length,
                temperature=rollout.temperature,
                finished=finished,
            )

    def score(self, questions: list[Question]) -> np.ndarray:
        """What the reward function says, [num_prompts, group_size]."""
        with self.pace.act("reward"):
            scores = self._score(questions)
        return np.array(scores, dtype=np.float64).reshape(-1, self.group_size)

    def pack(self, rollouts: Rollouts) -> Batch:
        prompts = [row.prompt_ids for row in rollouts.rows for _ in range(rollouts.group_size)]
        return self._pack(prompts, rollouts.responses)

    def _pack(self, prompts: list[list[int]], responses: list[Response]) -> Batch:
        batch = pack(prompts, [r.token_ids for r in responses], [r.log_probs for r in responses], self.parts.pad_id)
        if self.config.algorithm.mask_truncated:
            truncated = torch.tensor([not response.finished for response in responses])
            batch = batch.with_mask(mask_truncated(torch.from_numpy(batch.mask), truncated).numpy())
        return batch

    def log_probs(self, batch: Batch) -> LogProbs:
        """Old and reference log-probs of the batch, [B, L-1] each, as far as the updates need them."""
        if not (self.config.needs_old_log_probs or self.config.needs_reference):
            return {}
        dealt, _ = self._dealt()
        with self.pace.act("log_probs"):
            if self._ahead is not None:
                return self._ahead.of(batch)
            found = self.parts.ranks.log_probs([batch.rows(rows) for rows in dealt])
        return {name: in_order([part[name] for part in found], dealt) for name in found[0]}

    def _log_probs_ahead(self, rows: list[Row]) -> LogProbsAhead:
        """Of the batch that these rows' responses will make up."""

        def pack(places: list[int], responses: list[Response]) -> Batch:
            return self._pack([rows[place // self.group_size].prompt_ids for place in places], responses)

        size = self.config.actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu
        return LogProbsAhead(self.parts.ranks, self._dealt()[0], size, pack)

    def rewards(self, rollouts: Rollouts, batch: Batch, log_probs: LogProbs) -> np.ndarray:
        """The scores less what length and divergence cost, [num_prompts, group_size]."""
        config, rewards = self.config, torch.from_numpy(rollouts.scores).flatten()
        overlong = config.reward_model.overlong_buffer
        if overlong.enable:
            lengths = torch.tensor([len(response.token_ids) for response in rollouts.responses])
            limit = config.data.max_response_length
            rewards = rewards + overlong_penalty(
                lengths, max_length=limit, buffer_length=overlong.len, factor=overlong.penalty_factor
            )
        if config.algorithm.use_kl_in_reward:
            mask, old, ref = (torch.from_numpy(a) for a in (batch.mask, log_probs["old"], log_probs["ref"]))
            kl = kl_penalty(old, ref, mask, config.algorithm.kl_penalty)
            rewards = kl_in_reward(rewards, kl, mask, config.algorithm.kl_ctrl.kl_coef)
        return rewards.double().numpy().reshape(rollouts.scores.shape)

    def advantages(self, rewards: np.ndarray) -> np.ndarray:
        """Group-relative advantages [num_prompts * group_size]."""
        algorithm = self.config.algorithm
        found = estimate_advantages(
            torch.from_numpy(rewards), algorithm.adv_estimator, normalize_by_std=algorithm.norm_adv_by_std_in_grpo
        )
        return found.flatten().numpy()

    def update(self, batch: Batch, log_probs: LogProbs) -> Metrics:
        """The optimizer updates, and the guard against stale engine weights: before them where it can be.

        Raises:
            StaleWeightsError: the engine samples from other weights. What a single update made of it is lost with the
                attempt: nothing is saved before this step counts.
        """
        guard = self._guard(batch, log_probs["old"]) if "old" in log_probs else None
        dealt, mini_batches = self._dealt()
        with self.pace.act("update"):
            metrics, old = self.parts.ranks.update(
                [batch.rows(rows) for rows in dealt],
                [{name: values[rows] for name, values in log_probs.items()} for rows in dealt],
                mini_batches,
            )
        return metrics | (self._guard(batch, in_order(old, dealt)) if guard is None else guard)

    def advance(self, rollouts: Rollouts, batch: Batch, rewards: np.ndarray, metrics: Metrics) -> None:
        """Count the finished step."""
        config, state = self.config, self.state
        actor = config.actor_rollout_ref.actor
        metrics |= rollout_metrics(rollouts, rewards)
        metrics |= {f"reward/{key}": value for key, value in self.parts.scorer.take_metrics().items()}
        if config.algorithm.filter_groups.enable:
            metrics["train/num_gen_batches"] = float(self._num_gen_batches)
        bad = sorted(name for name, value in metrics.items() if not np.isfinite(value))
        if bad:
            raise NonFiniteError(f"Step {state.global_step + 1}: {', '.join(bad)} is not finite.")
        state.global_step += 1
        state.num_gen_batches += self._num_gen_batches
        state.train_dataset_offset += self._num_gen_batches * config.data.train_batch_size
        state.num_updates += actor.ppo_epochs * (len(rollouts) // actor.ppo_mini_batch_size)
        state.num_response_tokens += int(batch.mask.sum())
        # Only this step's: a checkpoint that carried an earlier validation could pass for the best.
        state.metrics = dict(metrics)

    def sync_weights(self) -> None:
        """Give the engines the policy's weights as version `global_step`."""
        with self.pace.act("weight_sync"):
            weights = self.parts.ranks.full_weights(self.config.actor_rollout_ref.rollout.dtype)
            self.parts.engines.update_weights(weights, self.state.global_step)

    def validation_owed(self) -> bool:
        """Before the first step, and where an attempt left in the validation of the step that it saved."""
        step, trainer = self.state.global_step, self.config.trainer
        return (
            trainer.val_before_train if step == 0 else self._due(trainer.test_freq) and MEAN not in self.state.metrics
        )

    def validate(self, beside: Sequence[Sample] = ()) -> Metrics:
        """Of the validation set; its first rollouts are kept, with some of the training step `beside` them."""
        val_set, state = self.parts.val_set, self.state
        if val_set is None or self.config.trainer.test_freq < 1:
            return {}
        with self.pace.act("validation"):
            step = state.global_step
            found = validate(self.config, val_set, self.parts.engines, self._score, self.parts.decode, step=step)
        metrics = found.metrics() | {f"val/{key}": value for key, value in self.parts.scorer.take_metrics().items()}
        state.val_dataset_offset += len(val_set)
        state.metrics |= metrics
        self.parts.keep(step, [*found.samples, *beside])
        return metrics

    def samples(self, rollouts: Rollouts, rewards: np.ndarray, advantages: np.ndarray) -> list[Sample]:
        """Of the step's first prompts, as many as are kept of a validation."""
        num_prompts, group_size = self.config.trainer.log_val_generations, rollouts.group_size
        rows = [row for row in rollouts.rows[:num_prompts] for _ in range(group_size)]
        beside = zip(rollouts.responses, rewards.flatten(), advantages, strict=True)
        return [
            Sample(
                "train", row.prompt_text, self.parts.decode(response.token_ids), str(row.ground_truth), *map(float, n)
            )
            for row, (response, *n) in zip(rows, beside, strict=False)
        ]

    def report(self, metrics: Metrics, begin: float) -> None:
        timings = {f"timing_s/{name}": value for name, value in self.pace.end_step().items()}
        self.parts.report(self.state.global_step, metrics | timings | {"timing_s/step": time.monotonic() - begin})

    def save_due(self) -> bool:
        """Every `save_freq` steps, at the end, and again after a save that failed its verification."""
        last = self.state.global_step == self.total_steps
        return last or self.parts.saver.wanted or self._due(self.config.trainer.save_freq)

    def save(self) -> None:
        """Hand a snapshot of the state to the saver; it writes, verifies and publishes behind the loop."""
        with self.pace.act("save"):
            if prompts := self.parts.probe_prompts:
                self.state.probe = resume_probe.record(prompts, self.parts.ranks.probe(prompts))
            self.parts.saver.save(self.state, self.parts.ranks)

    def _due(self, every: int) -> bool:
        return due(self.state.global_step, every)

    def _score(self, questions: list[Question]) -> list[float]:
        """One reward per response. Scored here, in the main thread: verifiers set alarms, which work nowhere else."""
        scorer, timeout_s = self.parts.scorer, self.config.timeouts.reward_s

        def late() -> NoProgressError:
            at = scorer.current
            where = f"It hangs on the response {at.text[:60]!r} to a row of {at.data_source!r}; or r" if at else "R"
            return NoProgressError(
                f"Step {self.state.global_step + 1}: the reward function did not end within {timeout_s:.0f} s.",
                f"{where}aise timeouts.reward_s. A limit for each response: reward_model.timeout_s.",
            )

        with self.parts.leaving.limit(timeout_s, late):
            return scorer.score(questions, self.parts.leaving.check)

    def _dealt(self) -> tuple[list[list[int]], list[list[list[int]]]]:
        """(rows of the batch that each rank gets; per rank, its mini-batches as places among those)."""
        config = self.config
        actor, group_size = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
        dealt = deal(config.data.train_batch_size, group_size, actor.ppo_mini_batch_size, config.world_size)
        sizes = [[len(mini) for mini in rank] for rank in dealt]
        mini_batches = [[list(range(sum(s[:i]), sum(s[: i + 1]))) for i in range(len(s))] for s in sizes]
        return [[row for mini in rank for row in mini] for rank in dealt], mini_batches

    def _guard(self, batch: Batch, old: np.ndarray) -> Metrics:
        """Largest and mean |engine - trainer| log-prob of the sampled tokens, and what follows from it.

        Raises:
            StaleWeightsError: beyond `rollout.logprob_tolerance`: the engine samples from other weights.
        """
        engine, mask = batch.engine_log_probs, batch.mask
        gaps = np.abs(engine - old)[mask > 0]
        tolerance = self.config.actor_rollout_ref.rollout.logprob_tolerance
        worst = float(gaps.max(initial=0.0))
        if not worst <= tolerance:
            raise StaleWeightsError(
                f"Step {self.state.global_step + 1}: engine and trainer differ by {worst:.3g} in the log-prob of a "
                f"token, tolerance {tolerance:g}: the engine samples from other weights.",
                "With another engine precision raise actor_rollout_ref.rollout.logprob_tolerance; else report it.",
            )
        found = {"rollout/logprob_gap_max": worst, "rollout/logprob_gap_mean": float(gaps.mean()) if gaps.size else 0.0}
        return found | mismatch_metrics(*(torch.from_numpy(array) for array in (old, engine, mask)))


def in_order(parts: list[np.ndarray], dealt: list[list[int]]) -> np.ndarray:
    """What the ranks say of the rows that they were dealt, in the order of the batch."""
    return np.concatenate(parts)[np.argsort([row for rows in dealt for row in rows])]


def rollout_metrics(rollouts: Rollouts, rewards: np.ndarray) -> Metrics:
    """Of scores, rewards and lengths, under verl's names."""
    scores, responses = rollouts.scores, rollouts.responses
    num_tokens = np.array([len(response.token_ids) for response in responses])
    return {
        "critic/score/mean": float(scores.mean()),
        "critic/rewards/mean": float(rewards.mean()),
        "critic/rewards/max": float(rewards.max()),
        "critic/rewards/min": float(rewards.min()),
        "critic/rewards/zero_std_groups": float(np.mean(scores.max(axis=1) == scores.min(axis=1))),
        "rollout/identical_groups": identical_groups(responses, rollouts.group_size),
        "response_length/mean": float(num_tokens.mean()),
        "response_length/clip_ratio": float(np.mean([not response.finished for response in responses])),
    }


def identical_groups(responses: list[Response], group_size: int) -> float:
    """Share of groups whose responses are all the same text: near 1, sampling is broken or the policy has collapsed."""
    groups = [responses[first : first + group_size] for first in range(0, len(responses), group_size)]
    same = [len({tuple(response.token_ids) for response in group}) == 1 for group in groups]
    return float(np.mean(same)) if group_size > 1 else 0.0
