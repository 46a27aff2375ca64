"""The properties of GPUs and machines, from their data sheets. No torch.

GPUS is the registry. `parse` reads what a user types: `8xA100-40GB`, or `4xL4` where a card has one size of memory.
"""

import difflib
import re
from dataclasses import dataclass, replace

from esmshard.errors import UsageError

NETWORK_GBIT = 200
"""The default speed between machines, in Gbit/s for each GPU: one InfiniBand HDR port for each GPU."""

MIB = 2**20
CUDA_CONTEXT = 1024 * MIB
"""Bytes of a GPU that tensors cannot use: the CUDA context with its kernels, about 0.5 GiB, and NCCL's buffers."""


@dataclass(frozen=True)
class GPU:
    """One kind of GPU. Speeds are those of the data sheet, dense, without sparsity."""

    name: str
    memory_bytes: int
    """The memory that the driver reports, which is slightly less than the name says."""
    half_flops: float
    """FLOP/s of the tensor cores in bf16 (fp16 where there is no bf16), with sums in fp32."""
    fp32_flops: float
    """FLOP/s of fp32 products with torch's defaults, without TF32."""
    hbm: float
    """Bytes/s of the GPU's own memory."""
    link: float
    """Bytes/s that one GPU can receive from the others of its machine: over NVLink, or else PCIe."""
    per_machine: int
    """The number of GPUs in a usual machine."""
    has_bf16: bool = True
    """Whether the GPU has bf16: from compute capability 8.0 on. Kernels for packed attention require the same."""
    speed_of: str = ""
    """The name of the GPU whose speeds stand here, if those of this one are not known."""

    @property
    def link_name(self) -> str:
        """Return the kind of the link: PCIe reaches 64 GB/s each way, and NVLink begins above."""
        return "NVLink" if self.link > 64e9 else "PCIe"


def _small(name: str, memory: int, fp32: float, hbm: float, *, half: float = 2, per_machine: int = 2) -> GPU:
    """Return a card for one slot. Its half precision is a multiple of fp32: 2 for GeForce, 4 for workstations and for
    GeForce RTX 20, 8 for Quadro RTX.

    Args:
        name: its name in GPUS.
        memory: MiB that the driver reports.
        fp32: TFLOP/s.
        hbm: GB/s.
        half: this multiple.
        per_machine: the number of cards in a usual machine.
    """
    turing = name.startswith(("RTX20", "TITANRTX", "QUADRO"))
    link = 16e9 if turing else 64e9 if name.startswith(("RTX50", "RTXPRO")) else 32e9
    flops = fp32 * 1e12
    return GPU(name, memory * MIB, half * flops, flops, hbm * 1e9, link, per_machine, has_bf16=not turing)


