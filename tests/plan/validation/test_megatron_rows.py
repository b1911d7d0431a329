"""How a row that Megatron-LM ran becomes its plan and network."""

import pytest
from msgspec.structs import replace
from tests.plan.plan_values import llama, plan_of

from fullstride.plan.plan import Batch, Layout, Pipeline, Precision, Shard
from fullstride.plan.validation.megatron_rows import refine, stages_of_layout
from fullstride.plan.validation.networks import Network

NETWORK = Network(layers=12, hidden=512, ffn=2048, heads=8, kv_heads=8, vocab=50304, positions=1024)
PLAN = plan_of(
    layout=Layout(dp_replicate=4, tp=2, pp=2, sequence_parallel=False),
    shard=Shard(carrier="megatron", stage=0),
    pipeline=Pipeline(schedule="1f1b"),
    batch=Batch(micro_batch=4, accumulation=2),
    precision=Precision(cast="weights", embedding="bf16", block="bf16", head="bf16", gradient="fp32"),
)


def refined(name, given, words="DDP (zero0)", framework="megatron-ci", plan=PLAN, network=NETWORK, **columns):
    row = {"model": name, "layers": "12", "seq_len": "1024", "cp": "1", "zero_stage_or_fsdp": words, **columns}
    return refine(row, given, framework, network, plan, llama())


@pytest.mark.parametrize(
    ("text", "stages"),
    [("Et*3|(tt|)*6mL", (3, 2, 2, 2, 2, 2, 2, 0)), ("Et*2|(tt|)*5t|tmL", (2, 2, 2, 2, 2, 2, 1, 1)), ("Ettt|tttL", (3, 3))],
)
def test_stages_of_a_pipeline_layout(text, stages):
    assert stages_of_layout(text) == stages


def test_other_frameworks_are_left_alone():
    spec = llama()
    assert refine({}, {}, "torchtitan", NETWORK, PLAN, spec) == (PLAN, spec)


def test_recipes_decide_attention_workspace_and_dropout():
    deterministic = {"deterministic-mode": "True"}
    plan, spec = refined("gpt/gpt3_mcore_te_tp2_pp2", deterministic)
    assert plan.kernels.attention == "fused_softmax"
    assert plan.comm.env == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert spec.family == "megatron-te"
    assert any(saved.dtype == "bool" for s in spec.stacks[0].sublayers for saved in s.saved)
    assert refined("gpt/gpt3_mcore_te_tp2_pp2_resume", deterministic)[0].kernels.attention == "sdpa"
    local = refined("gpt/gpt3_mcore_tp2_pp2_resume", {**deterministic, "transformer-impl": "local"})
    assert local[0].kernels.attention == "fused_softmax"
    assert local[1].family == "megatron-local"
    free, spec = refined("gpt/gpt3_mcore_te_tp2_pp2_cp2", {}, cp="2")
    assert not free.comm.env
    assert not any(saved.dtype == "bool" for s in spec.stacks[0].sublayers for saved in s.saved)
    wide, _ = refined("gpt/x", {}, cp="2", gpu="GB200", gpus="8", gpus_per_node="4")
    assert wide.comm.env == plan.comm.env  # 32 MiB as well, by torch's own choice
    assert not refined("gpt/x", {}, cp="2", gpu="GB200", gpus="4", gpus_per_node="4")[0].comm.env
    assert not refined("gpt/x", {}, cp="2", gpu="H100", gpus="16", gpus_per_node="8")[0].comm.env
    assert refined("gpt/x", {"cuda-graph-impl": "transformer_engine"})[0].compile.graphs


def test_optimizer_sharding_follows_the_column():
    plan, _ = refined("gpt/x", {}, "distributed optimizer (zero1)")
    assert (plan.layout.dp_shard, plan.layout.dp_replicate, plan.shard.stage) == (4, 1, 1)
    plan, _ = refined("gpt/x_multi_dist_optimizer_instances", {}, "distributed optimizer (zero1)")
    assert (plan.layout.dp_shard, plan.layout.dp_replicate) == (2, 2)
    narrow = replace(PLAN, precision=replace(PLAN.precision, block="fp16"))
    assert refined("gpt/x", {}, plan=narrow)[0].precision.gradient == "fp16"


def test_layers_of_stages_are_taken_from_the_arguments():
    four = replace(PLAN, layout=replace(PLAN.layout, pp=4))
    uneven = {"decoder-first-pipeline-num-layers": "2", "decoder-last-pipeline-num-layers": "2"}
    assert refined("gpt/x", uneven, plan=four)[0].pipeline.layers_per_stage == (2, 4, 4, 2)
    stated = {"pipeline-model-parallel-layout": "Et*3|(ttt|)*3L"}
    pipeline = refined("gpt/x", stated)[0].pipeline
    assert pipeline.layers_per_stage == ()  # five stages are no multiple of two ranks
    pipeline = refined("gpt/x", {"pipeline-model-parallel-layout": "Ettt|(ttt|)*2tttL"})[0].pipeline
    assert (pipeline.layers_per_stage, pipeline.chunks, pipeline.schedule) == ((3, 3, 3, 3), 2, "interleaved")


def test_simumax_rows_share_over_context_ranks_too():
    network = Network(
        layers=4, hidden=512, ffn=2048, heads=8, kv_heads=8, vocab=1024, positions=0, gated=True, bias=False, rms=True
    )
    plan, spec = refined("llama", {}, framework="megatron-simumax", network=network, vocab="1000")
    assert plan.shard.stage == 1
    assert plan.loss.fused == "native"
    assert plan.kernels.gradient_fusion
    assert spec.vocab_size == 1000
