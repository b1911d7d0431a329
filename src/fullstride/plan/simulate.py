"""The timeline of a pipeline schedule, from the durations of its actions.

Every rank carries out its list in order. A send takes its turn on the link from rank to rank; a receive waits until its
message has arrived; a reduce runs beside computation. Since lists and links have one order, the outcome does not depend
on how the simulation interleaves the ranks (a Kahn network): one pass over the actions is exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from fullstride.errors import RuleBroken
from fullstride.files import Value
from fullstride.plan.schedule.action import Action
from fullstride.plan.schedule.generators import generate
from fullstride.plan.schedule.placement import Placement, placement_of


class StageDurations(Value, frozen=True, kw_only=True):
    """What one stage costs; seconds and bytes are for one sample unless said otherwise."""

    forward_seconds: float
    input_grad_seconds: float
    weight_grad_seconds: float
    recompute_seconds: float = 0.0
    """Added to a backward, or to the input gradient where it is split."""
    fixed_seconds: float = 0.0
    """Of each computation, however many samples it has: launches."""
    send_seconds: float = 0.0
    """Over the border to the next stage, either way."""
    reduce_seconds: float = 0.0
    """Gradients of the whole stage across data-parallel ranks, once a step."""
    optimizer_seconds: float = 0.0
    """Once a step."""
    activation_bytes: float = 0.0
    """Kept from forward to backward."""
    held_bytes: float | None = None
    """Kept from input gradient to weight gradient; None: all that forward kept."""
    working_bytes: float = 0.0
    """Only while something is computed, such as logits or a block made again."""
    static_bytes: float = 0.0
    """Of the stage, whatever is computed: weights, gradients, optimizer states."""


class Durations(Value, frozen=True, kw_only=True):
    """What the actions of a schedule cost."""

    stages: tuple[StageDurations, ...]
    latency_seconds: float = 0.0
    """Of each message."""
    overlap: bool = True
    """Whether a rank computes while it sends; a rank without it waits until the message has arrived."""
    synchronised: bool = True
    """Whether the optimizer waits for all ranks, as clipping by the global norm makes it."""


class ActionRun(Value, frozen=True, kw_only=True, gc=False):
    """When an action took place, in seconds from the start of the step."""

    action: Action
    start: float
    end: float


class RankTimeline(Value, frozen=True, kw_only=True):
    """How one rank fared."""

    rank: int
    start: float
    """When its first computation began."""
    end: float
    """When its last one ended, optimizer left out."""
    busy_seconds: float
    """Computing, optimizer left out."""
    idle_share: float
    """Of the time from the first forward of any rank to the last backward of any."""
    peak_bytes: float
    peak_samples: tuple[int, ...]
    """Samples of each chunk alive when most are, a sample being alive from forward until its weight gradient is made."""
    memory: tuple[tuple[float, float], ...] = ()
    """(time, bytes from then on)."""


class PipelineTimeline(Value, frozen=True, kw_only=True):
    """A step of a pipeline."""

    ranks: tuple[RankTimeline, ...]
    span_seconds: float
    """From the first forward of any rank to the last backward of any."""
    step_seconds: float
    """To the end of the last optimizer."""
    bubble_share: float
    """Mean over ranks of the idle share of the span; waits for sends count as idle."""
    own_bubble_share: float
    """The same with each rank's span from its own first to its own last computation, of which the longest counts: what is
    lost where steps follow each other without a barrier (Qi et al., 2023)."""
    runs: tuple[ActionRun, ...] = ()
    """Computations, sends (on their links), reduces and optimizers, by rank; empty where not asked for."""
    waits: tuple[ActionRun, ...] = ()
    """Receives that made a rank wait, and for how long."""

    @property
    def peak_bytes(self) -> float:
        """Peak of the fullest rank."""
        return max(rank.peak_bytes for rank in self.ranks)


def uniform_durations(
    num_stages: int, *, forward: float = 1.0, input_grad: float = 1.0, weight_grad: float = 1.0, send: float = 0.0
) -> Durations:
    """The same for all stages, in seconds a sample, with one byte of activations a sample."""
    one = StageDurations(
        forward_seconds=forward,
        input_grad_seconds=input_grad,
        weight_grad_seconds=weight_grad,
        send_seconds=send,
        activation_bytes=1.0,
    )
    return Durations(stages=(one,) * num_stages)


def simulate_schedule(
    schedule: str,
    pp: int,
    chunks: int,
    samples: int,
    micro_batch_per_stage: int | tuple[int, ...],
    durations: Durations,
    *,
    record: bool = False,
) -> PipelineTimeline:
    """Generate a schedule and simulate it (see `generate`, `simulate`).

    Raises:
        RuleBroken: the schedule does not exist in this form.
    """
    actions = generate(schedule, pp, chunks, samples, micro_batch_per_stage)
    return simulate(actions, durations, placement_of(schedule, pp, chunks), record=record)


@dataclass(slots=True)
class _Rank:
    """One rank at work."""

    number: int
    actions: list[Action] = field(default_factory=list)
    at: int = 0
    clock: float = 0.0
    comm_free: float = 0.0
    start: float = -1.0
    end: float = 0.0
    busy: float = 0.0
    static: float = 0.0
    bytes: float = 0.0
    peak: float = 0.0
    optimizer: Action | None = None
    alive: list[int] = field(default_factory=list)
    fullest: tuple[int, ...] = ()
    memory: list[tuple[float, float]] = field(default_factory=list)


@dataclass(slots=True)
class _World:
    """All ranks and the links between them."""

    placement: Placement
    durations: Durations
    record: bool
    ranks: list[_Rank]
    arrivals: dict[tuple[int, int], deque[float]] = field(default_factory=dict)
    link_free: dict[tuple[int, int], float] = field(default_factory=dict)
    runs: list[ActionRun] = field(default_factory=list)
    waits: list[ActionRun] = field(default_factory=list)


def simulate(actions: Iterable[Action], durations: Durations, placement: Placement, *, record: bool = True) -> PipelineTimeline:
    """The timeline of a step.

    Args:
        actions: of all ranks, in order within each rank; a list that `checker.faults` passes.
        durations: one entry for each stage of `placement`.
        placement: where the stages stand.
        record: keep when each action took place and memory over time; without it only the sums.

    Raises:
        RuleBroken: the ranks wait for each other for ever, or durations for another number of stages.
    """
    if len(durations.stages) != placement.num_stages:
        raise RuleBroken(
            f"durations of {len(durations.stages)} stages for a pipeline of {placement.num_stages}",
            fix="give one for each stage",
        )
    world = _world(actions, durations, placement, record)
    todo = deque(world.ranks)
    while todo:
        for woken in _advance(world, todo.popleft()):
            todo.append(world.ranks[woken])
    for rank in world.ranks:
        if rank.at < len(rank.actions):
            met = rank.actions[rank.at].text()
            raise RuleBroken(f"{met} waits for a message that is never sent: a deadlock", fix="check the schedule first")
    return _result(world)


def _world(actions: Iterable[Action], durations: Durations, placement: Placement, record: bool) -> _World:
    ranks = []
    for number in range(placement.pp):
        stages = [durations.stages[placement.stage(number, chunk)] for chunk in range(placement.chunks)]
        static = sum(stage.static_bytes for stage in stages)
        ranks.append(_Rank(number, static=static, bytes=static, peak=static, alive=[0] * placement.chunks))
    for action in actions:
        ranks[action.rank].actions.append(action)
    return _World(placement, durations, record, ranks)


def _advance(world: _World, rank: _Rank) -> set[int]:
    """Carry on with one rank until it must wait; the ranks that its sends may have woken."""
    woken: set[int] = set()
    actions, stages, chunks = rank.actions, world.durations.stages, world.placement.chunks
    own = [stages[world.placement.stage(rank.number, chunk)] for chunk in range(chunks)]
    while rank.at < len(actions):
        action = actions[rank.at]
        kind = action.kind
        if kind in _COMPUTE:
            _compute(world, rank, action, own[action.chunk])
        elif kind in ("recv_forward", "recv_backward"):
            queue = world.arrivals.get((action.peer, rank.number))
            if not queue:
                return woken
            arrival = queue.popleft()
            if arrival > rank.clock:
                if world.record:
                    world.waits.append(ActionRun(action=action, start=rank.clock, end=arrival))
                rank.clock = arrival
        elif kind == "reduce":
            begin = max(rank.clock, rank.comm_free)
            rank.comm_free = begin + own[action.chunk].reduce_seconds
            if world.record and rank.comm_free > begin:
                world.runs.append(ActionRun(action=action, start=begin, end=rank.comm_free))
        elif kind == "optimizer":
            rank.optimizer = action
        else:
            _send(world, rank, action)
            woken.add(action.peer)
        rank.at += 1
    return woken


_COMPUTE = frozenset({"forward", "backward", "input_grad", "weight_grad"})


def _compute(world: _World, rank: _Rank, action: Action, stage: StageDurations) -> None:
    samples, kind = action.hi - action.lo, action.kind
    if kind == "forward":
        each = stage.forward_seconds
        rank.bytes += samples * stage.activation_bytes
        rank.alive[action.chunk] += samples
        if sum(rank.alive) > sum(rank.fullest):
            rank.fullest = tuple(rank.alive)
    elif kind == "backward":
        each = stage.input_grad_seconds + stage.weight_grad_seconds + stage.recompute_seconds
    else:
        each = stage.input_grad_seconds + stage.recompute_seconds if kind == "input_grad" else stage.weight_grad_seconds
    start = rank.clock
    rank.clock = end = start + stage.fixed_seconds + samples * each
    rank.busy += end - start
    rank.end = end
    if rank.start < 0:
        rank.start = start
    working = rank.bytes + samples * stage.working_bytes
    rank.peak = max(rank.peak, working)
    before = rank.bytes
    _free(rank, action, stage, samples)
    if world.record:
        world.runs.append(ActionRun(action=action, start=start, end=end))
        if working != before or kind == "forward" or not rank.memory:
            rank.memory.append((start, working))
        if rank.bytes != working:
            rank.memory.append((end, rank.bytes))


def _free(rank: _Rank, action: Action, stage: StageDurations, samples: int) -> None:
    """Give back what an action was the last to need."""
    held = stage.activation_bytes if stage.held_bytes is None else stage.held_bytes
    if action.kind == "input_grad":
        rank.bytes -= samples * (stage.activation_bytes - held)
    elif action.kind == "weight_grad":
        rank.bytes -= samples * held
    elif action.kind == "backward":
        rank.bytes -= samples * stage.activation_bytes
    if action.kind in ("weight_grad", "backward"):
        rank.alive[action.chunk] -= samples


def _send(world: _World, rank: _Rank, action: Action) -> None:
    stage = world.placement.stage(rank.number, action.chunk)
    border = stage if action.kind == "send_forward" else stage - 1
    pair = (rank.number, action.peer)
    begin = max(rank.clock, world.link_free.get(pair, 0.0))
    seconds = world.durations.latency_seconds + (action.hi - action.lo) * world.durations.stages[border].send_seconds
    world.link_free[pair] = begin + seconds
    world.arrivals.setdefault(pair, deque()).append(begin + seconds)
    if not world.durations.overlap:
        rank.clock = begin + seconds
    if world.record and seconds > 0:
        world.runs.append(ActionRun(action=action, start=begin, end=begin + seconds))


def _result(world: _World) -> PipelineTimeline:
    ranks = world.ranks
    first = min(max(rank.start, 0.0) for rank in ranks)
    span = max(rank.end for rank in ranks) - first
    busy = sum(rank.busy for rank in ranks) / len(ranks)
    own = max(rank.end - max(rank.start, 0.0) for rank in ranks)
    return PipelineTimeline(
        ranks=tuple(
            RankTimeline(
                rank=rank.number,
                start=max(rank.start, 0.0),
                end=rank.end,
                busy_seconds=rank.busy,
                idle_share=1.0 - rank.busy / span if span else 0.0,
                peak_bytes=rank.peak,
                peak_samples=rank.fullest,
                memory=tuple(rank.memory),
            )
            for rank in ranks
        ),
        span_seconds=span,
        step_seconds=_optimizers(world),
        bubble_share=1.0 - busy / span if span else 0.0,
        own_bubble_share=1.0 - busy / own if own else 0.0,
        runs=tuple(sorted(world.runs, key=lambda run: (run.action.rank, run.start))),
        waits=tuple(sorted(world.waits, key=lambda run: (run.action.rank, run.start))),
    )


def _optimizers(world: _World) -> float:
    """Run the optimizers; when the last one ends."""
    ready = [max(rank.clock, rank.comm_free) for rank in world.ranks]
    ends = []
    for rank, own in zip(world.ranks, ready, strict=True):
        start = max(ready) if world.durations.synchronised else own
        stages = [world.placement.stage(rank.number, chunk) for chunk in range(world.placement.chunks)]
        seconds = sum(world.durations.stages[stage].optimizer_seconds for stage in stages) if rank.optimizer else 0.0
        if world.record and rank.optimizer and seconds > 0:
            world.runs.append(ActionRun(action=rank.optimizer, start=start, end=start + seconds))
        ends.append(start + seconds)
    return max(ends)
