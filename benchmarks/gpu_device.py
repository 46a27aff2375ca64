"""The GPU that is measured: what it is, how it is clocked, and whether anything is in the way of measuring it."""

import json
import subprocess
import sys
import time
from typing import Any

import torch

from esmshard.cluster.doctor.findings import Unanswered, ask, gib
from esmshard.cluster.doctor.gpus import parse_processes

TAKEN = 2 * 2**30
"""Bytes. A GPU of which more is taken before a stage begins is in use: figures from it would be of two programs."""

LOOKS = 5
"""How often a GPU that is in use is looked at before that is believed."""

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
_CLOCKS = "clocks.sm,clocks.mem,temperature.gpu,power.draw"
_FIXED = "driver_version,clocks.max.sm,clocks.max.mem,power.limit,ecc.mode.current"


def obstacle() -> str | None:
    """Why nothing can be measured on the GPU, in one sentence with what to do; None if nothing is in the way.

    A process of its own asks torch, for this one must hold no memory of the GPU while the stages run.
    """
    for _ in range(LOOKS):
        done = subprocess.run([sys.executable, "-c", _QUESTION], capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            return f"torch cannot be asked for its GPU ({last}); install torch anew, or rehearse with --rehearse"
        found = json.loads(done.stdout.splitlines()[-1])
        if "free" not in found or found["total"] - found["free"] <= TAKEN:
            break
        time.sleep(2)  # a process that was killed keeps its memory for a moment
    return judged(found, processes())


def judged(found: dict[str, Any], running: str) -> str | None:
    """What `obstacle` makes of torch's answers.

    Args:
        found: `torch`, `built` (CUDA version or None), and either `error` or `free` and `total` bytes.
        running: the programs on the GPU, for people; may be empty.
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
            f"{gib(taken)} of the GPU's {gib(found['total'])} are in use{by}; wait until that program has ended, or "
            "choose another GPU with CUDA_VISIBLE_DEVICES"
        )
    return None


def processes() -> str:
    """Programs on the GPUs as the driver names them, for people; empty where it does not say."""
    query = "--query-compute-apps=gpu_uuid,pid,process_name,used_memory"
    found = parse_processes(_smi(query, "--format=csv,noheader,nounits"))
    return ", ".join(one for several in found.values() for one in several)


def about(device: torch.device) -> dict[str, str]:
    """Facts about a GPU that do not change while it is measured; none about the CPU."""
    if device.type != "cuda":
        return {}
    known = torch.cuda.get_device_properties(device)
    values = [value.strip() for value in _of_gpu(_FIXED).split(",")]
    found = {"capability": f"{known.major}.{known.minor}", "memory": gib(known.total_memory)}
    if len(values) == len(_FIXED.split(",")):
        driver, sm, memory, power, ecc = values
        found |= {"driver": driver, "highest clocks": f"SM {sm}, memory {memory}", "power limit": power, "ECC": ecc}
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else ""  # type: ignore[no-untyped-call]
    return {**found, "CUDA": str(torch.version.cuda), "cuDNN": str(torch.backends.cudnn.version()), "NCCL": nccl}


def clocks(device: torch.device) -> str:
    """Clocks, temperature and power at this moment; empty for the CPU and where the driver does not say."""
    if device.type != "cuda":
        return ""
    values = [value.strip() for value in _of_gpu(_CLOCKS).split(",")]
    if len(values) != len(_CLOCKS.split(",")):
        return ""
    sm, memory, temperature, power = values
    return f"SM {sm}, memory {memory}, {temperature} C, {power}"


def _of_gpu(fields: str) -> str:
    """What the driver says of the GPU that torch computes on, separated by commas; empty without an answer."""
    query = (f"--query-gpu={fields}", "--format=csv,noheader")
    uuid = getattr(torch.cuda.get_device_properties(), "uuid", "")
    return (_smi(*query, f"--id=GPU-{uuid}") or _smi(*query)).split("\n", 1)[0]


def _smi(*arguments: str) -> str:
    """What nvidia-smi answers; empty if it is not there or fails."""
    try:
        answer = ask(["nvidia-smi", *arguments])
    except Unanswered:
        return ""
    return "" if answer.code else answer.out
