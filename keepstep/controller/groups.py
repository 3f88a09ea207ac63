"""The ranks and the engines as the loop sees them: one call, all workers, a time limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import ray

from keepstep.actor.batch import Batch
from keepstep.config.schema import TimeoutConfig
from keepstep.controller.supervision import Supervisor
from keepstep.errors import KeepstepError, NoProgressError, WorkerDiedError
from keepstep.rollout.types import Request, Response, Sampled

if TYPE_CHECKING:
    from keepstep.actor.rank import LoadReport

T = TypeVar("T")
SLICE_S = 1.0
"""Seconds after which an engine tells what is finished, where somebody wants to know."""


class EngineRecovery(Protocol):
    """How lost engines are replaced (`controller.recovery.Recovery`)."""

    def replace(self, actors: list[Any], lost: list[int], error: KeepstepError) -> None:
        """Start these engines again, in their places in `actors`; raises `error` where that is not to be done."""
        ...

    def weights(self) -> Any:
        """Reference to the policy's weights as they are now."""
        ...


class RankGroup:
    """All FSDP2 ranks. Every method is answered by all of them or raises."""

    def __init__(
        self, actors: list[Any], identities: list[dict[str, Any]], supervisor: Supervisor, timeouts: TimeoutConfig
    ) -> None:
        self.actors = actors
        self.identities = identities
        """Where each rank runs."""
        self._supervisor = supervisor
        self._timeouts = timeouts

    def connect(self) -> None:
        calls = [("rank 0", self.actors[0].rendezvous.remote())]
        ((host, port),) = self._supervisor.gather(calls, self._timeouts.start_s, "meeting of the ranks")
        self._all("meeting of the ranks", self._timeouts.start_s, lambda actor, _: actor.connect.remote(host, port))

    def load_initial(self, model_dir: str) -> None:
        self._all("loading the model", self._timeouts.start_s, lambda actor, _: actor.load_initial.remote(model_dir))

    def load_checkpoint(
        self, folder: str, staged: Sequence[str | None], rebuild_scheduler_at: int | None
    ) -> list[LoadReport]:
        """
        Args:
            staged: per rank, its node's own copy.
            rebuild_scheduler_at: the global step to set a lost scheduler to.
        """
        return self._all(
            f"loading {folder}",
            self._timeouts.start_s,
            lambda actor, rank: actor.load_checkpoint.remote(folder, staged[rank], rebuild_scheduler_at),
        )

    def load_weights(self, folder: str, skip_mismatched: bool) -> list[str]:
        """Names of the tensors that were left as they were."""
        what = f"loading weights of {folder}"
        call = lambda actor, _: actor.load_weights.remote(folder, skip_mismatched)  # noqa: E731
        return self._all(what, self._timeouts.start_s, call)[0]

    def probe(self, prompts: list[list[int]]) -> list[list[float]]:
        """Log-probs of the prompts' own tokens under the policy."""
        return self._step("probe", lambda actor, _: actor.probe.remote(prompts))[0]

    def by_node(self) -> dict[str, list[int]]:
        """Ranks by the node that they run on."""
        found: dict[str, list[int]] = {}
        for rank, identity in enumerate(self.identities):
            found.setdefault(identity["node_id"], []).append(rank)
        return found

    def log_probs(self, shards: Sequence[Batch]) -> list[dict[str, np.ndarray]]:
        return self.end_log_probs([self.begin_log_probs(shards)])[0]

    def begin_log_probs(self, shards: Sequence[Batch]) -> list[Any]:
        """Have the ranks work; what comes back is for the two below."""
        return [actor.log_probs.remote(shard) for actor, shard in zip(self.actors, shards, strict=True)]

    def have_log_probs(self, begun: list[Any]) -> bool:
        """Whether all ranks have answered, or failed; does not wait."""
        return len(ray.wait(begun, num_returns=len(begun), timeout=0)[0]) == len(begun)

    def end_log_probs(self, begun: Sequence[list[Any]]) -> list[list[dict[str, np.ndarray]]]:
        """Answers to each of `begun`, by rank, all within one time limit."""
        calls = [(f"rank {rank}", reference) for asked in begun for rank, reference in enumerate(asked)]
        answers = iter(self._supervisor.gather(calls, self._timeouts.step_s, "log-probs"))
        return [[next(answers) for _ in asked] for asked in begun]

    def update(
        self, shards: Sequence[Batch], log_probs: Sequence[Any], mini_batches: Sequence[Any]
    ) -> tuple[dict[str, float], list[np.ndarray]]:
        """(metrics of the step, equal on all ranks; per rank the old log-probs that it was not given)."""
        found = self._step(
            "update", lambda actor, rank: actor.update.remote(shards[rank], log_probs[rank], mini_batches[rank])
        )
        return found[0][0], [old for _, old in found]

    def refresh_reference(self) -> None:
        self._step("refreshing the reference", lambda actor, _: actor.refresh_reference.remote())

    def full_weights(self, dtype: str) -> Any:
        """Reference to the full weights in this precision, which rank 0 holds when all ranks have gathered."""
        references = [actor.full_weights.remote(dtype) for actor in self.actors]
        calls = [(f"rank {rank}", reference) for rank, reference in enumerate(references)]
        self._supervisor.gather(calls[1:], self._timeouts.step_s, "gathering weights")
        # Whoever is given the reference would be taken for the one that hangs.
        self._supervisor.gather(calls[:1], self._timeouts.step_s, "gathering weights", fetch=False)
        return references[0]

    def fetch_weights(self) -> dict[str, np.ndarray]:
        """The full weights themselves, in float32."""
        calls = [("rank 0", self.full_weights("float32"))]
        return self._supervisor.gather(calls, self._timeouts.step_s, "fetching weights")[0]

    def learning_rate(self) -> float:
        calls = [("rank 0", self.actors[0].learning_rate.remote())]
        return self._supervisor.gather(calls, self._timeouts.step_s, "learning rate")[0]

    def snapshots(self, shared: Sequence[bool]) -> list[Any]:
        """References to host copies of every rank's state, taken before any later call to the ranks.

        Args:
            shared: per rank, whether its writer is on its host and maps the memory.
        """
        return [actor.snapshot.remote(here) for actor, here in zip(self.actors, shared, strict=True)]

    def reference_snapshots(self) -> list[Any]:
        return [actor.snapshot_reference.remote() for actor in self.actors]

    def await_copies(self, *copies: list[Any]) -> None:
        """Wait until these snapshots are taken; one that failed is there as well, and its writer meets the error.

        Raises:
            NoProgressError: not all within `timeouts.step_s`, with the ranks that hang.
        """
        calls = [(f"rank {rank}", call) for one in copies for rank, call in enumerate(one)]
        self._supervisor.gather(calls, self._timeouts.step_s, "copying the state", fetch=False)

    def _step(self, what: str, call: Any) -> list[Any]:
        return self._all(what, self._timeouts.step_s, call)

    def _all(self, what: str, timeout_s: float, call: Any) -> list[Any]:
        calls = [(f"rank {rank}", call(actor, rank)) for rank, actor in enumerate(self.actors)]
        return self._supervisor.gather(calls, timeout_s, what)


