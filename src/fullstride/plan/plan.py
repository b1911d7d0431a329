"""The Plan: everything that decides how a model is trained, in one frozen value and one file that a person can edit.

Four parts say what the work is (`model`, `workload`, `recipe`, `made_for`); the others say how it is done, and are what
planning and tuning may change. `work_hash` covers what, `plan_hash` covers how. Two measurements compare only if their
`work_hash` is equal.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from fullstride.files import FileValue, Value, digest

DType: TypeAlias = Literal["fp64", "fp32", "bf16", "fp16"]
Carrier: TypeAlias = Literal["none", "ddp", "fsdp2", "flat", "megatron", "deepspeed"]
RecomputeChoice: TypeAlias = Literal["keep", "recompute"]
Axis: TypeAlias = Literal["pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"]
Schedule: TypeAlias = Literal["none", "gpipe", "1f1b", "interleaved", "bfs", "zb-h1", "zb-v"]


class ModelRef(Value, frozen=True, kw_only=True):
    """Which model."""

    source: str
    """A preset, a `config.json`, a model directory (its weights are loaded), or `file.py:function` / `module:function`."""
    digest: str = ""
    """Digest of the ModelSpec the plan was made for; checked before a run, empty to skip."""
    embedding: str = ""
    """Path of the token embedding in a model of your own, where the one that is found is not meant; empty to look for it."""
    blocks: str | tuple[str, ...] = ""
    """Path of the list of blocks (`trunk.layers`), or the blocks' own paths in their order (`["b0", "b1"]`); empty to look."""
    final_norm: str = ""
    """Path of the norm between the last block and the head; empty to look for it."""
    head: str = ""
    """Path of the layer that makes logits; empty to look for it."""

    @property
    def named(self) -> dict[str, str | tuple[str, ...]]:
        """The parts that are named, by entry."""
        parts = {name: getattr(self, name) for name in ("embedding", "blocks", "final_norm", "head")}
        return {name: value for name, value in parts.items() if value}

    def block(self, path: str, number: int) -> str:
        """Path of a block: its name where blocks are named one by one, else its place in the list at `path`."""
        one_by_one = isinstance(self.blocks, tuple) and number < len(self.blocks)
        return self.blocks[number] if one_by_one else f"{path}.{number}"


class Workload(Value, frozen=True, kw_only=True):
    """What is learned from, and how much of it in one step."""

    sequence_length: int
    """Tokens of one sample."""
    samples_per_step: int
    """Samples of the whole world in one optimizer step."""
    data: str = "stdlib"
    """A file or folder of text, JSONL or Parquet; `stdlib`: the Python standard library's sources on this machine."""
    tokenizer: str = "bytes"
    """`bytes`, a `tokenizer.json`, or a directory that holds one."""
    eval_data: str = ""
    """Held-out data in the same formats; empty for none."""
    documents: Literal["across", "separate"] = "across"
    """Whether packed documents attend across their borders."""


class Recipe(Value, frozen=True, kw_only=True):
    """The learning itself; tune never touches it."""

    steps: int = 1000
    seed: int = 0
    learning_rate: float = 3e-4
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_steps: int = 100
    """Steps over which the rate rises from zero; a short one throws a fresh model about, and hides in that what a change of
    numerics does."""
    min_lr_ratio: float = 0.1
    """The schedule ends at this share of `learning_rate`."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    """On matrices; vectors (norms, biases) are not decayed."""
    clip_norm: float = 1.0
    """Largest global gradient norm; 0 to leave gradients as they are."""


class MadeFor(Value, frozen=True, kw_only=True):
    """Where the plan comes from; nothing is decided by it."""

    cluster: str = ""
    """Digest of the Cluster."""
    device: str = ""
    """Kind of device, as in the catalogue."""
    versions: dict[str, str] = {}


class Layout(Value, frozen=True, kw_only=True):
    """Degrees of the mesh axes; their product is the number of ranks."""

    dp_replicate: int = 1
    """Copies of the whole (sharded) model."""
    dp_shard: int = 1
    """Ranks that share one copy's states (ZeRO)."""
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    """Expert parallel, laid over the data axes: not a factor of the world size."""
    order: tuple[Axis, ...] = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    """Axes from the slowest varying to the fastest: the last one has neighbouring ranks."""
    sequence_parallel: bool = True
    """With tp above 1: norms, residuals and dropout are cut along the sequence (Korthikanti et al., 2022)."""
    expert_tp: int = 1
    """Ranks that share one expert's matrices; 1: experts are cut by `ep` alone (Megatron's own default is `tp`)."""
    parts: dict[str, Literal["column", "row", "whole"]] = {}
    """With tp above 1: how products of your own model are cut, by the end of their path (`attention.to_q`), where their names
    and shapes do not tell: `column` makes part of the outputs, `row` reads part of the inputs, `whole` is not cut."""

    def __hash__(self) -> int:
        """A layout is a key of what pricing remembers; `parts` is a dict, which has no hash of its own."""
        return hash((self.dp_replicate, self.dp_shard, self.tp, self.pp, self.cp, self.ep, self.expert_tp))

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.dp_replicate * self.dp_shard * self.tp * self.pp * self.cp

    @property
    def data_parallel(self) -> int:
        """Ranks that see different samples."""
        return self.dp_replicate * self.dp_shard


