# Everything on a fresh machine: `make finetune` runs the main job, `make test` the whole CPU suite.
PYTHON ?= python3
VENV ?= .venv
RUN ?= runs/contact
# Processes: one for each GPU, or two on the CPU.
NPROC ?= $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU ' | sed 's/^0$$/2/')
TORCH ?= torch
BIN := $(VENV)/bin
# Images often set this. Without files of bytecode each process that a test starts compiles the package again.
TESTS := PYTHONDONTWRITEBYTECODE= $(BIN)/pytest
READY := $(VENV)/.ready

.PHONY: finetune gpu test check quick newest suite nightly browser lint static docs format clean lock sbom audit gpu-wheels

finetune: $(READY)
	$(BIN)/esmshard finetune recipes/contact.yaml out=$(RUN) --nproc $(NPROC) --resume auto $(ARGUMENTS)
	$(BIN)/esmshard embed $(RUN)/model data/contact/test.fasta -o $(RUN)/test.h5 --overwrite
	$(BIN)/esmshard embed $(RUN)/model data/contact/test.fasta -o $(RUN)/test.npy --overwrite

test: $(READY)
	$(MAKE) --jobs 2 lint suite

# The quick half of `make test`, between two edits: no test that starts processes or takes long, and no HTML.
check: $(READY)
	$(MAKE) --jobs 2 static quick

quick: $(READY)
	$(TESTS) -n 2 --dist loadfile -m "not gpu and not slow and not processes and not lengthy"

# Before a release: the quick half with the newest release of every dependency, in an environment of its own. A bare torch
# brings gigabytes of CUDA libraries; TORCH="torch==2.13.0" takes another release.
newest:
	$(PYTHON) -m venv --clear .venv-newest
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check '$(TORCH)' -e '.[dev]'
	touch .venv-newest/.ready
	$(MAKE) quick VENV=.venv-newest

suite: $(READY)
	$(TESTS) -n 3 --dist loadfile --no-loadscope-reorder

# The tests that take too long for `make test`: long drills, the tutorials, the notebook, and the rehearsal of `make gpu`.
nightly: $(READY)
	$(TESTS) -n 2 --dist loadfile -m "slow and not gpu"

# The page of `esmshard app` in the system's Chromium, which is installed if it is missing (Debian, as root).
browser: $(READY)
	command -v chromium || (apt-get update && apt-get install --yes --no-install-recommends chromium)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check playwright
	$(TESTS) -m browser tests/app

static: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

lint: static
	$(BIN)/hadolint Dockerfile
	$(MAKE) docs

docs: $(READY)
	$(BIN)/sphinx-build -W --keep-going -n -q docs build/docs

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Everything that needs a GPU, most valuable first; goes on with what an earlier call has left in build/gpu.
gpu: $(READY)
	$(BIN)/python benchmarks/gpu.py --out build/gpu $(ARGUMENTS)

# The image's packages, with their versions; after every change of a dependency.
lock:
	$(PYTHON) deploy/image/lock.py

# What an installation consists of, into dist/.
sbom: $(READY)
	$(BIN)/python deploy/image/sbom.py

# Known vulnerabilities of the image's packages. 3 where packages could not be looked up.
audit: $(READY)
	$(BIN)/python deploy/image/audit.py

# The packages of the proof on a GPU, for a machine without network that has torch and transformers (benchmarks/README.md).
GPU_PYTHON ?= 3.12
gpu-wheels:
	$(PYTHON) -m pip download --no-deps --only-binary=:all: --implementation cp --python-version $(GPU_PYTHON) \
		$(foreach n,28 27 24 17 12 5,--platform manylinux_2_$(n)_x86_64) --platform manylinux2014_x86_64 \
		-d build/gpu-wheels -r benchmarks/gpu-packages.txt

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .venv-newest dist build .pytest_cache .mypy_cache .ruff_cache
