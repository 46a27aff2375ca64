"""What nvidia-smi prints, read; the texts are of its format, from several drivers and machines."""

from pathlib import Path

import pytest

from esmshard.cluster.doctor import gpus
from esmshard.cluster.doctor.findings import Finding
from esmshard.cluster.doctor.gpus import Card, judge, parse_processes

A100 = (
    "0, GPU-5f7c1b2e-0000-1111-2222-333344445555, NVIDIA A100-SXM4-80GB, 535.104.05, 8.0, 81920, 81038, Enabled, 0, "
    "Disabled, Default, Enabled, 31, 0x0000000000000001\n"
)
TROUBLED = (
    "1, GPU-aaaa, NVIDIA A100-SXM4-80GB, 535.104.05, 8.0, 81920, 20480, Enabled, 2, Enabled, Prohibited, Disabled, 88, "
    "0x0000000000000060\n"
)
RTX = (
    "0, GPU-bbbb, NVIDIA GeForce RTX 4090, 570.86.10, 8.9, 24564, 24111, [N/A], [N/A], [N/A], Default, Disabled, 40, "
    "[N/A]\n"
)


def parse_cards(text: str) -> list[Card]:
    cards, others = gpus.parse_cards(text)
    assert others == []
    return cards


def look() -> tuple[list[Card], list[Finding]]:
    """The GPUs as the `nvidia-smi` on the path reports them, and the findings."""
    cards: list[Card] = []
    return cards, list(gpus.check(cards))


def levels(cards: list[Card], processes: dict[str, list[str]] | None = None) -> dict[str, str]:
    return {found.name: found.level for found in judge(cards, processes or {})}


def test_a_healthy_card() -> None:
    (card,) = parse_cards(A100)
    assert card.capability == (8, 0)
    assert card.driver == "535.104.05"
    assert card.memory_total == 81920 * 2**20
    assert card.throttle == 1  # idle
    assert levels([card]) == {"gpu 0": "ok"}


def test_a_card_with_every_trouble() -> None:
    cards = parse_cards(A100 + TROUBLED)
    found = levels(cards, {"GPU-aaaa": ["python (pid 4711, 61000 MiB)"]})
    assert found == {
        "gpu 0": "ok",
        "gpu 1": "ok",
        "gpu 1 free": "warning",
        "gpu 1 ecc": "error",
        "gpu 1 mig": "warning",
        "gpu 1 mode": "error",
        "gpu 1 clocks": "warning",
    }
    said = {one.name: one.found for one in judge(cards, {"GPU-aaaa": ["python (pid 4711, 61000 MiB)"]})}
    assert said["gpu 1 clocks"] == "GPU 1 is slowed down: heat (software), heat (hardware), at 88 C"
    assert "python (pid 4711, 61000 MiB)" in said["gpu 1 free"]


def test_fields_that_a_card_has_not() -> None:
    (card,) = parse_cards(RTX)
    assert (card.ecc_errors, card.mig, card.throttle) == (None, None, None)
    assert levels([card]) == {"gpu 0": "ok", "persistence": "note"}


def test_unequal_cards() -> None:
    assert levels(parse_cards(A100 + RTX.replace("0,", "1,", 1)))["equal"] == "warning"


def test_processes() -> None:
    text = "GPU-aaaa, 4711, /usr/bin/python3, 61000\nGPU-aaaa, 4712, [Not Found], [N/A]\n"
    assert parse_processes(text) == {"GPU-aaaa": ["python3 (pid 4711, 61000 MiB)", "[Not Found] (pid 4712, [N/A] MiB)"]}
    assert parse_processes("") == {}


@pytest.mark.parametrize(
    ("chosen", "left"),
    [
        (None, [0, 1]),
        ("1", [1]),
        ("1,0", [1, 0]),
        ("", []),
        ("-1", []),
        ("0,7,1", [0]),
        ("GPU-aaaa", [1]),
        ("MIG-5c89", [0, 1]),
    ],
)
def test_gpus_that_are_visible(chosen: str | None, left: list[int]) -> None:
    assert [card.index for card in gpus.visible(parse_cards(A100 + TROUBLED), chosen)] == left


def _fake(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


@pytest.mark.parametrize(
    ("code", "said", "fix"),
    [
        (9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "modprobe nvidia"),
        (18, "Failed to initialize NVML: Driver/library version mismatch", "reboot, or reload"),
        (6, "No devices were found", "was given a GPU"),
        (2, 'Field "compute_cap" is not a valid field to query.', "update the driver"),
        (15, "Unable to determine the device handle for GPU 0000:3B:00.0: GPU is lost.", "drain the node"),
        (255, "Unable to determine the device handle for GPU0000:3B:00.0: Unknown Error", "drain the node"),
    ],
)
def test_nvidia_smi_that_fails(code: int, said: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake(tmp_path, f"""echo '{said.replace("'", "")}'; exit {code}""", monkeypatch)
    (found,) = look()[1]
    assert (found.name, found.level) == ("nvidia-smi", "error")
    assert found.found == f"nvidia-smi (exit code {code}): {said.replace(chr(39), '')}"
    assert fix in found.fix


def test_a_gpu_that_fell_off_the_bus_beside_one_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "Unable to determine the device handle for GPU 0000:3B:00.0: Unknown Error"
    _fake(tmp_path, f"""case "$1" in --query-gpu=*) echo '{A100.strip()}'; echo '{said}';; esac""", monkeypatch)
    cards, findings = look()
    assert [card.index for card in cards] == [0]
    found = {one.name: one for one in findings}
    assert (found["nvidia-smi"].level, found["nvidia-smi"].values["said"]) == ("error", [said])
    assert "drain the node" in found["nvidia-smi"].fix
    assert found["gpu 0"].level == "ok"


def test_an_older_driver_knows_the_other_name_of_a_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake(
        tmp_path,
        f"""case "$1" in
*clocks_event_reasons*) echo 'Field "clocks_event_reasons.active" is not a valid field to query.'; exit 2;;
--query-gpu=*clocks_throttle_reasons.active) echo '{TROUBLED.strip()}';;
esac""",
        monkeypatch,
    )
    (card,), _ = look()
    assert (card.driver, card.throttle) == ("535.104.05", 0x60)


@pytest.mark.parametrize(("module", "level"), [("580.65.06\n", "note"), (None, "ok")])
def test_a_container_without_nvidia_smi(
    module: str | None, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's own file still has the version of the driver."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpus, "MODULE", tmp_path / "version")
    if module is not None:
        (tmp_path / "version").write_text(module)
    cards, (found,) = look()
    assert (cards, gpus.driver(), found.level) == ([], module and module.strip(), level)
    if module is not None:
        assert found.found.startswith("nvidia-smi cannot be run (no such file or directory)")


def test_nvidia_smi_that_hangs_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake(tmp_path, "exec sleep 5", monkeypatch)
    monkeypatch.setattr(gpus, "ANSWER", 0.2)
    (found,) = look()[1]
    assert found.level == "error"
    assert found.found.startswith("nvidia-smi did not answer within 0.2 s")
    assert "drain the node" in found.fix