class Shard(Value, frozen=True, kw_only=True):
    """ZeRO, and who carries it out."""

    carrier: Carrier = "none"
    """`none` for one rank, `ddp` (torch DistributedDataParallel), `fsdp2` (torch fully_shard), `flat` (fullstride's own
    ZeRO on flat buffers); `megatron` and `deepspeed` are other frameworks' own, which fullstride prices and does not run."""
    stage: Literal[0, 1, 2, 3] = 0
    """0 replicates all; 1 shards optimizer states, 2 also gradients, 3 also weights."""
    reshard: dict[str, bool] = {}
    """Stage 3 only: whether weights are freed after forward, by module group (`embedding`, `blocks`, `head`) or by a path
    such as `model.layers.0`; groups not named follow the stage."""


class Pipeline(Value, frozen=True, kw_only=True):
    """How stages take turns."""

    schedule: Schedule = "none"
    chunks: int = 1
    """Stages on each rank."""
    layers_per_stage: tuple[int, ...] = ()
    """Blocks of each stage, first to last; empty for one stage."""
    micro_batch_per_stage: tuple[int, ...] = ()
    """Samples of a micro-batch on each stage; empty for `batch.micro_batch` on all."""
    schedule_file: str = ""
    """A file of actions that is run instead of what `schedule` generates, on the same ranks, chunks and samples; empty for
    none."""


class Batch(Value, frozen=True, kw_only=True):
    """How a step's samples are cut: micro_batch x accumulation x data-parallel degree = samples per step."""

    micro_batch: int = 1
    """Samples of one forward and backward on one rank."""
    accumulation: int = 1
    """Micro-batches of one step on one rank."""


class Recompute(Value, frozen=True, kw_only=True):
    """What is kept for backward and what is made again."""

    mode: Literal["none", "norm_activation", "attention", "full"] = "none"
    """`norm_activation`: everything in a block but matrix products and attention is made again; `attention`: the core of
    attention alone (Megatron's selective); `full`: whole blocks are."""
    every: int = 1
    """Applies to one block in `every`, the first blocks of each run of `every` being kept; 1 for all blocks."""
    blocks: int = 0
    """Applies to the first so many blocks of each stage (Megatron's block method); 0 for all."""
    products: float = 0.0
    """With `norm_activation`: share of matrix products made again too (torchtitan's per-operator choice: every second, 0.5)."""
    offload: Literal["none", "cpu", "nvme"] = "none"
    """Where the kept inputs of recomputed blocks wait for backward."""


class Optimizer(Value, frozen=True, kw_only=True):
    """How AdamW is carried out."""

    kind: Literal["adamw"] = "adamw"
    implementation: Literal["fused", "foreach", "loop"] = "fused"
    cpu_share: float = 0.0
    """Share of masters and moments that lies in pinned host memory."""
    nvme_share: float = 0.0
    """Share that lies on disk."""


class Precision(Value, frozen=True, kw_only=True):
    """A dtype for each role."""

    cast: Literal["none", "autocast", "weights"] = "none"
    """How a lower compute dtype comes about: `autocast` casts at each operator from fp32 weights; `weights` keeps a copy of
    the weights in the compute dtype beside fp32 masters."""
    embedding: DType = "fp32"
    block: DType = "fp32"
    head: DType = "fp32"
    loss: DType = "fp32"
    """Logits are widened to this before the softmax."""
    gradient: DType = "fp32"
    """Storage and accumulation of gradients between micro-batches."""
    reduction: DType = "fp32"
    """What gradients are summed in across ranks."""
    master: DType = "fp32"
    optimizer_state: DType = "fp32"
    fp8: Literal["off", "tensorwise", "rowwise", "delayed", "blockwise", "mxfp8", "nvfp4"] = "off"
    """Scaling recipe of linears computed in fp8 (`nvfp4`: in fp4)."""


class Loss(Value, frozen=True, kw_only=True):
    """How head and loss are computed."""

    kind: Literal["model", "chunked"] = "model"
    """`model`: the model's own logits, whole; `chunked`: head and loss by chunks of tokens, logits never stand whole."""
    chunk_tokens: int = 4096
    """Tokens of one chunk."""
    fused: Literal["no", "script", "native", "operators"] = "no"
    """Megatron's cross entropy: operators in place, a scripted fusion (which makes one more fp32 copy), or one kernel that
    turns logits into their gradient where they stand; `operators`: torch's `loss_parallel`, each operator by itself."""


