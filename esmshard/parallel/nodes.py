"""Several machines of one run: how many, and where their launchers meet. Starts without torch."""

import re
from dataclasses import dataclass, fields

from esmshard.errors import UsageError

LAST_CALL = 15
"""Seconds for which machines that are enough wait for more. Each start with less than all of them takes so much longer;
each machine that comes later costs a checkpoint and a start."""


@dataclass(frozen=True)
class Nodes:
    """The machines of a run, on each of which the same command is started once.

    The times are torchrun's, with the names that they have in its `--rdzv-conf`.
    """

    least: int
    """Machines without which nothing runs."""
    most: int
    """Machines that are taken in. More than `least`: the run goes on without one that is lost, and takes in others."""
    endpoint: str
    """`HOST:PORT` of one of them; what they tell each other is kept there. The run cannot outlive it."""
    run_id: str
    """What they have in common, and other runs have not."""
    local_addr: str | None = None
    """Address of this machine for the others; found by itself where None."""
    join_timeout: int = 600
    """Seconds for which a machine waits for `least` of them, at the start and after a loss."""
    last_call_timeout: int = LAST_CALL
    keep_alive_interval: int = 5
    """Seconds between two signs of life."""
    keep_alive_max_attempt: int = 3
    """Signs of life that may fail to come before a machine counts as gone."""

    @property
    def patience(self) -> int:
        """Seconds without a sign of life after which a machine is gone."""
        return self.keep_alive_interval * self.keep_alive_max_attempt

    @property
    def meeting_place(self) -> tuple[str, int]:
        """Host and port of the endpoint."""
        return _endpoint(self.endpoint)


_CONF = {field.name for field in fields(Nodes) if field.type is int} - {"least", "most"}


def parse(
    nnodes: str, endpoint: str | None, run_id: str | None, local_addr: str | None = None, conf: str = ""
) -> Nodes:
    """The machines as torchrun's options name them.

    Args:
        nnodes: `2`, or `1:2` for at least one and at most two.
        endpoint: `HOST:PORT`; the port is 29400 if there is none.
        run_id: any name; the job id of the scheduler is a good one.
        local_addr: name or address of this machine, or None.
        conf: `KEY=VALUE,...` of the times in `Nodes`, in whole seconds.

    Raises:
        UsageError: if one is missing or malformed.
    """
    numbers = re.fullmatch(r"(\d{1,5})(?::(\d{1,5}))?", nnodes, re.ASCII)
    least, most = (int(numbers[1]), int(numbers[2] or numbers[1])) if numbers else (0, 0)
    if not 1 <= least <= most:
        raise UsageError(f"--nnodes {nnodes}: a number of machines is expected, as 2, or a least and a most, as 1:2")
    if not endpoint:
        raise UsageError("--nnodes: say where the machines meet: --rdzv-endpoint HOST:PORT, the same on each of them")
    _endpoint(endpoint)
    if not run_id:
        raise UsageError("--nnodes: no scheduler names this job; name it by --rdzv-id ID, the same on each machine")
    times: dict[str, int] = {}
    for pair in filter(None, conf.split(",")):
        key, _, value = pair.partition("=")
        if key.strip() not in _CONF or not re.fullmatch(r"\s*0*[1-9]\d{0,8}\s*", value, re.ASCII):
            raise UsageError(f"--rdzv-conf {pair}: KEY=SECONDS is expected, and known are {', '.join(sorted(_CONF))}")
        times[key.strip()] = int(value)
    return Nodes(least, most, endpoint, run_id, local_addr, **times)


def _endpoint(text: str) -> tuple[str, int]:
    parts = re.fullmatch(r"(?:\[([0-9a-fA-F:.%\w]+)\]|([\w.-]+))(?::(\d{1,5}))?", text, re.ASCII)
    port = int(parts[3] or 29400) if parts else 0
    if parts is None or not 0 < port < 1 << 16:
        raise UsageError(f"--rdzv-endpoint {text}: HOST:PORT is expected, as node1:29400, or [fe80::1]:29400")
    return parts[1] or parts[2], port
