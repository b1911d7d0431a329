"""Tensor parallelism: every family's weights cut exactly, what cannot be cut refused with the names that were looked at."""

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from fullstride.engine.anatomy import find
from fullstride.engine.anatomy_block import regions
from fullstride.engine.anatomy_region import Part, Slicing
from fullstride.engine.mesh import Mesh
from fullstride.engine.parallel.collectives import Ranks
from fullstride.engine.parallel.tensor import tensor_parallel
from fullstride.engine.parallel.tensor_look import Ends, _require_named, ends_of, look, refuse_uncut, try_on_meta
from fullstride.engine.parallel.tensor_parts import Border
from fullstride.engine.parity import run_cases
from fullstride.engine.parity_cases import make_case, model_of
from fullstride.engine.parity_models import FAMILIES, ONLY_FP32, PlainModel
from fullstride.errors import BadInput, RuleBroken
from fullstride.model.config import FAMILIES as KNOWN
from fullstride.plan.plan import Loss, Overlap, Recompute

CUT = sorted(set(FAMILIES) - {"plain"})
pytestmark = pytest.mark.filterwarnings("ignore:.*this architecture cannot use scaled_dot_product_attention:UserWarning")
FULL, PART = Recompute(mode="full"), Recompute(mode="norm_activation")
CHUNKS = Loss(kind="chunked", chunk_tokens=7)


def model(family="llama", **changes):
    return model_of(make_case(family, changes=changes or None))


def cut_blocks(built, tp, **named):
    anatomy = find(built)
    hidden = built.get_parameter(f"{anatomy.embedding}.weight").shape[1]
    return [region for block in anatomy.blocks for region in regions(built, block, hidden, tp, named)]


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", CUT)
def test_shares_of_all_ranks_make_up_each_weight(family, tp):
    built = model(family, **({"num_key_value_heads": 4} if family == "phi3" else {}))
    shapes = {name: tuple(param.shape) for name, param in built.named_parameters()}
    found = cut_blocks(built, tp)
    for region in found:
        for name, slicing in region.slicings.items():
            size = shapes[name][slicing.dim]
            owners = torch.zeros(size, dtype=torch.int64)
            for rank in range(tp):
                for lo, hi in slicing.cut(rank, tp).ranges:
                    owners[lo:hi] += 1
            assert owners.eq(slicing.copies).all(), name
        assert len(region.rows) >= 1 or any(slicing.dim == 2 for slicing in region.slicings.values())
    named = {name for region in found for name in (*region.slicings, *region.terms)}
    rows = {f"{path}.bias" for region in found for path in region.rows}
    for name in shapes:  # whatever a region holds is cut, a term, or the bias of a row
        if any(name.startswith(f"{region.path}.") for region in found):
            assert name in named | rows, name


def test_families_are_all_those_of_transformers_that_plans_know():
    assert {c["model_type"] for c in FAMILIES.values() if "model_type" in c} == set(KNOWN)


def test_a_vocabulary_that_does_not_divide_is_cut_in_unequal_runs():
    cuts = [Slicing(0, (Part(61),)).cut(rank, 4).ranges for rank in range(4)]
    assert cuts == [((0, 16),), ((16, 31),), ((31, 46),), ((46, 61),)]


def test_fused_weights_are_cut_part_by_part():
    found = cut_blocks(model("phi3"), 2)
    attention = next(r for r in found if r.path.endswith("layers.0.self_attn"))
    cut = attention.slicings["model.layers.0.self_attn.qkv_proj.weight"].cut(1, 2)
    assert cut.ranges == ((16, 32), (40, 48), (56, 64))
    mlp = next(r for r in found if r.path.endswith("layers.0.mlp"))
    assert mlp.slicings["model.layers.0.mlp.gate_up_proj.weight"].cut(0, 2).ranges == ((0, 24), (48, 72))


def test_key_value_heads_fewer_than_ranks_are_repeated():
    attention = cut_blocks(model(), 4)[0]
    slicing = attention.slicings["model.layers.0.self_attn.k_proj.weight"]
    assert [slicing.cut(rank, 4).ranges for rank in range(4)] == [((0, 8),), ((0, 8),), ((8, 16),), ((8, 16),)]
    assert slicing.copies == 2
    assert ("model.layers.0.self_attn", "num_key_value_groups", 1) in attention.settings


