"""The ledger over layouts: cuts, stages, pipelines, recomputation, tiers, adapters, in closed form."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.plan.plan_values import gpus, llama, plan_of, whole_rows

from fullstride.model.presets import preset_config
from fullstride.model.source import load_spec
from fullstride.plan.defaults import AUTOCAST, FP32, weights_cast
from fullstride.plan.ledger.local import local_of
from fullstride.plan.ledger.reserved import FRAGMENTATION
from fullstride.plan.ledger.table import ledger, moments_of, peak_device_bytes, peak_of
from fullstride.plan.ledger.totals import chance, fullest, static_bytes, totals
from fullstride.plan.plan import Adapter, Batch, Compile, Layout, Loss, Optimizer, Overlap, Pipeline, Recompute, Shard, Workload
from fullstride.plan.stages import blocks_per_stage, stages_of

GPUS = gpus()
NARROW = weights_cast(2, "fsdp2")


def plan_for(spec=None, micro=2, accumulation=4, stage=3, precision=NARROW, sequence=64, **parts):
    layout = parts.pop("layout", Layout(dp_shard=2))
    samples = micro * accumulation * layout.data_parallel
    base = {
        "workload": Workload(sequence_length=sequence, samples_per_step=samples),
        "layout": layout,
        "shard": Shard(carrier="fsdp2" if layout.dp_shard > 1 else "none", stage=stage if layout.dp_shard > 1 else 0),
        "batch": Batch(micro_batch=micro, accumulation=accumulation),
        "precision": precision,
    }
    return plan_of(**{**base, **parts})


def sums(plan, spec, *kinds, stage=None, name=""):
    rows = ledger(plan, spec, GPUS)
    return sum(r.bytes for r in rows if r.kind in kinds and stage in (None, r.stage) and r.name.startswith(name))


layouts = st.builds(
    Layout,
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 3]),
    cp=st.sampled_from([1, 2]),
    dp_shard=st.sampled_from([1, 2, 4]),
    sequence_parallel=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(layout=layouts, blocks=st.integers(1, 9), schedule=st.sampled_from(["1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"]))
def test_stages_hold_the_whole_model_once(layout, blocks, schedule):
    spec = llama(blocks=blocks)
    plan = plan_for(layout=layout, pipeline=Pipeline(schedule=schedule, chunks=2 if schedule == "interleaved" else 1))
    stages = stages_of(plan, spec)
    assert sum(stage.num_blocks for stage in stages) == blocks
    assert [stage.has_embedding for stage in stages] == [True] + [False] * (len(stages) - 1)
    assert [stage.has_head for stage in stages] == [False] * (len(stages) - 1) + [True]
    assert {stage.rank for stage in stages} == set(range(layout.pp))
    counts = blocks_per_stage(plan, spec)
    assert max(counts) - min(counts) <= 1
    for rank in range(layout.pp):
        chunks = sorted(stage.chunk for stage in stages if stage.rank == rank)
        assert chunks == list(range(len(chunks)))
    if schedule == "zb-v" and layout.pp > 1:
        assert stages[0].rank == stages[-1].rank == 0


@settings(max_examples=60, deadline=None)
@given(layout=layouts, tied=st.booleans())
def test_parameters_of_all_ranks_sum_to_the_model(layout, tied):
    spec = replace(llama(blocks=6, vocab=104), tied_embeddings=tied)
    plan = plan_for(layout=layout, pipeline=Pipeline(schedule="1f1b" if layout.pp > 1 else "none"))
    total = sum(local_of(plan, spec, rank).count for rank in range(layout.pp)) * layout.tp
    norms = 64 * (1 + 2 * 6) * (layout.tp - 1)  # whole on every tensor-parallel rank
    copies = 104 * 64 if tied and layout.pp > 1 else 0  # the last stage's own table
    assert total == spec.num_parameters + norms + copies


@settings(max_examples=40, deadline=None)
@given(tp=st.sampled_from([1, 2, 4]), sp=st.booleans(), cp=st.sampled_from([1, 2]), micro=st.integers(1, 3))
def test_kept_bytes_with_tensor_sequence_and_context_parallelism(tp, sp, cp, micro):
    """Korthikanti et al.'s split of a block: norms and inputs of column products stand whole without sequence parallelism."""
    spec = llama(blocks=4, vocab=128)
    plan = plan_for(layout=Layout(tp=tp, cp=cp, sequence_parallel=sp), micro=micro, compile=Compile(mode="block"))
    tokens = micro * 64 / cp
    stream = 2 * (2 * 64 + 2 * 64)  # two norms' inputs, inputs of qkv and of gate_up
    inside = 2 * ((2 * 64 + 2 * 32) + 64 + 2 * 128 + 128)  # q k v out, input of out, gate and up, input of down
    expected = 4 * inside / tp + (4 * stream + 2 * 64) / (tp if sp else 1) + 2 * 64  # the final norm's input; the head's, whole
    assert sums(plan, spec, "activations") == pytest.approx(tokens * expected, abs=8)


