"""GPUs with the figures of their data sheets, and the machines of a plan. No torch."""

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
    has_bf16: bool = True
    """Whether the GPU has bf16: from compute capability 8.0 on. Kernels for packed attention require the same."""


# Memory: `nvidia-smi`, ECC on. The rest: NVIDIA data sheets of each product, dense figures (half of those "with
# sparsity"); GeForce cards: the architecture white papers, fp16 with fp32 accumulation. Links: NVLink 2, 3, 4, 5 are
# 300, 600, 900, 1800 GB/s in both directions together; PCIe 3, 4, 5 x16 are 16, 32, 64 GB/s each way.
GPUS: dict[str, GPU] = {
    gpu.name: gpu
    for gpu in (
        GPU("V100-16GB", 16160 * MIB, 125e12, 15.7e12, 0.9e12, 150e9, has_bf16=False),
        GPU("V100-32GB", 32510 * MIB, 125e12, 15.7e12, 0.9e12, 150e9, has_bf16=False),
        GPU("T4-16GB", 15109 * MIB, 65e12, 8.1e12, 0.32e12, 16e9, has_bf16=False),
        GPU("RTX3090-24GB", 24268 * MIB, 71e12, 35.6e12, 0.936e12, 32e9),
        GPU("RTX4090-24GB", 24564 * MIB, 165.2e12, 82.6e12, 1.008e12, 32e9),
        GPU("RTX5090-32GB", 32607 * MIB, 209.6e12, 104.8e12, 1.792e12, 64e9),
        GPU("A10G-24GB", 23028 * MIB, 70e12, 35e12, 0.6e12, 32e9),
        GPU("L4-24GB", 23034 * MIB, 121e12, 30.3e12, 0.3e12, 32e9),
        GPU("A6000-48GB", 48685 * MIB, 154.8e12, 38.7e12, 0.768e12, 32e9),
        GPU("L40S-48GB", 46068 * MIB, 362e12, 91.6e12, 0.864e12, 32e9),
        GPU("A100-40GB", 40536 * MIB, 312e12, 19.5e12, 1.555e12, 300e9),
        GPU("A100-80GB", 81251 * MIB, 312e12, 19.5e12, 2.039e12, 300e9),
        GPU("H100-80GB", 81559 * MIB, 989e12, 67e12, 3.35e12, 450e9),
        GPU("H200-141GB", 143771 * MIB, 989e12, 67e12, 4.8e12, 450e9),
        GPU("B200-180GB", 183359 * MIB, 2250e12, 75e12, 7.7e12, 900e9),
    )
}


def data_sheet(name: str, memory_bytes: int | None = None) -> GPU | None:
    """Return the row of GPUS for a driver's name of a GPU; None if there is none.

    Args:
        name: the name from `torch.cuda.get_device_name` or nvidia-smi.
        memory_bytes: the memory of the GPU, to choose between rows of one name, which differ mainly in memory.

    >>> data_sheet("NVIDIA A100-SXM4-80GB", 81920 * 2**20).name, data_sheet("Tesla V100-SXM2-16GB", 2**34).name
    ('A100-80GB', 'V100-16GB')
    >>> data_sheet("NVIDIA GeForce RTX 4090").name, data_sheet("NVIDIA GeForce RTX 3090 Ti"), data_sheet("Quadro P400")
    ('RTX4090-24GB', None, None)
    """
    joined = re.sub(r"\bRTX (?=\d)|(?<=\d) (?=(?:TI|PCIE|NVL)\b)", lambda part: part[0].strip(), name.upper())
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


def parse(text: str, nodes: int = 1, network_gbit: float = NETWORK_GBIT, memory_gb: float | None = None) -> Machines:
    """Read machines from `8xA100-40GB`, or `A100-80GB` for a single GPU. Upper and lower case are equal.

    The memory may be left out if GPUS has one row for the card.

    Args:
        text: the GPUs of one machine.
        nodes: the number of machines.
        network_gbit: Gbit/s of each GPU between machines.
        memory_gb: the memory of a GPU that is not in GPUS. It gets the speeds of an A10G, which compare strategies and
            say little about times.

    Raises:
        UsageError: for a GPU that is not in GPUS, unless its memory is given; or a number below 1.

    >>> str(parse("8xa100-40gb", nodes=2)), str(parse("4xL4")), str(parse("2xMine", memory_gb=12))
    ('8 x A100-40GB on each of 2 machines', '4 x L4-24GB', '2 x Mine')
    """
    count, name = re.fullmatch(r"(?:(\d+) ?x ?)?(.*)", text.strip(), re.IGNORECASE).groups()  # type: ignore[union-attr]
    per_machine = int(count or 1)
    if min(per_machine, nodes) < 1 or network_gbit <= 0 or (memory_gb is not None and memory_gb <= 1):
        raise UsageError("--gpus, --nodes, --network and --memory: each number must be at least 1")
    if memory_gb is None:
        plain = name.upper().replace(" ", "")
        rows = [gpu for gpu in GPUS.values() if plain in (gpu.name, gpu.name.partition("-")[0])]
        if len(rows) != 1:
            near = [gpu.name for gpu in rows] or difflib.get_close_matches(plain, GPUS, n=1)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            raise UsageError(
                f"--gpus {text}: no GPU is known as '{name}'; {hint}known are {', '.join(GPUS)}; for another one give "
                "its memory, as --memory 24"
            )
        gpu = rows[0]
    else:  # Drivers report up to 3% less than the name of a card says.
        gpu = replace(GPUS["A10G-24GB"], name=name, memory_bytes=int(memory_gb * 2**30 * 0.97))
    return Machines(gpu, per_machine, nodes, network_gbit * 1e9 / 8)
