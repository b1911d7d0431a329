"""What a run on two CPU ranks holds, beside what its ledger says: `python -m tests.plan.held_bytes STEP WORD...` under
torchrun; every STEP-th of its cases, those whose names hold the words.

Prints on rank 0 a JSON list: for each case its name, and pairs of measured and predicted bytes of weights (masters and moments
included), gradients at the optimizer's step, gradients between steps, and activations when the first backward begins.
"""

import contextlib
import itertools
import json
import sys

import torch
import torch.distributed as dist
from msgspec.structs import replace
from tests.plan.live_bytes import LiveBytes, local
from tests.plan.plan_values import gpus, plan_of

from fullstride.engine.build import from_config, parameters_on_meta
from fullstride.engine.run import prepare
from fullstride.model.config import spec_from_config
from fullstride.plan.defaults import AUTOCAST, FP32, layout_for, weights_cast
from fullstride.plan.ledger.table import ledger
from fullstride.plan.plan import Adapter, Batch, Layout, Loss, Pipeline, Recompute, Shard, Workload
from fullstride.plan.rules import check

LENGTH = 72
"""Tokens: no weight has as many rows or columns as two samples have tokens (see `Watch.kept`)."""
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 201,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
}
GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 100,
    "vocab_size": 211,
    "activation_function": "gelu",
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
SHAPES = {"llama": LLAMA, "llama tied": {**LLAMA, "tie_word_embeddings": True}, "gpt2": GPT2}
DENSE = tuple(SHAPES)
SHAPES["mixtral"] = {
    **LLAMA,
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
MODES = ("none", "norm_activation", "full")
SETTLED = ("weights", "master", "optimizer")


ALL, SOME = Adapter(rank=4), Adapter(rank=3, targets=("qkv", "down"))


def data_parallel(carried, mode, kind, precision, accumulation):
    stage, carrier = CARRIERS[carried]
    layout, _ = layout_for(stage, 2)
    shard = Shard(carrier=carrier, stage=stage)
    return made(layout, shard, mode, kind, precision_of(precision, accumulation, carrier), accumulation)


def precision_of(name, accumulation=1, carrier="none"):
    return {"fp32": FP32, "autocast": AUTOCAST, "weights": weights_cast(accumulation, carrier)}[name]


def made(layout, shard, mode, kind, precision, accumulation, **parts):
    samples = 2 * accumulation * layout.data_parallel
    return plan_of(
        workload=Workload(sequence_length=LENGTH, samples_per_step=samples),
        layout=layout,
        shard=shard,
        batch=Batch(micro_batch=2, accumulation=accumulation),
        recompute=Recompute(mode=mode),
        loss=Loss(kind=kind, chunk_tokens=64),
        precision=precision,
        **parts,
    )


CARRIERS = {"DDP": (0, "ddp")} | {f"{c} ZeRO {n}": (n, c) for c in ("fsdp2", "flat") for n in (1, 2, 3)}
CHOICES = (DENSE, tuple(CARRIERS), MODES, ("model", "chunked"), ("fp32", "autocast", "weights"), (1, 2))
PIPES = (DENSE, MODES, ("fp32", "autocast"))
ADAPTERS = (DENSE, tuple(CARRIERS), MODES, ("model", "chunked"), ("fp32", "autocast", "weights"), ((1, ALL), (2, SOME)))
TENSOR = (DENSE, (True, False), MODES, ("model", "chunked"), ("fp32", "autocast", "weights"))


def cases(step=1):
    """Every `step`-th plan of two ranks, by what its name lists, of those that the rules allow."""
    found = {}
    for shape, carried, mode, kind, precision, accumulation in itertools.islice(itertools.product(*CHOICES), 0, None, step):
        plan = data_parallel(carried, mode, kind, precision, accumulation)
        found[f"{shape}, {carried}, {mode}, {kind} loss, {precision}, {accumulation} micro-batches"] = (shape, plan)
    for shape, mode, precision in itertools.islice(itertools.product(*PIPES), 0, None, min(step, 5)):
        pipe = Pipeline(schedule="1f1b", layers_per_stage=(2, 2))
        plan = made(Layout(pp=2), Shard(), mode, "model", precision_of(precision), 4, pipeline=pipe)
        found[f"{shape}, pipeline, {mode}, {precision}"] = (shape, plan)
    for shape, cut, mode, kind, precision in itertools.islice(itertools.product(*TENSOR), 0, None, step):
        layout = Layout(tp=2, sequence_parallel=cut)
        name = f"{shape}, tensor{' and sequence' if cut else ''}, {mode}, {kind} loss, {precision}"
        found[name] = (shape, made(layout, Shard(), mode, kind, precision_of(precision), 1))
    for shape, carried, mode, kind, precision, (micro, adapter) in itertools.islice(
        itertools.product(*ADAPTERS), step // 2, None, 2 * step - 1
    ):
        plan = replace(data_parallel(carried, mode, kind, precision, micro), adapter=adapter)
        name = f"{shape}, {carried}, {mode}, {kind} loss, {precision}, {micro} micro-batches, {len(adapter.targets)} adapted"
        found[name] = (shape, plan)
    for cut, mode in itertools.product((True, False), MODES):
        name = f"mixtral, tensor{' and sequence' if cut else ''}, {mode}, chunked loss, fp32"
        layout = Layout(tp=2, sequence_parallel=cut)
        found[name] = ("mixtral", made(layout, Shard(), mode, "chunked", FP32, 1))
    specs = {name: spec_from_config(config, name) for name, config in SHAPES.items()}
    return {name: (shape, plan) for name, (shape, plan) in found.items() if not check(plan, specs[shape])}


def storages(tensors):
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in map(local, tensors)}


