"""The collectives of one step on two tensor-parallel ranks: `python -m tests.engine.tensor_counts` under torchrun.

Prints on rank 0 a JSON object: for each case each rank's collectives, in order, as [phase, kind, ranks, bytes of the whole].
With `compiled` as argument: for each case of one family how many of each kind a step has, eager and compiled, and why compiled
code fell into pieces.
"""

import contextlib
import functools
import itertools
import json
import sys
from collections import Counter

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch.profiler import ProfilerActivity, profile

from fullstride.engine.parallel import collectives
from fullstride.engine.parity import batches
from fullstride.engine.parity_cases import make_case, model_of
from fullstride.engine.run import prepare
from fullstride.plan.plan import Compile, Recompute

MODES = ("none", "norm_activation", "full")
OTHERS = (
    ("gemma2", "full"),
    ("gpt2", "norm_activation"),
    ("mixtral", "none"),
    ("mixtral", "full"),
    ("deepseek_v3", "norm_activation"),
)
KINDS = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter", "all_reduce": "all_reduce"}


def cases():
    """By name."""
    every = [("llama", *rest) for rest in itertools.product((True, False), MODES, (False, True))]
    every += [(family, True, mode, True) for family, mode in OTHERS]
    found = {}
    for family, sequence, mode, overlap in every:
        case = make_case(
            family,
            tp=2,
            layers=2,
            dtype="fp32",
            micro_batch=2,
            accumulation=2,
            sequence_parallel=sequence,
            recompute=Recompute(mode=mode),
            overlap=overlap,
        )
        found[f"{family} {'sequence' if sequence else 'whole'} {mode} {'overlap' if overlap else 'one'}"] = case
    return found


class Recorder:
    """Stands in for the functional collectives' operators, and for the one that torch.distributed has."""

    def __init__(self, operators):
        self.operators, self.phase, self.seen = operators, "", []
        self.plain = dist.all_reduce

    def __getattr__(self, name):
        operator = getattr(self.operators, name)
        if name not in KINDS:
            return operator

        def recorded(tensor, *args):
            group = dist.distributed_c10d._resolve_process_group(args[-1])
            size = tensor.numel() * tensor.element_size() * (group.size() if name == "all_gather_into_tensor" else 1)
            self.seen.append([self.phase, KINDS[name], group.size(), size])
            return operator(tensor, *args)

        return recorded

    def all_reduce_in_place(self, tensor, *args, **kwargs):
        self.seen.append(
            [f"{self.phase} in place", "all_reduce", kwargs["group"].size(), tensor.numel() * tensor.element_size()]
        )
        return self.plain(tensor, *args, **kwargs)

    @contextlib.contextmanager
    def around(self, name, **_where):
        before, self.phase = self.phase, name
        yield
        self.phase = before


def recorded(case):
    """One step's collectives on this rank."""
    run = prepare(model_of(case), case.plan)
    whole = batches(case)[0]
    recorder = Recorder(collectives._ops)
    collectives._ops, dist.all_reduce, run.on_phase = recorder, recorder.all_reduce_in_place, recorder.around
    try:
        run.step(whole)
    finally:
        collectives._ops, dist.all_reduce = recorder.operators, recorder.plain
    run.close()
    return recorder.seen


def compiled(case):
    """How many collectives of each kind one compiled step runs on this rank, and why blocks are more than one graph."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    run = prepare(model_of(case), replace(case.plan, compile=Compile(mode="block")))
    whole = batches(case)[0]
    run.step(whole)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        run.step(whole)
    run.close()
    names = [event.name.removeprefix("_c10d_functional::") for event in seen.events() if event.name.startswith("_c10d_f")]
    return Counter(KINDS[name] for name in names if name in KINDS), dict(torch._dynamo.utils.counters["graph_break"])


def beside_eager():
    """Compiled beside eager; partitioned as inductor does, but not made into code, which takes long."""
    torch.compile = functools.partial(torch.compile, backend="aot_eager_decomp_partition")
    found = {}
    for name, case in cases().items():
        if case.family == "llama":
            eager = Counter(kind for phase, kind, _, _ in recorded(case) if "in place" not in phase)
            found[name] = eager, *compiled(case)
    return found


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    if "compiled" in sys.argv:
        found = beside_eager()
    else:
        for name, case in cases().items():
            both = [None, None]
            dist.all_gather_object(both, recorded(case))
            found[name] = both
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
