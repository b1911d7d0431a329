import pytest
from msgspec.structs import replace
from tests.plan.plan_values import cpus, experts, gpus, llama, plan_of

from fullstride.errors import RuleBroken
from fullstride.plan.defaults import AUTOCAST, FP32, weights_cast
from fullstride.plan.plan import (
    Adapter,
    Batch,
    Comm,
    Compile,
    Data,
    Layout,
    Loss,
    ModelRef,
    Optimizer,
    Overlap,
    Pipeline,
    Precision,
    Recipe,
    Recompute,
    Shard,
    Threads,
    Workload,
)
from fullstride.plan.rules import RULES, check, inert, not_run, require, rules_table

SPEC = llama()
TWO = {"layout": Layout(dp_shard=2), "shard": Shard(carrier="fsdp2", stage=3), "batch": Batch(micro_batch=4)}
DDP = {"layout": Layout(dp_replicate=2), "shard": Shard(carrier="ddp"), "batch": Batch(micro_batch=4)}
WORK = Workload(sequence_length=64, samples_per_step=8)
WEIGHTS = weights_cast(1, "none")
FP64 = Precision(**dict.fromkeys((f for f in Precision.__struct_fields__ if f not in ("cast", "fp8")), "fp64"))


def recipe(**fields):
    return {"recipe": Recipe(**fields)}


def fsdp(**fields):
    return {**TWO, "shard": Shard(carrier="fsdp2", **{"stage": 3, **fields})}


def pipe(schedule, pp=2, **fields):
    return {"layout": Layout(pp=pp), "pipeline": Pipeline(schedule=schedule, **fields)}


def sharded(**degrees):
    """A layout over data ranks, and the carrier that goes with it."""
    return {"layout": Layout(**degrees), "shard": Shard(carrier="fsdp2", stage=3)}


