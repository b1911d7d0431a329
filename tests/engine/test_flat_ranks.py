"""What two ranks hold and do on flat buffers: precision, hand-written loops, schedules, frozen and unused weights, resuming."""

import os
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from fullstride.engine.checkpoint import load_run, save_run
from fullstride.engine.compiling import compile_available
from fullstride.engine.gathering import Gathering
from fullstride.engine.parity_cases import PlainModel
from fullstride.engine.run import prepare
from fullstride.engine.schedule import learning_rate
from fullstride.plan.plan import Batch, Compile, Layout, ModelRef, Optimizer, Plan, Precision, Recipe, Shard, Workload

RANKS, LENGTH = 2, 12
PLAN = Plan(
    model=ModelRef(source="in memory"),
    workload=Workload(sequence_length=LENGTH, samples_per_step=8),
    recipe=Recipe(steps=10, learning_rate=1e-2, warmup_steps=1, clip_norm=0.5, weight_decay=0.3),
)
CAST = Precision(cast="weights", embedding="bf16", block="bf16", head="bf16")


class Model(PlainModel):
    """Without biases of keys: their gradient is zero but for rounding, which AdamW blows up."""

    def __init__(self):
        super().__init__()
        for block in self.stack:
            block.qkv.bias = None


def plan_of(carrier="flat", stage=2, *, accumulation=2, **parts):
    layout = Layout(dp_shard=RANKS)
    batch = Batch(micro_batch=8 // RANKS // accumulation, accumulation=accumulation)
    return msgspec.structs.replace(PLAN, layout=layout, batch=batch, shard=Shard(carrier=carrier, stage=stage), **parts)


def batch_of(step, run):
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 61, (8, LENGTH), generator=generator)
    each = 8 // run.plan.layout.data_parallel
    mine = slice(run.data_rank * each, (run.data_rank + 1) * each)
    return {"input_ids": ids[mine], "labels": ids[mine]}


def begin(plan, change=None, model=Model):
    with torch.device("meta"):
        made = model()
    if change:
        change(made)
    return prepare(made, plan, device="cpu")


def weights_of(run):
    state = {key.removeprefix("weights/"): value for key, value in run.state().items() if key.startswith("weights/")}
    return dict(Gathering(run.pieces(), run.device).all(state, torch.float64))


def trained(plan, steps=3, change=None, model=Model):
    """Losses, norms and whole weights after some steps."""
    run = begin(plan, change, model)
    told = [run.step(batch_of(step, run)) for step in range(steps)]
    found = [r.loss for r in told], [r.grad_norm for r in told], weights_of(run)
    run.close()
    return found


