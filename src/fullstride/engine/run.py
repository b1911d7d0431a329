"""A model that has been prepared by a Plan, ready to step. `prepare` is all that a user's own loop needs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fullstride.engine.adapter import Adapters
from fullstride.engine.anatomy import logits_of
from fullstride.engine.apply import Applied, apply_plan
from fullstride.engine.init import seed_of
from fullstride.engine.loss import IGNORED, shifted, token_loss_sum
from fullstride.engine.mesh import join, pick_device
from fullstride.engine.optimizer import AdamW, global_norm
from fullstride.engine.pieces import Piece
from fullstride.engine.pipeline.executor import Forward
from fullstride.engine.pipeline.tied import sum_tied
from fullstride.engine.precision import TORCH_DTYPE, compute_context
from fullstride.engine.schedule import learning_rate
from fullstride.errors import BadInput, RuleBroken
from fullstride.plan.plan import Axis, Plan
from fullstride.plan.rules import require

_default_threads = torch.get_num_threads()


class StepResult:
    """What a step came to. Values lie on the device until they are read; the first read of each waits for the step."""

    def __init__(self, loss: torch.Tensor, tokens: torch.Tensor, norm: torch.Tensor, lr: float) -> None:
        """Hold scalars: mean loss, counted tokens, gradient norm."""
        self._loss, self._tokens, self._norm = loss, tokens, norm
        self.lr = lr
        """Learning rate of this step."""

    @property
    def loss(self) -> float:
        """Mean per token over the world."""
        return float(self._loss)

    @property
    def tokens(self) -> int:
        """Tokens that counted, over the world."""
        return int(self._tokens)

    @property
    def grad_norm(self) -> float:
        """Global norm before clipping."""
        return float(self._norm)

    @property
    def skipped(self) -> bool:
        """The norm was not finite, and weights stayed as they were."""
        return not bool(torch.isfinite(self._norm))


class Run:
    """A prepared model: steps, evaluates, hands out its state."""

    def __init__(self, plan: Plan, applied: Applied, device: torch.device) -> None:
        """Made by `prepare`."""
        self.plan = plan
        self.device = device
        self.step_index = 0
        """Optimizer steps done so far."""
        self.on_phase: Callable[..., contextlib.AbstractContextManager[object]] = lambda _name, **_where: (
            contextlib.nullcontext()
        )
        """Called with `h2d`, `forward`, `backward`, `weight_grad` and `optimizer` around each, in a pipeline also with
        `micro_batch=` (its first sample) and `stage=`; set it to see where time goes."""
        self._applied = applied
        self._carrier = applied.carrier
        self._mesh = applied.mesh
        self._weights = applied.weights
        self._ranks = plan.layout.data_parallel
        self._hf = hasattr(self.module, "get_input_embeddings")

    @property
    def model(self) -> nn.Module:
        """What to call in a hand-written loop (under DDP its wrapper).

        Raises:
            RuleBroken: with a pipeline a rank's model is a part, which only the schedule can run; with tensor parallelism its
                logits are those of this rank's part of the vocabulary.
        """
        self._by_hand("run.model")
        return self._carrier.module

    @property
    def module(self) -> nn.Module:
        """The user's model itself, without a wrapper."""
        inner = self._carrier.module
        return inner.module if isinstance(inner, DistributedDataParallel) else inner

    @property
    def data_rank(self) -> int:
        """Which share of a step's samples is this rank's: 0 to the data-parallel degree - 1."""
        return self._mesh.data_rank

    @property
    def optimizer(self) -> AdamW:
        """For a hand-written loop: `step()` updates from the gradients as they are, `zero_grad()` forgets them.

        Raises:
            RuleBroken: with a pipeline or tensor parallelism, as for `model`.
        """
        self._by_hand("run.optimizer")
        return self._applied.optimizer

    def _by_hand(self, what: str) -> None:
        pp = self.plan.layout.pp
        if pp > 1:
            raise RuleBroken(
                f"{what} with layout.pp = {pp}: a rank holds a part of the model, which only the schedule can run",
                fix="call run.step, or use layout.pp = 1",
            )
        tp = self.plan.layout.tp
        if tp > 1:
            raise RuleBroken(
                f"{what} with layout.tp = {tp}: the model's logits are those of a part of the vocabulary, of which a loss "
                "written by hand would be wrong without an error",
                fix="call run.step, or use layout.tp = 1",
            )

    def step(self, batch: dict[str, torch.Tensor]) -> StepResult:
        """One optimizer update.

        Args:
            batch: this rank's samples of the whole step. `input_ids` int64 [samples, seq]; `labels` likewise, -100 where
                not counted, not shifted; with separate documents `document_ids` int64 [samples, seq].

        Raises:
            BadInput: another number of samples than the Plan's, or a tensor is missing.
        """
        micro, count = self.plan.batch.micro_batch, self.plan.batch.accumulation
        self._check(batch, micro * count)
        with self.on_phase("h2d"):
            ids, labels, documents = self._on_device(batch)
        tokens = self._world_sum((labels != IGNORED).sum())
        scale = self._ranks / tokens.clamp(min=1).to(TORCH_DTYPE[self.plan.precision.loss])
        total = torch.zeros_like(scale)
        if executor := self._applied.executor:
            total += sum(executor.step(self._stage_forward(ids, labels, documents, scale), self.on_phase))
        for index in range(count if executor is None else 0):
            part = slice(index * micro, (index + 1) * micro)
            with self._carrier.micro_batch(index == count - 1):
                with self.on_phase("forward"):
                    loss = self._forward(ids[part], labels[part], None if documents is None else documents[part], scale)
                with self.on_phase("backward"):
                    loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        with self.on_phase("optimizer"):
            self._carrier.finish()
            self._sum_tied()
            self._weights.settle()
            norm, lr = self._update()
        return StepResult(self._world_sum(total, "pp") / self._ranks, tokens, norm, lr)

    def _check(self, batch: dict[str, torch.Tensor], samples: int) -> None:
        wanted = ["input_ids", "labels"] + (["document_ids"] if self.plan.workload.documents == "separate" else [])
        for name in wanted:
            if name not in batch:
                raise BadInput(f"the batch has no {name!r} (it has {', '.join(batch) or 'nothing'})", fix=f"add {name}")
        found = batch["input_ids"].shape[0]
        if found != samples:
            raise BadInput(
                f"the batch holds {found} samples, the plan takes {samples} a rank and step (micro_batch x accumulation)",
                fix="hand over this rank's share of the step",
            )

    def _on_device(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        moved = {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}
        documents = moved.get("document_ids") if self.plan.workload.documents == "separate" else None
        return moved["input_ids"], shifted(moved["labels"]), documents

    def _forward(
        self, ids: torch.Tensor, labels: torch.Tensor, documents: torch.Tensor | None, scale: torch.Tensor
    ) -> torch.Tensor:
        """Scaled loss sum of a micro-batch."""
        head = self._applied.head
        if head is not None:
            head.arm(labels, scale)
        logits = self._call(ids, documents)
        if head is not None:
            return head.take(logits)
        tensor, wide = self._applied.tensor, TORCH_DTYPE[self.plan.precision.loss]
        return token_loss_sum(logits, labels, wide, tensor.vocabulary if tensor else None) * scale

    def _stage_forward(
        self, ids: torch.Tensor, labels: torch.Tensor, documents: torch.Tensor | None, scale: torch.Tensor
    ) -> Forward:
        """What the executor calls for samples [lo, hi): the scaled loss sum on the last stage, else whatever comes out."""

        def forward(lo: int, hi: int, last: bool) -> torch.Tensor:
            told = None if documents is None else documents[lo:hi]
            return self._forward(ids[lo:hi], labels[lo:hi], told, scale) if last else self._call(ids[lo:hi], told)

        return forward

    def _call(self, ids: torch.Tensor, documents: torch.Tensor | None) -> torch.Tensor:
        """The model's logits."""
        extra = {} if documents is None else {"position_ids": positions_in_documents(documents)}
        with compute_context(self.plan, self.device):
            return logits_of(self._carrier.module(input_ids=ids, **extra) if self._hf else self._carrier.module(ids))

    def _update(self) -> tuple[torch.Tensor, float]:
        """Clip, step, forget gradients."""
        recipe, optimizer = self.plan.recipe, self._applied.optimizer
        holders: tuple[Axis, ...] = ("dp_shard", "tp", "pp") if self.plan.shard.stage else ("tp", "pp")
        norm = global_norm(self._weights.counted(), self._mesh.group(*holders), self.device)
        divisor = None
        if recipe.clip_norm > 0:  # as torch.nn.utils.clip_grad_norm_ does, its 1e-6 included
            divisor = ((norm + 1e-6) / recipe.clip_norm).clamp(min=1.0)
        lr = learning_rate(self.step_index, recipe)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.update(divisor, (~torch.isfinite(norm)).float())
        self._weights.clear()
        self.step_index += 1
        return norm, lr

    def _sum_tied(self) -> None:
        """With a pipeline, both stages that share a weight get the sum of their gradients."""
        stages = self._applied.stages
        if stages and stages.tied:
            gradient = self._weights.gradient(self._weights.names.index(stages.cut.tied))
            if gradient is not None:
                sum_tied(gradient, stages.tied)

    def _world_sum(self, value: torch.Tensor, *more: Axis) -> torch.Tensor:
        """Sum over data-parallel ranks, and over other axes whose ranks hold parts of it."""
        group = self._mesh.group("dp_replicate", "dp_shard", *more)
        if group is not None:
            dist.all_reduce(value, group=group)
        return value

    @torch.no_grad()
    def evaluate(self, batch: dict[str, torch.Tensor]) -> tuple[float, int]:
        """Loss on held-out samples, nothing learned.

        Args:
            batch: as for `step`, any number of samples, equal on all ranks.

        Returns:
            Sum of the loss over the counted tokens of all ranks, and their number.
        """
        ids, labels, documents = self._on_device(batch)
        one = torch.ones((), dtype=TORCH_DTYPE[self.plan.precision.loss], device=self.device)
        total = torch.zeros_like(one)
        module = self._carrier.module
        module.eval()
        size = self.plan.batch.micro_batch
        if executor := self._applied.executor:
            total += sum(executor.evaluate(self._stage_forward(ids, labels, documents, one), ids.shape[0], size))
        for start in range(0, ids.shape[0] if executor is None else 0, size):
            part = slice(start, start + size)
            total += self._forward(ids[part], labels[part], None if documents is None else documents[part], one)
        module.train()
        self._carrier.reshard()
        return float(self._world_sum(total, "pp")), int(self._world_sum((labels != IGNORED).sum()))

    def ready(self) -> None:
        """Let the computing stream wait for what runs beside it: `flat` steps the optimizer beside the next forward."""
        self._weights.ready()

    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds: live masters and moments (DTensors where sharded) under the unmodified model's names.

        With adapters these are the adapters' alone (`lora_A.weight` and `lora_B.weight` below the product's name).
        """
        found: dict[str, torch.Tensor] = {}
        self.ready()
        for index, name in enumerate(self._weights.names):
            if self._given(name):
                continue
            found[f"weights/{name}"] = self._weights.masters[index].detach()
            moments = self._applied.optimizer.moments(index)
            if moments is not None:
                found[f"exp_avg/{name}"], found[f"exp_avg_sq/{name}"] = moments
        return found

    def _given(self, name: str) -> bool:
        """Whether a parameter is frozen beside adapters."""
        adapters = self._applied.adapters
        return adapters is not None and name not in adapters.matrices

    def frozen(self) -> dict[str, torch.Tensor]:
        """With adapters: this rank's parts of the frozen weights, by name. A checkpoint does not hold them."""
        named = zip(self._weights.names, self._weights.masters, strict=True)
        return {name: master.detach() for name, master in named if self._given(name)}

    @property
    def adapters(self) -> Adapters | None:
        """The low-rank adapters, if the Plan has some."""
        return self._applied.adapters

    def pieces(self) -> dict[str, Piece]:
        """Where this rank's parts in `state()` and `frozen()` lie in the unmodified model, by the parameter's name."""
        return {piece.name: piece for piece in self._weights.pieces}

    def after_load(self, step_index: int) -> None:
        """Call it after `state()`'s tensors were filled from a checkpoint made after `step_index` steps."""
        self.step_index = step_index
        self._applied.optimizer.num_steps = step_index
        self._carrier.reshard()
        self._weights.publish()

    def save(self, folder: Path | str) -> None:
        """Write a checkpoint into `folder`, whole or not at all."""
        from fullstride.engine.checkpoint import save_run

        save_run(self, Path(folder))

    def close(self) -> None:
        """Let go of model, optimizer and gradients; the Run cannot be used afterwards."""
        self._weights.clear()
        self._weights.close()
        self._applied.optimizer.state.clear()
        del self._applied, self._carrier, self._weights