# code: (what breaks it, a neighbour that is allowed, words of the message)
CASES = {
    "size.sequence": (
        {"workload": replace(WORK, sequence_length=1)},
        {"workload": replace(WORK, sequence_length=2)},
        "sequence_length = 1",
    ),
    "size.samples": ({"workload": replace(WORK, samples_per_step=0)}, {}, "samples_per_step = 0"),
    "size.steps": (recipe(steps=0), recipe(steps=1), "recipe.steps = 0"),
    "size.layout": ({"layout": Layout(dp_shard=0)}, {}, "layout.dp_shard = 0"),
    "size.batch": ({"batch": Batch(micro_batch=8, accumulation=0)}, {}, "batch.accumulation = 0"),
    "size.chunk": (
        {"loss": Loss(kind="chunked", chunk_tokens=0)},
        {"loss": Loss(kind="chunked", chunk_tokens=1)},
        "chunk_tokens = 0",
    ),
    "size.every": ({"recompute": Recompute(mode="full", every=0)}, {"recompute": Recompute(mode="full", every=2)}, "every = 0"),
    "size.chunks": ({"pipeline": Pipeline(chunks=0)}, {}, "pipeline.chunks = 0"),
    "size.prefetch": ({"overlap": Overlap(prefetch=-1)}, {"overlap": Overlap(prefetch=0)}, "overlap.prefetch = -1"),
    "size.bucket": ({"overlap": Overlap(bucket_bytes=0)}, {"overlap": Overlap(bucket_bytes=1)}, "bucket_bytes = 0"),
    "size.workers": ({"data": Data(workers=-1)}, {"data": Data(workers=1)}, "data.workers = -1"),
    "size.threads": ({"threads": Threads(compute=-1)}, {"threads": Threads(compute=1)}, "threads.compute = -1"),
    "size.ctas": ({"comm": Comm(ctas=65)}, {"comm": Comm(ctas=64)}, "comm.ctas = 65"),
    "size.timeout": ({"comm": Comm(timeout_seconds=0.0)}, {"comm": Comm(timeout_seconds=1.0)}, "timeout_seconds = 0"),
    "size.finite": (recipe(eps=float("nan")), recipe(eps=1e-8), "recipe.eps = nan"),
    "size.learning_rate": (recipe(learning_rate=0.0), recipe(learning_rate=1e-9), "learning_rate = 0"),
    "size.betas": (recipe(beta2=1.0), recipe(beta2=0.0), "recipe.beta2 = 1.0"),
    "size.eps": (recipe(eps=0.0), recipe(eps=1e-12), "recipe.eps = 0"),
    "size.recipe": (recipe(clip_norm=-1.0), recipe(clip_norm=0.0), "recipe.clip_norm = -1"),
    "size.min_lr": (recipe(min_lr_ratio=1.5), recipe(min_lr_ratio=1.0), "min_lr_ratio = 1.5"),
    "size.counts": ({"recompute": Recompute(blocks=-1)}, {}, "recompute.blocks = -1"),
    "size.shares": ({"optimizer": Optimizer(cpu_share=0.7, nvme_share=0.5)}, {}, "cpu_share = 0.7, nvme_share = 0.5"),
    "layout.order": (
        {"layout": Layout(order=("pp", "tp"))},
        {"layout": Layout(order=("pp", "ep", "dp_shard", "dp_replicate", "cp", "tp"))},
        "layout.order",
    ),
    "layout.unbuilt": ({"layout": Layout(ep=2)}, {}, "layout.ep = 2: this axis is not built yet"),
    "run.unbuilt": ({"recompute": Recompute(mode="attention")}, {"recompute": Recompute(mode="full")}, "'attention'"),
    "layout.heads": ({"layout": Layout(tp=3)}, {"layout": Layout(tp=4)}, "layout.tp = 3, 4 / 3 = 1.333 heads a rank"),
    "layout.width": ({"layout": Layout(tp=4)}, {"layout": Layout(tp=2)}, "layout.tp = 4, mlp.down has 130 / 4 = 32.5 a rank"),
    "layout.vocabulary": ({"layout": Layout(tp=4)}, {"layout": Layout(tp=2)}, "3 rows of the vocabulary"),
    "layout.context": (
        {**sharded(cp=3)},
        {**sharded(cp=4)},
        "layout.cp = 3, 64 / 6 = 10.67 tokens a slice",
    ),
    "layout.sequence": (
        {"layout": Layout(tp=2), "workload": replace(WORK, sequence_length=63)},
        {"layout": Layout(tp=2, sequence_parallel=False), "workload": replace(WORK, sequence_length=63)},
        "layout.tp = 2 x cp 1, 63 / 2 = 31.5 tokens a rank",
    ),
    "layout.experts": (
        {**sharded(dp_shard=8, ep=4), "batch": Batch(micro_batch=1)},
        {**sharded(dp_shard=8, ep=2), "batch": Batch(micro_batch=1)},
        "layout.ep = 4, 6 / 4 = 1.5 experts a rank",
    ),
    "layout.expert_ranks": (
        {**sharded(dp_shard=4, ep=3), "batch": Batch(micro_batch=2)},
        {**sharded(dp_shard=4, ep=2), "batch": Batch(micro_batch=2)},
        "layout.ep = 3 over 4 data-parallel ranks, 4 / 3 = 1.333",
    ),
    "layout.devices": (
        {
            "layout": Layout(dp_shard=16),
            "shard": Shard(carrier="fsdp2", stage=3),
            "batch": Batch(micro_batch=1),
            "workload": replace(WORK, samples_per_step=16),
        },
        TWO,
        "16 ranks on 8 devices",
    ),
    "batch.samples": (
        {"batch": Batch(micro_batch=3)},
        {"batch": Batch(micro_batch=4, accumulation=2)},
        "micro_batch 3 x accumulation 1",
    ),
    "shard.none": ({**TWO, "shard": Shard()}, TWO, "'none' with 2 ranks"),
    "shard.none_stage": ({"shard": Shard(stage=1)}, {}, "shard.stage = 1"),
    "shard.ddp": ({**TWO, "shard": Shard(carrier="ddp")}, DDP, "ddp with shard.stage = 0 and layout.dp_shard = 2"),
    "shard.fsdp2": (
        {**DDP, "shard": Shard(carrier="fsdp2", stage=1)},
        {**TWO, "layout": Layout(dp_replicate=2, dp_shard=2), "batch": Batch(micro_batch=2)},
        "layout.dp_shard = 1",
    ),
    "shard.flat": (
        {"shard": Shard(carrier="flat")},
        {**TWO, "shard": Shard(carrier="flat", stage=2)},
        "flat with shard.stage = 0 and layout.dp_shard = 1",
    ),
    "shard.reshard_stage": (fsdp(stage=2, reshard={"blocks": False}), fsdp(reshard={"blocks": False}), "at stage 2"),
    "shard.reshard_names": (fsdp(reshard={"model.layers.4": True}), fsdp(reshard={"model.layers.3": True}), "no such block"),
    "pipeline.none": ({"layout": Layout(pp=2)}, pipe("1f1b"), "pipeline.schedule = 'none' with layout.pp = 2"),
    "pipeline.chunks": (pipe("zb-v", chunks=1), pipe("zb-v", chunks=2), "pipeline.chunks = 1 with schedule zb-v"),
    "pipeline.stages": (pipe("1f1b", pp=8), pipe("1f1b", pp=4), "layout.pp = 8 x chunks 1 = 8 stages for 4 blocks"),
    "pipeline.even": (
        pipe("1f1b", pp=4),
        pipe("1f1b", pp=4, layers_per_stage=(8, 8, 7, 7)),
        "30 layers on 4 stages, 30 / 4 = 7.5 a stage",
    ),
    "pipeline.layers": (
        pipe("1f1b", layers_per_stage=(2, 1)),
        pipe("1f1b", layers_per_stage=(3, 1)),
        "adds up to 3, and hand has 4 blocks",
    ),
    "pipeline.rounds": (
        {**pipe("interleaved", chunks=2), "batch": Batch(micro_batch=8)},
        {**pipe("interleaved", chunks=2), "batch": Batch(micro_batch=4, accumulation=2)},
        "1 micro-batches in turns of 2, 1 / 2 = 0.5",
    ),
    "pipeline.sizes": (
        pipe("1f1b", micro_batch_per_stage=(4, 6)),
        pipe("1f1b", micro_batch_per_stage=(4, 2)),
        "has 4 beside 6",
    ),
    "pipeline.ddp": (
        {**pipe("1f1b"), "shard": Shard(carrier="ddp"), "layout": Layout(pp=2, dp_replicate=2), "batch": Batch(micro_batch=4)},
        {
            **pipe("1f1b"),
            "shard": Shard(carrier="fsdp2", stage=1),
            "layout": Layout(pp=2, dp_shard=2),
            "batch": Batch(micro_batch=4),
        },
        "shard.carrier = 'ddp' with layout.pp = 2",
    ),
    "pipeline.fsdp2": (
        {
            **pipe("zb-h1"),
            "shard": Shard(carrier="fsdp2", stage=1),
            "layout": Layout(pp=2, dp_shard=2),
            "batch": Batch(micro_batch=4),
        },
        {
            **pipe("1f1b"),
            "shard": Shard(carrier="fsdp2", stage=1),
            "layout": Layout(pp=2, dp_shard=2),
            "batch": Batch(micro_batch=4),
        },
        "shard.carrier = 'fsdp2' with schedule zb-h1 and 1 chunks",
    ),
    "pipeline.empty": (
        pipe("1f1b", layers_per_stage=(4, 0)),
        pipe("1f1b", layers_per_stage=(2, 2)),
        "pipeline.layers_per_stage = [4, 0]",
    ),
    "precision.fp16": (
        {"precision": Precision(cast="autocast", block="fp16", head="fp16")},
        {"precision": AUTOCAST},
        "loss scaler",
    ),
    "precision.none": ({"precision": Precision(block="bf16")}, {"precision": FP64}, "block bf16"),
    "precision.cast": ({"precision": Precision(cast="autocast")}, {"precision": AUTOCAST}, "'autocast' with block fp32"),
    "precision.weights": (
        {"precision": replace(WEIGHTS, head="fp32", gradient="fp32")},
        {"precision": WEIGHTS},
        "embedding bf16, block bf16, head fp32, tied",
    ),
    "precision.autocast": (
        {"precision": replace(AUTOCAST, head="fp32")},
        {"precision": replace(AUTOCAST, embedding="bf16")},
        "head fp32",
    ),
    "precision.ddp": (
        {**DDP, "precision": weights_cast(1, "ddp")},
        {**fsdp(stage=1), "precision": weights_cast(1, "fsdp2")},
        "carrier ddp",
    ),
    "precision.master": ({"precision": replace(FP32, optimizer_state="bf16")}, {"precision": FP64}, "optimizer_state bf16"),
    "precision.loss": ({"precision": replace(AUTOCAST, loss="bf16")}, {"precision": AUTOCAST}, "loss bf16"),
    "precision.gradient": (
        {"precision": WEIGHTS, "batch": Batch(micro_batch=4, accumulation=2)},
        {"precision": weights_cast(2, "none"), "batch": Batch(micro_batch=4, accumulation=2)},
        "'bf16' with accumulation 2",
    ),
    "precision.reduction": (
        {**DDP, "precision": replace(AUTOCAST, reduction="bf16")},
        {**TWO, "precision": replace(weights_cast(1, "fsdp2"), reduction="bf16")},
        "reduction = 'bf16'",
    ),
    "precision.fp8": ({"precision": replace(WEIGHTS, fp8="rowwise")}, {"precision": WEIGHTS}, "'rowwise' on h100-sxm"),
    "workload.sequence": (
        {"workload": replace(WORK, sequence_length=257)},
        {"workload": replace(WORK, sequence_length=256)},
        "256 positions",
    ),
    "workload.separate": ({"workload": replace(WORK, documents="separate")}, {}, "separate"),
    "model.names": (
        {"model": ModelRef(source="tiny", blocks=("b0", "b1"))},
        {"model": ModelRef(source="tiny")},
        "model.blocks = ['b0', 'b1'] in",
    ),
    "model.digest": (
        {"model": ModelRef(source="tiny", digest="0")},
        {"model": ModelRef(source="tiny", digest=SPEC.digest)},
        "digest = '0'",
    ),
    "loss.chunked": ({"loss": Loss(kind="chunked")}, {}, "family gemma2"),
    "adapter.targets": (
        {"adapter": Adapter(rank=4, targets=("qkv", "c_proj"))},
        {"adapter": Adapter(rank=4, targets=("qkv", "down"))},
        "adapter.targets names 'c_proj', and ",
    ),
    "adapter.layout": (
        {"adapter": Adapter(rank=4), "layout": Layout(tp=2)},
        {"adapter": Adapter(rank=4)},
        "adapter.rank = 4 with layout.tp = 2",
    ),
    "compile.compiler": ({"compile": Compile(mode="block")}, {}, "without a C++ compiler"),
    "data.pin": ({"data": Data(pin=True)}, {}, "without a GPU"),
    "data.prefetch": (
        {"data": Data(workers=1, prefetch=0)},
        {"data": Data(workers=1, prefetch=1)},
        "prefetch = 0 with 1 workers",
    ),
    "comm.env": ({"comm": Comm(env={"PATH": "/"})}, {"comm": Comm(env={"NCCL_DEBUG": "INFO"})}, "'PATH'"),
}
SPECS = {
    "precision.weights": replace(SPEC, tied_embeddings=True),
    "layout.width": llama(ffn=130),
    "layout.vocabulary": llama(vocab=3),
    "layout.experts": experts(6),
    "layout.expert_ranks": experts(6),
    "pipeline.even": llama(blocks=30),
    "workload.separate": replace(SPEC, family="module"),
    "loss.chunked": replace(SPEC, family="gemma2"),
}
PRICED_ONLY = {code for code in CASES if code.startswith(("layout.", "pipeline."))} - {
    "layout.order",
    "layout.unbuilt",
    "layout.devices",
}
"""Rules whose allowed neighbour this version does not run."""
RUN_CODES = {rule.code for rule in RULES if rule.scope == "run"}
SIZE_CODES = {rule.code for rule in RULES if rule.code.startswith("size.")}
CLUSTERS = {"compile.compiler": cpus(has_compiler=False), "data.pin": cpus()}


