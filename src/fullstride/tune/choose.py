"""Which lever to pull next: every allowed move is priced, the largest predicted gain comes first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fullstride.cluster.cluster import Cluster
from fullstride.files import Value
from fullstride.measure.measurement import Measurement
from fullstride.model.spec import ModelSpec
from fullstride.plan.estimate import Estimate
from fullstride.plan.plan import Plan
from fullstride.tune.learned import Learned, Prediction, Pricer, predict
from fullstride.tune.levers import Lever, Move, micro_batches, with_micro_batch
from fullstride.tune.stages import refused
from fullstride.units import format_bytes

WORTH = 1.02
"""A predicted ratio under this is not worth a trial."""
MEMORY_TARGET = 0.65
"""A device that is used less than this has memory to spare: saving more is no aim in itself."""
_COMBINED_GAIN = 1.01
"""What a change together with another micro-batch must bring over the change alone."""


class Choice(Value, frozen=True, kw_only=True):
    """The best move of one lever."""

    lever: str
    move: Move
    ratio: float
    """Predicted time now over time after."""
    estimate: Estimate


class Passed(Value, frozen=True, kw_only=True):
    """Why a lever has no move worth a trial, and the best of those it had."""

    lever: str
    reason: str
    choice: Choice | None = None


class Situation(Value, frozen=True, kw_only=True):
    """Where tuning stands: the best plan so far and what is known."""

    plan: Plan
    spec: ModelSpec
    cluster: Cluster
    learned: Learned
    use: float | None = None
    """Share of the device's memory in use; None if unknown."""


def memory_use(measured: Measurement, estimate: Estimate | None) -> float | None:
    """Share of the device's memory that a measured plan uses."""
    if estimate is None or not estimate.capacity_bytes:
        return None
    used = max(measured.memory.device_used_bytes, measured.memory.peak_reserved_bytes, measured.memory.peak_allocated_bytes)
    return used / estimate.capacity_bytes if used else None


def weigh(situation: Situation, levers: Sequence[Lever], pricer: Pricer) -> tuple[list[Choice], list[Passed]]:
    """Choices worth a trial, the best first, and why the other levers have none.

    A tie keeps the order of `levers`.
    """
    now = predict(situation.plan, situation.spec, situation.cluster, situation.learned, pricer)
    choices: list[Choice] = []
    passed: list[Passed] = []
    for lever in levers:
        found = _best_of(situation, lever, now, pricer) if now else Passed(lever=lever.name, reason="the plan has no price")
        if isinstance(found, Choice):
            choices.append(found)
        else:
            passed.append(found)
    return sorted(choices, key=lambda choice: -choice.ratio), passed


def _best_of(situation: Situation, lever: Lever, now: Prediction, pricer: Pricer) -> Choice | Passed:
    moves = list(lever.changes(situation.plan, situation.spec, situation.cluster))
    if not moves:
        return Passed(lever=lever.name, reason=lever.needs)
    why_not = ""
    priced: list[tuple[Move, Prediction]] = []
    for move in moves:
        if broken := refused(move.plan, situation.spec, situation.cluster):
            why_not = why_not or f"not allowed: {broken}"
            continue
        priced += _priced(situation, lever, move, pricer)
    if not priced:
        return Passed(lever=lever.name, reason=why_not or "every choice was tried or has no price")
    fitting = [(move, prediction) for move, prediction in priced if prediction.fits]
    if not fitting:
        return _too_large(lever, priced)
    move, prediction = min(fitting, key=lambda pair: pair[1].seconds)
    choice = Choice(lever=lever.name, move=move, ratio=now.seconds / prediction.seconds, estimate=prediction.estimate)
    if choice.ratio >= WORTH:
        return choice
    return Passed(lever=lever.name, reason=_not_worth(situation, lever, choice), choice=choice)


def _priced(situation: Situation, lever: Lever, move: Move, pricer: Pricer) -> list[tuple[Move, Prediction]]:
    """The move, and where it moves memory also with the micro-batch that it makes room for, or that pays for it."""
    alone = predict(move.plan, situation.spec, situation.cluster, situation.learned, pricer)
    found = [(move, alone)] if alone and move.plan.plan_hash not in situation.learned.tried else []
    if not lever.moves_memory or alone is None:
        return found
    for combined in _combined(move, alone.fits):
        if combined.plan.plan_hash in situation.learned.tried or refused(combined.plan, situation.spec, situation.cluster):
            continue
        if alone.fits and _fits_already(situation, combined.plan.batch.micro_batch, pricer):
            continue
        together = predict(combined.plan, situation.spec, situation.cluster, situation.learned, pricer)
        if together and together.fits and (not alone.fits or together.seconds * _COMBINED_GAIN < alone.seconds):
            found.append((combined, together))
    return found


def _combined(move: Move, fits: bool) -> Iterator[Move]:
    size = move.plan.batch.micro_batch
    words = "which makes room for" if fits else "paid for with"
    for other in micro_batches(move.plan):
        if (other > size) == fits and other != size:
            changed = with_micro_batch(move.plan, other)
            yield Move(plan=changed.plan, words=f"{move.words}, {words} {changed.words}")


def _fits_already(situation: Situation, size: int, pricer: Pricer) -> bool:
    """Whether the larger micro-batch needs no help: then it is a lever of its own."""
    changed = with_micro_batch(situation.plan, size).plan
    alone = predict(changed, situation.spec, situation.cluster, situation.learned, pricer)
    return alone is not None and alone.fits


def _too_large(lever: Lever, priced: list[tuple[Move, Prediction]]) -> Passed:
    move, smallest = min(priced, key=lambda pair: pair[1].device_bytes)
    capacity = smallest.estimate.capacity_bytes
    reason = f"{move.words} needs {format_bytes(smallest.device_bytes)} of {format_bytes(capacity)}"
    return Passed(lever=lever.name, reason=reason)


def _not_worth(situation: Situation, lever: Lever, choice: Choice) -> str:
    reason = f"best choice ({choice.move.words}) is predicted at {choice.ratio:.3f} x, under {WORTH:.2f} x"
    if lever.moves_memory and situation.use is not None and situation.use < MEMORY_TARGET:
        reason += f"; device memory is used to {situation.use:.0%}, under the target of {MEMORY_TARGET:.0%}: none needs saving"
    return reason
