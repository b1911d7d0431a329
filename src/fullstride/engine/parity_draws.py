"""Random cases of the parity check, and the pairs of settings that they reach.

Faults hide where two settings meet, so each draw goes for a pair that no draw before it reached; what else it holds is
random. A pair is given up for impossible when the rules forbid every one of many cases that hold it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from fullstride.engine.parity_cases import Case, make_case
from fullstride.engine.parity_models import FAMILIES, ONLY_FP32
from fullstride.model.config import spec_from_config
from fullstride.model.spec import ModelSpec
from fullstride.plan.plan import Adapter, Loss, Recompute
from fullstride.plan.rules import check

Choice: TypeAlias = dict[str, Any]
Pair: TypeAlias = frozenset[tuple[str, Any]]

SETTINGS: dict[str, tuple[Any, ...]] = {
    "family": tuple(sorted(FAMILIES)),
    "tied": (False, True),
    "tp": (1, 2, 4),
    "sequence": (True, False),
    "overlap": (False, True),
    "pp": (1, 2, 4),
    "schedule": ("gpipe", "1f1b", "interleaved", "bfs", "zb-h1", "zb-v"),
    "even": (True, False),
    "sizes": ("equal", "growing", "shrinking"),
    "carrier": ("ddp", "fsdp2", "flat"),
    "stage": (1, 2, 3),
    "replicate": (1, 2),
    "reshard": ("all", "some"),
    "accumulation": (1, 3, 4),
    "micro_batch": (1, 2),
    "recompute": ("none", "norm_activation", "full"),
    "every": (1, 2),
    "loss": ("model", "chunked"),
    "dtype": ("fp64", "fp32"),
    "adapter": (False, True),
}
"""What is drawn. Settings that say nothing in a case (a schedule without a pipeline) do not count as reached there."""
TRIES = 600
"""Random cases that a pair is looked for in before it is given up."""


def settings_of(choice: Choice, ranks: int) -> frozenset[tuple[str, Any]]:
    """The settings of a choice that say something, for `ranks` ranks in all."""
    idle = set()
    data = ranks // (choice["tp"] * choice["pp"])
    if choice["tp"] == 1:
        idle |= {"sequence", "overlap"}
    if choice["pp"] == 1:
        idle |= {"schedule", "even", "sizes"}
    if data == 1:
        idle |= {"carrier", "stage", "replicate", "reshard"}
    elif choice["carrier"] == "ddp":
        idle |= {"stage", "replicate", "reshard"}
    elif choice["stage"] < 3:
        idle.add("reshard")
    if choice["recompute"] == "none":
        idle.add("every")
    return frozenset((name, value) for name, value in choice.items() if name not in idle)


def pairs_of(settings: frozenset[tuple[str, Any]]) -> set[Pair]:
    """All pairs of settings of a case."""
    return {frozenset(pair) for pair in itertools.combinations(settings, 2)}


def all_pairs() -> Iterator[Pair]:
    """Every pair of settings, allowed or not, in a fixed order."""
    for one, other in itertools.combinations(SETTINGS, 2):
        for a, b in itertools.product(SETTINGS[one], SETTINGS[other]):
            yield frozenset(((one, a), (other, b)))


def case_of(choice: Choice, ranks: int, seed: int) -> Case | None:
    """The case of a choice; None where it does not come out even over the ranks or breaks a rule."""
    split = choice["tp"] * choice["pp"]
    if ranks % split or (choice["family"] in ONLY_FP32 and choice["dtype"] == "fp64"):
        return None
    if choice["adapter"] and split > 1:  # there is a rule, and this is quicker
        return None
    data = ranks // split
    stage = 0 if data == 1 or choice["carrier"] == "ddp" else choice["stage"]
    if stage and data % choice["replicate"]:
        return None
    chunks = 2 if choice["schedule"] in ("interleaved", "bfs", "zb-v") else 1
    stages = choice["pp"] * chunks
    more = not choice["even"]
    if choice["pp"] > 1 and choice["schedule"] == "interleaved" and choice["sizes"] != "equal":
        return None  # the larger micro-batches may be too few to go round
    case = make_case(
        choice["family"],
        tied=choice["tied"],
        stage=stage,
        ranks=data,
        replicate=choice["replicate"] if stage else 1,
        accumulation=choice["accumulation"],
        recompute=Recompute(mode=choice["recompute"], every=1 if choice["recompute"] == "none" else choice["every"]),
        loss=Loss(kind=choice["loss"], chunk_tokens=7),
        dtype=choice["dtype"],
        reshard={"blocks": False, "head": True} if stage == 3 and choice["reshard"] == "some" else None,
        seed=seed,
        micro_batch=choice["micro_batch"],
        carrier="" if data == 1 else choice["carrier"],
        pp=choice["pp"],
        schedule=choice["schedule"],
        chunks=chunks if choice["pp"] > 1 else 1,
        layers_per_stage=(2, *(1,) * (stages - 1)) if choice["pp"] > 1 and more else (),
        micro_batch_per_stage=_sizes(choice["sizes"], stages) if choice["pp"] > 1 else (),
        layers=3 if choice["pp"] == 1 else stages + more,
        adapter=_adapter(choice["family"]) if choice["adapter"] else None,
        tp=choice["tp"],
        sequence_parallel=choice["sequence"] or choice["tp"] == 1,
        overlap=choice["overlap"] and choice["tp"] > 1,
        # Fused keys and values of fewer heads than ranks are refused.
        changes={"num_key_value_heads": 4} if choice["family"] == "phi3" and choice["tp"] == 4 else None,
    )
    return case if _allowed(case) else None


def _adapter(family: str) -> Adapter:
    """What plans adapt by default, but where names say nothing."""
    return Adapter(rank=3, alpha=6.0, targets=("to_q", "back") if family == "modular" else Adapter().targets)


def _sizes(way: str, stages: int) -> tuple[int, ...]:
    """Samples of a micro-batch on each stage; empty for the same on all."""
    growing = (1,) * (stages // 2) + (2,) * (stages - stages // 2)
    return {"equal": (), "growing": growing, "shrinking": growing[::-1]}[way]


def _allowed(case: Case) -> bool:
    if case.family == "plain" and case.plan.layout.tp > 1:
        return False  # its blocks reckon with all heads
    return not check(case.plan, _spec(case.family, case.tied, case.layers, tuple(sorted(case.changes.items()))))


@functools.lru_cache(maxsize=256)
def _spec(family: str, tied: bool, layers: int, changes: tuple[tuple[str, Any], ...]) -> ModelSpec | None:
    """Of a family of transformers."""
    config: dict[str, Any] = FAMILIES[family]
    if "model_type" not in config:
        return None
    deep: dict[str, Any] = {name: layers for name in ("num_hidden_layers", "n_layer") if name in config}
    return spec_from_config({**config, **deep, **dict(changes), "tie_word_embeddings": tied}, family)


def draw_cases(rng: random.Random, count: int, ranks: int) -> tuple[Case, ...]:
    """Random cases that the rules allow, each for `ranks` ranks in all."""
    return draw(rng, count, ranks).cases


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawn:
    """Cases, and how far they reach."""

    cases: tuple[Case, ...]
    reached: frozenset[Pair]
    waiting: tuple[Pair, ...]
    """Pairs that no case reaches and that were not looked for yet."""


def draw(rng: random.Random, count: int, ranks: int) -> Drawn:
    """Random cases for `ranks` ranks in all, each for a pair of settings that the ones before it do not reach.

    Args:
        rng: decides everything.
        count: of cases; 0: as many as it takes to reach every pair that the rules allow.
        ranks: in all.
    """
    waiting = list(all_pairs())
    rng.shuffle(waiting)
    reached: set[Pair] = set()
    drawn: list[Case] = []
    while len(drawn) < count or (not count and waiting):
        wanted = waiting.pop() if waiting else frozenset()
        if wanted and wanted in reached:
            continue
        # Of a few, the one that reaches most.
        found = [f for f in (_complete(rng, dict(wanted), ranks) for _ in range(3)) if f is not None]
        if not found:
            continue
        case, pairs = max(found, key=lambda item: len(item[1] - reached))
        drawn.append(case)
        reached |= pairs
    left = tuple(pair for pair in waiting if pair not in reached)
    return Drawn(cases=tuple(drawn), reached=frozenset(reached), waiting=left)


def _complete(rng: random.Random, wanted: Choice, ranks: int) -> tuple[Case, set[Pair]] | None:
    """A random case that holds the settings wanted, and means them, with the pairs it reaches; None if none was met."""
    for _ in range(TRIES):
        choice = {name: wanted.get(name, rng.choice(values)) for name, values in SETTINGS.items()}
        settings = settings_of(choice, ranks)
        case = case_of(choice, ranks, rng.randrange(1000)) if set(wanted.items()) <= settings else None
        if case is not None:
            return case, pairs_of(settings)
    return None


def listed(pairs: Iterable[Pair]) -> list[str]:
    """Pairs in words, a line for each two settings."""
    found: dict[tuple[str, str], list[str]] = {}
    for pair in pairs:
        (one, a), (other, b) = sorted(pair, key=lambda item: list(SETTINGS).index(item[0]))
        found.setdefault((one, other), []).append(f"{a}+{b}")
    order = list(SETTINGS)
    keys = sorted(found, key=lambda key: (order.index(key[0]), order.index(key[1])))
    return [f"{one} x {other}: {' '.join(sorted(found[one, other]))}" for one, other in keys]