def test_every_rule_has_a_case_and_codes_are_unique():
    assert [rule.code for rule in RULES] == list(CASES)
    assert len(rules_table()) == len(RULES)


@pytest.mark.parametrize("code", CASES)
def test_a_rule_refuses_with_value_rule_and_fix(code):
    broken, neighbour, words = CASES[code]
    rule = next(rule for rule in RULES if rule.code == code)
    found = {v.code: v for v in check(plan_of(**broken), SPECS.get(code, SPEC), CLUSTERS.get(code, gpus()))}
    assert code in found, found
    assert words in found[code].message
    assert found[code].message.endswith(rule.statement)
    assert found[code].fix == rule.fix
    if code in PRICED_ONLY:  # allowed as far as any framework goes, and not run by this version
        spec = SPECS[code] if code in ("layout.experts", "layout.expert_ranks", "pipeline.even") else SPEC
        assert check(plan_of(**neighbour), spec, gpus(), to_run=False) == ()
        assert {v.code for v in check(plan_of(**neighbour), spec, gpus())} <= RUN_CODES
    else:
        assert check(plan_of(**neighbour), SPEC, gpus()) == ()


@pytest.mark.parametrize("code", CASES)
def test_rules_of_this_version_do_not_hold_back_a_price(code):
    plan, spec, cluster = plan_of(**CASES[code][0]), SPECS.get(code, SPEC), CLUSTERS.get(code, gpus())
    to_run = {v.code for v in check(plan, spec, cluster)}
    priced = {v.code for v in check(plan, spec, cluster, to_run=False)}
    assert to_run - priced == to_run & RUN_CODES
    assert (code in priced) == (code not in RUN_CODES)
    assert {v.code for v in not_run(plan, spec, cluster)} == to_run & RUN_CODES or not priced.isdisjoint(SIZE_CODES)


