"""Why attempts ended: one rule per cause, data in, findings out. `ENDS` holds them, the most telling first.

A rule merges the attempts that ended for the same cause into one finding. Where a message fits several rules (a rank
that waited in vain for its dead peer), the earlier rule explains the attempt and the later ones leave it alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from shlex import quote as shell

from keepstep.config.schema import RetryConfig
from keepstep.doctor.evidence import AttemptEvidence, Evidence, Quote, Row
from keepstep.doctor.finding import NOTE, PROBLEM, Finding
from keepstep.doctor.jumps import jump_of
from keepstep.errors import KILLS, NEVER, budget_of
from keepstep.retry import AttemptEnd, Failure, decide, failures

Rule = Callable[[Evidence], list[Finding]]
SAME_COMMAND = "Start the same command again; `keepstep plan RUN` says where it goes on."
_KEYS = re.compile(r"state dict does not match the model|shard of shape")
_MEMORY = re.compile(
    r"out of memory|can.?t allocate memory|cannot allocate memory|MemoryError|unable to allocate", re.I
)
_PORT = re.compile(r"port (\d+) is in use by (.+?)\.?$", re.M)
_NODE = re.compile(r"node (?:has )?died|its node|node .*(?:was terminated|is dead)|missed too many heartbeats", re.I)
_DIED = re.compile(r"^(?P<what>.*?): (?P<roles>.*?) died|^(?P<where>.*?): a worker died")
_KILLER = re.compile(r"SIGKILL|OOM.?kill|oom_kill|out-of-memory killer|signal 9|exit code -?9", re.I)
_SILENT = re.compile(
    r"no answer from|Timed out waiting|timed out after|Connection (?:closed|reset) by peer|Nothing was heard",
    re.I,
)
_ROLE = re.compile(r"no answer from (.+?) within (\d+) s")


def keys_do_not_match(evidence: Evidence) -> list[Finding]:
    hits = failed(evidence, lambda attempt: bool(_KEYS.search(attempt.message)))
    return explain(
        evidence,
        "keys_do_not_match",
        hits,
        "The checkpoint's tensors are not those of the model that was built: the model's options have changed "
        "(tie_word_embeddings, number of layers, vocabulary).",
        f"Bring back the config.json of {setting(evidence, 'actor_rollout_ref.model.path', 'the model')} that the run "
        f"began with (a checkpoint's tokenizer/ folder holds a copy), or start a run of its own from the other model.",
    )


def other_policy(evidence: Evidence) -> list[Finding]:
    hits = failed(evidence, lambda attempt: attempt.failure_class == "probe")
    return explain(
        evidence,
        "other_policy",
        hits,
        "The policy that a resume loaded is not the one that was saved: it gives other log-probs to the same prompts.",
        _remedy(hits, f"Resume from another checkpoint: keepstep plan {shell(str(evidence.root))}"),
        [row.quote() for hit in hits[-1:] for row in hit.events if row.kind == "resumed"],
    )


def out_of_memory(evidence: Evidence) -> list[Finding]:
    """Apart when memory sufficed before: then something that was not there in the first start takes it."""
    hits = failed(evidence, lambda a: a.failure_class == "out_of_memory" or bool(_MEMORY.search(a.message)))
    on_resume = [hit for hit in hits if resumed_at(hit) is not None and _trained_before(evidence, hit)]
    first = [hit for hit in hits if hit not in on_resume]
    return explain(
        evidence,
        "out_of_memory_on_resume",
        on_resume,
        f"Memory ran out after a resume, and the same settings had trained before: {_leftover(on_resume)}",
        f"See who holds memory (free -h, nvidia-smi), end what earlier attempts left ({shell(str(evidence.root))}"
        "/attempts/<n>.json names their processes), then start the same command again.",
    ) + explain(
        evidence,
        "out_of_memory",
        first,
        "Memory ran out before this run had ever held: the model, the batch and the KV cache do not fit together.",
        "Lower actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu, rollout.gpu_memory_utilization or "
        "rollout.kv_cache_gib, or use more ranks.",
    )


def node_lost(evidence: Evidence) -> list[Finding]:
    hits = failed(
        evidence,
        lambda a: (
            budget_of(a.failure_class) == KILLS and bool(_NODE.search(f"{a.message} {a.outcome.get('remedy', '')}"))
        ),
    )
    return explain(
        evidence,
        "node_lost",
        hits,
        "A node of the Ray cluster went away with the workers on it.",
        f"See that the node is back (ray status). {SAME_COMMAND}",
    )


def worker_lost(evidence: Evidence) -> list[Finding]:
    hits = failed(evidence, lambda a: a.failure_class == "worker_died")
    return explain(
        evidence,
        "worker_lost",
        hits,
        f"{'; '.join(_loss(hit) for hit in hits)}.",
        f"{SAME_COMMAND} Under `keepstep run` that happens by itself. If it comes again, see who kills: dmesg -T | "
        "grep -i kill.",
    )


def writer_lost(evidence: Evidence) -> list[Finding]:
    """What is started again in place; no attempt ends for it."""
    lost = made_good(evidence.events)
    if not lost:
        return []
    roles = ", ".join(sorted({row.text("role") or "worker" for row in lost}))
    return [
        Finding(
            "worker_replaced",
            NOTE,
            f"The {roles} died {times(len(lost))} and was started again in its place; training went on.",
            tuple(row.quote() for row in lost[-2:]),
            "Nothing to do, unless it comes again: dmesg -T | grep -i kill.",
        )
    ]


def made_good(events: Iterable[Row]) -> list[Row]:
    """Losses of a worker whose place another took: an attempt that is ending loses its workers as well."""
    pending: dict[tuple[int | None, str], Row] = {}
    found: list[Row] = []
    for row in events:
        who = (row.attempt, row.text("role"))
        if row.kind == "worker_lost":
            pending[who] = row
        elif row.kind == "recovered" and who in pending:
            found.append(pending.pop(who))
    return found


def orphaned(evidence: Evidence) -> list[Finding]:
    hits = failed(evidence, lambda attempt: attempt.failure_class == "orphaned")
    return explain(
        evidence,
        "command_gone",
        hits,
        "The command that had started the trainer died, so the trainer left.",
        f"{SAME_COMMAND} A flow run of `keepstep up` comes back by itself: within half a minute, after twelve where "
        "its worker died too, and after `keepstep down` with the next `keepstep up`.",
    )


def no_answer(evidence: Evidence) -> list[Finding]:
    hits = failed(evidence, lambda a: a.failure_class == "no_progress" or bool(_SILENT.search(a.message)))
    named = [match for hit in hits if (match := _ROLE.search(hit.message))]
    collective = bool(hits) and hits[-1].failure_class != "no_progress"
    who = "A rank waited in vain for another one in a collective" if collective else "What was waited for did not come"
    if named:
        who = f"The {named[-1].group(1)} gave no answer for {named[-1].group(2)} s"
    return explain(
        evidence,
        "no_answer",
        hits,
        f"{who}: something hangs, is stopped, or is much slower than its time limit.",
        f"{SAME_COMMAND} If it was only slow, raise the limit: timeouts.step_s, timeouts.collective_s, or for a save "
        "checkpoint.save_timeout_s.",
    )


def port_in_use(evidence: Evidence) -> list[Finding]:
    hits = failed(evidence, lambda attempt: bool(_PORT.search(attempt.message)))
    match = _PORT.search(hits[-1].message) if hits else None
    port, holder = (match.group(1), match.group(2)) if match else ("", "")
    return explain(
        evidence,
        "port_in_use",
        hits,
        f"The engine's port {port} is taken by {holder}.",
        "End that process, or start the same command with another actor_rollout_ref.rollout.port.",
    )


def store_refused(evidence: Evidence) -> list[Finding]:
    hits = failed(evidence, lambda attempt: attempt.failure_class == "storage_refused")
    refusals = [row for row in evidence.of("upload_failed") if row.text("reason").startswith("refused")]
    no_bucket = any("NoSuchBucket" in text for text in [hit.message for hit in hits[-1:]])
    return explain(
        evidence,
        "store_refused",
        hits,
        f"The object store says no, because {'the bucket is not there' if no_bucket else 'of credentials or rights'}: "
        "another try cannot help.",
        (
            "Create the bucket, or correct s3.bucket and s3.endpoint_url."
            if no_bucket
            else "Check the credentials (standard AWS chain: environment, profile, instance role) and what they permit."
        )
        + " Then start the same command again: it uploads what is missing and trains nothing that is saved.",
        [row.quote() for row in refusals[:1]],
    )


def store_away(evidence: Evidence) -> list[Finding]:
    hits = failed(evidence, lambda attempt: attempt.failure_class == "storage")
    return explain(
        evidence,
        "store_away",
        hits,
        f"The object store did not answer, so {_owed(evidence)} not confirmed there.",
        "See that the store answers, then start the same command again: it uploads what is missing and trains nothing "
        "that is saved.",
        [row.quote() for row in evidence.of("upload_failed")[-1:]],
    )


def no_room(evidence: Evidence) -> list[Finding]:
    hits = failed(evidence, lambda attempt: attempt.failure_class == "no_room")
    return explain(
        evidence,
        "no_room",
        hits,
        "There was no room on the filesystem for a checkpoint.",
        f"Free space (what would go by the rules: keepstep prune {shell(str(evidence.root))} --dry-run), or lower "
        "checkpoint.keep_last; then start the same command again.",
        [row.quote() for row in evidence.of("checkpoint_skipped")[-1:]],
    )


def non_finite(evidence: Evidence) -> list[Finding]:
    hits = failed(evidence, lambda attempt: attempt.failure_class == "non_finite")
    rate = setting(evidence, LEARNING_RATE, "")
    wild = _as_float(rate) > MOST_LEARNING_RATE
    return explain(
        evidence,
        "non_finite",
        hits,
        f"A loss, gradient or reward is not a finite number{_after(hits)}: "
        + (f"the learning rate of {rate} has carried the weights away." if wild else "the same step gives it again."),
        ("Lower " if wild else "See that the reward function returns finite numbers only. If it does, lower ")
        + f"{LEARNING_RATE}, in a run of its own: the recorded one may not change.",
        settings_quoted=(LEARNING_RATE,),
    )


LEARNING_RATE = "actor_rollout_ref.actor.optim.lr"
MOST_LEARNING_RATE = 0.1
"""Above it AdamW, whose steps are of the size of the learning rate, leaves the range of any trained weight."""


def reward_raised(evidence: Evidence) -> list[Finding]:
    hits = failed(evidence, lambda attempt: attempt.failure_class == "reward")
    return explain(
        evidence,
        "reward_raised",
        hits,
        f"The reward function failed on a response{_after(hits)}.",
        _remedy(hits, "Mend the function.")
        + " Then start the same command with resume.allow=[custom_reward_function.source].",
    )


def stale_weights(evidence: Evidence) -> list[Finding]:
    hits = failed(evidence, lambda attempt: attempt.failure_class == "stale_weights")
    engine = setting(evidence, "actor_rollout_ref.rollout.dtype", "")
    mixed = engine == "bfloat16" and setting(evidence, "actor_rollout_ref.actor.fsdp_config.model_dtype", "") == "fp32"
    return explain(
        evidence,
        "stale_weights",
        hits,
        "Engine and trainer disagree on the log-probs of sampled tokens: the engine "
        + (
            "computes in bfloat16 beside float32 ranks, at the tolerance of equal precision."
            if mixed
            else "samples from other weights than those that are trained."
        ),
        "Raise actor_rollout_ref.rollout.logprob_tolerance above the difference that the message names and start the "
        "same command again, or use actor_rollout_ref.rollout.dtype=float32 in a run of its own."
        if mixed
        else _remedy(hits, "Report it with this run's train.log."),
        settings_quoted=("actor_rollout_ref.rollout.dtype",) if mixed else (),
    )


def replay_differs(evidence: Evidence) -> list[Finding]:
    """With what differed first, where the metrics of the steps before show it."""
    hits = failed(evidence, lambda attempt: attempt.failure_class == "exactness")
    resumes = [row for hit in hits[-1:] for row in hit.events if row.kind == "resumed"]
    jump = jump_of(evidence, resumes[-1]) if resumes else None
    shown = [jump.before.quote(jump.key), jump.after.quote(jump.key)] if jump else []
    return explain(
        evidence,
        "replay_differs",
        hits,
        "A step that was trained again gave other tensors than its verified checkpoint holds: "
        + (f"{jump.which}." if jump else "what was loaded, the reward function or the machine is not what it was."),
        _remedy(hits, "Resume from another checkpoint.")
        + " To keep what stands, start the same command without trainer.resume_from_checkpoint; what it would resume "
        f"from: keepstep plan {shell(str(evidence.root))}.",
        [*(row.quote() for row in resumes), *shown],
    )


def data_refused(evidence: Evidence) -> list[Finding]:
    hits = failed(evidence, lambda attempt: attempt.failure_class == "data")
    return explain(
        evidence,
        "no_usable_rows",
        hits,
        f"The data cannot be trained on: {_first(hits)}",
        _remedy(hits, "Give other files in data.train_files.")
        + " Nothing that the run has recorded of its data may change: start it in a new trainer.output_dir.",
    )


def settings_refused(evidence: Evidence) -> list[Finding]:
    hits = failed(evidence, lambda attempt: attempt.failure_class in ("config", "contract", "held"))
    return explain(evidence, "refused", hits, f"The start was refused: {_first(hits)}", _remedy(hits, SAME_COMMAND))


def checkpoints_bad(evidence: Evidence) -> list[Finding]:
    hits = failed(evidence, lambda attempt: attempt.failure_class == "checkpoint")
    return explain(
        evidence,
        "checkpoints_bad",
        hits,
        f"No checkpoint was good enough: {_first(hits)}",
        _remedy(hits, f"See what stands: keepstep plan {shell(str(evidence.root))}"),
        [row.quote() for row in evidence.of("checkpoint_rejected")[-1:]],
    )


def fenced(evidence: Evidence) -> list[Finding]:
    """An attempt that was overtaken: it may say so itself, or have been too stale to write even that."""
    said = failed(evidence, lambda attempt: attempt.failure_class == "fenced")
    if not said:
        return []
    numbers = ", ".join(str(hit.number) for hit in said)
    return [
        Finding(
            "fenced",
            NOTE,
            f"Attempt {numbers} was overtaken by a newer one and stopped without writing: it had been silent or was "
            "taken for dead.",
            tuple(quote for hit in said if (quote := hit.quote_end())),
            "Nothing to do. If both were alive, start only one; a longer retry.lease_timeout_s waits longer for a "
            "silent one.",
            frozenset(hit.number for hit in said),
        )
    ]


def preempted(evidence: Evidence) -> list[Finding]:
    hits = [attempt for attempt in evidence.attempts if attempt.outcome.get("status") == "preempted"]
    if not hits:
        return []
    waits = hits[-1] is evidence.newest and not evidence.finished
    return [
        Finding(
            "preempted",
            NOTE,
            f"{times(len(hits)).capitalize()} an attempt was asked to leave, saved and left.",
            tuple(quote for hit in hits[-2:] if (quote := hit.quote_end())),
            SAME_COMMAND if waits else "Nothing to do: a later attempt took it up.",
            frozenset(hit.number for hit in hits),
        )
    ]


def repeated_failure(evidence: Evidence) -> list[Finding]:
    """What makes the flow stop: the same failure at the same step, or a budget that is used up."""
    history = list(_history(evidence))
    if not history or evidence.finished or evidence.at_work:
        return []
    numbers, failed_so = zip(*history, strict=True)
    decision = decide(list(failed_so), RetryConfig(max_retries=_max_retries(evidence)))
    last = failed_so[-1]
    if decision.retry or last.budget == NEVER:
        return []
    same = [
        n for n, f in history if (f.failure_class, f.message, f.step) == (last.failure_class, last.message, last.step)
    ]
    by_number = {attempt.number: attempt for attempt in evidence.attempts}
    if len(same) > 1:
        cause = f"The same failure came {times(len(same))} after step {last.step} without progress in between"
        remedy = "Another try gives the same. Mend what the message names, then start the same command again."
        return [_stop("repeated_failure", f"{cause}: {brief(last.message)}", [by_number[n] for n in same], remedy)]
    recent = [by_number[n] for n in numbers[-1 - _max_retries(evidence) :]]
    cause = f"The retry budget is gone ({decision.reason}). The last failure: {brief(last.message)}"
    remedy = "Mend what fails, then start the same command again, which begins with a full budget (retry.max_retries)."
    return [_stop("budget_gone", cause, recent, remedy)]


def unexpected(evidence: Evidence) -> list[Finding]:
    """The rest: bugs, and classes of releases to come."""
    hits = failed(evidence, lambda attempt: attempt.failure_class != "fenced")
    return explain(
        evidence,
        "unexpected",
        hits,
        f"The attempt failed{_after(hits)}: {_first(hits)}",
        _remedy(hits, "See its train.log.") + f" {SAME_COMMAND}",
        settings_quoted=(),
        tracebacks=True,
    )


ENDS: tuple[Rule, ...] = (
    keys_do_not_match, other_policy, out_of_memory, node_lost, worker_lost, port_in_use, store_refused, store_away,
    no_room, non_finite, reward_raised, stale_weights, replay_differs, data_refused, settings_refused, checkpoints_bad,
    no_answer, repeated_failure, orphaned, unexpected, fenced, preempted, writer_lost,
)  # fmt: skip


def failed(evidence: Evidence, fits: Callable[[AttemptEvidence], bool]) -> list[AttemptEvidence]:
    """Attempts that failed and that `fits` holds of."""
    return [a for a in evidence.attempts if a.outcome.get("status") in ("failed", "fenced") and fits(a)]


def explain(
    evidence: Evidence,
    name: str,
    hits: list[AttemptEvidence],
    cause: str,
    remedy: str,
    more: Iterable[Quote] = (),
    settings_quoted: Iterable[str] = (),
    tracebacks: bool = False,
) -> list[Finding]:
    """One finding for the attempts that ended for this cause: a problem while the newest one is among them.

    Args:
        more: further quotes.
        settings_quoted: keys whose lines in the last attempt's log are quoted.
        tracebacks: quote the last line of the last attempt's traceback.
    """
    if not hits:
        return []
    last = hits[-1]
    quotes: list[Quote | None] = [hit.quote_end() for hit in hits[-2:]]
    quotes += more
    quotes += [last.settings[setting].quote for setting in settings_quoted if setting in last.settings]
    quotes += [_traceback(last)] if tracebacks else []
    stands = last is evidence.newest and not evidence.finished
    overcome = "" if stands else f" A later attempt went on{' and finished the run' if evidence.finished else ''}."
    return [
        Finding(
            name,
            PROBLEM if stands else NOTE,
            cause + overcome,
            tuple(quote for quote in quotes if quote),
            remedy if stands else "Nothing to do, unless it comes again.",
            frozenset(hit.number for hit in hits),
        )
    ]


def setting(evidence: Evidence, key: str, default: str) -> str:
    """What the newest start used."""
    found = evidence.newest.settings.get(key) if evidence.newest else None
    return default if found is None else found.value


def _as_float(text: str) -> float:
    """A number's value; of anything else 0."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def resumed_at(attempt: AttemptEvidence) -> int | None:
    return next((row.step for row in attempt.events if row.kind == "resumed"), None)