# Memory: `nvidia-smi`, ECC on. The rest: NVIDIA data sheets of each product, dense figures (half of those "with
# sparsity"); GeForce cards: the architecture white papers, fp16 with fp32 accumulation. Links: NVLink 2, 3, 4, 5 are
# 300, 600, 900, 1800 GB/s in both directions together; PCIe 3 and 4 x16 are 16 and 32 GB/s each way.
GPUS: dict[str, GPU] = {
    gpu.name: gpu
    for gpu in (
        GPU("V100-16GB", 16160 * MIB, 125e12, 15.7e12, 0.9e12, 150e9, 8, has_bf16=False),
        GPU("V100-32GB", 32510 * MIB, 125e12, 15.7e12, 0.9e12, 150e9, 8, has_bf16=False),
        GPU("T4-16GB", 15109 * MIB, 65e12, 8.1e12, 0.32e12, 16e9, 4, has_bf16=False),
        GPU("RTX3090-24GB", 24268 * MIB, 71e12, 35.6e12, 0.936e12, 32e9, 2),
        GPU("RTX4090-24GB", 24564 * MIB, 165.2e12, 82.6e12, 1.008e12, 32e9, 2),
        GPU("A10-24GB", 22731 * MIB, 125e12, 31.2e12, 0.6e12, 32e9, 4),
        GPU("A10G-24GB", 23028 * MIB, 70e12, 35e12, 0.6e12, 32e9, 4),  # of AWS (G5), with slower half precision
        GPU("L4-24GB", 23034 * MIB, 121e12, 30.3e12, 0.3e12, 32e9, 4),
        GPU("A6000-48GB", 48685 * MIB, 154.8e12, 38.7e12, 0.768e12, 32e9, 4),
        GPU("L40S-48GB", 46068 * MIB, 362e12, 91.6e12, 0.864e12, 32e9, 8),
        GPU("A100-40GB", 40536 * MIB, 312e12, 19.5e12, 1.555e12, 300e9, 8),
        GPU("A100-80GB", 81251 * MIB, 312e12, 19.5e12, 2.039e12, 300e9, 8),
        GPU("H100-80GB", 81559 * MIB, 989e12, 67e12, 3.35e12, 450e9, 8),
        GPU("H200-141GB", 143771 * MIB, 989e12, 67e12, 4.8e12, 450e9, 8),
        GPU("B200-180GB", 183359 * MIB, 2250e12, 75e12, 7.7e12, 900e9, 8),
        GPU("A800-80GB", 81251 * MIB, 312e12, 19.5e12, 2.039e12, 200e9, 8),
        GPU("A30-24GB", 24062 * MIB, 165e12, 10.3e12, 0.933e12, 32e9, 4),
        GPU("H100PCIE-80GB", 81559 * MIB, 756e12, 51e12, 2.0e12, 64e9, 4),
        GPU("H100NVL-94GB", 95830 * MIB, 835e12, 60e12, 3.9e12, 300e9, 2),
        GPU("H20-96GB", 97871 * MIB, 148e12, 44e12, 4.0e12, 450e9, 8),
        GPU("GH200-96GB", 97871 * MIB, 989e12, 67e12, 4.0e12, 450e9, 1),
        GPU("L40-48GB", 46068 * MIB, 181e12, 90.5e12, 0.864e12, 32e9, 8),
        _small("A2-16GB", 15356, 4.5, 200, half=4, per_machine=4),
        _small("A40-48GB", 46068, 37.4, 696, half=4, per_machine=8),
        _small("A4000-16GB", 16376, 19.2, 448, half=4, per_machine=4),
        _small("A4500-20GB", 20470, 23.7, 640, half=4, per_machine=4),
        _small("A5000-24GB", 24564, 27.8, 768, half=4, per_machine=4),
        _small("RTX4000ADA-20GB", 20475, 26.7, 360, half=4, per_machine=4),
        _small("RTX5000ADA-32GB", 32760, 65.3, 576, half=4, per_machine=4),
        _small("RTX6000ADA-48GB", 46068, 91.1, 960, half=4, per_machine=4),
        _small("RTXPRO6000-96GB", 97887, 125.0, 1792, half=4, per_machine=4),
        _small("QUADRORTX5000-16GB", 16125, 11.2, 448, half=8),
        _small("QUADRORTX6000-24GB", 24220, 16.3, 672, half=8),
        _small("QUADRORTX8000-48GB", 48601, 16.3, 672, half=8),
        _small("TITANRTX-24GB", 24220, 16.3, 672, half=8),
        _small("RTX2060-6GB", 5934, 6.5, 336, half=4),
        _small("RTX2070-8GB", 7982, 7.5, 448, half=4),
        _small("RTX2080-8GB", 7979, 10.1, 448, half=4),
        _small("RTX2080TI-11GB", 11019, 13.4, 616, half=4),
        _small("RTX3060-12GB", 12045, 12.7, 360),
        _small("RTX3060TI-8GB", 7982, 16.2, 448),
        _small("RTX3070-8GB", 7982, 20.3, 448),
        _small("RTX3070TI-8GB", 7982, 21.7, 608),
        _small("RTX3080-10GB", 10018, 29.8, 760),
        _small("RTX3080-12GB", 12045, 30.6, 912),
        _small("RTX3080TI-12GB", 12045, 34.1, 912),
        _small("RTX3090TI-24GB", 24268, 40.0, 1008),
        _small("RTX4060-8GB", 8188, 15.1, 272),
        _small("RTX4060TI-8GB", 8188, 22.1, 288),
        _small("RTX4060TI-16GB", 16380, 22.1, 288),
        _small("RTX4070-12GB", 12282, 29.1, 504),
        _small("RTX4070SUPER-12GB", 12282, 35.5, 504),
        _small("RTX4070TI-12GB", 12282, 40.1, 504),
        _small("RTX4070TISUPER-16GB", 16376, 44.1, 672),
        _small("RTX4080-16GB", 16376, 48.7, 717),
        _small("RTX4080SUPER-16GB", 16376, 52.2, 736),
        _small("RTX5070-12GB", 12227, 30.9, 672),
        _small("RTX5070TI-16GB", 16303, 43.9, 896),
        _small("RTX5080-16GB", 16303, 56.3, 960),
        _small("RTX5090-32GB", 32607, 104.8, 1792),
    )
}


def data_sheet(name: str, memory_bytes: int | None = None) -> GPU | None:
    """Return the row of GPUS for a driver's name of a GPU; None if there is none.

    Args:
        name: the name from `torch.cuda.get_device_name` or nvidia-smi.
        memory_bytes: the memory of the GPU, to choose between rows of one name, which differ mainly in memory.

    >>> data_sheet("NVIDIA A100-SXM4-80GB", 81920 * 2**20).name, data_sheet("Tesla V100-SXM2-16GB", 2**34).name
    ('A100-80GB', 'V100-16GB')
    >>> data_sheet("NVIDIA GeForce RTX 4090").name, data_sheet("NVIDIA A10G").name, data_sheet("Quadro P400")
    ('RTX4090-24GB', 'A10G-24GB', None)
    """
    joined = re.sub(r"\b(TITAN|QUADRO|PRO|RTX) (?=RTX|PRO|\d)", r"\1", name.upper())
    joined = re.sub(r"RTX (?=PRO)", "RTX", joined)
    joined = re.sub(r"(?<=\d) (?=(?:TI|SUPER|ADA)\b)|(?<=TI) (?=SUPER\b)|(?<=H100) (?=PCIE\b|NVL\b)", "", joined)
    words = re.findall(r"[A-Z]+\d*[A-Z]*", joined)
    rows = [gpu for gpu in GPUS.values() if gpu.name.partition("-")[0] in words]
    return min(rows, key=lambda gpu: abs(gpu.memory_bytes - (memory_bytes or gpu.memory_bytes)), default=None)


