"""Several ranks on one GPU, which NCCL refuses: collectives go through the host's memory. Slow, and right in the same places.

What it shows is the engine's own order of streams, devices and dtypes on a GPU; what it cannot show is NCCL's and any speed.
"""

import os

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from fullstride.engine.parity_models import FAMILIES
from fullstride.engine.pipeline import exchange
from fullstride.plan.plan import Precision

CONFIG = {**FAMILIES["llama"], "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "vocab_size": 8191}
CONFIG |= {"num_key_value_heads": 4, "num_hidden_layers": 8, "max_position_embeddings": 2048, "initializer_range": 0.02}
CAST = Precision(cast="weights", embedding="bf16", block="bf16", head="bf16")


def _done(result):
    future = torch.futures.Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)


class Landing(dist.Work):
    """A receive: what came is copied to the GPU when it is waited for."""

    def __init__(self, work, tensors, copies):
        super().__init__()
        self._work, self._pairs, self._over = work, list(zip(tensors, copies, strict=True)), False

    def wait(self, timeout=None):
        if not self._over:
            self._work.wait()
            for tensor, copy in self._pairs:
                tensor.copy_(copy)
            self._over = True
        return True

    def is_completed(self):
        return self._over or self._work.is_completed()


class Staged(dist.ProcessGroup):
    """Gloo for tensors of any device."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self._gloo, self._number, self._many = dist.ProcessGroupGloo(store, rank, size, timeout), rank, size

    def _reduced(self, tensors, op):
        copies = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
        average = op == dist.ReduceOp.AVG
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM if average else op
        for copy in copies:
            self._gloo.allreduce([copy], options).wait()
            if average:
                copy.div_(self._many)
        return copies

    def _gathered(self, tensor):
        copy = tensor.detach().to("cpu", copy=True)
        parts = [torch.empty_like(copy) for _ in range(self._many)]
        self._gloo.allgather([parts], [copy]).wait()
        return parts

    def allreduce(self, tensors, opts=None):
        for tensor, copy in zip(tensors, self._reduced(tensors, (opts or dist.AllreduceOptions()).reduceOp), strict=True):
            tensor.copy_(copy)
        return _done(tensors)

    allreduce_coalesced = allreduce

    def barrier(self, opts=None):
        return self.allreduce([torch.ones(1)])

    def broadcast(self, tensors, opts=None):
        copies = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
        self._gloo.broadcast(copies, opts).wait()
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.copy_(copy)
        return _done(tensors)

    def allgather(self, outputs, inputs, opts=None):
        for parts, tensor in zip(outputs, inputs, strict=True):
            for part, copy in zip(parts, self._gathered(tensor), strict=True):
                part.copy_(copy)
        return _done(outputs)

    def _gather_one(self, output, tensor, opts=None):
        output.view(-1).copy_(torch.cat([part.view(-1) for part in self._gathered(tensor)]))
        return _done([output])

    def _gather_many(self, outputs, inputs, opts=None):
        for output, tensor in zip(outputs, inputs, strict=True):
            self._gather_one(output, tensor)
        return _done(outputs)

    def _scatter_one(self, output, tensor, opts=None):
        (copy,) = self._reduced([tensor.reshape(-1)], (opts or dist.ReduceScatterOptions()).reduceOp)
        output.view(-1).copy_(copy.chunk(self._many)[self._number])
        return _done([output])

    def _scatter_many(self, outputs, inputs, opts=None):
        for output, tensor in zip(outputs, inputs, strict=True):
            self._scatter_one(output, tensor, opts)
        return _done(outputs)

    # Under the names of torch up to 2.12, and of torch from 2.13 on.
    _allgather_base = all_gather_single = _gather_one
    allgather_into_tensor_coalesced = all_gather_single_coalesced = _gather_many
    _reduce_scatter_base = reduce_scatter_single = _scatter_one
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced = _scatter_many

    def send(self, tensors, peer, tag=0):
        copies = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
        self._kept = [*getattr(self, "_kept", [])[-64:], copies]  # gloo reads them until they have left
        return self._gloo.send(copies, peer, tag)

    def recv(self, tensors, peer, tag=0):
        copies = [torch.empty_like(tensor, device="cpu") for tensor in tensors]
        return Landing(self._gloo.recv(copies, peer, tag), tensors, copies)

    def size(self):
        return self._many

    def rank(self):
        return self._number

    def getBackendName(self):
        return "staged"

    @property
    def pg_name(self):
        return c10d._world.pg_names[self]

    @property
    def group_name(self):
        return self.pg_name


def join(rank, world_size, folder):
    """Begin as a rank of some: a GPU each and NCCL where there are enough, else all on the first.

    Returns:
        Whether each rank has a GPU of its own.
    """
    own = torch.cuda.device_count() >= world_size
    os.environ["LOCAL_RANK"] = str(rank if own else 0)
    if torch.cuda.is_available():
        torch.cuda.set_device(rank if own else 0)
    bound = {"device_id": torch.device("cuda", rank)} if own else {}
    if not own:
        dist.Backend.register_backend("staged", Staged, devices=["cpu", "cuda"])
        exchange._new_group = lambda ranks, wait, device: dist.new_group(ranks, timeout=wait)
    backend = "cpu:gloo,cuda:nccl" if own else "staged"
    store = f"file://{folder}/store"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=world_size, **bound)
    return own