def times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def brief(message: str) -> str:
    """A message's first line."""
    lines = message.strip().splitlines()
    return lines[0][:200] if lines else "no message"


def _stop(name: str, cause: str, hits: list[AttemptEvidence], remedy: str) -> Finding:
    quotes = [hit.quote_end() for hit in hits[-3:]] + [_traceback(hits[-1])]
    return Finding(name, PROBLEM, cause, tuple(q for q in quotes if q), remedy, frozenset(hit.number for hit in hits))


def _history(evidence: Evidence) -> list[tuple[int, Failure]]:
    """Failures of the attempts, as the retry decision sees them."""

    def end(attempt: AttemptEvidence) -> AttemptEnd:
        verified = [row.step or 0 for row in attempt.events if row.kind == "checkpoint_verified"]
        return AttemptEnd(attempt.number, attempt.outcome, attempt.last_step, max(verified, default=None))

    return failures(map(end, evidence.attempts))


def _max_retries(evidence: Evidence) -> int:
    found = setting(evidence, "retry.max_retries", "3")
    return int(found) if found.isdecimal() and len(found) < 6 else 3


def _trained_before(evidence: Evidence, attempt: AttemptEvidence) -> bool:
    return any(earlier.last_step is not None for earlier in evidence.attempts if earlier.number < attempt.number)


