"""Inspected modules against the same networks read from their configurations; plain modules; users' mistakes."""

import subprocess
import sys

import pytest
import torch
from tests.model.keeping import CONFIGS, build, kept_bytes
from torch import nn

from fullstride.engine.build import build_model
from fullstride.engine.build_source import load_factory
from fullstride.engine.inspect import main, spec_of_module
from fullstride.errors import BadInput
from fullstride.files import read_json
from fullstride.model import ModelSpec
from fullstride.model.config import spec_from_config
from fullstride.model.flops import forward_flops_per_token
from fullstride.model.saved import cost_of, saved_bytes

CASTS = {"none": 4, "weights": 2, "autocast": 2}
PLAIN = """
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, size, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.qkv, self.out = nn.Linear(size, 3 * size, bias=False), nn.Linear(size, size, bias=False)
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x):
        b, t, size = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, size))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Net(nn.Module):
    def __init__(self, vocab=100, size=48, heads=4, depth=3, length=64):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, size), nn.Embedding(length, size)
        self.layers = nn.ModuleList([Block(size, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, vocab, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Factories:
    @staticmethod
    def small():
        return Net(depth=1)


def make():
    return Net()


def needs(size):
    return Net(size=size)


def fails():
    raise RuntimeError("no luck\\nat all")


def wrong():
    return [1]


number = 3
"""


@pytest.fixture
def plain(tmp_path):
    file = tmp_path / "net.py"
    file.write_text(PLAIN)
    return file


@pytest.mark.parametrize(
    "name",
    ["llama-gqa-bias-tied", "mistral-window", "qwen3", "gemma", "olmo2", "phi3", "gpt2", "gpt_neox", "phi-qknorm", "mixtral"],
)
def test_an_inspected_model_equals_the_one_read_from_its_configuration(name):
    read = spec_from_config(CONFIGS[name], name)
    seen = spec_of_module(build(CONFIGS[name], device="meta"), name, 128)
    assert seen.num_parameters == read.num_parameters
    assert (seen.num_blocks, len(seen.stacks), seen.stacks[0].path) == (read.num_blocks, 1, read.stacks[0].path)
    assert (seen.hidden_size, seen.vocab_size, seen.tied_embeddings) == (
        read.hidden_size,
        read.vocab_size,
        read.tied_embeddings,
    )
    assert seen.max_sequence == read.max_sequence
    for convention in ("full", "causal"):
        flops = [forward_flops_per_token(spec, 128, convention) for spec in (seen, read)]
        assert flops[0] == pytest.approx(flops[1], rel=1e-9)
    names = [{p.name: p.shape for s in spec.stacks[0].sublayers for p in s.parameters} for spec in (seen, read)]
    assert names[0] == names[1]
    for cast, width in CASTS.items():
        for compiled in (False, True):
            size = {"cast": cast, "compute_bytes": width, "compiled": compiled, "samples": 2, "sequence_length": 32}
            pairs = [(x.embedding, y.embedding) for x, y in ((seen, read),)]
            pairs += [(seen.stacks[0].sublayers, read.stacks[0].sublayers), (seen.tail, read.tail)]
            for mine, theirs in pairs:
                assert saved_bytes(mine, **size) == pytest.approx(saved_bytes(theirs, **size), rel=0.05), (cast, compiled)
        launches = [sum(cost_of(s, cast).operators for s in spec.stacks[0].sublayers) for spec in (seen, read)]
        assert launches[0] == pytest.approx(launches[1], rel=0.1), cast


def test_a_plain_module_is_understood(plain):
    module = load_factory(f"{plain}:make")()
    spec = spec_of_module(module, "net", 64)
    assert spec.num_parameters == sum(p.numel() for p in module.parameters())
    assert [(s.path, s.first, s.count) for s in spec.stacks] == [("layers", 0, 3)]
    assert (spec.vocab_size, spec.hidden_size, spec.max_sequence, spec.tied_embeddings) == (100, 48, 64, False)
    block = 2 * 48 * (3 * 48 + 48 + 8 * 48) + 4 * 64 * 48
    assert forward_flops_per_token(spec, 64, "full") == 3 * block + 2 * 48 * 100
    core = next(s for s in spec.stacks[0].sublayers if s.attention)
    assert (core.attention.num_heads, core.attention.head_dim, core.attention.causal) == (4, 12, True)
    ids = torch.zeros(2, 32, dtype=torch.int64)
    real = kept_bytes(lambda: module(ids), list(module.parameters()))
    size = {"cast": "none", "compute_bytes": 4, "samples": 2, "sequence_length": 32}
    ends = [s for s in (*spec.embedding, *spec.tail) if s.kind != "loss"]
    assert saved_bytes(ends, **size) + 3 * saved_bytes(spec.stacks[0].sublayers, **size) == pytest.approx(real, rel=0.01)
    assert all(not p.is_meta for p in module.parameters())