class EngineGroup:
    """All rollout engines; requests are dealt in contiguous shares and answered in order.

    An engine that dies or hangs in a call is started again, gets the weights of the running version, and the call is
    made once more: what it samples is a function of the seeds of the requests, so nothing of it is lost.
    """

    def __init__(
        self, actors: list[Any], supervisor: Supervisor, timeouts: TimeoutConfig, *, sleep: bool = False
    ) -> None:
        self.actors = actors
        self._sleep = sleep
        self.recovery: EngineRecovery | None = None
        """None: the death of an engine is the caller's matter."""
        self._supervisor = supervisor
        self._timeouts = timeouts

    def update_weights(self, weights: Any, version: int) -> None:
        """Give all engines the weights (a reference to rank 0's) as `version`."""

        def update() -> None:
            calls = self._calls(lambda actor, _: actor.update_weights.remote(weights, version))
            self._supervisor.gather(calls, self._timeouts.step_s, "weight sync")

        self._reviving(update)

    def sleep(self) -> None:
        """Leave the GPUs to the ranks until the next weights come, if the engines were built to."""

        def sleep() -> None:
            calls = self._calls(lambda actor, _: actor.sleep.remote())
            self._supervisor.gather(calls, self._timeouts.step_s, "putting the engines to sleep")

        if self._sleep:
            self._reviving(sleep)

    def generate(
        self,
        requests: list[Request],
        *,
        version: int,
        max_tokens: int,
        temperature: float,
        finished: Callable[[dict[int, Response]], None] | None = None,
    ) -> list[Response]:
        """One response per request, in order.

        Args:
            finished: told of responses, by their places, while others are still sampled; of some of them twice when an
                engine is lost. None: nobody is, which saves asking.
        """
        slice_s = SLICE_S if finished else None
        shares = np.array_split(np.arange(len(requests)), len(self.actors))

        def begin(actor: Any, index: int) -> Any:
            share = [requests[row] for row in shares[index]]
            return actor.generate.remote(share, version, max_tokens, temperature, slice_s)

        def generate() -> dict[int, Response]:
            found: dict[int, Response] = {}
            asked = {index: begin(actor, index) for index, actor in enumerate(self.actors)}
            while asked:
                # Asked before the answers are looked at: no engine waits for this process.
                ahead = {index: self.actors[index].go_on.remote(slice_s) for index in asked} if finished else {}
                calls = [(f"engine {index}", reference) for index, reference in asked.items()]
                answers: list[Sampled] = self._supervisor.gather(calls, self._timeouts.step_s, "rollout")
                for index, answer in zip(asked, answers, strict=True):
                    new = {int(shares[index][at]): response for at, response in answer.finished}
                    found |= new
                    if finished:
                        finished(new)
                left = [index for index, answer in zip(asked, answers, strict=True) if not answer.done]
                asked = {index: ahead[index] for index in left}
            return found

        answers = self._reviving(generate, version)
        return [answers[row] for row in range(len(requests))]

    def _reviving(self, act: Callable[[], T], version: int | None = None) -> T:
        """`act`, made again after each loss of an engine that may be mended.

        Args:
            version: of the weights that a new engine needs for it; None: `act` brings them.
        """
        while True:
            try:
                return act()
            except (WorkerDiedError, NoProgressError) as error:
                lost = [index for index in range(len(self.actors)) if f"engine {index}" in error.roles]
                if not lost or self.recovery is None:
                    raise
                self.recovery.replace(self.actors, lost, error)
                weights = self.recovery.weights() if version is not None else None
            if version is not None:
                self.update_weights(weights, version)

    def _calls(self, call: Any) -> list[tuple[str, Any]]:
        return [(f"engine {index}", call(actor, index)) for index, actor in enumerate(self.actors)]
