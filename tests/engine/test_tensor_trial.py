"""Code that does not go with a rank's share of heads and columns is refused by its numbers, whatever names and shapes say."""

import json
import math

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from msgspec.structs import replace
from torch import nn
from torch.nn import functional

from fullstride.engine.anatomy import find
from fullstride.engine.anatomy_block import regions
from fullstride.engine.parallel.tensor_look import look
from fullstride.engine.parallel.tensor_trial import is_tested, try_numbers
from fullstride.engine.parity import batches
from fullstride.engine.parity_cases import make_case, model_of
from fullstride.engine.parity_models import FAMILIES, PlainModel
from fullstride.engine.run import prepare
from fullstride.errors import BadInput, RuleBroken

WIDTH, HEADS = 32, 4
CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:.*this architecture cannot use scaled_dot_product_attention:UserWarning")


class Attention(nn.Module):
    """Two key-value heads for four of queries; `pairing`: which queries read which keys."""

    def __init__(self, pairing="neighbours", innermost=False):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.pairing, self.innermost = HEADS, 2, pairing, innermost
        self.wq, self.wo = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wk, self.wv = nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH // 2)

    def heads(self, made, count):
        if self.innermost:
            return made.view(*made.shape[:2], -1, count).permute(0, 3, 1, 2)
        return made.view(*made.shape[:2], count, -1).transpose(1, 2)

    def forward(self, x):
        q = self.heads(self.wq(x), self.n_heads)
        k, v = (self.heads(product(x), self.n_kv_heads) for product in (self.wk, self.wv))
        times = self.n_heads // self.n_kv_heads
        if self.pairing == "neighbours":
            k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        else:
            k, v = k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        order = (0, 2, 3, 1) if self.innermost else (0, 2, 1, 3)
        return self.wo(mixed.permute(order).reshape(*x.shape[:2], -1))


class Fused(nn.Module):
    """Queries, keys and values in one product: part behind part, or head by head."""

    def __init__(self, way):
        super().__init__()
        self.num_heads, self.way = HEADS, way
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        size = (self.num_heads, 3) if self.way == "heads" else (3, self.num_heads)
        parts = self.qkv(x).view(*x.shape[:2], *size, -1)
        q, k, v = (p.transpose(1, 2) for p in parts.unbind(3 if self.way == "heads" else 2))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(*x.shape[:2], -1))


class Feed(nn.Module):
    """An MLP; `inside` stands between its products, `behind` after them."""

    def __init__(self, inside=functional.gelu, behind=lambda made, x: made, halves=1):
        super().__init__()
        self.fc1, self.fc2, self.inside, self.behind = nn.Linear(WIDTH, 64 * halves), nn.Linear(64, WIDTH), inside, behind

    def forward(self, x):
        return self.behind(self.fc2(self.inside(self.fc1(x))), x)


class Shifting(nn.Module):
    """A block that mixes each token with the one before it."""

    def __init__(self, like):
        super().__init__()
        self.before, self.between, self.attention, self.feed = like.before, like.between, like.attention, like.feed

    def forward(self, x):
        x = x + functional.pad(x, (0, 0, 1, -1))
        x = x + self.attention(self.before(x))
        return x + self.feed(self.between(x))


def built(attention=None, feed=None, wrap=lambda block: block):
    model = PlainModel(modular=True, depth=2)
    for index, block in enumerate(model.stack):
        block.attention = attention() if attention else block.attention
        block.feed = feed() if feed else block.feed
        model.stack[index] = wrap(block)
    return model


def looked(model, *, tp=2, sequence=True, **parts):
    plan = make_case("modular", tp=tp, sequence_parallel=sequence).plan
    return look(model, find(model), replace(plan, layout=replace(plan.layout, parts=parts)))


