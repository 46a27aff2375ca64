"""The GPU that is measured: its name and clocks, and obstacles to a measurement."""

import json
import subprocess
import sys
from typing import Any

import torch

from esmshard.cluster.doctor import nvidia_smi
from esmshard.io.paths import memory_text

TAKEN = 2 * 2**30
"""The bytes of a GPU in use from which on another program uses it. Figures would then be those of two programs."""

_QUESTION = """
import json, warnings
warnings.simplefilter("ignore")
import torch
found = {"torch": torch.__version__, "built": torch.version.cuda}
try:
    torch.cuda.init()
    found["free"], found["total"] = torch.cuda.mem_get_info()
except Exception as error:
    found["error"] = " ".join(str(error).split())
print(json.dumps(found))
"""


def obstacle() -> str | None:
    """Return why the GPU cannot be measured, in one sentence with a fix; None if it can.

    A separate process asks torch, because this process must use no memory of the GPU while the stages run.
    """
    done = subprocess.run([sys.executable, "-c", _QUESTION], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return f"torch cannot be asked for its GPU ({last}); install torch anew, or rehearse with --rehearse"
    found = json.loads(done.stdout.splitlines()[-1])
    return judged(found, processes())


def judged(found: dict[str, Any], running: str) -> str | None:
    """Return the result of `obstacle` for the answers of torch.

    Args:
        found: `torch`, `built` (CUDA version or None), and either `error` or `free` and `total` bytes.
        running: the programs on the GPU, as a text for users; may be empty.
    """
    error = found.get("error", "")
    if found["built"] is None:
        return (
            f"torch {found['torch']} is built without CUDA; install a CUDA build (pip install torch on a machine with "
            "network), or rehearse with --rehearse"
        )
    if "driver" in error and "too old" in error:
        return (
            f"the NVIDIA driver is too old for torch {found['torch']}, which is built for CUDA {found['built']}; "
            "update the driver, or install a torch for an older CUDA (`esmshard doctor` names both)"
        )
    if error:
        return f"no CUDA device: {error.split('. ')[0]}; run this on a machine with an NVIDIA GPU, or with --rehearse"
    taken = found["total"] - found["free"]
    if taken > TAKEN:
        by = f" by {running}" if running else ""
        return (
            f"{memory_text(taken)} of the GPU's {memory_text(found['total'])} are in use{by}; wait until that program "
            "has ended, or choose another GPU with CUDA_VISIBLE_DEVICES"
        )
    return None


def processes() -> str:
    """Return the programs on the GPUs by the driver's names, as a text for users; empty if the driver has no names."""
    rows = _smi("--query-compute-apps=process_name,pid,used_memory", "--format=csv,noheader").strip()
    return "; ".join(row.strip() for row in rows.splitlines())


def about(device: torch.device) -> dict[str, str]:
    """Return facts about a GPU that stay the same during a measurement; empty for the CPU."""
    if device.type != "cuda":
        return {}
    known = torch.cuda.get_device_properties(device)
    facts = {"capability": f"{known.major}.{known.minor}", "memory": memory_text(known.total_memory)}
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    facts |= {"CUDA": str(torch.version.cuda), "cuDNN": str(torch.backends.cudnn.version()), "NCCL": nccl}
    return facts | _of_gpu("driver_version", "clocks.max.sm", "clocks.max.mem", "power.limit", "ecc.mode.current")


def clocks(device: torch.device) -> str:
    """Return the present clocks, temperature and power; empty for the CPU, and if the driver does not have them."""
    facts = _of_gpu("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw") if device.type == "cuda" else {}
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def _of_gpu(*fields: str) -> dict[str, str]:
    """Return facts of the driver about torch's GPU by name; nothing without an answer."""
    query = (f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    uuid = getattr(torch.cuda.get_device_properties(), "uuid", "")
    line = (_smi(*query, f"--id=GPU-{uuid}") or _smi(*query)).split("\n", 1)[0]
    values = [value.strip() for value in line.split(",")]
    names = [name.removesuffix("_version") for name in fields]
    return dict(zip(names, values, strict=True)) if len(values) == len(fields) else {}


def _smi(*arguments: str) -> str:
    """Return the output of nvidia-smi; empty if it is not installed or fails."""
    try:
        return nvidia_smi(*arguments)
    except (OSError, subprocess.SubprocessError):
        return ""
