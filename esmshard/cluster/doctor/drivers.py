"""The table of NVIDIA drivers, builds of torch, and GPUs that work together. No torch.

`esmshard doctor` compares a machine with the table WHEELS.
"""

import re
from dataclasses import dataclass

Version = tuple[int, ...]

TORCH_FLOOR = "2.11"
"""The oldest torch that esmshard supports, as in the package's metadata."""


@dataclass(frozen=True)
class Wheel:
    """A CUDA version for which torch is built."""

    index: str
    """The last part of the address of the package index, such as cu130."""
    cuda: str
    """The version of the CUDA toolkit, as in `torch.version.cuda`."""
    driver: str
    """The oldest Linux driver that runs this build, by CUDA's minor version compatibility within 12.x or 13.x."""
    native_driver: str
    """The driver that was released with this toolkit. An older driver cannot compile PTX for GPUs newer than
    `capabilities`.
    """
    capabilities: tuple[tuple[int, int], ...]
    """The compute capabilities for which the wheel has machine code, on x86-64."""
    first_torch: str
    """The first release with such a wheel."""
    last_torch: str | None
    """The last release with such a wheel; None if releases still have one."""

    @property
    def address(self) -> str:
        """Return the package index for `pip install torch --index-url ...`."""
        return f"https://download.pytorch.org/whl/{self.index}"

    @property
    def is_usable(self) -> bool:
        """Whether a torch that esmshard supports has such a wheel."""
        return self.last_torch is None or version_of(self.last_torch) >= version_of(TORCH_FLOOR)


_OLD = ((5, 0), (6, 0), (7, 0), (7, 5), (8, 0), (8, 6), (9, 0))  # Maxwell to Hopper
_VOLTA_ON = ((7, 0), (7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0))  # Volta to Blackwell
_TURING_ON = _VOLTA_ON[1:]

# Drivers: NVIDIA CUDA Toolkit Release Notes, tables "CUDA Toolkit and Minimum Required Driver Version for CUDA Minor
# Version Compatibility" and "CUDA Toolkit and Corresponding Driver Versions", Linux x86_64. GPUs and releases: the
# "Release Compatibility Matrix" and "PyTorch CUDA Support Matrix" of pytorch/RELEASE.md; cu128 had Volta until 2.10.
WHEELS: dict[str, Wheel] = {
    wheel.index: wheel
    for wheel in (
        Wheel("cu118", "11.8", "450.80.02", "520.61.05", _OLD, "2.0", "2.7"),
        Wheel("cu121", "12.1", "525.60.13", "530.30.02", _OLD, "2.1", "2.5"),
        Wheel("cu124", "12.4", "525.60.13", "550.54.14", _OLD, "2.4", "2.6"),
        Wheel("cu126", "12.6", "525.60.13", "560.28.03", _OLD, "2.6", None),
        Wheel("cu128", "12.8", "525.60.13", "570.26", _TURING_ON, "2.7", "2.11"),
        Wheel("cu129", "12.9", "525.60.13", "575.51.03", _VOLTA_ON, "2.8", "2.8"),
        Wheel("cu130", "13.0", "580", "580.65.06", _TURING_ON, "2.9", None),
        Wheel("cu132", "13.2", "580", "595.45.04", _TURING_ON, "2.12", None),
    )
}


def version_of(text: str) -> Version:
    """Return the numbers at the beginning of a version; empty for a text without numbers.

    >>> version_of("2.11.0+cu130"), version_of("535.104.05"), version_of("2.13.0rc1")
    ((2, 11, 0), (535, 104, 5), (2, 13, 0))
    """
    found = re.match(r"\d+(?:\.\d+)*", text.strip())
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def runs_on(capability: tuple[int, int], built_for: tuple[tuple[int, int], ...]) -> bool:
    """Whether machine code for the capabilities `built_for` runs on a GPU: same major number, same or lower minor
    number.

    >>> runs_on((8, 9), ((8, 0), (8, 6))), runs_on((10, 0), ((9, 0),))
    (True, False)
    """
    return any(major == capability[0] and minor <= capability[1] for major, minor in built_for)


def wheel_for(driver: str, capabilities: tuple[tuple[int, int], ...] = ()) -> Wheel | None:
    """Return the wheel to install for a driver and all GPUs of a machine; None if there is none.

    A wheel whose toolkit the driver knows is preferred, then one that is still built, then the newest one.

    >>> wheel_for("535.104.05", ((8, 0),)).index, wheel_for("580.65.06", ((8, 0),)).index, wheel_for("470.82.01")
    ('cu126', 'cu130', None)
    """
    here = version_of(driver)
    fitting = [
        wheel
        for wheel in WHEELS.values()
        if wheel.is_usable
        and here >= version_of(wheel.driver)
        and all(runs_on(capability, wheel.capabilities) for capability in capabilities)
    ]

    def order(wheel: Wheel) -> tuple[bool, bool, Version]:
        return here >= version_of(wheel.native_driver), wheel.last_torch is None, version_of(wheel.cuda)

    return max(fitting, key=order, default=None)