def test_user_names_products_that_neither_name_nor_shape_tells():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 32)

    built = PlainModel(modular=True)
    built.stack[0].feed = Odd()
    with pytest.raises(BadInput, match=r"what a, b, c in stack\.0\.feed is .*looked at a \(32, 64\), b \(64, 32\), c"):
        cut_blocks(built, 2)
    feed = cut_blocks(built, 2, **{"feed.a": "column", "feed.b": "row", "feed.c": "whole"})[1]
    assert (feed.columns, feed.rows) == (["stack.0.feed.a"], ["stack.0.feed.b"])
    assert set(feed.terms) == {"stack.0.feed.c.weight", "stack.0.feed.c.bias"}


class Alone(nn.Module):
    """A block whose own code needs all heads, though its attributes would say otherwise."""

    def __init__(self):
        super().__init__()
        self.heads = 4
        self.to_q, self.to_k, self.to_v, self.back = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).view(*x.shape[:2], 4, 8).transpose(1, 2) for f in (self.to_q, self.to_k, self.to_v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.back(mixed.transpose(1, 2).reshape(x.shape))


def stubborn():
    built = PlainModel(modular=True)
    built.stack[0].attention = Alone()
    return built


def with_outside():
    built = PlainModel(modular=True)
    built.bridge = nn.Linear(32, 32)
    return built


def headless():
    built = PlainModel(modular=True)
    built.to_vocab = nn.Identity()
    return built


def owning():
    built = PlainModel(modular=True)
    built.stack[0].attention.sink = nn.Parameter(torch.zeros(4))
    return built


def without_heads():
    built = PlainModel(modular=True)
    del built.stack[0].attention.heads
    return built


REFUSED = {
    "heads": (lambda: cut_blocks(model(), 3), RuleBroken, r"layout\.tp = 3, model\.layers\.0\.self_attn has 4 heads: .*whole"),
    "key_value_heads": (
        lambda: (
            cut_blocks(model(num_attention_heads=8, num_key_value_heads=2, head_dim=4, hidden_size=32), 8)
            and cut_blocks(model(num_attention_heads=12, num_key_value_heads=4, head_dim=4, hidden_size=48), 6)
        ),
        RuleBroken,
        "has 4 key-value heads: they are cut, or repeated, evenly",
    ),
    "fused_key_value_heads": (
        lambda: cut_blocks(model("phi3"), 4),
        RuleBroken,
        "qkv_proj joins queries with 2 key-value heads",
    ),
    "width": (lambda: cut_blocks(model(intermediate_size=46), 4), RuleBroken, r"mlp\.down_proj is 46 wide|_proj is 46 wide"),
    "expert_width": (
        lambda: cut_blocks(model("mixtral", intermediate_size=46), 4),
        RuleBroken,
        r"experts\.down_proj is 46 wide: tensor parallelism cuts widths evenly",
    ),
    "grouped_rows": (
        lambda: cut_blocks(model("qwen3_moe", moe_intermediate_size=24), 4),
        RuleBroken,
        r"mlp\.experts would have 6 columns of 4 bytes a rank: grouped products take rows of a multiple of 16 bytes",
    ),
    "products_in_the_block": (
        lambda: cut_blocks(model("plain"), 2),
        BadInput,
        r"stack\.0 holds products itself, .*looked at norm \(LayerNorm\), qkv \(Linear\), out \(Linear\)",
    ),
    "weights_that_nobody_knows": (lambda: cut_blocks(owning(), 2), BadInput, r"what stack\.0\.attention\.sink in .* is for"),
    "number_of_heads": (
        lambda: cut_blocks(without_heads(), 2),
        BadInput,
        r"does not say how many heads it has \(looked for num_attention_heads, num_heads",
    ),
    "own_sizes": (
        lambda: try_on_meta(stubborn(), cut_blocks(stubborn(), 2), Ranks(2, 0, "x")),
        BadInput,
        r"code does not take a rank's share of heads and columns .*looked at stack\.0\.attention: to_q, to_k, to_v, back",
    ),
    "dropout": (
        lambda: refuse_uncut(model("gpt2", resid_pdrop=0.1), find(model("gpt2")), 2),
        RuleBroken,
        r"\(Dropout\) draws dropout of 0\.1: tensor-parallel ranks would draw differently",
    ),
    "router_noise": (
        lambda: refuse_uncut(model("mixtral", router_jitter_noise=0.1), find(model("mixtral")), 2),
        RuleBroken,
        r"draws router noise of 0\.1",
    ),
    "head": (
        lambda: refuse_uncut(headless(), find(headless()), 2),
        BadInput,
        "has no nn.Linear that makes logits .looked at get_output_embeddings",
    ),
    "outside": (
        lambda: refuse_uncut(with_outside(), find(with_outside()), 2),
        BadInput,
        "bridge has weight, bias outside the blocks, which is neither embedding, norm nor head",
    ),
}


@pytest.mark.parametrize("what", sorted(REFUSED))
def test_what_cannot_be_cut_is_refused(what):
    make, kind, words = REFUSED[what]
    with pytest.raises(kind, match=words) as caught:
        make()
    assert caught.value.message.startswith("layout.tp = ")
    assert caught.value.fix


def test_one_rank_changes_nothing():
    case = make_case("llama")
    built = model()
    anatomy = find(built)
    assert look(built, anatomy, case.plan) is None
    assert tensor_parallel(built, anatomy, anatomy, case.plan, Mesh(case.plan.layout, torch.device("cpu")), None) is None
    assert not any("forward" in vars(module) for module in built.modules())


ELSEWHERE = {"llama", "gpt2", "olmo2", "qwen3", "mixtral", "deepseek_v3"}
"""Families that test_known_faults_of_numbers.py runs on four tensor-parallel ranks."""


def by_family(tp):
    for number, family in enumerate(CUT):
        if tp == 4 and family in ELSEWHERE:
            continue
        yield make_case(
            family,
            tp=tp,
            tied=number % 2 == 0,
            sequence_parallel=number % 3 != 0,
            dtype="fp32" if family in ONLY_FP32 else "fp64",
            recompute=(Recompute(), FULL, PART)[(number + tp // 2) % 3],
            loss=Loss() if family == "gemma2" else CHUNKS if (number + tp // 4) % 2 else Loss(),
            changes={"num_key_value_heads": 4} if family == "phi3" and tp == 4 else None,
        )


@pytest.mark.timeout(900)
@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
def test_every_family_equals_a_plain_loop(tp):
    cases = tuple(by_family(tp))
    outcomes = run_cases(cases, tp, timeout_seconds=600)
    assert len(outcomes) == len(cases) >= 10
    assert not [(o.name, o.errors) for o in outcomes if o.errors]


def test_a_named_part_that_no_block_has_is_refused():
    built = model()
    plan = make_case("llama", tp=2).plan
    for parts in ({"mlp.up_proj": "column"}, {"model.layers.1.mlp.up_proj": "column"}, {"up_proj": "column"}):
        _require_named(built, find(built), replace(plan, layout=replace(plan.layout, parts=parts)))
    with pytest.raises(BadInput, match=r"names 'nothing', which no block has \(one has .*mlp\.up_proj"):
        _require_named(built, find(built), replace(plan, layout=replace(plan.layout, parts={"nothing": "column"})))


MIXTURES = ("deepseek_v3", "mixtral", "qwen2_moe", "qwen3_moe")


@pytest.mark.parametrize("family", CUT)
def test_regions_of_all_families_begin_and_end_with_products_but_for_experts(family):
    built = model(family)
    found = ends_of(built, cut_blocks(built, 2))
    latent = family == "deepseek_v3"  # what reads the input is whole on every rank
    for path, ends in found.items():
        attends, experts = "att" in path, family in MIXTURES and "mlp" in path and not (latent and ".0." in path)
        assert ends == Ends(entry=not experts and not (attends and latent), exit=not experts), path
    assert len(found) == 2 * len(find(built).blocks)


class Altered(nn.Module):
    """A region that changes what it reads before its products, and what it makes behind the last."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return 0.5 * self.fc2(torch.relu(self.fc1(2.0 * x)))


def altered():
    built = PlainModel(modular=True, depth=1)
    built.stack[0].feed = Altered()
    return built


def test_a_region_that_changes_what_it_reads_or_makes_is_not_cut_into_parts():
    built = altered()
    found = ends_of(built, cut_blocks(built, 2))
    assert found == {"stack.0.attention": Ends(entry=True, exit=True), "stack.0.feed": Ends(entry=False, exit=False)}
    built.stack[0].attention = Altered()
    built.stack[0].attention.heads = 4
    plan = make_case("modular", tp=2).plan
    assert look(built, find(built), plan) is not None
    with pytest.raises(
        RuleBroken, match=r"overlap\.tensor = true: no region of PlainModel begins or ends with a product"
    ) as caught:
        look(built, find(built), replace(plan, overlap=Overlap(tensor=True)))
    assert caught.value.fix


@pytest.mark.parametrize("length", [1, 2, 5, 12])
@pytest.mark.parametrize("sequence", [True, False])
def test_parts_are_each_row_once(length, sequence):
    border = Border(Ranks(2, 0, "x"), sequence, 2)
    runs = border.runs(length)
    assert [n for lo, hi in runs for n in range(lo, hi)] == list(range(length)) and all(lo < hi for lo, hi in runs)
    assert len(runs) == min(2, length)
    whole = torch.randn(3, length * (2 if sequence else 1), 4)
    assert border.runs_inside(whole) == runs
    parts = [border.rows(whole, lo, hi) for lo, hi in runs]
    assert torch.equal(border.joined(parts), whole)


def overlapped():
    """Both borders in parts under what acts on them, on four ranks: lengths that do not divide, stages, compiled blocks."""
    for sequence in (True, False):
        yield make_case("modular", tp=4, overlap=True, sequence_parallel=sequence, micro_batch=1, accumulation=2)
        yield make_case("gpt2", tp=4, overlap=True, sequence_parallel=sequence, recompute=FULL, loss=CHUNKS)
        yield make_case("llama", tp=4, overlap=True, sequence_parallel=sequence, recompute=PART, dtype="fp32")
        yield make_case("modular", tp=2, ranks=2, stage=3, overlap=True, sequence_parallel=sequence, recompute=PART)
        yield make_case(
            "modular", tp=2, pp=2, layers=2, schedule="zb-h1", accumulation=3, overlap=True, sequence_parallel=sequence
        )
    yield make_case("deepseek_v3", tp=2, ranks=2, stage=2, carrier="flat", overlap=True, dtype="fp32", recompute=FULL)


@pytest.mark.timeout(900)
@pytest.mark.multi
@pytest.mark.slow
def test_products_in_parts_equal_a_plain_loop():
    outcomes = run_cases(tuple(overlapped()), 4, timeout_seconds=600)
    assert len(outcomes) == 11
    assert not [(o.name, o.errors) for o in outcomes if o.errors]


@pytest.mark.timeout(900)
@pytest.mark.multi
@pytest.mark.slow
def test_compiled_blocks_of_experts_and_of_parts_equal_a_plain_loop():
    exact = "fp32" if torch.__version__.startswith("2.11.") else "fp64"  # whose compiled layer norm does not run in fp64
    cases = (
        make_case("modular", tp=2, overlap=True, compiled=True, dtype=exact),
        make_case("modular", tp=2, overlap=True, compiled=True, dtype=exact, recompute=PART, sequence_parallel=False),
        make_case("llama", tp=2, overlap=True, compiled=True, recompute=PART, dtype="fp32"),
        *(make_case(f, tp=2, compiled=True, dtype="fp32", sequence_parallel=f != "qwen3_moe") for f in MIXTURES),
    )
    outcomes = run_cases(cases, 2, timeout_seconds=800)
    assert not [(o.name, o.errors) for o in outcomes if o.errors]


@pytest.mark.multi
@pytest.mark.slow
def test_named_parts_are_those_of_the_whole_model_on_every_stage():
    def named(**parts):
        case = make_case("modular", tp=2, pp=2, layers=2)
        return replace(case, name=str(parts), plan=replace(case.plan, layout=replace(case.plan.layout, parts=parts)))

    there, nowhere = run_cases((named(**{"stack.1.feed.2": "row"}), named(nothing="column")), 4, timeout_seconds=300)
    assert not there.errors, "one stage alone has it"
    assert any("layout.parts names 'nothing', which no block has" in line for line in nowhere.errors)