OTHER_NUMBERS = "from the ranks' shares than from the whole"
REFUSED = {
    "keys_of_other_queries": (lambda: built(lambda: Attention("tiled")), r"stack\.0\.attention .*" + OTHER_NUMBERS),
    "heads_innermost": (lambda: built(lambda: Attention(innermost=True)), r"stack\.0\.attention .*looked at wq, wo, wk, wv"),
    "gate_and_up_in_turns": (
        lambda: built(feed=lambda: Feed(lambda y: y[..., ::2].sigmoid() * y[..., 1::2], halves=2)),
        r"stack\.0\.feed \(Feed\) makes other numbers .*looked at fc1, fc2",
    ),
    "across_the_width": (lambda: built(feed=lambda: Feed(lambda y: y.softmax(-1))), r"stack\.0\.feed .*" + OTHER_NUMBERS),
    "behind_the_sum": (lambda: built(feed=lambda: Feed(behind=lambda y, x: y.tanh())), r"stack\.0\.feed .*" + OTHER_NUMBERS),
    "residual_inside": (lambda: built(feed=lambda: Feed(behind=lambda y, x: y + x)), r"stack\.0\.feed .*" + OTHER_NUMBERS),
    "constant_inside": (lambda: built(feed=lambda: Feed(behind=lambda y, x: y + 1.0)), r"stack\.0\.feed .*" + OTHER_NUMBERS),
}


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("what", sorted(REFUSED))
def test_code_that_makes_other_numbers_from_shares_is_refused(what, sequence):
    make, words = REFUSED[what]
    with pytest.raises(BadInput, match=words) as caught:
        looked(make(), sequence=sequence)
    assert caught.value.message.startswith("layout.tp = 2: ")
    assert "layout.tp = 1" in caught.value.fix


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(
    "make",
    [
        lambda: built(Attention),
        lambda: built(feed=lambda: Feed(lambda y: y.chunk(2, -1)[0].sigmoid() * y.chunk(2, -1)[1], halves=2)),
        lambda: built(feed=lambda: Feed(behind=lambda y, x: 0.5 * y)),
        lambda: built(feed=lambda: Feed(behind=lambda y, x: y.mul_(2.0))),
    ],
    ids=["keys of neighbours", "gate before up", "scaled", "scaled in place"],
)
def test_code_that_goes_with_shares_is_taken(make, tp):
    assert looked(make(), tp=tp) is not None


@pytest.mark.parametrize(("way", "runs"), [("parts", ((16, 32), (48, 64), (80, 96))), ("heads", ((48, 96),))])
def test_fused_queries_keys_and_values_are_cut_as_the_code_reads_them(way, runs):
    """Both ways have the same name and shape."""
    seen = looked(built(lambda: Fused(way)))
    attention = next(region for region in seen.regions["stack.1"] if region.path == "stack.1.attention")
    assert attention.slicings["stack.1.attention.qkv.weight"].cut(1, 2).ranges == runs


def test_code_that_looks_across_positions_keeps_the_whole_sequence():
    with pytest.raises(
        BadInput, match=r"stack\.0 \(Shifting\) makes .*looks across positions outside attention and feed"
    ) as caught:
        looked(built(wrap=Shifting))
    assert "layout.sequence_parallel = false" in caught.value.fix
    assert looked(built(wrap=Shifting), sequence=False) is not None


class Around(PlainModel):
    """A model whose top level does something of its own with the hidden state."""

    between, behind = (staticmethod(lambda x: x) for _ in range(2))

    def __init__(self):
        super().__init__(modular=True, depth=2)

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.stack:
            x = self.between(block(x))
        return self.to_vocab(self.last_norm(self.behind(x)))


def around(**does):
    model = Around()
    for name, code in does.items():
        setattr(model, name, code)
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: around(between=lambda x: x - x.mean(1, keepdim=True)),
            "makes other numbers where .* of the sequence: it looks",
        ),
        (
            lambda: around(behind=lambda x: x - x.mean(1, keepdim=True)),
            "makes other numbers where .* of the sequence: it looks",
        ),
        (
            lambda: around(between=lambda x: x + torch.linspace(0, 1, 4)[:, None]),
            r"does not run where .*tensor a \(2\) must match",
        ),
    ],
    ids=["between blocks", "behind the last", "positions of its own"],
)
def test_a_top_level_that_looks_across_positions_keeps_the_whole_sequence(make, words):
    with pytest.raises(BadInput, match=r"layout\.tp = 2: the code of Around around stack " + words) as caught:
        looked(make())
    assert "layout.sequence_parallel = false" in caught.value.fix
    assert looked(make(), sequence=False) is not None


def test_a_top_level_that_takes_positions_one_by_one_is_taken():
    assert looked(around(between=lambda x: 0.5 * x, behind=torch.tanh)) is not None