def plain(plan, steps=3, change=None, model=Model):
    """The same by torch alone, one process with all samples, from the weights that `begin` gives."""
    run = begin(plan, change, model)
    start = weights_of(run)
    run.close()
    made = model()
    if change:
        change(made)
    made.load_state_dict({name: value.float() for name, value in start.items()})
    named, recipe, losses, norms = dict(made.named_parameters()), plan.recipe, [], []
    groups = [
        {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(recipe.beta1, recipe.beta2), eps=recipe.eps)
    for step in range(steps):
        ids = torch.randint(0, 61, (8, LENGTH), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(made(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(made.parameters(), recipe.clip_norm).item())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, recipe)
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: value.detach().double() for name, value in named.items()}


def same_course(one, other, relative):
    """Equal losses and norms."""
    for what, mine, theirs in zip(("losses", "norms"), one[:2], other[:2], strict=True):
        assert mine == pytest.approx(theirs, rel=relative), f"{what} {mine} {theirs}"


def close_to(one, other, relative, absolute=None):
    same_course(one, other, relative)
    assert one[2].keys() == other[2].keys(), f"{sorted(one[2])} {sorted(other[2])}"
    for name, value in one[2].items():
        torch.testing.assert_close(value, other[2][name], rtol=relative, atol=absolute or relative * 1e-1, msg=name)


def check_cast_weights_are_fsdp2s():
    for accumulation, reduction in ((1, "bf16"), (2, "fp32")):
        gradient = reduction if accumulation == 1 else "fp32"
        precision = msgspec.structs.replace(CAST, reduction=reduction, gradient=gradient)
        options = {"accumulation": accumulation, "precision": precision}
        wanted = trained(plan_of("fsdp2", 2, **options))
        for stage in (1, 2, 3):
            found = trained(plan_of("flat", stage, **options))
            assert found[1][0] == pytest.approx(wanted[1][0], rel=1e-5)
            same_course(found, wanted, 1e-3)  # from then on a rounded weight may fall to the other side


def check_bf16_sums_of_micro_batches():
    """FSDP2 adds micro-batches up in the reduction dtype, where flat buffers have fp32."""
    precision = msgspec.structs.replace(CAST, reduction="bf16")
    wanted = plain(plan_of())
    for stage in (1, 2):
        same_course(trained(plan_of("flat", stage, precision=precision)), wanted, 2e-2)


def check_a_mixed_cast():
    precision = msgspec.structs.replace(CAST, embedding="fp32", head="fp32")
    wanted = plain(plan_of())
    for stage in (1, 3):
        same_course(trained(plan_of("flat", stage, precision=precision)), wanted, 2e-2)


def check_other_implementations():
    wanted = trained(plan_of())
    for implementation in ("foreach", "loop"):
        close_to(trained(plan_of(optimizer=Optimizer(implementation=implementation))), wanted, 1e-5)


def check_a_loop_by_hand():
    """Two backwards, then a step: gradients of both add up, and `zero_grad` forgets."""

    def by_hand(run):
        for step in range(3):
            batch = batch_of(step, run)
            for ids in batch["input_ids"].chunk(2):
                loss = nn.functional.cross_entropy(run.model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
                (loss / 2).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
        return weights_of(run)

    wanted = by_hand(begin(plan_of("fsdp2", 2)))
    for stage in (1, 2, 3):
        run = begin(plan_of("flat", stage))
        found = by_hand(run)
        assert run.optimizer.param_groups[0]["weight_decay"] == 0.3
        run.close()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=2e-5, atol=2e-6, msg=f"{stage} {name}")


def check_a_schedule_decides():
    """Held gradients add up here and are reduced when told; what was not told is by `finish`."""
    for stage in (1, 2, 3):
        run, other = begin(plan_of("flat", stage)), begin(plan_of("flat", stage))
        batch = batch_of(0, run)["input_ids"].chunk(2)
        for r, held in ((run, True), (other, False)):
            carrier = r._carrier
            carrier.hold(held)
            for index, ids in enumerate(batch):
                with carrier.micro_batch(index == 1):
                    r.model(ids).logsumexp(-1).sum().backward()
            if held:
                assert all(unit.gradient is None for unit in carrier.units)
                carrier.reduce(["head", "stack.2"])
                assert [unit.gradient is not None for unit in carrier.units] == [False, False, False, True, True]
            carrier.finish()
        for index, name in enumerate(run._weights.names):
            torch.testing.assert_close(run._weights.gradient(index), other._weights.gradient(index), msg=name)
        run.close()
        other.close()


def check_frozen_weights():
    def freeze(model):
        model.table.requires_grad_(False)
        model.stack[1].qkv.requires_grad_(False)
        model.to_vocab.weight.requires_grad_(False)

    def freeze_blocks(model):
        model.stack.requires_grad_(False)

    for change in (freeze, freeze_blocks):
        wanted = plain(plan_of(), change=change)
        for stage in (1, 3):
            for precision in (Precision(), CAST):
                found = trained(plan_of("flat", stage, precision=precision), change=change)
                (close_to if precision == Precision() else same_course)(
                    found, wanted, 2e-5 if precision == Precision() else 2e-2
                )


class WithSpare(Model):
    """One matrix is never used, another in the last step only."""

    quiet_calls = 0

    def __init__(self):
        super().__init__()
        self.stack[1].spare = nn.Linear(32, 32)
        self.stack[1].late = nn.Linear(32, 32, bias=False)
        self.calls = 0
        inner = self.stack[1].forward

        def forward(x):
            self.calls += not x.is_meta  # a look at a copy without memory is no call
            return inner(x) + (self.stack[1].late(x) if self.calls > self.quiet_calls else 0)

        self.stack[1].forward = forward


def check_unused_weights_stay():
    """They are not decayed; what is reached for the first time by a later step is stepped then."""
    WithSpare.quiet_calls = 2  # a call a step
    wanted = plain(plan_of(), model=WithSpare)
    WithSpare.quiet_calls = 4  # two micro-batches a step
    for stage in (1, 2, 3):
        found = trained(plan_of("flat", stage), model=WithSpare)
        late, reference = found[2].pop("stack.1.late.weight"), wanted[2]["stack.1.late.weight"]
        close_to(found, (*wanted[:2], {n: v for n, v in wanted[2].items() if "late" not in n}), 2e-5)
        # Torch counts a parameter's steps from its own first one in its bias correction, a Run all steps.
        assert not torch.equal(late, trained(plan_of("flat", stage), 2, model=WithSpare)[2]["stack.1.late.weight"])
        assert (late - reference).abs().max() < 2 * PLAN.recipe.learning_rate


def check_evaluation_between_steps():
    wanted = None
    for stage in (1, 2, 3):
        run = begin(plan_of("flat", stage))
        run.step(batch_of(0, run))
        loss, tokens = run.evaluate(batch_of(1, run))
        assert tokens == 8 * (LENGTH - 1)
        after = run.step(batch_of(2, run)).loss
        wanted = wanted or (loss, after)
        assert (loss, after) == pytest.approx(wanted, rel=1e-6)
        run.close()


def check_memory():
    """Weights are freed under stage 3; a shard holds its part of masters and moments, and nothing else stays."""
    for stage, standing in ((2, True), (3, False)):
        run = begin(plan_of("flat", stage, precision=CAST))
        run.step(batch_of(0, run))
        for unit in run._carrier.units:
            region = unit.trained
            assert (region.whole.untyped_storage().size() > 0) is standing
            assert region.master.untyped_storage().size() == 4 * region.size // RANKS
            assert unit.gradient is None and unit.stored is None
            assert all(slot.param.grad is None for slot in region.slots)
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().size() for t in run.state().values() if t.numel()}
        assert sum(held.values()) == 3 * 4 * sum(unit.trained.size for unit in run._carrier.units) // RANKS
        run.close()


