import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from fullstride.engine.build import build_model, from_config
from fullstride.engine.data.tokenise import BYTE_BOS, BYTE_EOS, ByteTokenizer
from fullstride.engine.export import export
from fullstride.engine.run import prepare
from fullstride.errors import BadInput, EnvironmentFault
from fullstride.plan.plan import Batch, ModelRef, Plan, Recipe, Workload

CONFIGS = {
    "llama": {"num_key_value_heads": 2, "tie_word_embeddings": True, "intermediate_size": 48},
    "qwen3": {"num_key_value_heads": 2, "tie_word_embeddings": False, "intermediate_size": 48, "head_dim": 8},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
}
PLAN = Plan(
    model=ModelRef(source="in memory"),
    workload=Workload(sequence_length=8, samples_per_step=2),
    recipe=Recipe(steps=2, learning_rate=1e-2, warmup_steps=0),
    batch=Batch(micro_batch=2),
)


MOE = {
    "num_hidden_layers": 2,
    "moe_intermediate_size": 16,
    "intermediate_size": 48,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}
DIRECTORIES = {
    **CONFIGS,
    "mixtral": {"num_key_value_heads": 2, "intermediate_size": 16, "num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen2_moe": {**MOE, "num_experts": 4, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {**MOE, "num_experts": 4, "head_dim": 8},
    "sarvam_moe": {**MOE, "num_experts": 4, "head_dim": 8, "num_key_value_heads": 4, "first_k_dense_replace": 1},
    "deepseek_v3": {
        **MOE,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
}
"""Models as transformers itself saves them, mixtures with an expert a tensor among them."""


def config_of(kind):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return {"model_type": kind, "vocab_size": 61, **(dropout if kind == "gpt2" else sizes), **DIRECTORIES[kind]}


def ids():
    return torch.arange(16).reshape(2, 8) % 61


def trained(model, plan=PLAN):
    run = prepare(model, plan, device="cpu")
    run.step({"input_ids": ids(), "labels": ids()})
    return run


@pytest.mark.parametrize("kind", CONFIGS)
def test_transformers_gives_the_same_logits(kind, tmp_path):
    run = trained(from_config(config_of(kind), kind))
    export(run, tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32, attn_implementation="sdpa").eval()
    with torch.no_grad():
        assert torch.equal(loaded(ids()).logits, run.module.eval()(ids()).logits)


def test_many_files_have_an_index_and_the_dtype_that_was_asked_for(tmp_path):
    run = trained(from_config(config_of("llama"), "llama"))
    export(run, tmp_path / "model", dtype="bf16", shard_bytes=4000)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.dtype == torch.bfloat16
    for name, value in loaded.state_dict().items():
        if name != "lm_head.weight":
            assert torch.equal(value, run.state()[f"weights/{name}"].bfloat16())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_the_tokenizer_comes_along(tmp_path):
    home = tmp_path / "tok"
    home.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "notes.txt"):
        (home / name).write_text(name)
    plan = msgspec.structs.replace(PLAN, workload=msgspec.structs.replace(PLAN.workload, tokenizer=str(home)))
    export(trained(from_config(config_of("llama"), "llama"), plan), tmp_path / "model")
    copied = {p.name for p in (tmp_path / "model").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= copied
    assert "notes.txt" not in copied


def saved_by_transformers(kind, folder):
    """A bf16 directory with random values everywhere, buffers included."""
    content = config_of(kind)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(content.pop("model_type"), **content))
    torch.manual_seed(0)
    with torch.no_grad():
        for value in (*model.parameters(), *(b for b in model.buffers() if b.is_floating_point() and b.ndim < 2)):
            value.copy_(torch.rand(value.shape))
    model.to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


def weights_in(folder):
    found = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        found |= load_file(path)
    return found


@pytest.mark.parametrize("kind", DIRECTORIES)
def test_a_directory_comes_back_bit_for_bit_when_no_step_was_taken(kind, tmp_path):
    source = saved_by_transformers(kind, tmp_path / "source")
    plan = msgspec.structs.replace(PLAN, model=ModelRef(source=source))
    run = prepare(build_model(source), plan, device="cpu")
    export(run, tmp_path / "model")
    wanted, found = weights_in(source), weights_in(tmp_path / "model")
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert torch.equal(found[name], value), name
    run.step({"input_ids": ids(), "labels": ids()})
    export(run, tmp_path / "trained", dtype="fp32")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "trained", dtype=torch.float32, attn_implementation="sdpa").eval()
    with torch.no_grad():
        assert torch.equal(loaded(ids()).logits, run.module.eval()(ids()).logits)


def test_the_byte_tokenizer_is_written_so_that_transformers_reads_it(tmp_path):
    export(trained(from_config(config_of("llama"), "llama")), tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    for text in ("plain text\n  and more", "öäü € 你好 \x00\t", "".join(chr(c) for c in range(300))):
        assert tokenizer.encode(text) == ByteTokenizer().encode(text).tolist()
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BYTE_BOS, BYTE_EOS)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return x + self.linear(x)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(61, 16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 61)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def test_another_module_gets_plain_weights_and_a_note(tmp_path):
    run = trained(Plain())
    export(run, tmp_path / "model")
    fresh = Plain()
    fresh.load_state_dict(load_file(tmp_path / "model" / "model.safetensors"))
    assert torch.equal(fresh(ids()), run.module(ids()))
    assert "load_file" in (tmp_path / "model" / "README.md").read_text()
    assert not (tmp_path / "model" / "config.json").exists()


def test_nothing_is_overwritten_and_nothing_half_is_left(tmp_path, monkeypatch):
    run = trained(Plain())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    with pytest.raises(BadInput, match="is not empty"):
        export(run, tmp_path / "full")

    def refuse(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fullstride.engine.export.save_file", refuse)
    with pytest.raises(EnvironmentFault, match="No space left on device"):
        export(run, tmp_path / "model")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full"]