def test_blocks_that_return_tuples_are_followed():
    class Pair(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.before, self.between, self.attention, self.feed = block.before, block.between, block.attention, block.feed

        def forward(self, x):
            x = x + self.attention(self.before(x))
            return x + self.feed(self.between(x)), x.detach()

    model = around(between=lambda made: made[0])
    for index, block in enumerate(model.stack):
        model.stack[index] = Pair(block)
    assert looked(model) is not None
    model.between = lambda made: made[0] - made[0].mean(1, keepdim=True)
    with pytest.raises(BadInput, match="around stack makes other numbers where ranks hold parts of the sequence"):
        looked(model)


# What stands where.


class Ends(PlainModel):
    """Norms in front of the blocks, behind them, and behind the head, in any order of registration."""

    def __init__(self, first=(), last=("last_norm",), logits=lambda made: made):
        super().__init__(modular=True, depth=2)
        self.first, self.last, self.logits = first, last, logits
        for name in dict.fromkeys((*last, *first, "idle_norm")):
            setattr(self, name, nn.LayerNorm(WIDTH))

    def forward(self, tokens):
        x = self.table(tokens)
        for name in self.first:
            x = getattr(self, name)(x)
        for block in self.stack:
            x = block(x)
        for name in self.last:
            x = getattr(self, name)(x)
        return self.logits(self.to_vocab(x))


ENDS = {
    "table's norm registered last": (lambda: Ends(("table_norm",)), "last_norm", ()),
    "table's norm alone": (lambda: Ends(("table_norm",), ()), "", ()),
    "two norms": (lambda: Ends(last=("late_norm", "later_norm")), "later_norm", ("late_norm",)),
    "norms on both sides": (lambda: Ends(("table_norm",), ("b_norm", "a_norm")), "a_norm", ("b_norm",)),
}


@pytest.mark.parametrize("what", sorted(ENDS))
def test_the_final_norm_is_the_one_that_runs_last(what):
    make, final, late = ENDS[what]
    anatomy = find(make())
    assert (anatomy.final_norm, anatomy.late_norms) == (final, late)


def test_a_final_norm_that_runs_elsewhere_too_is_refused():
    with pytest.raises(BadInput, match=r"the code of Ends runs last_norm 2 times") as caught:
        looked(Ends(("last_norm",)), sequence=False)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("logits", "words"),
    [
        (lambda made: made.log_softmax(-1), "makes other numbers where ranks hold parts of the vocabulary"),
        (lambda made: made + torch.zeros(61), r"does not run where ranks hold parts of the vocabulary \(The size of tensor a"),
    ],
)
@pytest.mark.parametrize("sequence", [True, False])
def test_logits_that_are_seen_together_are_refused(logits, words, sequence):
    with pytest.raises(BadInput, match=rf"the code of Ends behind to_vocab {words}") as caught:
        looked(Ends(logits=logits), sequence=sequence)
    assert "return the logits as they are" in caught.value.fix
    assert looked(Ends(logits=lambda made: 3.0 * torch.tanh(made / 3.0)), sequence=sequence) is not None


TRAINED = {**{name: make for name, (make, _, _) in ENDS.items()}, "fused by heads": lambda: built(lambda: Fused("heads"))}


def seeded(name):
    torch.manual_seed(0)
    model = TRAINED[name]()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn(param.shape))
    return model


