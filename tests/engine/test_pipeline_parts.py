"""The parts of a pipeline in one process: cutting, random schedules run to their end, a backward in two halves."""

import contextlib
import threading
from collections import deque
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fullstride.engine.anatomy import find, logits_of
from fullstride.engine.build import from_config
from fullstride.engine.compiling import compile_available, compile_blocks
from fullstride.engine.deferred import Deferred
from fullstride.engine.memory.recompute import apply_recompute
from fullstride.engine.parallel.carrier import Carrier
from fullstride.engine.parity_cases import FAMILIES, PlainModel
from fullstride.engine.pipeline import tied
from fullstride.engine.pipeline.cut import Cut
from fullstride.engine.pipeline.executor import Executor, forward_only
from fullstride.engine.pipeline.held import Held
from fullstride.engine.pipeline.reducing import Reducing
from fullstride.engine.pipeline.splitting import split_backward
from fullstride.errors import BadInput, RuleBroken
from fullstride.plan.plan import Recompute
from fullstride.plan.schedule.checker import faults, require_runnable
from fullstride.plan.schedule.generators import complete, generate
from fullstride.plan.schedule.placement import Placement, cuts, placement_of
from fullstride.plan.schedule.text import Schedule, parse_schedule

LENGTH, VOCAB = 6, 61


class Threads:
    """Ranks of a pipeline as threads of which one runs at a time; messages are queues."""

    def __init__(self):
        self.turn = threading.Condition()
        self.sent = {}
        self.errors = []

    def run(self, ranks):
        def work(call):
            with self.turn:
                try:
                    call()
                except BaseException as error:
                    self.errors.append(error)
                    self.turn.notify_all()

        threads = [threading.Thread(target=work, args=(call,)) for call in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert not self.errors, self.errors[0]
        assert not any(thread.is_alive() for thread in threads)
        assert not any(self.sent.values())


class Mail:
    """An Exchange of one thread."""

    def __init__(self, threads, rank):
        self.threads, self.rank = threads, rank

    def begin(self, actions):
        pass

    def finish(self):
        pass

    def send(self, action, tensor):
        self.threads.sent.setdefault((self.rank, action.peer), deque()).append(tensor.clone())
        self.threads.turn.notify_all()

    def receive(self, action):
        queue = self.threads.sent.setdefault((action.peer, self.rank), deque())
        done = self.threads.turn.wait_for(lambda: queue or self.threads.errors, timeout=60)
        assert done and not self.threads.errors, f"nothing came for {action.text()}"
        found = queue.popleft()
        assert found.shape[0] == action.hi - action.lo
        return found


def plain(depth, tied=False):
    torch.manual_seed(0)
    return PlainModel(depth=depth, width=8, tied=tied).double()


def loss_of(logits, ids):
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), ids[:, 1:].reshape(-1), reduction="sum")


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def piped(actions, placement, depth, ids, *, layers=(), tied=False, recompute=None, around=contextlib.nullcontext):
    """Losses and gradients of a pipeline run by threads."""
    threads, calls, models, losses = Threads(), [], [], []
    schedule = Schedule(name="drawn", placement=placement, samples=ids.shape[0], actions=tuple(actions))
    for rank in range(placement.pp):
        model = plain(depth, tied)
        cut = Cut(model, find(model), placement, rank, layers, torch.float64)
        if recompute:
            apply_recompute(model, cut.anatomy, recompute)
        split_backward([model.stack, model.to_vocab] if cut.anatomy.head and not tied else [model.stack])
        models.append(model)

        def forward(lo, hi, last, model=model):
            logits = model(ids[lo:hi])
            return loss_of(logits, ids[lo:hi]) if last else logits

        reducing = Reducing(Carrier(model), cut.chunks, ())
        executor = Executor(schedule, rank, cut, reducing, Mail(threads, rank), LENGTH)

        def call(executor=executor, forward=forward):
            with around():
                losses.extend(executor.step(forward, phase))

        calls.append(call)
    threads.run(calls)
    found = {}
    for model in models:
        for name, grad in gradients(model).items():
            found[name] = found[name] + grad if name in found else grad
    return sum(losses), found


class phase:
    """A phase that measures nothing."""

    def __init__(self, *_args, **_kwargs):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        pass


def wanted(depth, ids, tied=False):
    model = plain(depth, tied)
    loss = loss_of(model(ids), ids)
    loss.backward()
    return loss.detach(), gradients(model)


