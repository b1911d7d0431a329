"""Rows to cases, conventions by source, error statistics, the constant-utilisation model; made-up rows of the public form."""

import csv
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fullstride.cluster.catalogue import DEVICES, assumed_cluster
from fullstride.cluster.cluster import Coefficients, MatmulPoint
from fullstride.errors import BadInput
from fullstride.plan.calibration import calibrated, calibration, calibration_for, words_of
from fullstride.plan.validation.conventions import CONVENTIONS, convention_of
from fullstride.plan.validation.errors import errors_of, ideal_seconds, naive_seconds
from fullstride.plan.validation.machines import kind_of_gpu, network_of
from fullstride.plan.validation.predict import predict_file, summary
from fullstride.plan.validation.rows import Case, Skip, arguments_of, read_rows

ROW = {
    "source": "mosaicml/llm-foundry README",
    "model": "MPT-x",
    "params_b": "",
    "layers": "24",
    "hidden": "2048",
    "ffn_hidden": "8192",
    "heads": "16",
    "kv_heads": "16",
    "vocab": "50368",
    "seq_len": "2048",
    "gpu": "A100-80GB-SXM",
    "gpus": "8",
    "gpus_per_node": "8",
    "interconnect_intra": "NVLink",
    "interconnect_inter": "RoCE 1600 Gbit/s per node",
    "tp": "1",
    "pp": "1",
    "vpp": "",
    "cp": "1",
    "ep": "1",
    "dp": "8",
    "zero_stage_or_fsdp": "FSDP FULL_SHARD (zero3)",
    "micro_batch": "8",
    "global_batch": "128",
    "precision": "amp_bf16",
    "recompute": "none",
    "flash_attention": "yes",
    "step_time_s": "1.9",
    "memory_gib": "",
    "static_memory_gib": "",
    "note": "",
}
MEGATRON = {
    **ROW,
    "source": "NVIDIA/Megatron-LM/test_cases/gpt/x",
    "zero_stage_or_fsdp": "distributed optimizer (zero1)",
    "precision": "bf16",
    "vocab": "",
    "step_time_s": "0.2",
    "memory_gib": "30",
    "static_memory_gib": "4.5",
}


def read(tmp_path, *rows, name="runs.csv", **more):
    path = tmp_path / name
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(ROW))
        writer.writeheader()
        writer.writerows(rows)
    return read_rows(path, **more)


def one(tmp_path, base=None, **changes):
    (item,) = read(tmp_path, {**(base or ROW), **changes})
    return item


@pytest.mark.parametrize(("stated", "taken"), [("", True), ("1.3", True), ("0.12", False), ("13", False), ("large", True)])
def test_layers_that_do_not_make_the_stated_parameters_are_left_out(tmp_path, stated, taken):
    found = one(tmp_path, params_b=stated)  # 24 x 12 x 2048^2 is 1.2 billion
    assert isinstance(found, Case) is taken
    assert taken or (found.reason == "the source's own numbers do not agree" and not found.eligible)


def test_torchtitan_publishes_what_its_allocator_reserved(tmp_path):
    row = {"source": "pytorch/torchtitan", "vocab": "128256", "recompute": "selective", "memory_gib": "60"}
    case = one(tmp_path, **row, gpu="H100")
    assert case.reserved
    assert case.plan.recompute.products == 0.5
    assert case.plan.shard.reshard == {"embedding": False, "head": False, "blocks.23": False}
    products = [len(s.matmuls) for s in case.spec.stacks[0].sublayers if s.matmuls]
    assert products == [3, 1, 2, 1]
    (done,) = predict_file([case])
    inside = sum(r.bytes for r in done.rows if r.kind == "fragmentation")
    assert done.peak_bytes > inside > 0
    many = one(tmp_path, **row, gpu="H100", pp="2", dp="4")
    assert many.plan.shard.stage == 1  # gathered throughout, whole gradients summed


def test_a_row_becomes_a_plan_a_network_and_a_machine(tmp_path):
    case = one(tmp_path)
    plan = case.plan
    assert (plan.layout.dp_shard, plan.shard.carrier, plan.shard.stage) == (8, "fsdp2", 3)
    assert (plan.batch.micro_batch, plan.batch.accumulation, plan.workload.samples_per_step) == (8, 2, 128)
    assert plan.precision.block == "bf16" and plan.precision.reduction == "fp32"
    expected = 24 * 12 * 2048**2 + 50368 * 2048 + 2048 * 2048
    assert case.spec.num_parameters == pytest.approx(expected, rel=1e-3)
    assert case.cluster.device == DEVICES["a100-sxm-80"]
    assert case.seconds == 1.9 and case.static_bytes is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden": ""}, "no hidden size published"),
        ({"gpus": ""}, "no GPUs published"),
        ({"tp": ""}, "no layout published"),
        ({"micro_batch": "", "global_batch": ""}, "no batch published"),
        ({"note": "NOT a decoder-only LM; x"}, "not a decoder-only network"),
        ({"step_time_s": ""}, "no time or memory published"),
        ({"gpus": "16"}, "layout and number of GPUs do not agree"),
        ({"layers": "many"}, "not a number"),
    ],
)
def test_what_says_too_little_is_left_out_with_its_reason(tmp_path, changes, reason):
    item = one(tmp_path, **changes)
    assert isinstance(item, Skip) and reason in item.reason and not item.eligible


