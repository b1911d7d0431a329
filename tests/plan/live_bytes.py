"""Counts the bytes of all live tensors of a real step on the CPU, which is what a GPU's allocator would report.

As a program, under torchrun: `live_bytes.py CONFIG PLAN...` prints a JSON list of peaks and states, each measured and
predicted, on rank 0.
"""

import json
import sys
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from tests.plan.plan_values import cpus
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from fullstride.engine.build import build_model
from fullstride.engine.run import prepare
from fullstride.model.source import load_spec
from fullstride.plan.ledger.table import ledger, moments_of, peak_of
from fullstride.plan.toml import read_plan

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 448,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 2000,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


class LiveBytes(TorchDispatchMode):
    """Sums storages that operators touch, until they are freed or emptied; `peak` is the most there ever was."""

    def __init__(self):
        super().__init__()
        self.sizes, self.storages, self.peak = {}, {}, 0

    def add(self, tensor):
        tensor = getattr(tensor, "_local_tensor", tensor)
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.sizes:
            self.storages[key] = weakref.ref(storage)
            weakref.finalize(storage, self.drop, key)
        self.sizes[key] = storage.nbytes()

    def drop(self, key):
        self.sizes.pop(key, None)
        self.storages.pop(key, None)

    def settle(self):
        if sum(list(self.sizes.values())) <= self.peak:
            return
        for key, reference in list(
            self.storages.items()
        ):  # FSDP2 empties storages without an operator; others may end meanwhile
            storage = reference()
            if storage is not None and key in self.sizes:
                self.sizes[key] = storage.nbytes()
        self.peak = max(self.peak, sum(list(self.sizes.values())))

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        for value in tree_iter((args, kwargs, result)):
            if isinstance(value, torch.Tensor):
                self.add(value)
        self.settle()
        return result


STATES = ("weights", "master", "optimizer", "gradients")


def local(tensor):
    return getattr(tensor, "_local_tensor", tensor)


def held(run):
    """Bytes of the storages behind weights, masters, moments and gradients that the run holds on this rank."""
    parameters = list(run.module.parameters())
    gradients = [*run._weights._gathered.values(), *(p.grad for p in parameters if p.grad is not None)]
    tensors = [*parameters, *run.state().values(), *gradients]
    storages = {local(t).untyped_storage()._cdata: local(t).untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def between_steps(rows):
    """Bytes that the ledger says stay from one step to the next, of the kinds in `held`."""
    return sum(row.bytes for row in rows if row.kind in STATES and "checkpoint" in row.moments)


def peaks(config, plan):
    """Bytes at the peak of the second step, and of states after it: measured, and predicted."""
    spec = load_spec(str(config))
    run = prepare(build_model(str(config)), plan)
    live = LiveBytes()
    for tensor in (*run.module.parameters(), *run.module.buffers(), *run.state().values()):
        live.add(tensor)
    for gathered in run._weights._gathered.values():
        live.add(gathered)
    samples = plan.batch.micro_batch * plan.batch.accumulation
    ids = torch.randint(0, spec.vocab_size, (samples, plan.workload.sequence_length))
    for _ in range(2):
        live.peak = 0
        with live:
            run.step({"input_ids": ids, "labels": ids.clone()})
    rows, states = ledger(plan, spec, cpus()), held(run)
    run.close()
    return live.peak, peak_of(moments_of(rows, inside=True)).bytes, states, between_steps(rows)


def main():
    config, *plans = sys.argv[1:]
    torch.set_num_threads(1)
    found = [peaks(config, read_plan(plan)) for plan in plans]
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


def write_config(folder):
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


if __name__ == "__main__":
    main()