def same(found, right):
    assert torch.allclose(found[0], right[0], rtol=1e-12)
    assert set(found[1]) == set(right[1])
    for name, grad in right[1].items():
        assert torch.allclose(found[1][name], grad, rtol=1e-10, atol=1e-12), name


def ids_of(samples):
    return torch.randint(0, VOCAB, (samples, LENGTH), generator=torch.Generator().manual_seed(samples))


@st.composite
def schedules(draw):
    """Any order in which the data allows computations to come, on any placement, with sizes of any integer factors."""
    pp, style = draw(st.integers(2, 3)), draw(st.sampled_from(["loop", "v"]))
    placement = Placement(pp=pp, chunks=draw(st.integers(1, 2)), style=style)
    samples = draw(st.integers(1, 5))
    sizes = [draw(st.sampled_from([1, 2, 4]))]
    while len(sizes) < placement.num_stages:
        sizes.append(draw(st.sampled_from([1, 2, 4])))
    parts = [cuts(0, samples, size) for size in sizes]
    split = [draw(st.booleans()) for _ in sizes]
    forwarded, backed = [set() for _ in sizes], [set() for _ in sizes]
    todo = [("forward", stage, *part) for stage, own in enumerate(parts) for part in own]
    orders = [[] for _ in range(pp)]
    while todo:
        ready = [work for work in todo if _ready(work, forwarded, backed)]
        kind, stage, lo, hi = work = draw(st.sampled_from(ready))
        todo.remove(work)
        rank, chunk = placement.home(stage)
        orders[rank].append((kind, chunk, lo, hi))
        if kind == "forward":
            forwarded[stage] |= set(range(lo, hi))
            todo.append(("input_grad" if split[stage] else "backward", stage, lo, hi))
        elif kind != "weight_grad":
            backed[stage] |= set(range(lo, hi))
            if kind == "input_grad":
                todo.append(("weight_grad", stage, lo, hi))
    return placement, samples, complete(orders, placement, samples, tuple(sizes))


def _ready(work, forwarded, backed):
    kind, stage, lo, hi = work
    rows = set(range(lo, hi))
    if kind == "forward":
        return stage == 0 or rows <= forwarded[stage - 1]
    if kind == "weight_grad":
        return rows <= backed[stage]
    return rows <= forwarded[stage] and (stage == len(backed) - 1 or rows <= backed[stage + 1])


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(schedules(), st.booleans(), st.sampled_from(["none", "full"]))
def test_any_legal_schedule_runs_to_its_end_with_equal_gradients(drawn, tied, mode):
    placement, samples, actions = drawn
    assert faults(actions, placement, samples) == ()
    depth, ids = placement.num_stages + 1, ids_of(samples)
    same(piped(actions, placement, depth, ids, tied=tied, recompute=Recompute(mode=mode)), wanted(depth, ids, tied))


BY_HAND = """
kind=schedule format=1 name=mine pp=2 chunks=1 placement=loop samples=8
0:forward c0 [0,3)
0:send_forward c0 [0,2) -> 1
0:send_forward c0 [2,3) -> 1
0:forward c0 [3,4)
0:send_forward c0 [3,4) -> 1
0:recv_backward c0 [2,3) -> 1
0:recv_backward c0 [3,4) -> 1
0:backward c0 [3,4)
0:forward c0 [4,8)
0:send_forward c0 [4,6) -> 1
0:send_forward c0 [6,8) -> 1
0:recv_backward c0 [0,2) -> 1
0:recv_backward c0 [4,6) -> 1
0:recv_backward c0 [6,8) -> 1
0:backward c0 [4,8)
0:backward c0 [0,3)
0:reduce c0 [0,8)
0:optimizer c0 [0,8)
1:recv_forward c0 [0,2) -> 0
1:forward c0 [0,2)
1:recv_forward c0 [2,3) -> 0
1:recv_forward c0 [3,4) -> 0
1:forward c0 [2,4)
1:input_grad c0 [2,4)
1:send_backward c0 [2,3) -> 0
1:send_backward c0 [3,4) -> 0
1:recv_forward c0 [4,6) -> 0
1:forward c0 [4,6)
1:input_grad c0 [0,2)
1:send_backward c0 [0,2) -> 0
1:weight_grad c0 [2,4)
1:recv_forward c0 [6,8) -> 0
1:forward c0 [6,8)
1:input_grad c0 [4,6)
1:send_backward c0 [4,6) -> 0
1:input_grad c0 [6,8)
1:send_backward c0 [6,8) -> 0
1:weight_grad c0 [0,2)
1:weight_grad c0 [4,6)
1:weight_grad c0 [6,8)
1:reduce c0 [0,8)
1:optimizer c0 [0,8)
"""


