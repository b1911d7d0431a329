import pytest
from msgspec.structs import replace
from tests.plan.plan_values import gpus, llama, plan_of

from fullstride.plan.explain import explain_plan
from fullstride.plan.facts import num_trainable
from fullstride.plan.folklore import gain, gain_words, notes, ring_bytes
from fullstride.plan.plan import Batch, Comm, Kernels, Layout, Optimizer, Pipeline, Precision, Recompute, Shard, Workload
from fullstride.plan.price import price
from fullstride.report.document import Text

TEN_BILLION = llama(hidden=4096, blocks=48, heads=32, kv_heads=32, ffn=11008, vocab=32000, positions=4096)
SPEC = llama()
WORK = Workload(sequence_length=64, samples_per_step=64)


def told(spec=SPEC, **parts):
    return " ".join(notes(plan_of(workload=WORK, **parts), spec))


def sharded(stage, accumulation=1, ranks=16):
    shard = Shard(carrier="fsdp2", stage=stage)
    return {"layout": Layout(dp_shard=ranks), "shard": shard, "batch": Batch(micro_batch=1, accumulation=accumulation)}


def test_ten_billion_parameters_on_sixteen_ranks_move_75_gb_and_not_640():
    assert ring_bytes(40e9, 16) == 75e9
    count = num_trainable(TEN_BILLION)
    words = told(TEN_BILLION, layout=Layout(dp_replicate=16), shard=Shard(carrier="ddp"))
    assert f"{ring_bytes(4 * count, 16) / 1e9:.3g} GB, not n times it ({16 * 4 * count / 1e9:.3g} GB)" in words
    assert count == pytest.approx(10e9, rel=0.02)
    assert "not n times it (638 GB)" in words
    assert "74.8 GB" in words


def test_zero_2_does_not_double_but_accumulation_costs():
    assert "ZeRO-1 and ZeRO-2 move 2P elements a step, ZeRO-3 3P (arXiv" in told(**sharded(2))
    assert "reduced for each of 4 micro-batches: (m + 1)P, so 5P" in told(**sharded(2, 4))
    assert "moves 3P elements a step here" in told(**sharded(3))
    assert "moves 12P elements a step here" in told(**sharded(3, 4))


def test_step_times_of_unequal_work_are_not_a_gain():
    by_step, by_token = gain(1.80, 1116, 1.12, 999)
    assert (round(by_step, 2), round(by_token, 2)) == (1.61, 1.44)
    words = gain_words(1.80, 1116, 1.12, 999)
    assert words.startswith("1.44 times the tokens a second. Step times alone say 1.61, and compare unequal work: 1116")
    assert gain_words(2.0, 8192, 1.0, 8192) == "2.00 times the tokens a second."


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (
            {"layout": Layout(pp=4), "pipeline": Pipeline(schedule="1f1b"), "batch": Batch(accumulation=13)},
            "= 18.8 % of the whole",
        ),
        (
            {"layout": Layout(pp=4), "pipeline": Pipeline(schedule="interleaved", chunks=2), "batch": Batch(accumulation=16)},
            "2 stages on each rank shrink the bubble to 8.57 % of the whole, where 1F1B has 15.8 %",
        ),
        ({"layout": Layout(tp=4)}, "four all-reduces (or gather and scatter pairs) of 2sbh"),
        ({"recompute": Recompute(mode="full")}, "recompute of attention alone cannot use less memory"),
        ({"recompute": Recompute(mode="attention")}, "never stores its scores"),
        ({"optimizer": Optimizer(nvme_share=1.0)}, "24 bytes a parameter"),
        ({"precision": Precision(cast="autocast", block="fp16", head="fp16")}, "fp16 is not faster than bf16"),
        ({"comm": Comm(env={"NCCL_IB_REGULARIZE": "1"})}, "no such variable"),
        ({"comm": Comm(env={"NCCL_NTHREADS": "8"})}, "64 to 512"),
        ({"comm": Comm(env={"NCCL_PROTO": "ll,llvm"})}, "a protocol that is none"),
        ({"comm": Comm(env={"NCCL_ALGO": "ring,tree"})}, "shuts out NVLS"),
        ({"comm": Comm(env={"NCCL_IB_GID_INDEX": "3"})}, "RoCE only"),
        ({"comm": Comm(env={"NCCL_SOCKET_NTHREADS": "8"})}, "inert beside InfiniBand"),
    ],
)  # fmt: skip
def test_a_plan_that_touches_folklore_is_told(parts, words):
    assert words in told(**parts)


def test_other_plans_are_left_alone():
    assert told() == ""
    assert told(comm=Comm(env={"NCCL_NTHREADS": "256", "NCCL_PROTO": "LL128,Simple", "NCCL_ALGO": "NVLS"})) == ""
    assert told(recompute=Recompute(mode="attention"), kernels=Kernels(attention="unfused")) == ""


def test_explain_tells_them():
    plan = plan_of(workload=replace(WORK, samples_per_step=8), **sharded(2, ranks=8))
    document = explain_plan(plan, price(plan, SPEC, gpus()), SPEC, gpus())
    assert any("ZeRO-2 does not double" in block.text for block in document.blocks if isinstance(block, Text))
