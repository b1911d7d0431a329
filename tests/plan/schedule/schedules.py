"""Schedules for tests: the ways to draw legal ones, generated or made up."""

import random

from hypothesis import strategies as st

from fullstride.plan.schedule.generators import complete
from fullstride.plan.schedule.placement import SCHEDULES, Placement, cuts

NAMES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("bfs", 2), ("bfs", 3), ("zb-h1", 1), ("zb-v", 2)]


@st.composite
def stage_sizes(draw, num_stages, choices=(1, 2, 3, 4, 8)):
    """Sizes whose neighbours differ by an integer factor."""
    sizes = [draw(st.sampled_from(choices))]
    while len(sizes) < num_stages:
        near = [size for size in choices if max(size, sizes[-1]) % min(size, sizes[-1]) == 0]
        sizes.append(draw(st.sampled_from(near)))
    return tuple(sizes)


@st.composite
def generated(draw, most_ranks=4, uniform=False):
    """(schedule, pp, chunks, samples, sizes) that `generate` accepts."""
    schedule, chunks = draw(st.sampled_from(NAMES))
    pp = draw(st.integers(2, most_ranks))
    sizes = (draw(st.integers(1, 4)),) * (pp * chunks) if uniform else draw(stage_sizes(pp * chunks))
    least = max(sizes) * (pp if SCHEDULES[schedule].full_rounds else 1)
    return schedule, pp, chunks, draw(st.integers(least, least + 20)), sizes


def made_up(seed, pp, chunks, style, samples, sizes, split):
    """A legal schedule in no particular order: ranks do any computation whose data is there."""
    rng = random.Random(seed)
    placement = Placement(pp=pp, chunks=chunks, style=style)
    done = {}  # (stage, forward or input_grad): samples
    todo = {}
    for stage in range(placement.num_stages):
        todo[stage] = [(lo, hi) for lo, hi in cuts(0, samples, sizes[stage])]
    forward = {stage: list(parts) for stage, parts in todo.items()}
    back = {stage: list(parts) for stage, parts in todo.items()}
    weight = {stage: [] for stage in todo}
    orders = [[] for _ in range(pp)]

    def has(stage, kind, part):
        return not 0 <= stage < placement.num_stages or set(range(*part)) <= done.get((stage, kind), set())

    while any(forward.values()) or any(back.values()) or any(weight.values()):
        ready = []
        for stage in todo:
            ready += [("forward", stage, part) for part in forward[stage] if has(stage - 1, "forward", part)]
            ready += [
                ("back", stage, part)
                for part in back[stage]
                if part not in forward[stage] and has(stage + 1, "back", part) and has(stage, "forward", part)
            ]
            ready += [("weight_grad", stage, part) for part in weight[stage]]
        kind, stage, part = rng.choice(ready)
        rank, chunk = placement.home(stage)
        if kind == "weight_grad":
            weight[stage].remove(part)
        else:
            {"forward": forward, "back": back}[kind][stage].remove(part)
            done.setdefault((stage, kind), set()).update(range(*part))
        if kind == "back":
            late = split and rng.random() < 0.5
            weight[stage] += [part] if late else []
            kind = "input_grad" if late else "backward"
        orders[rank].append((kind, chunk, *part))
    return complete(orders, placement, samples, sizes), placement