def test_a_schedule_written_by_hand_may_cut_samples_anyhow_and_split_one_stage_alone():
    schedule = parse_schedule(BY_HAND, "here")
    assert faults(schedule.actions, schedule.placement, schedule.samples) == ()
    same(piped(schedule.actions, schedule.placement, 3, ids_of(8)), wanted(3, ids_of(8)))


@settings(max_examples=25, deadline=None)
@given(schedules(), st.data())
def test_an_illegal_schedule_is_refused_with_the_actions_at_fault(drawn, data):
    placement, samples, actions = drawn
    broken = list(actions)
    place = data.draw(st.integers(0, len(broken) - 1))
    if data.draw(st.booleans()):
        broken.insert(place, broken.pop(data.draw(st.integers(0, len(broken) - 1))))
    else:
        del broken[place]
    broken.sort(key=lambda action: action.rank)
    found = faults(broken, placement, samples)
    if not found:  # the order was changed in a way that data allows
        return
    with pytest.raises(RuleBroken) as refused:
        require_runnable(broken, placement, samples)
    assert refused.value.message.startswith(found[0].message)
    assert all(action.text() in refused.value.message for action in found[0].actions)


@pytest.mark.parametrize("mode", ["none", "norm_activation", "full"])
def test_a_split_backward_costs_no_product_more_than_a_whole_one(mode):
    """The count of matrix products, recomputation included."""
    counts = {}
    for schedule in ("1f1b", "zb-h1"):
        placement = placement_of(schedule, 2, 1)
        actions = generate(schedule, 2, 1, 4, 1)
        found = []
        piped(actions, placement, 4, ids_of(4), recompute=Recompute(mode=mode), around=lambda found=found: Products(found))
        counts[schedule] = len(found)
    # 4 blocks of 2 products and the head, for 4 samples: forward, and both gradients
    assert counts["zb-h1"] == counts["1f1b"] == 4 * (9 * 3 + (8 if mode == "full" else 0))