@settings(max_examples=40, deadline=None)
@given(pp=st.integers(2, 6), m=st.integers(1, 12), schedule=st.sampled_from(["1f1b", "gpipe", "zb-h1"]))
def test_in_flight_copies_follow_the_schedule(pp, m, schedule):
    spec = llama(blocks=2 * pp)
    one = plan_for(layout=Layout(), accumulation=m)
    each = sums(one, spec, "activations", name="mlp.activation") / (2 * pp)
    plan = plan_for(layout=Layout(pp=pp), accumulation=m, pipeline=Pipeline(schedule=schedule))
    for rank in range(pp):
        count = {"gpipe": m, "1f1b": min(m, pp - rank), "zb-h1": min(m, pp)}[schedule]
        assert sums(plan, spec, "activations", stage=rank, name="mlp.activation") == pytest.approx(2 * count * each)


def test_parts_of_a_product_stand_beside_it_where_exchange_is_overlapped():
    spec, beside = llama(), Overlap(tensor=True)
    plan = plan_for(layout=Layout(tp=2, dp_shard=2), overlap=beside)
    widest = max(m.n for s in spec.stacks[0].sublayers for m in s.matmuls)
    parts = "parts of one product"
    assert sums(plan, spec, "temporary", name=parts) == 2 * 64 * max(spec.hidden_size, widest // 2) * 2
    assert sums(replace(plan, overlap=Overlap()), spec, "temporary", name=parts) == 0
    assert sums(plan_for(layout=Layout(dp_shard=4), overlap=beside), spec, "temporary", name=parts) == 0


def test_selective_recomputation_keeps_a_regions_sum_in_the_place_of_its_term():
    spec = llama()
    cut, whole = (
        plan_for(layout=Layout(tp=2, dp_shard=2, sequence_parallel=cut), recompute=Recompute(mode="norm_activation"))
        for cut in (True, False)
    )
    stream = 2 * 64 * spec.hidden_size * 2
    for name in ("attn.out", "mlp.down"):
        assert sums(whole, spec, "activations", name=name) == spec.num_blocks * stream
        assert sums(cut, spec, "activations", name=name) == spec.num_blocks * stream / 2


def test_stages_with_their_own_micro_batches():
    """The last stage works on twice the samples at a time, and keeps as many of them as it must."""
    spec, name = llama(blocks=4), "mlp.activation"
    even = plan_for(layout=Layout(pp=2), micro=1, accumulation=8, pipeline=Pipeline(schedule="1f1b"))
    own = replace(even, pipeline=Pipeline(schedule="1f1b", micro_batch_per_stage=(1, 2)))
    one = sums(even, spec, "activations", stage=1, name=name)
    assert sums(own, spec, "activations", stage=1, name=name) == 2 * one
    assert sums(own, spec, "logits", stage=1) == 2 * sums(even, spec, "logits", stage=1)
    assert sums(own, spec, "activations", stage=0, name=name) >= sums(even, spec, "activations", stage=0, name=name)


def test_interleaving_multiplies_the_first_stage():
    """1 + (p - 1) / (p v) of 1F1B's first stage (Korthikanti et al., section 4)."""
    spec, p, v = llama(blocks=24), 4, 3
    flat = plan_for(layout=Layout(pp=p), accumulation=16, pipeline=Pipeline(schedule="1f1b"))
    cut = plan_for(layout=Layout(pp=p), accumulation=16, pipeline=Pipeline(schedule="interleaved", chunks=v))
    name = "mlp.activation"
    ratio = sums(cut, spec, "activations", stage=0, name=name) / sums(flat, spec, "activations", stage=0, name=name)
    assert ratio == pytest.approx(1 + (p - 1) / (p * v))


def test_logits_stand_on_the_last_stage_cut_by_tensor_parallelism():
    spec = llama(vocab=100)
    plan = plan_for(layout=Layout(tp=4, pp=2), pipeline=Pipeline(schedule="1f1b"), precision=FP32)
    rows = [r for r in ledger(plan, spec, GPUS) if r.kind == "logits"]
    assert {r.stage for r in rows} == {1}
    assert sum(r.bytes for r in rows if "loss" in r.moments) == 2 * 64 * 25 * (4 + 4)
    torchs = replace(plan, loss=Loss(fused="operators"))
    assert sum(r.bytes for r in ledger(torchs, spec, GPUS) if r.kind == "logits" and "loss" in r.moments) == 2 * 64 * 25 * 16


def test_peaks_are_of_the_fullest_rank():
    spec = llama(blocks=8)
    plan = plan_for(layout=Layout(pp=2, dp_shard=2), pipeline=Pipeline(schedule="1f1b"), accumulation=8)
    rows = ledger(plan, spec, GPUS)
    peaks = [peak_of(moments_of(rows, stage=rank)).bytes for rank in range(2)]
    assert peak_of(moments_of(rows)).bytes == max(peaks)
    assert fullest(rows) == peaks.index(max(peaks))
    for rank in range(2):
        own = [r for r in rows if r.stage == rank]
        inside = peak_of(moments_of(rows, inside=True, stage=rank)).bytes
        assert own[-1].kind == "fragmentation"
        assert own[-1].bytes == round(FRAGMENTATION * inside)


@settings(max_examples=60, deadline=None)
@given(
    pp=st.integers(1, 6),
    blocks=st.integers(6, 14),
    schedule=st.sampled_from(["1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"]),
    m=st.integers(1, 8),
    carrier=st.sampled_from(["fsdp2", "megatron"]),
)
def test_fewer_ranks_give_the_same_peak(pp, blocks, schedule, m, carrier):
    spec = llama(blocks=blocks)
    pipe = Pipeline(schedule=schedule, chunks=2 if schedule in ("interleaved", "zb-v") else 1)
    shard = Shard(carrier=carrier, stage=1)
    plan = plan_for(layout=Layout(pp=pp, dp_shard=2), accumulation=m, pipeline=pipe, shard=shard)
    assert peak_device_bytes(plan, spec, GPUS) == peak_of(moments_of(ledger(plan, spec, GPUS))).bytes


def test_first_step_and_checkpoint():
    spec = llama()
    for plan in (plan_for(layout=Layout()), plan_for(), plan_for(shard=Shard(carrier="megatron", stage=1))):
        rows = ledger(plan, spec, GPUS)
        at = {m.name: m.bytes for m in moments_of(rows, inside=True)}
        late = sum(r.bytes for r in rows if r.kind == "optimizer" and "load" not in r.moments)
        fullest_before = max(at[name] for name in ("forward_end", "loss", "backward", "backward_end"))
        assert at["first_step"] == fullest_before - late
        assert at["checkpoint"] == static_bytes(rows)
        assert at["checkpoint"] >= at["load"]
        assert (late > 0) == (plan.shard.carrier == "megatron")


def test_recompute_of_some_blocks_and_offloaded_inputs():
    spec, tokens = llama(blocks=4), 2 * 64
    stream = tokens * 64 * 2
    some = plan_for(layout=Layout(), recompute=Recompute(mode="full", blocks=3))
    assert sums(some, spec, "activations", name="block inputs") == 3 * stream
    away = plan_for(layout=Layout(), recompute=Recompute(mode="full", offload="cpu"))
    assert sums(away, spec, "host") == 4 * stream
    assert sums(away, spec, "activations", name="block inputs") == 2 * stream
    assert totals(ledger(away, spec, GPUS), GPUS).host_bytes == 4 * stream
    disk = plan_for(layout=Layout(), recompute=Recompute(mode="full", offload="nvme"))
    assert totals(ledger(disk, spec, GPUS), GPUS).disk_bytes == 4 * stream


def test_recompute_of_attention_keeps_all_but_its_results():
    spec = llama(blocks=4)
    none, core = (plan_for(layout=Layout(), recompute=Recompute(mode=mode)) for mode in ("none", "attention"))
    results = 2 * 64 * 4 * (16 * 2 + 4)
    assert sums(none, spec, "activations") - sums(core, spec, "activations") == 4 * results
    assert sums(core, spec, "recompute") == results


def test_attention_alone_saves_less_than_whole_blocks():
    """Folklore has it the other way round; under a flash kernel attention's own part of what is kept is small."""
    spec = load_spec("llama3-8b")
    shape = {"layout": Layout(), "sequence": 4096, "micro": 1, "compile": Compile(mode="block")}
    none, core, full = (plan_for(**shape, recompute=Recompute(mode=mode)) for mode in ("none", "attention", "full"))
    kept = [sums(plan, spec, "activations") for plan in (none, core, full)]
    assert kept[0] > kept[1] > kept[2]
    assert 0.05 < 1 - kept[1] / kept[0] < 0.15
    assert kept[2] < 0.2 * kept[0]


def test_offload_gathers_no_whole_gradients():
    spec = llama()
    plan = plan_for(layout=Layout(dp_shard=4), stage=2, optimizer=Optimizer(cpu_share=1.0))
    shares = [r.bytes for r in ledger(plan, spec, GPUS) if r.kind in ("gradients", "host")]
    assert max(shares) <= 12 * whole_rows(spec, 4)


@settings(max_examples=30, deadline=None)
@given(cpu=st.sampled_from([0.0, 0.25, 0.5]), nvme=st.sampled_from([0.0, 0.25, 0.5]), ranks=st.sampled_from([1, 2, 4]))
def test_optimizer_states_are_somewhere(cpu, nvme, ranks):
    spec = llama()
    plan = plan_for(layout=Layout(dp_shard=ranks), optimizer=Optimizer(cpu_share=cpu, nvme_share=nvme), precision=NARROW)
    device = sums(plan, spec, "master", "optimizer")
    host = sums(plan, spec, "host", name="masters and moments")
    disk = sums(plan, spec, "disk", name="masters and moments")
    assert device + host + disk == pytest.approx(12 * whole_rows(spec, ranks), abs=4)
    assert host == pytest.approx(cpu * 12 * whole_rows(spec, ranks), abs=1)
    assert (sums(plan, spec, "host", name="ring") > 0) == (nvme > 0)


@settings(max_examples=20, deadline=None)
@given(
    copies=st.sampled_from([1, 2, 4]),
    shard=st.sampled_from([2, 4]),
    cp=st.sampled_from([1, 2]),
    carrier=st.sampled_from(["fsdp2", "megatron"]),
)
def test_hybrid_sharding_shares_within_a_copy(copies, shard, cp, carrier):
    """Copies of the sharded model hold the same; context parallel ranks share states too."""
    spec = llama(vocab=128)
    layout = Layout(dp_replicate=copies, dp_shard=shard, cp=cp, sequence_parallel=False)
    plan = plan_for(layout=layout, shard=Shard(carrier=carrier, stage=1))
    assert sums(plan, spec, "optimizer") == pytest.approx(8 * spec.num_parameters / (shard * cp), abs=1)


def test_adapters_have_all_states_and_frozen_weights_none():
    spec, rank = llama(blocks=4), 8
    plan = plan_for(layout=Layout(), adapter=Adapter(rank=rank, targets=("qkv", "down")), precision=weights_cast(4, "none"))
    low = 4 * rank * ((64 + 128) + (128 + 64))
    assert local_of(plan, spec).trainable == low
    assert sums(plan, spec, "optimizer") == 8 * low
    assert sums(plan, spec, "master") == 4 * low
    assert sums(plan, spec, "gradients") == 4 * low
    assert sums(plan, spec, "weights") == 2 * (spec.num_parameters + low)
    full = plan_for(layout=Layout(), precision=weights_cast(4, "none"))
    assert sums(plan, spec, "activations") < sums(full, spec, "activations") + low * 2 * 64


def test_experts_have_a_data_parallel_degree_of_their_own():
    config = dict(preset_config("olmoe-1b-7b")) if "olmoe-1b-7b" in _presets() else _mixture()
    spec = _spec(config)
    base = plan_for(layout=Layout(dp_shard=8), sequence=64)
    cut = plan_for(layout=Layout(dp_shard=8, ep=4), sequence=64)
    local = local_of(cut, spec)
    experts = sum(p.count for s in spec.stacks for sub in s.sublayers for p in sub.parameters if p.role == "expert")
    experts *= spec.stacks[0].count
    assert local.experts == experts // 4
    assert local.count == spec.num_parameters - experts + experts // 4
    assert sums(cut, spec, "optimizer") == pytest.approx(sums(base, spec, "optimizer"), abs=64)  # 8 ranks hold each state once


def _presets():
    from fullstride.model.presets import PRESETS

    return PRESETS


def _mixture():
    return {
        "model_type": "mixtral",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 128,
        "max_position_embeddings": 128,
    }


def _spec(config):
    from fullstride.model.config import spec_from_config

    return spec_from_config(config, "mixture")


def test_chance_of_running_out():
    gib = 2**30
    assert chance(40 * gib, 38 * gib, gib, 80 * gib) < 1e-9
    assert chance(80 * gib, 76 * gib, gib, 80 * gib) == pytest.approx(0.5)
    assert chance(100 * gib, 96 * gib, gib, 80 * gib) > 0.999
    rising = [chance(x * gib, 0.95 * x * gib, gib, 80 * gib) for x in range(70, 90)]
    assert rising == sorted(rising)
    spec = load_spec("llama3-8b")
    plan = plan_for(layout=Layout(dp_shard=8), sequence=8192, micro=1, accumulation=1)
    found = totals(ledger(plan, spec, GPUS), GPUS)
    assert found.peak_allocated_bytes < found.peak_reserved_bytes < found.peak_device_bytes
    narrow, shards = 8192 * 128256 * 2, 4 * spec.num_parameters / 8
    gathers = 2 * (128256 * 4096 + sum(p.count for s in spec.stacks[0].sublayers for p in s.parameters))
    more = FRAGMENTATION * found.peak_allocated_bytes + narrow + shards + gathers
    assert found.peak_reserved_bytes - found.peak_allocated_bytes == pytest.approx(more, rel=1e-3)


@settings(max_examples=60, deadline=None)
@given(
    layout=layouts,
    mode=st.sampled_from(["none", "norm_activation", "attention", "full"]),
    precision=st.sampled_from([FP32, AUTOCAST, NARROW]),
    carrier=st.sampled_from(["fsdp2", "megatron", "deepspeed"]),
    fp8=st.sampled_from(["off", "tensorwise"]),
)
def test_every_layout_is_priced(layout, mode, precision, carrier, fp8):
    spec = llama(blocks=6)
    shard = Shard(carrier=carrier, stage=2)
    plan = plan_for(
        layout=layout,
        shard=shard,
        precision=replace(precision, fp8=fp8),
        recompute=Recompute(mode=mode),
        pipeline=Pipeline(schedule="1f1b" if layout.pp > 1 else "none"),
    )
    rows = ledger(plan, spec, GPUS)
    assert {r.stage for r in rows} == set(range(layout.pp))
    assert all(r.bytes >= 0 and r.moments and r.source for r in rows)
    assert totals(rows, GPUS).peak_allocated_bytes > 0
