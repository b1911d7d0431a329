"""What is written is read back as the same plan, entry by entry; what is not is on the list."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.plan.formats import samples

from fullstride.model.source import load_spec
from fullstride.plan.formats.detect import flat, kind_of_text, ranks_said, read_text, write_as
from fullstride.plan.formats.imported import FOREIGN
from fullstride.plan.plan import (
    Batch,
    Comm,
    Compile,
    Data,
    Kernels,
    Layout,
    Loss,
    ModelRef,
    Optimizer,
    Overlap,
    Pipeline,
    Plan,
    Precision,
    Recipe,
    Recompute,
    Shard,
    Workload,
)

MODEL = "llama3-1b"
BF16 = {"cast": "weights", "embedding": "bf16", "block": "bf16", "head": "bf16"}
degree = st.sampled_from([1, 2, 3, 4])
rate = st.sampled_from([1e-5, 3e-4, 0.0125])


@st.composite
def recipes(draw):
    steps = draw(st.integers(10, 5000))
    return Recipe(
        steps=steps,
        seed=draw(st.integers(0, 9999)),
        learning_rate=draw(rate),
        schedule=draw(st.sampled_from(["constant", "linear", "cosine"])),
        warmup_steps=draw(st.integers(0, steps)),
        min_lr_ratio=draw(st.sampled_from([0.0, 0.1, 0.37])),
        beta2=draw(st.sampled_from([0.95, 0.999])),
        weight_decay=draw(st.sampled_from([0.0, 0.1])),
        clip_norm=draw(st.sampled_from([0.0, 1.0])),
    )


@st.composite
def any_plan(draw):
    """Plans of every part, also of combinations that no framework has."""
    layout = Layout(
        dp_replicate=draw(degree),
        dp_shard=draw(degree),
        tp=draw(degree),
        pp=draw(st.sampled_from([1, 2, 4])),
        cp=draw(degree),
        sequence_parallel=draw(st.booleans()),
    )
    batch = Batch(micro_batch=draw(st.integers(1, 4)), accumulation=draw(st.integers(1, 9)))
    samples_per_step = batch.micro_batch * batch.accumulation * layout.data_parallel
    pipeline = Pipeline()
    if layout.pp > 1:
        chunks = draw(st.sampled_from([1, 2]))
        schedule = draw(st.sampled_from(["gpipe", "1f1b"] if chunks == 1 else ["interleaved", "bfs", "zb-v"]))
        layers = draw(st.sampled_from([(), tuple([2] * (layout.pp * chunks - 1) + [16 - 2 * (layout.pp * chunks - 1)])]))
        pipeline = Pipeline(schedule=schedule, chunks=chunks, layers_per_stage=layers)
    precision = draw(
        st.sampled_from(
            [
                Precision(),
                Precision(**BF16),
                Precision(**BF16, gradient="bf16", reduction="bf16"),
                Precision(cast="weights", embedding="fp16", block="fp16", head="fp16", gradient="fp16", reduction="fp16"),
                Precision(cast="autocast", block="bf16", head="bf16"),
                Precision(**BF16, fp8="tensorwise"),
                Precision(**BF16, fp8="delayed"),
            ]
        )
    )
    return Plan(
        model=ModelRef(source=MODEL, digest=load_spec(MODEL).digest),
        workload=Workload(sequence_length=draw(st.sampled_from([512, 4096])), samples_per_step=samples_per_step),
        recipe=draw(recipes()),
        layout=layout,
        shard=Shard(
            carrier=draw(st.sampled_from(["none", "ddp", "fsdp2", "megatron", "deepspeed"])),
            stage=draw(st.sampled_from([0, 1, 2, 3])),
            reshard=draw(st.sampled_from([{}, {"head": False}])),
        ),
        pipeline=pipeline,
        batch=batch,
        recompute=draw(
            st.sampled_from(
                [
                    Recompute(),
                    Recompute(mode="full"),
                    Recompute(mode="full", every=2),
                    Recompute(mode="full", blocks=3),
                    Recompute(mode="attention"),
                    Recompute(mode="norm_activation"),
                    Recompute(mode="norm_activation", products=0.5),
                    Recompute(mode="full", offload="cpu"),
                ]
            )
        ),
        optimizer=Optimizer(
            implementation=draw(st.sampled_from(["fused", "foreach", "loop"])), cpu_share=draw(st.sampled_from([0.0, 0.5, 1.0]))
        ),
        precision=precision,
        kernels=Kernels(attention=draw(st.sampled_from(["sdpa", "fused_softmax", "unfused"]))),
        loss=Loss(kind=draw(st.sampled_from(["model", "chunked"])), fused=draw(st.sampled_from(["no", "script", "native"]))),
        compile=Compile(mode=draw(st.sampled_from(["off", "block"])), graphs=draw(st.booleans())),
        overlap=Overlap(
            bucket_bytes=draw(st.sampled_from([26214400, 10**8])),
            gradients=draw(st.booleans()),
            tensor=draw(st.booleans()),
            deferred_head=draw(st.sampled_from([0, 2])),
        ),
        comm=Comm(env=draw(st.sampled_from([{}, {"NCCL_ALGO": "Ring"}])), timeout_seconds=draw(st.sampled_from([60.0, 600.0]))),
        data=Data(workers=draw(st.integers(0, 3)), pin=draw(st.booleans())),
    )


def back(plan, kind):
    """What a user would give who has only the file: its model and the number of GPUs."""
    written = write_as(plan, kind)
    assert kind_of_text(written.text, "f") == kind
    read = read_text(written.text, "f", MODEL, num_ranks=ranks_said(plan, kind), sequence_length=plan.workload.sequence_length)
    return written, read.require_plan()


@pytest.mark.parametrize("kind", FOREIGN)
@given(plan=any_plan())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_entry_comes_back_or_is_listed(kind, plan):
    written, read = back(plan, kind)
    listed = {one.key for one in written.not_carried}
    said, understood = flat(plan), flat(read)
    for key, value in said.items():
        if key not in listed:
            assert understood[key] == pytest.approx(value) if isinstance(value, float) else understood[key] == value, key
    assert all(one.why for one in written.not_carried)
    if kind != "accelerate":  # which casts by FSDP or by autocast, and reads a world of one as the latter
        assert back(read, kind)[1] == read, "what was read once is read the same for ever"


EXPECTED = {
    # what of a plan that the framework carries out itself may stay behind
    "deepspeed": {"workload.sequence_length", "recipe.seed", "recipe.steps"},
    "megatron": set(),
    "torchtitan": {"model.source"},  # torchtitan has no model of this name
}


@st.composite
def plans_of(draw, kind):
    """Plans as the framework itself would carry them out."""
    plan = replace(
        draw(any_plan()),
        loss=Loss(),
        kernels=Kernels(),
        compile=Compile(),
        overlap=Overlap(),
        comm=Comm(),
        data=Data(),
        optimizer=Optimizer(),
        recompute=draw(st.sampled_from([Recompute(), Recompute(mode="full")])),
    )
    layout, recipe = plan.layout, plan.recipe
    shard = Shard()
    precision = Precision(**BF16)
    if kind == "deepspeed":
        stage = draw(st.sampled_from([0, 1, 2, 3]))
        data = layout.data_parallel
        layout = Layout(tp=layout.tp, cp=layout.cp, dp_replicate=1 if stage else data, dp_shard=data if stage else 1)
        shard, plan = Shard(carrier="deepspeed", stage=stage), replace(plan, pipeline=Pipeline())
        recipe = replace(recipe, schedule="constant", min_lr_ratio=0.1)
    elif kind == "megatron":
        stage = draw(st.sampled_from([0, 1]))
        layout = replace(
            layout, dp_shard=layout.dp_shard if stage else 1, sequence_parallel=layout.tp == 1 or layout.sequence_parallel
        )
        shard = Shard(carrier="megatron", stage=stage)
        pipeline = plan.pipeline
        if layout.pp > 1:
            pipeline = replace(pipeline, schedule="1f1b" if pipeline.chunks == 1 else "interleaved")
        plan = replace(plan, pipeline=pipeline, kernels=Kernels(gradient_fusion=True))
    else:
        layout = replace(layout, sequence_parallel=True)
        sharded = layout.dp_shard * layout.cp > 1
        shard = Shard(carrier="fsdp2", stage=draw(st.sampled_from([2, 3]))) if sharded else shard
        if not sharded:
            shard = Shard(carrier="ddp" if layout.dp_replicate > 1 else "none")
            precision = Precision(cast="autocast", block="bf16", head="bf16")
        recipe = replace(recipe, min_lr_ratio=0.1) if recipe.schedule == "constant" else recipe
    samples_per_step = plan.batch.micro_batch * plan.batch.accumulation * layout.data_parallel
    workload = replace(plan.workload, samples_per_step=samples_per_step)
    if kind == "deepspeed":
        narrow = "fp32" if shard.stage == 0 else draw(st.sampled_from(["fp32", "bf16"]))
        precision = Precision(**BF16, gradient=narrow, reduction=draw(st.sampled_from(["fp32", "bf16"])))
    return replace(plan, layout=layout, shard=shard, precision=precision, recipe=recipe, workload=workload)


@pytest.mark.parametrize("kind", EXPECTED)
@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_plan_of_the_frameworks_own_kind_comes_back_whole(kind, data):
    plan = data.draw(plans_of(kind))
    written, read = back(plan, kind)
    assert {one.key for one in written.not_carried} <= EXPECTED[kind]
    assert flat(read) == {
        key: pytest.approx(value) if isinstance(value, float) else value for key, value in flat(plan).items()
    } | {key: flat(read)[key] for key in EXPECTED[kind]}


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("source", [text for texts in samples.ALL.values() for text in texts])
def test_every_sample_is_written_as_every_kind(kind, source):
    read = read_text(source, "sample", MODEL)
    read = read if read.plan else read_text(source, "sample", MODEL, num_ranks=32)
    written = write_as(read.require_plan(), kind)
    assert kind_of_text(written.text, "f") == kind