class Written(nn.Module):
    """Attention written out, one block, head tied to the embedding."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))

        def forward(self, x):
            q, k, v = (p(x).view(*x.shape[:2], 2, 16).transpose(1, 2) for p in (self.q, self.k, self.v))
            weights = (q @ k.transpose(-1, -2) / 4).softmax(-1)
            return x + (weights @ v).transpose(1, 2).reshape(x.shape)

    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(50, 32), nn.ModuleList([self.Block() for _ in range(2)])
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_attention_written_out_keeps_its_scores():
    module = Written()
    spec = spec_of_module(module, "w", 128)
    assert spec.tied_embeddings
    assert spec.num_parameters == sum(p.numel() for p in module.parameters())
    core = next(s for s in spec.stacks[0].sublayers if s.attention)
    assert (core.attention.num_heads, core.attention.head_dim, core.attention.value_dim) == (2, 16, 16)
    assert [(v.per, v.elements) for v in core.saved if v.per == "pair" and "weights" in v.cast] == [("pair", 2.0)]
    assert forward_flops_per_token(spec, 64, "full") == 2 * (2 * 3 * 32 * 32 + 2 * 64 * 2 * 32) + 2 * 32 * 50


class Looks(Written):
    def forward(self, ids):
        return super().forward(ids) if ids.sum().item() >= 0 else ids


class Skips(Written):
    def forward(self, ids):
        return self.head(self.blocks[0](self.embed(ids)))


@pytest.mark.parametrize(("module", "words"), [(Looks, "look at values"), (Skips, r"blocks\.1 was never called")])
def test_modules_that_cannot_be_traced_are_refused(module, words):
    with pytest.raises(BadInput, match=words):
        spec_of_module(module(), "mine", 128)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("missing.py:make", "no such file"),
        ("{plain}:nothing", r"has no nothing; it has make, needs"),
        ("{plain}:number", "number is a int, expected a function"),
        ("{plain}:needs", "needs size, is called without arguments"),
        ("{plain}:fails", r"RuntimeError: no luck at net\.py:\d+;"),
        ("{plain}:wrong", "returned a list"),
        ("no_such_package.inside:make", "no module no_such_package"),
        ("json:nothing", "json has no nothing"),
        ("json", "names no function"),
    ],
)
def test_sources_that_cannot_be_used(plain, source, words):
    with pytest.raises(BadInput, match=words) as caught:
        load_factory(source.format(plain=plain))()
    assert "\n" not in str(caught.value)


def test_a_file_that_does_not_run(tmp_path):
    (tmp_path / "bad.py").write_text("import no_such_thing_at_all\n")
    with pytest.raises(BadInput, match=r"ModuleNotFoundError: .*bad\.py:1"):
        load_factory(f"{tmp_path}/bad.py:make")
    (tmp_path / "worse.py").write_text("def make(:\n")
    with pytest.raises(BadInput, match="SyntaxError"):
        load_factory(f"{tmp_path}/worse.py:make")


def test_names_with_dots(plain):
    assert len(load_factory(f"{plain}:Factories.small")().layers) == 1


def test_the_command(plain, tmp_path, capsys):
    out = tmp_path / "model.json"
    assert main([f"{plain}:make", str(out)]) == 0
    assert read_json(out, ModelSpec).num_blocks == 3
    assert main([f"{plain}:fails", str(out)]) == 3
    assert main([]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert errors[0].startswith("error: ")


@pytest.mark.slow
def test_the_command_in_a_process_of_its_own(plain, tmp_path):
    command = [sys.executable, "-m", "fullstride.engine.inspect", f"{plain}:make", str(tmp_path / "m.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert read_json(tmp_path / "m.json", ModelSpec).family == "module"


def test_the_tiny_preset_as_the_engine_builds_it():
    model = build_model("tiny")
    spec = spec_of_module(model, "tiny", 2048)
    assert spec.num_parameters == 8_065_280
    assert [s.count for s in spec.stacks] == [8]
    assert all(p.is_meta for p in model.parameters())
