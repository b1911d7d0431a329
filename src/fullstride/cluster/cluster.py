"""What a machine or a cluster is: devices, hosts, links, and what was measured on them.

Every number is a `Figure`: the value with the word that says where it came from. What is not known is None, never a guess.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from fullstride.files import FileValue, Value, digest

Source: TypeAlias = Literal["measured", "datasheet", "assumed"]
DType: TypeAlias = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4"]
CollectiveName: TypeAlias = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"]


class Figure(Value, frozen=True, kw_only=True):
    """One number and where it came from."""

    value: float
    source: Source
    note: str = ""
    """Which sheet, which measurement."""


class MatmulPoint(Value, frozen=True, kw_only=True):
    """Measured time of one matrix product [m, k] x [k, n]."""

    dtype: DType
    m: int
    n: int
    k: int
    seconds: float

    @property
    def rate(self) -> float:
        """FLOP per second."""
        return 2.0 * self.m * self.n * self.k / self.seconds


class AttentionPoint(Value, frozen=True, kw_only=True):
    """Measured time of causal attention as torch's `scaled_dot_product_attention` runs it."""

    dtype: DType
    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    sequence_length: int
    forward_seconds: float
    backward_seconds: float


class CollectivePoint(Value, frozen=True, kw_only=True):
    """Measured time of one collective over `ranks` local ranks.

    `bytes` is the size of the full buffer: the tensor reduced, the gathered result, the input that is scattered, the
    message that is sent.
    """

    op: CollectiveName
    ranks: int
    bytes: int
    seconds: float


class Device(Value, frozen=True, kw_only=True):
    """One accelerator, or one CPU rank's share of a host."""

    kind: str
    """Key of the catalogue, such as `h200-sxm`; `cpu`; or `unknown`."""
    name: str
    """What the driver calls it."""
    memory_bytes: Figure
    """Memory that a process can use, device context included."""
    peak_flops: dict[DType, Figure] = {}
    """Dense peak by dtype, FLOP/s."""
    memory_bandwidth: Figure | None = None
    """Bytes per second, read plus write, of a device copy."""
    compute_capability: str = ""
    launch_seconds: Figure | None = None
    """Host time to launch one kernel (eager torch operator)."""


class Host(Value, frozen=True, kw_only=True):
    """The machine that devices sit in."""

    cpu_name: str
    num_cores: int
    """Cores this process may use."""
    memory_bytes: int
    numa_nodes: int = 1
    has_compiler: bool | None = None
    """A C++ compiler is there, which `torch.compile` needs on CPU."""
    disk_write: Figure | None = None
    """Bytes per second with direct I/O."""
    disk_read: Figure | None = None
    host_to_device: Figure | None = None
    """Bytes per second from pinned memory, one device."""
    device_to_host: Figure | None = None
    memory_bandwidth: Figure | None = None
    """Bytes per second of a host copy, read plus write, all cores."""


class Link(Value, frozen=True, kw_only=True):
    """How ranks are joined: bandwidth one way per rank, and the latency of one message."""

    name: str
    """`nvlink4`, `pcie5`, `infiniband`, `loopback`."""
    bandwidth: Figure
    """Bytes per second, one way, for each rank."""
    latency: Figure
    """Seconds."""


class NodeGroup(Value, frozen=True, kw_only=True):
    """Some equal nodes."""

    count: int
    num_devices: int
    """Devices in each node."""
    device: Device
    host: Host
    link: Link
    """Between devices of a node."""
    network: Link | None = None
    """Between nodes, per device; None for a single machine."""
    topology: tuple[tuple[str, ...], ...] = ()
    """Matrix of connections between the node's devices in `nvidia-smi topo -m`'s words (`NV18`, `PIX`, `SYS`)."""


class Coefficients(Value, frozen=True, kw_only=True):
    """What software reaches of what hardware could do: few numbers, each of one physical meaning.

    They stand in where a table was not measured. The defaults are assumed; a calibration brings fitted ones.
    """

    matmul_share: float = 0.75
    """Share of the dense 16-bit peak that an endlessly large product reaches (power and clocks included)."""
    fp8_share: float = 0.65
    fp4_share: float = 0.5
    """Likewise of the fp8 and fp4 peaks."""
    matmul_depth: float = 96.0
    """Inner size of a product that costs as much as filling and emptying a tile."""
    wave_loss: float = 0.6
    """How much of an unfilled last wave is lost: 1 all, 0 none (stream-k)."""
    attention_forward: float = 0.5
    attention_backward: float = 0.4
    """Share of the 16-bit peak that flash attention reaches on long sequences."""
    attention_depth: float = 256.0
    """Sequence length at which flash attention reaches half of that."""
    memory_share: float = 0.85
    """Share of memory bandwidth that memory-bound operators reach."""
    traffic: float = 1.0
    """Bytes that memory-bound operators really move, over those counted."""
    link_share: float = 0.8
    network_share: float = 0.8
    """Share of a link's one-way bandwidth that collectives reach, inside a node and between nodes."""
    launch_seconds: float = 5e-6
    """Host time of one operator."""
    drift: float = 0.0
    """What each further rank that must meet in every block adds to the host's time: hosts drift, and all wait for the last."""
    meet_seconds: float = 0.0
    """What each collective inside a block costs beside its bytes: the device waits for the last rank to come."""
    kernel_seconds: float = 5e-6
    """Device time that any kernel costs, however small."""
    step_seconds: float = 1e-3
    """Host time of a step that no operator has."""
    loss_seconds: float = 0.0
    """Host time of each micro-batch's loss that no operator has: averaged over ranks, read, timed."""
    hidden_share: float = 0.9
    """Share of computation that communication of data parallelism can hide behind."""
    tensor_hidden: float = 0.5
    """Share of tensor-parallel communication that hides where it is overlapped."""
    expert_hidden: float = 0.6
    """Likewise of the exchange between experts."""
    straggle: float = 0.0
    """Share of a step lost to the slowest node, for each doubling of the nodes that must meet."""
    contention: float = 0.15
    """Hidden communication slows computation by this share of its time."""
    source: str = "assumed"
    """Where they are from: `assumed`, or the name of a calibration."""


class Cluster(FileValue, frozen=True, kw_only=True, tag="cluster"):
    """The hardware a Plan is made for."""

    name: str
    groups: tuple[NodeGroup, ...]
    matmuls: tuple[MatmulPoint, ...] = ()
    attentions: tuple[AttentionPoint, ...] = ()
    collectives: tuple[CollectivePoint, ...] = ()
    versions: dict[str, str] = {}
    """Driver, CUDA, NCCL, torch where they were seen."""
    assumed: bool = False
    """True for a default cluster that nobody probed."""
    coefficients: Coefficients | None = None
    """What is reached where nothing was measured; None for the defaults."""

    @property
    def reached(self) -> Coefficients:
        """The coefficients in force."""
        return self.coefficients or DEFAULT_COEFFICIENTS

    @property
    def num_devices(self) -> int:
        """Devices in all."""
        return sum(group.count * group.num_devices for group in self.groups)

    @property
    def device(self) -> Device:
        """The device of the first group; what a homogeneous cluster is made of."""
        return self.groups[0].device

    @property
    def host(self) -> Host:
        """The host of the first group."""
        return self.groups[0].host

    @property
    def digest(self) -> str:
        """Name of this content."""
        return digest(self)


DEFAULT_COEFFICIENTS = Coefficients()