def train(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    case, found = make_case("modular", tp=2, dtype="fp32"), {}
    for name in TRAINED:
        for sequence in (True, False):
            plan = replace(case.plan, layout=replace(case.plan.layout, sequence_parallel=sequence))
            run = prepare(seeded(name), plan, device="cpu")
            out = run.step(batches(case)[0])
            found[f"{name}, {sequence}"] = (out.loss, out.grad_norm)
            run.close()
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.mark.multi
@pytest.mark.slow
def test_what_is_taken_trains_on_the_numbers_of_one_process(tmp_path):
    mp.spawn(train, args=(tmp_path,), nprocs=2)
    batch = batches(make_case("modular", tp=2, dtype="fp32"))[0]
    found = json.loads((tmp_path / "found-0.json").read_text())
    assert found == json.loads((tmp_path / "found-1.json").read_text()) and len(found) == 2 * len(TRAINED)
    for name in TRAINED:
        model = seeded(name)
        logits = model(batch["input_ids"])[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        for sequence in (True, False):
            assert found[f"{name}, {sequence}"] == pytest.approx((loss.item(), norm.item()), rel=1e-5), name


class Named(nn.Module):
    """Hands attention its input by a name of its own."""

    def __init__(self, block):
        super().__init__()
        self.before, self.attention, self.between, self.feed = block.before, block.attention, block.between, block.feed

    def forward(self, x):
        x = x + self.attention(x=self.before(x))
        return x + self.feed(self.between(x))


def test_a_hidden_state_that_nobody_would_find_is_refused():
    with pytest.raises(BadInput, match=r"stack\.0\.attention \(_HeadedAttention\) is called without .*looked at x\)"):
        looked(built(wrap=Named))
    with pytest.raises(BadInput, match=r"stack\.0\.feed \(Feed\) returned a list"):
        looked(built(feed=lambda: Feed(behind=lambda y, x: [y])))


@pytest.mark.parametrize("name", ["scale_grad_by_freq", "sparse"])
def test_tables_with_gradients_of_their_own_are_refused(name):
    model = built()
    model.table = nn.Embedding(61, WIDTH, **{name: True})
    with pytest.raises(RuleBroken, match=rf"layout\.tp = 2, table \(Embedding\) has {name} = True") as caught:
        looked(model)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("inside", "words"),
    [
        (lambda y: functional.dropout(y, 0.2), r"stack\.0\.feed\.fc1 \(Linear\) draws dropout of 0\.2: .*differently"),
        (lambda y: y + torch.rand_like(y), r"draws random numbers \(rand_like\)"),
    ],
)
def test_random_numbers_that_no_module_tells_of_are_refused(inside, words):
    with pytest.raises(RuleBroken, match=words) as caught:
        looked(built(feed=lambda: Feed(inside)))
    assert caught.value.fix


def test_dropout_in_attention_is_refused_and_dropout_of_nothing_is_none():
    class Dropping(Fused):
        share = 0.1

        def forward(self, x):
            q = self.qkv(x).view(*x.shape[:2], 3, self.num_heads, -1).transpose(1, 3)
            mixed = functional.scaled_dot_product_attention(q[:, :, 0], q[:, :, 1], q[:, :, 2], dropout_p=self.share)
            return self.proj(mixed.transpose(1, 2).reshape(*x.shape[:2], -1))

    with pytest.raises(RuleBroken, match=r"draws dropout of 0\.1 in attention"):
        looked(built(lambda: Dropping("parts")))
    Dropping.share = 0.0
    assert looked(built(lambda: Dropping("parts"), lambda: Feed(lambda y: functional.dropout(y, 0.5, training=False))))


def test_what_does_not_run_by_itself_is_taken_aloud():
    class Deciding(Feed):
        def forward(self, x):
            return super().forward(x) if float(x.sum()) else x  # looks at values, which a copy without memory does not have

    with pytest.warns(UserWarning, match="blocks of PlainModel do not run by themselves, so that nobody has seen whether"):
        model = built(feed=Deciding)
        model.stack[0].register_forward_pre_hook(lambda _m, args: (args[0] + float(args[0].sum()) * 0,))
        looked(model)


# Families of transformers.


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"plain"}))
def test_the_trial_agrees_with_parity_for_every_family(family):
    """Nothing that parity shows to be right is refused."""
    model = model_of(make_case(family, changes={"num_key_value_heads": 4} if family == "phi3" else None))
    anatomy = find(model)
    assert is_tested(model, anatomy) == (family != "modular")
    for tp, sequence in ((2, True), (2, False), (4, True)):
        found = {block: regions(model, block, WIDTH, tp) for block in anatomy.blocks}
        assert try_numbers(model, anatomy, found, tp, CPU, sequence=sequence)


def test_a_family_with_a_module_of_the_users_own_is_tried():
    model = model_of(make_case("llama"))
    model.model.layers[1].mlp = Feed(lambda y: y.softmax(-1))
    with pytest.raises(BadInput, match=r"model\.layers\.1\.mlp \(Feed\) makes other numbers"):
        looked(model)


def test_trying_leaves_no_trace():
    model = built(Attention)
    before, random = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    looked(model)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any("forward" in vars(module) for module in model.modules())
    assert (model.stack[0].attention.n_heads, model.stack[0].attention.n_kv_heads) == (HEADS, 2)
