"""The loss of a mini-batch, as the settings put it together from `keepstep.algorithm`.

L = sum_it w_it (m_it l_it + c_kl KL_it - c_H H_it) / D: l the clipped surrogate, m the truncated importance weight
between engine and trainer, w and D the way to average. D is that of the mini-batch over all ranks, so micro-batches and
ranks may be cut as one likes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from keepstep.algorithm import losses
from keepstep.algorithm.mismatch import truncated_weights
from keepstep.config.schema import ActorConfig, RolloutCorrectionConfig


@dataclass(frozen=True)
class Tokens:
    """B responses of a micro-batch, T positions each; [B, T] but for `advantages`, [B, 1]."""

    mask: torch.Tensor
    old: torch.Tensor
    """Log-probs under the policy before the step's updates."""
    engine: torch.Tensor
    """Log-probs under the engine that sampled them."""
    ref: torch.Tensor | None
    """Log-probs under the reference."""
    advantages: torch.Tensor


@dataclass(frozen=True)
class Objective:
    """What is minimised."""

    actor: ActorConfig
    correction: RolloutCorrectionConfig
    max_response_length: int

    def denominator(self, mask: torch.Tensor) -> float:
        """What these rows add to D, [B, T] -> number."""
        return losses.loss_denominator(mask, self.actor.loss_agg_mode, max_response_length=self.max_response_length)

    def __call__(
        self, new: torch.Tensor, entropy: torch.Tensor, tokens: Tokens
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(sum of weighted token losses, not yet divided; terms by metric name, [B, T] each, without a gradient).

        Args:
            new: log-probs under the policy, [B, T].
            entropy: of its distributions, [B, T].
        """
        actor, mask = self.actor, tokens.mask
        entropy = entropy if actor.entropy_coeff else entropy.detach()
        policy = self._policy_loss(new, tokens)
        loss = policy.loss
        terms = {
            "pg_loss": policy.loss,
            "entropy": entropy,
            "ppo_kl": losses.masked_difference(tokens.old, new, mask),
            "pg_clipfrac": policy.clipped,
            "pg_clipfrac_lower": policy.clipped_lower,
        }
        if actor.use_kl_loss and tokens.ref is not None:
            terms["kl_loss"] = losses.kl_penalty(new, tokens.ref, mask, actor.kl_loss_type)
            loss = loss + actor.kl_loss_coef * terms["kl_loss"]
        if actor.entropy_coeff:
            loss = loss - actor.entropy_coeff * entropy
        total = losses.masked_sum(loss, losses.token_weights(mask, actor.loss_agg_mode))
        return total, {name: values.detach() for name, values in terms.items()}

    def _policy_loss(self, new: torch.Tensor, tokens: Tokens) -> losses.PolicyLoss:
        actor = self.actor
        gspo = actor.policy_loss.loss_mode == "gspo"
        ratio = losses.sequence_log_ratio if gspo else losses.token_log_ratio
        found = losses.policy_loss(
            ratio(new, tokens.old, tokens.mask),
            tokens.advantages,
            clip_low=actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low,
            clip_high=actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high,
            dual_clip=None if gspo else actor.clip_ratio_c,
        )
        level = self.correction.rollout_is
        if level is None:
            return found
        weights = truncated_weights(
            tokens.old, tokens.engine, tokens.mask, level=level, cap=self.correction.rollout_is_threshold
        )
        return losses.PolicyLoss(found.loss * weights, found.clipped, found.clipped_lower)