def test_an_unknown_gpu_lowers_coverage(tmp_path):
    rows = read(tmp_path, ROW, {**ROW, "gpu": "X999"}, {**ROW, "layers": ""})
    result = summary({"runs.csv": rows}, {"runs.csv": predict_file(rows)})["files"]["runs.csv"]
    assert result["eligible"] == 2 and result["coverage_pct"] == 50.0
    assert sum(result["skipped"].values()) == 2


def test_missing_columns_are_bad_input(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(BadInput, match="no column 'source'"):
        read_rows(path)
    with pytest.raises(BadInput, match="cannot be read"):
        read_rows(tmp_path / "none.csv")


def test_pipeline_experts_and_precision_words(tmp_path):
    case = one(
        tmp_path,
        source="NVIDIA-NeMo/Megatron-Bridge@1 docs/performance-summary.md",
        model="Qwen3_x",
        gpu="GB200",
        gpus="64",
        gpus_per_node="4",
        interconnect_intra="NVLink5 NVL72",
        pp="4",
        vpp="3",
        ep="8",
        dp="16",
        tp="1",
        zero_stage_or_fsdp="DDP + distributed optimizer (zero1)",
        micro_batch="1",
        global_batch="512",
        precision="NVFP4",
        recompute="",
        ffn_hidden="768",
        kv_heads="4",
        note="26.02 container; 128 experts top8, moe ffn 768; x",
    )
    plan = case.plan
    assert (plan.pipeline.schedule, plan.pipeline.chunks, plan.layout.ep) == ("interleaved", 3, 8)
    assert plan.precision.fp8 == "nvfp4" and plan.precision.reduction == "bf16"
    assert plan.batch.accumulation == 32
    assert case.cluster.groups[0].num_devices == 64
    groups = {m.groups for stack in case.spec.stacks for s in stack.sublayers for m in s.matmuls}
    assert groups == {1, 128}


def test_arguments_in_a_note_shape_a_megatron_network(tmp_path):
    plain = one(tmp_path, MEGATRON)
    note = "env=dev; swiglu=True; disable-bias-linear=True; untie-embeddings-and-output-weights=True; sequence-parallel=True"
    other = one(tmp_path, MEGATRON, note=note)
    assert arguments_of(note)["swiglu"] == "True"
    assert plain.seconds is None and plain.plan.layout.sequence_parallel is False
    assert other.plan.layout.sequence_parallel is True
    more = 24 * 2048 * 8192 + 50304 * 2048
    assert other.spec.num_parameters - plain.spec.num_parameters == pytest.approx(more, rel=0.01)


def test_gpus_and_links_as_tables_write_them():
    assert kind_of_gpu("H100-96GB-HBM2e-500W (2.4 TB/s)") == "h100-sxm-96"
    assert kind_of_gpu("A100-SXM (80GB in paper; not stated in the CSV)") == "a100-sxm-80"
    assert kind_of_gpu("GB300") == "gb300" and kind_of_gpu("MI325X") == "mi325x" and kind_of_gpu("Z1") == "unknown"
    assert network_of("RDMA 400 Gbit/s per GPU", "h100-sxm", 8).value == 50e9
    assert network_of("RoCE 1600 Gbit/s per node", "a100-sxm-80", 8).value == 25e9
    assert network_of("8x HDR 200 Gbit/s per node", "a100-sxm-80", 8).value == 25e9
    assert network_of("IB EDR 100 Gbit/s per NODE", "v100-sxm-16", 8).value == pytest.approx(12.5e9 / 8)
    assert network_of("", "h100-sxm", 8).source == "assumed"


def test_each_source_states_its_conventions_once():
    stated = [item.stated for item in CONVENTIONS]
    assert all(stated)
    for item in CONVENTIONS:
        assert convention_of(f"somewhere {item.pattern} else") in CONVENTIONS
    assert convention_of("an unheard of blog").framework == "unknown"


@given(st.lists(st.floats(-90, 500), min_size=1, max_size=50))
def test_statistics(signed):
    found = errors_of(signed)
    sizes = sorted(map(abs, signed))
    assert found.n == len(signed) and found.worst_abs_pct == sizes[-1]
    assert sizes[0] <= found.median_abs_pct <= found.p90_abs_pct <= found.worst_abs_pct
    assert found.mean_abs_pct == pytest.approx(sum(sizes) / len(sizes), abs=1e-9)
    assert abs(found.bias_pct) <= found.mean_abs_pct + 1e-9


def test_statistics_of_known_numbers():
    found = errors_of([10, -20, 30, -40, 50, 0, 0, 0, 0, 0])
    assert (found.mean_abs_pct, found.median_abs_pct, found.worst_abs_pct, found.bias_pct) == (15, 5, 50, 3)
    assert found.p90_abs_pct == pytest.approx(41)
    assert errors_of([]) is None


def test_the_constant_utilisation_is_the_best_there_is(tmp_path):
    times = ["1.9", "2.5", "4.0", "1.0", "3.3"]
    cases = read(tmp_path, *({**ROW, "step_time_s": t} for t in times))

    def miss(scale):
        return sum(abs(scale * ideal_seconds(c) / c.seconds - 1) for c in cases) / len(cases)

    best = naive_seconds(cases)[0] / ideal_seconds(cases[0])
    assert all(miss(best) <= miss(best * factor) + 1e-12 for factor in (0.5, 0.8, 0.95, 1.05, 1.2, 2.0))
    flops = 6 * (24 * 12 * 2048**2 + 50368 * 2048) + 12 * 24 * 2048 * 2048
    assert ideal_seconds(cases[0]) == pytest.approx(128 * 2048 * flops / (8 * 312e12), rel=0.01)


def test_coefficients_can_be_given_and_calibrations_are_whole(tmp_path):
    slow = {("a100-sxm-80", "llm-foundry"): Coefficients(matmul_share=0.4)}
    (quick,) = predict_file(read(tmp_path, ROW))
    (other,) = predict_file(read(tmp_path, ROW, coefficients=slow))
    assert other.seconds > 1.3 * quick.seconds
    names = [entry.name for entry in (files("fullstride.plan") / "calibrations").iterdir()]
    for name in names:
        kinds = [kind for kind in sorted(DEVICES, key=len, reverse=True) if name.endswith(f"-{kind}.toml")]
        kind, framework = kinds[0], name[: -len(kinds[0]) - len("-.toml")]
        item = calibration(kind, framework)
        assert item is not None and (item.kind, item.framework) == (kind, framework)
        assert calibration_for(kind, framework) is item.coefficients
        assert item.rows >= item.networks > 0 and item.error_held_out > 0
        assert item.coefficients.source == f"calibration {framework} on {kind}"
    assert names
    assert calibration_for("a100-sxm-80", "nothing") is None


def test_what_the_driver_showed_counts_the_context(tmp_path):
    rows = ({**MEGATRON, "note": note} for note in ("x", "Mem = nvidia-smi max of all ranks"))
    allocated, shown = (item.peak_bytes for item in predict_file(read(tmp_path, *rows)))
    assert shown > allocated + 2**29


def test_a_prediction_of_a_plain_run_is_near(tmp_path):
    """A dense model on eight A100: between the peak and a quarter of it, whatever is calibrated."""
    case = one(tmp_path)
    (done,) = predict_file([case])
    assert isinstance(case, Case)
    assert ideal_seconds(case) < done.seconds < 4 * ideal_seconds(case)
    assert done.seconds == pytest.approx(sum(term.exposed_seconds for term in done.terms))
    assert done.error("time") == pytest.approx(100 * (done.seconds / 1.9 - 1))
    assert done.error("peak_memory") is None


def test_a_calibration_stands_in_where_nothing_was_measured():
    plain = assumed_cluster("h100-sxm-96", 8)
    ours, megatron = calibrated(plain, "fsdp2"), calibrated(assumed_cluster("h100-sxm", 8), "megatron")
    assert "torchtitan on h100-sxm-96" in words_of(ours) and "megatron-bridge" in words_of(megatron)
    assert words_of(plain).endswith("assumed")
    assert calibrated(ours, "megatron") is ours  # what a cluster brings of its own stays
    assert calibrated(assumed_cluster("l4", 1), "fsdp2").coefficients is None  # nothing was fitted on it
    known = replace(plain, matmuls=(MatmulPoint(dtype="bf16", m=1, n=1, k=1, seconds=1e-5),))
    assert calibrated(known, "fsdp2") is known