def _leftover(hits: list[AttemptEvidence]) -> str:
    if hits and re.search(r"\bload(?:ing|ed)\b", hits[-1].message):
        return "the checkpoint is not at fault, something else is in memory (a left-over engine or rank, another job)."
    return "a second copy of what was loaded, or something else, is in memory (a left-over engine or rank)."


def _loss(attempt: AttemptEvidence) -> str:
    """Which role died in which act, and what killed it if the log knows."""
    match = _DIED.search(attempt.message)
    roles = (match.group("roles") or "a worker") if match else "the trainer"
    act = (match.group("what") or match.group("where")) if match else ""
    killer = next((line.text for line in attempt.log if _KILLER.search(line.text)), "")
    found = _KILLER.search(killer or attempt.message)
    by = f", killed by {found.group(0)}" if found else ""
    last = attempt.last_step if attempt.last_step is not None else resumed_at(attempt)
    where = "before the first step" if last is None else f"after step {last}"
    return f"Attempt {attempt.number} lost {roles} {where}{f' (in: {act})' if act else ''}{by}"


def _owed(evidence: Evidence) -> str:
    """Steps that were to go into the store and are not confirmed."""
    steps = sorted({row.step for row in evidence.of("upload_failed") if row.step is not None} - set(evidence.confirmed))
    if not steps:
        return "the last upload is"
    return f"step {steps[0]} is" if len(steps) == 1 else f"steps {', '.join(map(str, steps))} are"


def _after(hits: list[AttemptEvidence]) -> str:
    last = hits[-1].last_step if hits else None
    return "" if last is None else f" after step {last}"


def _first(hits: list[AttemptEvidence]) -> str:
    return brief(hits[-1].message) if hits else ""


def _remedy(hits: list[AttemptEvidence], default: str) -> str:
    """The way out that the error itself named."""
    found = hits[-1].outcome.get("remedy") if hits else None
    return found if isinstance(found, str) and found else default


def _traceback(attempt: AttemptEvidence) -> Quote | None:
    """The last line of the last traceback in an attempt's log."""
    last: Quote | None = None
    inside = False
    for line in attempt.log:
        if line.text.startswith("Traceback "):
            inside = True
        elif inside and line.text and not line.text[0].isspace() and not line.text.startswith(("During", "The above")):
            last, inside = line.quote(), False
    return last