class Products(TorchDispatchMode):
    """Counts the products of the thread that it is entered in."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.found.append(func)
        return func(*args, **(kwargs or {}))


def test_weights_wait_until_they_are_asked_for():
    linear = nn.Linear(3, 2).double()
    assert split_backward([linear]) == 1
    assert split_backward([linear]) == 0  # it has a forward of its own now
    value = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    deferred = Deferred()
    with deferred.collect():
        linear(value).sum().backward()
    assert value.grad is not None and linear.weight.grad is None and linear.bias.grad is None
    seen = []
    deferred.run(seen.append)
    assert [id(w) for w in seen] == [id(linear.weight), id(linear.bias)]
    assert torch.allclose(linear.weight.grad, value.detach().sum(0).expand(2, 3))
    assert torch.equal(linear.bias.grad, torch.full((2,), 5.0, dtype=torch.float64))


def test_under_autocast_a_split_product_is_the_plain_one():
    torch.manual_seed(1)
    linear, value = nn.Linear(8, 4), torch.randn(3, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        right = linear(value)
    right.float().square().sum().backward()
    kept = [value.grad.clone(), linear.weight.grad.clone(), linear.bias.grad.clone()]
    value.grad = linear.weight.grad = linear.bias.grad = None
    split_backward([linear])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = linear(value)
    assert found.dtype == torch.bfloat16 and torch.equal(found, right)
    found.float().square().sum().backward()
    for grad, old in zip([value.grad, linear.weight.grad, linear.bias.grad], kept, strict=True):
        assert grad.dtype == torch.float32
        assert torch.allclose(grad, old, rtol=0.02, atol=1e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.skipif(bool(compile_available(torch.device("cpu"))), reason="no C++ compiler")
@pytest.mark.parametrize("mode", ["none", "norm_activation", "full"])
def test_compiled_blocks_put_the_same_gradients_off(mode):
    ids, right, model = ids_of(2), wanted(2, ids_of(2))[1], plain(2).float()  # torch 2.11 compiles no attention in fp64
    compile_blocks(model, find(model))
    apply_recompute(model, find(model), Recompute(mode=mode))
    split_backward([model.stack, model.to_vocab])
    loss, deferred = loss_of(model(ids), ids), Deferred()
    with deferred.collect():
        loss.backward()
    assert len(deferred) == 2 * 3 + 2  # two weights and a bias a block, the head's weight and bias
    deferred.run()
    for name, grad in gradients(model).items():
        assert torch.allclose(grad.double(), right[name], rtol=1e-4, atol=1e-5), name


@pytest.mark.filterwarnings("ignore:.*eager attention keeps whole score matrices")
@pytest.mark.parametrize("family", sorted(name for name, config in FAMILIES.items() if "model_type" in config))
def test_a_rank_holds_its_stages_parameters_under_their_own_names(family):
    config = {**FAMILIES[family], "tie_word_embeddings": False}
    names = {name for name, _ in from_config(config, family).named_parameters()}
    held = []
    for rank in range(2):
        model = from_config(config, family)
        cut = Cut(model, find(model), Placement(pp=2), rank, (), torch.float32)
        held.append({name for name, _ in model.named_parameters()})
        assert len(cut.anatomy.blocks) == 2 - rank
        assert bool(cut.anatomy.embedding) is (rank == 0) and bool(cut.anatomy.head) is (rank == 1)
    assert held[0] | held[1] == names and not held[0] & held[1]


def test_while_a_chunk_runs_the_model_shows_it_alone_and_afterwards_all_again():
    model = plain(4)
    whole = dict(model.named_parameters())
    cut = Cut(model, find(model), Placement(pp=2, chunks=2, style="v"), 0, (), torch.float64)
    rest = dict(model.named_parameters())
    assert set(rest) == {n for n in whole if not n.startswith(("stack.1.", "stack.2."))}
    seen = []

    def call():
        seen.append({n for n, _ in model.named_parameters()})
        return model(ids_of(2))

    out = cut.run(0, (2, LENGTH), None, call)
    assert out.shape == (2, LENGTH, 8) and out.requires_grad
    back = cut.run(1, (2, LENGTH), out.detach(), call)
    assert back.shape == (2, LENGTH, VOCAB)
    assert {n.split(".")[0] + n.split(".")[1] for n in seen[0] if n.startswith("stack")} == {"stack0"}
    assert not any(n.startswith(("last_norm", "to_vocab")) for n in seen[0])
    assert not any(n.startswith("table") for n in seen[1])
    assert dict(model.named_parameters()).keys() == rest.keys()
    with pytest.raises(ValueError, match="a fault"):
        cut.run(0, (2, LENGTH), None, faulty)
    assert dict(model.named_parameters()).keys() == rest.keys()


def faulty():
    raise ValueError("a fault")


class Between(PlainModel):
    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.stack:
            x = block(x) * 0.5
        return self.to_vocab(self.last_norm(x))


class Twice(PlainModel):
    def forward(self, tokens):
        x = self.table(tokens)
        for block in (*self.stack, *self.stack):
            x = block(x)
        return self.to_vocab(self.last_norm(x))


class Takes(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x, first):
        return x + self.inner(first)


class Skips(PlainModel):
    def __init__(self):
        super().__init__(width=8)
        self.stack = nn.ModuleList(Takes() for _ in range(3))

    def forward(self, tokens):
        first = x = self.table(tokens)
        for block in self.stack:
            x = block(x, first)
        return self.to_vocab(self.last_norm(x))


class Loose(PlainModel):
    def __init__(self):
        super().__init__(width=8)
        self.places = nn.Parameter(torch.zeros(LENGTH, 8))

    def forward(self, tokens):
        return super().forward(tokens) + self.places.sum()


class Again(PlainModel):
    def forward(self, tokens):
        x = self.last_norm(self.table(tokens))
        for block in self.stack:
            x = block(x)
        return self.to_vocab(self.last_norm(x))


class Reads(PlainModel):
    def forward(self, tokens):
        return super().forward(tokens) * int(tokens.sum())


class Widens(PlainModel):
    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.stack:
            x = torch.cat((block(x), x), -1)[..., : x.shape[-1]]
        return self.to_vocab(self.last_norm(x))


class Doubles(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 16)

    def forward(self, x):
        return self.inner(x)


class Grows(PlainModel):
    def __init__(self):
        super().__init__(width=8)
        self.stack = nn.ModuleList(Doubles() for _ in range(3))

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.stack:
            x = block(x)[..., :8]
        return self.to_vocab(self.last_norm(x))


class ByName(PlainModel):
    def forward(self, tokens):
        x = self.stack[0](self.table(tokens))
        for block in self.stack[1:]:
            x = block(x=x)
        return self.to_vocab(self.last_norm(x))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Again, "last_norm of Again runs between blocks, or before and after them"),
        (Reads, "Reads cannot be cut into stages: called on meta it ends with RuntimeError"),
        (Widens, "does not take what the block"),
        (Grows, "does not map its first argument to a tensor of the same shape"),
        (ByName, "the blocks stack are not called alike"),
        (Between, "does not take what the block before it returned"),
        (Twice, "does not call its 3 blocks once each"),
        (Skips, "takes more than the hidden state"),
        (Loose, "places belongs to no module that is called"),
    ],
)
def test_models_that_are_no_chain_are_refused(model, words):
    built = model()
    with pytest.raises(BadInput, match=words):
        Cut(built, find(built), Placement(pp=2), 0, (), torch.float32)


@pytest.mark.parametrize("layers", [(2, 2), (3,), (3, 0)])
def test_layers_that_do_not_add_up_are_refused(layers):
    model = plain(3)
    with pytest.raises(RuleBroken, match="3 blocks on 2 stages"):
        Cut(model, find(model), Placement(pp=2), 0, layers, torch.float64)


def test_the_ends_of_a_tied_weight_wait_no_longer_than_the_plan_says(monkeypatch):
    made = []
    monkeypatch.setattr(tied, "_made", {})
    monkeypatch.setattr(torch.distributed, "new_group", lambda ranks, **options: made.append((ranks, options)) or ranks)
    mesh = SimpleNamespace(rank=2, sets=lambda axis: ((0, 1), (2, 3)))
    assert tied.tied_group(mesh, Placement(pp=2), 8.0) == [2, 3]
    assert made == [(ranks, {"timeout": timedelta(seconds=8)}) for ranks in ([0, 1], [2, 3])]
    assert tied.tied_group(mesh, placement_of("zb-v", 2, 2), 8.0) is None


def test_held_rows_are_cut_and_joined():
    held, rows = Held(), torch.arange(6.0).unsqueeze(1)
    held.put(0, 4, rows[:4])
    held.put(4, 6, rows[4:])
    assert torch.equal(held.take(0, 1), rows[:1])
    assert torch.equal(held.take(3, 5), rows[3:5])
    assert torch.equal(held.take(1, 3), rows[1:3])
    assert torch.equal(held.take(5, 6), rows[5:]) and not len(held)


def test_forward_alone_ends_and_has_no_backward():
    for name, chunks in (("1f1b", 1), ("interleaved", 3), ("zb-v", 2)):
        placement = placement_of(name, 2, chunks)
        schedule = Schedule(name=name, placement=placement, samples=4, actions=())
        actions = forward_only(schedule, 5, 2)
        assert {a.kind for a in actions} == {"forward", "send_forward", "recv_forward", "optimizer"}
        assert sum(a.kind == "forward" for a in actions) == 3 * placement.num_stages


def test_the_model_of_a_stage_makes_the_logits_of_the_whole_one():
    config = {**FAMILIES["llama"], "tie_word_embeddings": False}
    torch.manual_seed(2)
    whole = from_config(config, "llama").to_empty(device="cpu")
    for param in whole.parameters():
        nn.init.normal_(param, std=0.1)
    whole.eval()
    stages = [from_config(config, "llama").to_empty(device="cpu") for _ in range(2)]
    for stage in stages:
        stage.load_state_dict(whole.state_dict())
        for name, buffer in whole.named_buffers():
            stage.get_buffer(name).copy_(buffer)
        stage.eval()
    ids = ids_of(3)
    with torch.no_grad():
        right = logits_of(whole(input_ids=ids))
        state = None
        for rank, model in enumerate(stages):
            cut = Cut(model, find(model), Placement(pp=2), rank, (), torch.float32)
            state = cut.run(0, (3, LENGTH), state, lambda model=model: logits_of(model(input_ids=ids)))
    assert torch.equal(state, right)