class Kernels(Value, frozen=True, kw_only=True):
    """Which implementation computes."""

    attention: Literal["sdpa", "fused_softmax", "unfused"] = "sdpa"
    """`sdpa`: torch's own choice of a flash kernel; `fused_softmax`: scores stand whole, scale, mask and softmax in one
    kernel (older Megatron); `unfused`: each operator by itself."""
    gradient_fusion: bool = False
    """The matrix product itself adds weight gradients to the main gradients (Megatron's gradient accumulation fusion)."""


class Adapter(Value, frozen=True, kw_only=True):
    """Low-rank adapters on frozen weights (LoRA, Hu et al., 2021)."""

    rank: int = 0
    """0: none, all weights are trained."""
    targets: tuple[str, ...] = ("qkv", "out", "gate_up", "down")
    """Products in the blocks that get an adapter, by the end of the sublayer's name (`qkv`; `gate_up` means `up` too, where no
    gate is) or of the product's own (`q_proj`). The default means whatever of it the model has."""
    alpha: float = 0.0
    """The adapter's part is scaled by alpha / rank; 0: alpha = rank, a scale of 1."""


class Compile(Value, frozen=True, kw_only=True):
    """torch.compile."""

    mode: Literal["off", "block"] = "off"
    """`block`: each block (and a chunk of the chunked loss) is compiled."""
    graphs: bool = False
    """Launches are recorded once and replayed (CUDA graphs): the host's part of a micro-batch vanishes."""


class Overlap(Value, frozen=True, kw_only=True):
    """Communication beside computation."""

    prefetch: int = 1
    """Blocks whose weights are gathered ahead (ZeRO-3); 1 is what FSDP2 does by itself."""
    bucket_bytes: int = 25 * 2**20
    """Size of DDP's gradient buckets."""
    gradients: bool = True
    """Gradients are reduced, and weights gathered, beside computation (Megatron's overlaps); false: after it."""
    tensor: bool = False
    """Products are cut so that tensor-parallel communication runs beside them (AsyncTP, user buffers)."""
    experts: bool = False
    """Tokens travel to experts while another micro-batch computes."""
    deferred_head: int = 0
    """Micro-batches of a pipeline whose logits' gradients wait until the end of the step to be multiplied into the head's
    weight (Megatron's deferral of the embedding's weight gradient)."""


class Comm(Value, frozen=True, kw_only=True):
    """The communication library."""

    env: dict[str, str] = {}
    """NCCL variables, set before the process group is made."""
    timeout_seconds: float = 600.0
    """A collective that takes longer is a hang."""
    ctas: int = 0
    """On GPUs: blocks of threads (CTAs) of a collective between data-parallel ranks, each on a multiprocessor that computes
    nothing meanwhile; 0: NCCL decides."""


class Data(Value, frozen=True, kw_only=True):
    """The input pipeline."""

    workers: int = 0
    """Threads that prepare samples ahead on each rank; 0: the training thread does it."""
    prefetch: int = 2
    """Steps prepared ahead, with workers."""
    pin: bool = False
    """Copy from pinned memory, asynchronously."""


class Threads(Value, frozen=True, kw_only=True):
    """CPU threads of one rank."""

    compute: int = 0
    """For torch's operators; 0: torchrun's default, which is one when a host has several ranks."""


class Plan(FileValue, frozen=True, kw_only=True, tag="plan"):
    """All of it."""

    model: ModelRef
    workload: Workload
    recipe: Recipe = Recipe()
    made_for: MadeFor = MadeFor()
    layout: Layout = Layout()
    shard: Shard = Shard()
    pipeline: Pipeline = Pipeline()
    batch: Batch = Batch()
    recompute: Recompute = Recompute()
    optimizer: Optimizer = Optimizer()
    precision: Precision = Precision()
    kernels: Kernels = Kernels()
    adapter: Adapter = Adapter()
    loss: Loss = Loss()
    compile: Compile = Compile()
    overlap: Overlap = Overlap()
    comm: Comm = Comm()
    data: Data = Data()
    threads: Threads = Threads()

    @property
    def plan_hash(self) -> str:
        """Name of the way the work is done."""
        parts = ("layout", "shard", "pipeline", "batch", "recompute", "optimizer", "precision", "kernels", "loss", "compile")
        how = [getattr(self, part) for part in (*parts, "adapter", "overlap", "comm", "data", "threads")]
        return digest([*how, *([self.model.named] if self.model.named else [])])

    @property
    def work_hash(self) -> str:
        """Name of the work: model, workload and recipe, and the adapter where only it is trained; not where parts are."""
        model = {"source": self.model.source, "digest": self.model.digest}
        return digest([model, self.workload, self.recipe, *([self.adapter] if self.adapter.rank else [])])
