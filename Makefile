# Everything on a fresh machine: `make finetune` runs the main job, `make test` the whole CPU suite.
PYTHON ?= python3
VENV ?= .venv
NPROC ?= 2
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: finetune test suite lint format clean

finetune: $(READY)
	$(BIN)/esmshard finetune recipes/contact.yaml --nproc $(NPROC) --resume auto
	$(BIN)/esmshard embed runs/contact/model data/contact/test.fasta -o runs/contact/test.h5 --overwrite
	$(BIN)/esmshard embed runs/contact/model data/contact/test.fasta -o runs/contact/test.npy --overwrite

test: $(READY)
	$(MAKE) --jobs 2 lint suite

suite: $(READY)
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache
