"""Whether a schedule can be run, before it is run; what is wrong with it names the actions at fault.

Every rule is a function from the lists to faults. Lists that pass compute each sample once on each stage, in an order that
its data allows, and end, with blocking receives and as many sends on their way as `buffers` says.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from fullstride.errors import RuleBroken
from fullstride.files import Value
from fullstride.plan.schedule.action import Action, ActionKind
from fullstride.plan.schedule.execution import stuck
from fullstride.plan.schedule.placement import Placement


class Fault(Value, frozen=True, kw_only=True):
    """What is wrong, and with which actions."""

    rule: str
    """`known`, `covered`, `ordered`, `fed`, `sent`, `paired`, `ended`, `memory` or `deadlock`."""
    message: str
    actions: tuple[Action, ...] = ()
    """The pair that cannot both stand as they do; one action where the other is missing."""


@dataclass(slots=True)
class _Lists:
    """Actions by where they are looked for."""

    placement: Placement
    samples: int
    ranks: list[list[Action]] = field(default_factory=list)
    at: dict[tuple[int, ActionKind], list[tuple[int, Action]]] = field(default_factory=dict)
    """(stage, kind): actions with their place in the list of their rank."""

    def of(self, stage: int, *kinds: ActionKind) -> list[tuple[int, Action]]:
        """Actions of a stage, by their first sample."""
        found = [entry for kind in kinds for entry in self.at.get((stage, kind), [])]
        return sorted(found, key=lambda entry: (entry[1].lo, entry[0]))


_Rule: TypeAlias = Callable[[_Lists], Iterator[Fault]]
_SENDS = ("send_forward", "send_backward")
_RECEIVES = ("recv_forward", "recv_backward")
_COMPUTE = ("forward", "backward", "input_grad", "weight_grad")


def faults(
    actions: Iterable[Action],
    placement: Placement,
    samples: int,
    *,
    buffers: int | None = None,
    most_samples: tuple[int, ...] = (),
) -> tuple[Fault, ...]:
    """All faults of a schedule; empty if it can be run.

    Args:
        actions: of all ranks, in order within each rank.
        placement: where the stages stand.
        samples: samples of the step, each to be computed once on each stage.
        buffers: messages that may be on their way from one rank to another before the sender waits; None: as many as
            there are.
        most_samples: samples that may be alive on each stage; empty for no limit.
    """
    lists = _Lists(placement, samples, [[] for _ in range(placement.pp)])
    known = [fault for action in actions for fault in _sorted_in(lists, action)]
    if known:
        return tuple(known)
    found = [fault for rule in _RULES for fault in rule(lists)]
    found += _crowded(lists, most_samples)
    return tuple(found or _deadlocked(lists, buffers))


def require_runnable(
    actions: Iterable[Action],
    placement: Placement,
    samples: int,
    *,
    buffers: int | None = None,
    most_samples: tuple[int, ...] = (),
) -> None:
    """Refuse a schedule that has a fault (see `faults`).

    Raises:
        RuleBroken: names the first fault and its pair of actions.
    """
    found = faults(actions, placement, samples, buffers=buffers, most_samples=most_samples)
    if found:
        more = f" (and {len(found) - 1} faults more)" if len(found) > 1 else ""
        raise RuleBroken(found[0].message + more, fix="correct the schedule")


def live_samples(actions: Iterable[Action], placement: Placement) -> tuple[int, ...]:
    """Most samples alive on each stage, from their forward until the gradients of its weights are made."""
    alive, most = [0] * placement.num_stages, [0] * placement.num_stages
    for action in actions:
        stage = placement.stage(action.rank, action.chunk)
        if action.kind == "forward":
            alive[stage] += action.hi - action.lo
            most[stage] = max(most[stage], alive[stage])
        elif action.kind in ("backward", "weight_grad"):
            alive[stage] -= action.hi - action.lo
    return tuple(most)


def _sorted_in(lists: _Lists, action: Action) -> Iterator[Fault]:
    """Put an action where it belongs, if it can belong anywhere."""
    where, peer = lists.placement, action.peer
    moves = action.kind in _SENDS or action.kind in _RECEIVES
    if not (0 <= action.rank < where.pp and 0 <= action.chunk < where.chunks):
        yield _fault("known", f"{where.pp} ranks with {where.chunks} chunks each have no such stage", action)
    elif not 0 <= action.lo < action.hi <= lists.samples:
        yield _fault("known", f"samples must be in [0,{lists.samples}), and at least one", action)
    elif moves and not (0 <= peer < where.pp and peer != action.rank):
        yield _fault("known", f"the peer of a message is another of {where.pp} ranks", action)
    elif not moves and peer >= 0:
        yield _fault("known", "only messages have a peer", action)
    else:
        own = lists.ranks[action.rank]
        stage = where.stage(action.rank, action.chunk)
        lists.at.setdefault((stage, action.kind), []).append((len(own), action))
        own.append(action)


def _fault(rule: str, why: str, *actions: Action) -> Fault:
    return Fault(rule=rule, message=f"{' and '.join(action.text() for action in actions)}: {why}", actions=actions)


def _covered(lists: _Lists) -> Iterator[Fault]:
    """Each sample forward once, its input gradient once, its weight gradient once, on each stage."""
    ways: tuple[tuple[ActionKind, ...], ...] = (("forward",), ("backward", "input_grad"), ("backward", "weight_grad"))
    for stage in range(lists.placement.num_stages):
        for kinds in ways:
            yield from _partition(lists, stage, lists.of(stage, *kinds), " or ".join(kinds), "covered")


def _partition(lists: _Lists, stage: int, found: list[tuple[int, Action]], what: str, rule: str) -> Iterator[Fault]:
    """The ranges lie side by side from the first sample to the last."""
    end, before = 0, None
    for _, action in found:
        if action.lo < end and before is not None:
            yield _fault(rule, f"both cover sample {action.lo} on stage {stage}", before, action)
        elif action.lo > end:
            pair = (action,) if before is None else (before, action)
            yield _fault(rule, f"samples [{end},{action.lo}) have no {what} on stage {stage}", *pair)
        if action.hi >= end:
            end, before = action.hi, action
    if end < lists.samples:
        message = f"samples [{end},{lists.samples}) have no {what} on stage {stage}"
        yield _fault(rule, message, before) if before else Fault(rule=rule, message=message)


def _ordered(lists: _Lists) -> Iterator[Fault]:
    """A micro-batch goes forward, then has its input gradient, then its weight gradient, whole each time."""
    pairs: tuple[tuple[ActionKind, ActionKind], ...] = (
        ("forward", "backward"),
        ("forward", "input_grad"),
        ("input_grad", "weight_grad"),
    )
    for stage in range(lists.placement.num_stages):
        for first, second in pairs:
            ways = lists.of(stage, first)
            for place, action in lists.of(stage, second):
                own = _holding(ways, action)
                if own is None:
                    continue  # not covered, which has been said
                if (own[1].lo, own[1].hi) != (action.lo, action.hi):
                    yield _fault("ordered", "one micro-batch of a stage has one range", own[1], action)
                elif own[0] > place:
                    yield _fault("ordered", f"{second} stands before {first}", own[1], action)


def _holding(found: list[tuple[int, Action]], action: Action) -> tuple[int, Action] | None:
    """Of actions by their first sample, the one whose range holds the first sample of `action`."""
    place = bisect_right(found, action.lo, key=lambda entry: entry[1].lo) - 1
    return found[place] if place >= 0 and found[place][1].hi > action.lo else None


_BORDERS: tuple[tuple[tuple[ActionKind, ...], ActionKind, ActionKind, int], ...] = (
    (("forward",), "send_forward", "recv_forward", 1),
    (("backward", "input_grad"), "send_backward", "recv_backward", -1),
)
"""What computes, what it sends, what it receives, and the direction in which results go."""


def _fed(lists: _Lists) -> Iterator[Fault]:
    """What a computation needs has been received, or computed on the same rank, before it."""
    for stage in range(lists.placement.num_stages):
        for kinds, _, receive, step in _BORDERS:
            source, works, got = stage - step, lists.of(stage, *kinds), lists.of(stage, receive)
            near = 0 <= source < lists.placement.num_stages
            rank = lists.placement.home(source)[0] if near else -1
            if near and rank == lists.placement.home(stage)[0]:
                got, rank = lists.of(source, *kinds), -1
            elif near:
                yield from _partition(lists, stage, got, receive, "fed")
                yield from _inside(got, works, "fed")
            if rank < 0:
                yield from (_fault("fed", f"stage {stage} gets nothing", one) for _, one in lists.of(stage, receive))
            yield from (_fault("fed", f"it comes from rank {rank}", one) for _, one in got if rank >= 0 and one.peer != rank)
            yield from _after(works, got)


def _after(works: list[tuple[int, Action]], got: list[tuple[int, Action]]) -> Iterator[Fault]:
    """Each work stands after all that it needs."""
    starts = [action.lo for _, action in got]
    for place, action in works:
        first = max(0, bisect_right(starts, action.lo) - 1)
        for number in range(first, len(got)):
            at, needed = got[number]
            if needed.lo >= action.hi:
                break
            if needed.hi > action.lo and at > place:
                yield _fault("fed", "the second needs the first, and stands before it", needed, action)


def _inside(messages: list[tuple[int, Action]], works: list[tuple[int, Action]], rule: str) -> Iterator[Fault]:
    """Each message belongs to one micro-batch."""
    for _, message in messages:
        own = _holding(works, message)
        if own is not None and own[1].hi < message.hi:
            yield _fault(rule, "the message reaches over the end of the micro-batch", own[1], message)


def _sent(lists: _Lists) -> Iterator[Fault]:
    """What another rank needs is sent to it, after it has been computed."""
    for stage in range(lists.placement.num_stages):
        for kinds, send, _, step in _BORDERS:
            target, works, sent = stage + step, lists.of(stage, *kinds), lists.of(stage, send)
            rank = lists.placement.home(target)[0] if 0 <= target < lists.placement.num_stages else -1
            if rank < 0 or rank == lists.placement.home(stage)[0]:
                yield from (_fault("sent", f"stage {stage} sends nothing", message) for _, message in sent)
                continue
            yield from _partition(lists, stage, sent, send, "sent")
            yield from _inside(sent, works, "sent")
            for place, message in sent:
                own = _holding(works, message)
                if message.peer != rank:
                    yield _fault("sent", f"it belongs to rank {rank}", message)
                if own is not None and own[0] > place:
                    yield _fault("sent", "it is sent before it has been computed", own[1], message)


def _paired(lists: _Lists) -> Iterator[Fault]:
    """From one rank to another, messages are received in the order in which they are sent."""
    sent: dict[tuple[int, int], list[Action]] = {}
    got: dict[tuple[int, int], list[Action]] = {}
    for own in lists.ranks:
        for action in own:
            if action.kind in _SENDS:
                sent.setdefault((action.rank, action.peer), []).append(action)
            elif action.kind in _RECEIVES:
                got.setdefault((action.peer, action.rank), []).append(action)
    for pair in sorted({*sent, *got}):
        ways, ends = sent.get(pair, []), got.get(pair, [])
        for send, receive in zip(ways, ends, strict=False):
            if not _match(lists.placement, send, receive):
                yield _fault("paired", f"from rank {pair[0]} to rank {pair[1]} they come at the same place", send, receive)
                break
        else:
            for action in (*ways[len(ends) :], *ends[len(ways) :]):
                yield _fault("paired", "the other rank has no action for it", action)


def _match(placement: Placement, send: Action, receive: Action) -> bool:
    step = 1 if send.kind == "send_forward" else -1
    stages = placement.stage(send.rank, send.chunk) + step, placement.stage(receive.rank, receive.chunk)
    kinds = send.kind.removeprefix("send"), receive.kind.removeprefix("recv")
    return stages[0] == stages[1] and kinds[0] == kinds[1] and (send.lo, send.hi) == (receive.lo, receive.hi)


def _ended(lists: _Lists) -> Iterator[Fault]:
    """Each chunk is reduced once, after its last gradient; each rank has one optimizer, last."""
    for rank, own in enumerate(lists.ranks):
        for chunk in range(lists.placement.chunks):
            stage = lists.placement.stage(rank, chunk)
            reduces = lists.at.get((stage, "reduce"), [])
            if len(reduces) != 1:
                several = tuple(action for _, action in reduces[:2])
                message = f"rank {rank} has {len(reduces)} reduces of chunk {chunk}, not one"
                yield Fault(rule="ended", message=message, actions=several)
            for place, action in reduces[:1]:
                for at, late in lists.of(stage, "backward", "weight_grad"):
                    if at > place:
                        yield _fault("ended", "gradients are reduced before they are final", action, late)
        optimizers = [action for action in own if action.kind == "optimizer"]
        if len(optimizers) != 1:
            message = f"rank {rank} has {len(optimizers)} optimizers, not one"
            yield Fault(rule="ended", message=message, actions=tuple(optimizers[:2]))
        elif own[-1] is not optimizers[0]:
            yield _fault("ended", "the optimizer comes last", optimizers[0], own[-1])


def _crowded(lists: _Lists, most_samples: tuple[int, ...]) -> Iterator[Fault]:
    """No stage holds more samples than it may."""
    for own in lists.ranks:
        alive: dict[int, list[Action]] = {}
        for action in own:
            stage = lists.placement.stage(action.rank, action.chunk)
            held = alive.setdefault(stage, [])
            if action.kind == "forward":
                held.append(action)
                if most_samples and sum(one.hi - one.lo for one in held) > most_samples[stage]:
                    yield _fault("memory", f"stage {stage} may hold {most_samples[stage]} samples", held[0], action)
                    break
            elif action.kind in ("backward", "weight_grad"):
                held[:] = [one for one in held if (one.lo, one.hi) != (action.lo, action.hi)]


def _deadlocked(lists: _Lists, buffers: int | None) -> Iterator[Fault]:
    """Carried out with blocking receives and `buffers` sends on their way, the lists end."""
    pair = stuck(lists.ranks, buffers)
    if pair:
        yield _fault("deadlock", "each waits for something that comes after the other", *pair)


_RULES: tuple[_Rule, ...] = (_covered, _ordered, _fed, _sent, _paired, _ended)