def use_threads(plan: Plan, device: torch.device) -> None:
    """Give torch's operators the threads that a Plan asks for; they belong to the process, so a Plan taken up again asks anew.

    Args:
        plan: of which `threads` counts.
        device: on a GPU nothing changes.
    """
    if device.type == "cpu":
        torch.set_num_threads(plan.threads.compute or _default_threads)


def positions_in_documents(documents: torch.Tensor) -> torch.Tensor:
    """Positions that start again at each document, by which transformers keeps documents apart.

    Args:
        documents: int64 [samples, seq], equal within a document.

    Returns:
        int64 [samples, seq].
    """
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(begins, index, 0).cummax(dim=1).values


def prepare(model: nn.Module, plan: Plan, *, device: str | torch.device | None = None) -> Run:
    """Apply a Plan to a model; the model is changed in place and belongs to the Run from then on.

    Under torchrun the process group is joined, or made if there is none. Parameters on the meta device get their weights
    here: from the Plan's model directory, or from its seed and their names.

    Args:
        model: an unmodified causal language model of transformers, or an `nn.Module` with a list of blocks that maps
            int64 [samples, seq] to logits [samples, seq, vocab].
        plan: how.
        device: this rank's; by default its GPU, else the CPU.

    Raises:
        RuleBroken: the Plan breaks a rule, or does not go with this model.
        BadInput: the model's parts were not found, or another number of ranks is running.
        EnvironmentFault: the machine lacks what the Plan needs.
    """
    require(plan)
    place = pick_device(device)
    join(plan, place)
    use_threads(plan, place)
    applied = apply_plan(model, plan, place)
    applied.carrier.module.train()
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(seed_of(plan.recipe.seed, f"rank {rank}"))
    return Run(plan, applied, place)