def check_resuming_is_exact(folder):
    for stage in (1, 2, 3):
        plan = plan_of("flat", stage, precision=CAST)
        run = begin(plan)
        for step in range(2):
            run.step(batch_of(step, run))
        save_run(run, folder / f"stage {stage}")
        wanted = [run.step(batch_of(step, run)).loss for step in (2, 3)], weights_of(run)
        run.close()
        again = begin(plan)
        load_run(again, folder / f"stage {stage}")
        found = [again.step(batch_of(step, again)).loss for step in (2, 3)], weights_of(again)
        again.close()
        assert found[0] == wanted[0]
        assert all(torch.equal(found[1][name], value) for name, value in wanted[1].items())


def check_compiled_blocks():
    wanted = plain(plan_of())
    for stage in (2, 3):
        close_to(trained(plan_of("flat", stage, compile=Compile(mode="block"))), wanted, 2e-5, 0.1 * PLAN.recipe.learning_rate)


def work(rank, folder, names):
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    for name in names:
        check = globals()[f"check_{name}"]
        check(Path(folder)) if name == "resuming_is_exact" else check()
    dist.destroy_process_group()


GROUPS = {
    "numbers": [
        "cast_weights_are_fsdp2s",
        "bf16_sums_of_micro_batches",
        "a_mixed_cast",
        "other_implementations",
        "frozen_weights",
    ],
    "state": [
        "a_loop_by_hand",
        "a_schedule_decides",
        "evaluation_between_steps",
        "unused_weights_stay",
        "memory",
        "resuming_is_exact",
    ],
}


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize("group", sorted(GROUPS))
def test_on_two_ranks(group, tmp_path):
    mp.spawn(work, args=(str(tmp_path), GROUPS[group]), nprocs=RANKS)


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.skipif(bool(compile_available(torch.device("cpu"))), reason="nothing can be compiled here")
def test_compiled(tmp_path):
    mp.spawn(work, args=(str(tmp_path), ["compiled_blocks"]), nprocs=RANKS)