def test_the_arithmetic_is_told():
    def samples(micro, accumulation, ranks, wanted=256):
        plan = plan_of(
            layout=Layout(dp_replicate=ranks),
            shard=Shard(carrier="ddp"),
            batch=Batch(micro_batch=micro, accumulation=accumulation),
            workload=replace(WORK, samples_per_step=wanted),
        )
        return "; ".join(v.message for v in check(plan, SPEC) if v.code == "batch.samples")

    assert "256 / 8 = 32 a rank, accumulation would be 4" in samples(8, 1, 8)
    assert "256 / 8 = 32 a rank, and 32 / 5 = 6.4 is not whole" in samples(5, 6, 8)
    assert "256 / 6 = 42.67 is not whole" in samples(1, 42, 6)
    assert samples(8, 4, 8) == ""


def test_keys_and_values_may_be_repeated_evenly():
    spec = llama(heads=12, kv_heads=4, hidden=96)
    for tp, allowed in ((2, True), (4, True), (6, False), (12, True), (8, False)):
        assert ("layout.heads" in {v.code for v in check(plan_of(layout=Layout(tp=tp)), spec)}) is not allowed, tp


def test_carriers_go_with_data_parallel_ranks():
    model_parallel = plan_of(**pipe("1f1b"), batch=Batch(micro_batch=4, accumulation=2))
    assert check(model_parallel, SPEC, gpus(), to_run=False) == ()
    context = plan_of(layout=Layout(cp=2), shard=Shard(carrier="fsdp2", stage=3))
    assert check(context, SPEC, gpus(), to_run=False) == ()
    assert "shard.none" in {v.code for v in check(plan_of(layout=Layout(cp=2)), SPEC, to_run=False)}