def peak_flops(name: str, precision: str) -> float | None:
    """Return the FLOP/s of the data sheet of a driver's name of a GPU at a precision; None for an unknown GPU."""
    gpu = data_sheet(name)
    if gpu is None:
        return None
    return gpu.fp32_flops if precision == "fp32" else gpu.half_flops


@dataclass(frozen=True)
class Machines:
    """Equal machines with equal GPUs, with one process for each GPU."""

    gpu: GPU
    per_machine: int
    nodes: int = 1
    network: float = NETWORK_GBIT * 1e9 / 8
    """Bytes/s that one GPU can receive from other machines."""

    @property
    def world_size(self) -> int:
        """Return the number of all GPUs."""
        return self.per_machine * self.nodes

    @property
    def room(self) -> int:
        """Return the bytes of one GPU that tensors can use."""
        return self.gpu.memory_bytes - CUDA_CONTEXT

    def __str__(self) -> str:
        on = f" on each of {self.nodes} machines" if self.nodes > 1 else ""
        return f"{self.per_machine} x {self.gpu.name}{on}"


def parse(text: str, nodes: int = 1, network_gbit: float = NETWORK_GBIT, memory: str | None = None) -> Machines:
    """Read machines from `8xA100-40GB`, or `A100-80GB` for a single GPU. Upper and lower case are equal.

    The memory may be left out if GPUS has one row for the card.

    Args:
        text: the GPUs of one machine.
        nodes: the number of machines.
        network_gbit: Gbit/s of each GPU between machines.
        memory: the memory of a GPU, such as `24GB`. With it, a GPU that is not in GPUS gets the speeds of the slowest
            known GPU of similar memory, which compare strategies and say little about times.

    Raises:
        UsageError: for a GPU that is not in GPUS, unless its memory is given; or a number below 1.

    >>> str(parse("8xa100-40gb", nodes=2)), str(parse("4xL4"))
    ('8 x A100-40GB on each of 2 machines', '4 x L4-24GB')
    >>> parse("2xMine", memory="12GB").gpu.speed_of
    'A2-16GB'
    """
    count, name = re.fullmatch(r"(?:(\d+) ?x ?)?(.*)", text.strip(), re.IGNORECASE).groups()  # type: ignore[union-attr]
    found = _named(text, name) if memory is None else _with_memory(name, memory)
    if count is not None and int(count) < 1:
        raise UsageError(f"--gpus {text}: a machine has at least one GPU")
    if nodes < 1:
        raise UsageError(f"--nodes {nodes}: at least one machine is needed")
    if network_gbit <= 0:
        raise UsageError(f"--network {network_gbit:g}: the network needs a speed above 0, in Gbit/s a GPU")
    return Machines(found, int(count or 1), nodes, network_gbit * 1e9 / 8)


def _named(text: str, name: str) -> GPU:
    """Return the row of a name, with or without its memory."""
    plain = re.sub(r"[ _]|^(?:NVIDIA|GEFORCE)", "", name.upper())
    rows = [gpu for gpu in GPUS.values() if plain in (gpu.name.upper(), gpu.name.partition("-")[0])]
    if len(rows) == 1:
        return rows[0]
    if rows:
        raise UsageError(f"--gpus {text}: say which: {' or '.join(gpu.name for gpu in rows)}")
    near = difflib.get_close_matches(name.lower(), [known.lower() for known in GPUS], n=1)
    hint = f"did you mean {next(k for k in GPUS if k.lower() == near[0])}? " if near else ""
    raise UsageError(
        f"--gpus {text}: no GPU is known as '{name}'; {hint}known are {', '.join(GPUS)}; for another one give its "
        "memory, as --memory 24GB"
    )


def _with_memory(name: str, memory: str) -> GPU:
    """Return a GPU of this much memory: the row of its name, else the slowest row of similar memory."""
    amount = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:GB|GIB|G)?", memory.strip().upper())
    if amount is None or float(amount[1]) <= 1:
        raise UsageError(f"--memory {memory}: the memory of a GPU in GB is expected, such as 24GB")
    size = float(amount[1])
    taken = int(size * 2**30 * 0.97)  # Drivers report up to 3% less than the name of a card says.
    known = [gpu for gpu in GPUS.values() if gpu.name.partition("-")[0] == name.upper().partition("-")[0]]
    if known:
        return replace(known[0], name=f"{known[0].name.partition('-')[0]}-{size:g}GB", memory_bytes=taken)
    near = [gpu for gpu in GPUS.values() if 0.9 * taken <= gpu.memory_bytes <= 1.5 * taken]
    like = min(near or GPUS.values(), key=lambda gpu: gpu.half_flops)
    return replace(like, name=name or f"{size:g}GB", memory_bytes=taken, speed_of=like.name)
