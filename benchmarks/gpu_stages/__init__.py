"""The stages of `benchmarks/gpu.py`, most valuable first: each module makes one `Stage`, and starts nothing."""

from gpu_stages import correct, large, speed, whole
from gpu_stages.stage import Stage

STAGES: tuple[Stage, ...] = (correct.STAGE, speed.STAGE, large.STAGE, whole.STAGE)