def test_untied_ends_may_compute_in_fp32():
    wide = replace(WEIGHTS, head="fp32", gradient="fp32")
    assert check(plan_of(precision=wide), SPEC) == ()
    assert [v.code for v in check(plan_of(precision=replace(wide, gradient="bf16")), SPEC)] == ["precision.gradient"]


def test_rules_about_model_and_cluster_are_silent_without_them():
    for code in ("layout.devices", "workload.sequence", "model.digest", "compile.compiler", "data.pin", "loss.chunked"):
        assert check(plan_of(**CASES[code][0])) == ()


def test_ranks_of_a_cpu_host_are_not_devices():
    four = {"layout": Layout(dp_replicate=4), "shard": Shard(carrier="ddp"), "batch": Batch(micro_batch=2)}
    assert check(plan_of(**four), SPEC, cpus(num=2)) == ()


def test_a_cpu_host_is_not_flooded_with_ranks():
    cluster = cpus(num=2)
    ranks = 8 * cluster.host.num_cores + 1
    many = {"layout": Layout(dp_replicate=ranks), "shard": Shard(carrier="ddp"), "batch": Batch(micro_batch=1)}
    many["workload"] = replace(WORK, samples_per_step=ranks)
    (broken,) = check(plan_of(**many), SPEC, cluster)
    assert broken.code == "layout.devices"
    assert f"{ranks} ranks on {cluster.host.num_cores} cores" in broken.message


def test_require_names_everything_at_once():
    plan = plan_of(**TWO, pipeline=Pipeline(schedule="gpipe"), precision=Precision(block="bf16"))
    with pytest.raises(RuleBroken) as caught:
        require(plan)
    assert "gpipe" in caught.value.message
    assert "block bf16" in caught.value.message
    assert caught.value.exit_code == 3
    require(plan_of())


def test_settings_without_effect_are_told():
    assert inert(plan_of()) == ()
    assert inert(plan_of(optimizer=Optimizer(implementation="loop"))) == ()
    for part, words in [
        ({"loss": Loss(chunk_tokens=8)}, "loss.chunk_tokens = 8"),
        ({"overlap": Overlap(prefetch=2)}, "overlap.prefetch = 2"),
        ({"overlap": Overlap(bucket_bytes=1)}, "bucket_bytes = 1"),
        ({"overlap": Overlap(tensor=True)}, "overlap.tensor = true"),
        ({"data": Data(prefetch=4)}, "data.prefetch = 4"),
        ({"recompute": Recompute(every=2)}, "recompute.every = 2"),
        ({"comm": Comm(env={"NCCL_DEBUG": "INFO"})}, "NCCL_DEBUG"),
    ]:
        (found,) = inert(plan_of(**part))
        assert words in found
    assert inert(plan_of(**TWO, overlap=Overlap(prefetch=2))) == ()
    assert inert(plan_of(**DDP, overlap=Overlap(bucket_bytes=1))) == ()
