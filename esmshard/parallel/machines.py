"""GPUs and machines, as their data sheets describe them. No torch.

GPUS is the registry. `parse` reads what a user types: `8xA100-40GB`.
"""

import difflib
import re
from dataclasses import dataclass

from esmshard.errors import UsageError

NETWORK_GBIT = 200
"""Gbit/s of each GPU between machines, if the user says nothing: one InfiniBand HDR port a GPU."""

MIB = 2**20
CUDA_CONTEXT = 1024 * MIB
"""Of a GPU's memory that no tensor gets: the CUDA context with its kernels, about 0.5 GiB, and NCCL's buffers."""


@dataclass(frozen=True)
class GPU:
    """One kind of GPU. Speeds are those of the data sheet, dense, without sparsity."""

    name: str
    memory_bytes: int
    """What the driver reports, which is a little less than the name says."""
    half_flops: float
    """Tensor cores, bf16 (fp16 where there is no bf16), sums in fp32: FLOP/s."""
    fp32_flops: float
    """FLOP/s of fp32 products as torch computes them by default, without TF32."""
    hbm: float
    """Bytes/s of the GPU's own memory."""
    link: float
    """Bytes/s that one GPU can receive from the others of its machine: NVLink, else PCIe."""
    per_machine: int
    """In a usual machine."""
    has_bf16: bool = True
    """Compute capability 8.0 and later; packed attention kernels begin there too."""


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
        GPU("L4-24GB", 23034 * MIB, 121e12, 30.3e12, 0.3e12, 32e9, 4),
        GPU("A6000-48GB", 48685 * MIB, 154.8e12, 38.7e12, 0.768e12, 32e9, 4),
        GPU("L40S-48GB", 46068 * MIB, 362e12, 91.6e12, 0.864e12, 32e9, 8),
        GPU("A100-40GB", 40536 * MIB, 312e12, 19.5e12, 1.555e12, 300e9, 8),
        GPU("A100-80GB", 81251 * MIB, 312e12, 19.5e12, 2.039e12, 300e9, 8),
        GPU("H100-80GB", 81559 * MIB, 989e12, 67e12, 3.35e12, 450e9, 8),
        GPU("H200-141GB", 143771 * MIB, 989e12, 67e12, 4.8e12, 450e9, 8),
        GPU("B200-180GB", 183359 * MIB, 2250e12, 75e12, 7.7e12, 900e9, 8),
    )
}


@dataclass(frozen=True)
class Machines:
    """Equal machines with equal GPUs, one process a GPU."""

    gpu: GPU
    per_machine: int
    nodes: int = 1
    network: float = NETWORK_GBIT * 1e9 / 8
    """Bytes/s that one GPU can receive from other machines."""

    @property
    def world_size(self) -> int:
        """GPUs in all."""
        return self.per_machine * self.nodes

    @property
    def room(self) -> int:
        """Bytes of one GPU that tensors can have."""
        return self.gpu.memory_bytes - CUDA_CONTEXT

    def __str__(self) -> str:
        on = f" on each of {self.nodes} machines" if self.nodes > 1 else ""
        return f"{self.per_machine} x {self.gpu.name}{on}"


def parse(text: str, nodes: int = 1, network_gbit: float = NETWORK_GBIT) -> Machines:
    """Machines from `8xA100-40GB`, or `A100-80GB` for a single GPU; upper and lower case are the same.

    Args:
        text: GPUs of one machine.
        nodes: machines.
        network_gbit: Gbit/s of each GPU between machines.

    Raises:
        UsageError: for a GPU that is not in GPUS, or a number below 1.

    >>> str(parse("8xa100-40gb", nodes=2))
    '8 x A100-40GB on each of 2 machines'
    """
    count, name = re.fullmatch(r"(?:(\d+) ?x ?)?(.*)", text.strip(), re.IGNORECASE).groups()  # type: ignore[union-attr]
    found = {known.lower(): gpu for known, gpu in GPUS.items()}.get(name.lower())
    if found is None:
        near = difflib.get_close_matches(name.lower(), [known.lower() for known in GPUS], n=1)
        hint = f"did you mean {next(k for k in GPUS if k.lower() == near[0])}? " if near else ""
        raise UsageError(f"--gpus {text}: no GPU is known as '{name}'; {hint}known are {', '.join(GPUS)}")
    if count is not None and int(count) < 1:
        raise UsageError(f"--gpus {text}: a machine has at least one GPU")
    if nodes < 1:
        raise UsageError(f"--nodes {nodes}: at least one machine is needed")
    if network_gbit <= 0:
        raise UsageError(f"--network {network_gbit:g}: the network needs a speed above 0, in Gbit/s a GPU")
    return Machines(found, int(count or 1), nodes, network_gbit * 1e9 / 8)