class Watch:
    """Measures while a run steps."""

    def __init__(self, run, live, vocabulary):
        self.run, self.live, self.vocabulary = run, live, vocabulary
        self.gradients = self.activations = 0
        live.apart |= {key for key, reference in live.storages.items() if reference() is not None}
        self.step = run._applied.optimizer.update
        run._applied.optimizer.update = self.update
        run.on_phase = self.phase

    def phase(self, name, **_where):
        """Called around each part of a step."""
        if name == "backward" and not self.activations:
            self.activations = self.kept()
        return contextlib.nullcontext()

    def held(self):
        """Storages of gradients."""
        weights = self.run._weights
        tensors = [*weights._gathered.values(), *(p.grad for p in weights.params if p.grad is not None)]
        for unit in getattr(self.run._carrier, "units", ()):  # flat buffers
            tensors += [tensor for tensor in (unit.gradient, unit.stored) if tensor is not None]
        return sum(storages(tensors).values())

    def update(self, *args):
        self.gradients = self.held()
        return self.step(*args)

    def kept(self):
        """All that lives and was not there before the step, but weights (gathered, or copies of them), and logits."""
        module, size, tp = self.run.module, self.vocabulary, self.run.plan.layout.tp
        ours = set(storages([*module.parameters(), *module.buffers()])) | self.live.apart
        shapes = {tuple(p.shape) for p in module.parameters() if p.dim() > 1}
        shapes |= {tuple(reversed(shape)) for shape in shapes}
        logits = {size // tp, -(-size // tp)}
        total = 0
        for key, reference in self.live.storages.items():
            storage, shape = reference(), self.live.shapes.get(key, ())
            if storage is not None and key not in ours and shape not in shapes and not logits & set(shape[-1:]):
                total += storage.nbytes()
        return total


class Shapes(LiveBytes):
    """Also remembers the shape that a storage was first seen with, and which ones are no activations: integers, gathered
    weights, all that stood before.
    """

    def __init__(self):
        super().__init__()
        self.shapes, self.apart = {}, set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(operator, types, args, kwargs)
        for value in torch.utils._pytree.tree_iter(result):
            if isinstance(value, torch.Tensor):
                key = local(value).untyped_storage()._cdata
                self.shapes.setdefault(key, tuple(local(value).shape))
                if not value.is_floating_point():
                    self.apart.add(key)
                if operator.namespace == "fsdp":
                    self.apart.add(key)
        return result

    def drop(self, key):
        super().drop(key)
        self.shapes.pop(key, None)
        self.apart.discard(key)


def said(rows, kinds, moment):
    return sum(row.bytes for row in rows if row.kind in kinds and moment in row.moments)


def compare(shape, plan):
    config = SHAPES[shape]
    spec = spec_from_config(config, shape)
    with parameters_on_meta():
        model = from_config(config, shape)
    run = prepare(model, plan)
    ids = torch.randint(0, 200, (plan.batch.micro_batch * plan.batch.accumulation, LENGTH))
    batch = {"input_ids": ids, "labels": ids.clone()}
    live = Shapes()
    with live:
        for _ in range(2 if plan.shard.carrier == "ddp" else 1):  # its buckets are made anew after the first step
            run.step(batch)
        watches = []
        for _ in range(1 if plan.layout.tp == 1 else 2):
            watches.append(Watch(run, live, spec.vocab_size))
            run.step(batch)
    watch = watches[-1]
    rank = dist.get_rank() if plan.layout.pp > 1 else 0
    rows = [row for row in ledger(plan, spec, gpus()) if row.stage == rank]
    tensors = [*run.module.parameters(), *run.state().values(), *run.frozen().values()]
    settled = sum(storages(tensors).values())
    found = {
        "weights and states": (settled, said(rows, SETTLED, "checkpoint")),
        "gradients": (watch.gradients, said(rows, ("gradients",), "optimizer")),
        "gradients between steps": (watch.held(), said(rows, ("gradients",), "checkpoint")),
    }
    if plan.layout.pp == 1:  # a pipeline's messages lie among them
        kept = [row for row in rows if row.kind == "activations" and row.name != "embedding: embed"]  # tokens are integers
        kept += [row for row in rows if row.name == "gradient of the head's input"]
        # A thread that sends may still hold on to what it sent.
        found["activations"] = (
            min(each.activations for each in watches),
            sum(row.bytes for row in kept if "loss" in row.moments),
        )
    run.close()
    return found


def main():
    torch.set_num_threads(1)
    (step, *wanted), found = sys.argv[1:], []
    for name, (shape, plan) in cases(int(step)).items():
        if all(word in name for word in wanted):
            both = [None, None]
            torch.manual_seed(0)
            mine = compare(shape, plan)
            dist.all_gather_object(both, mine)
            found.append((name, both))
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
