PY   ?= $(or $(shell command -v python3.11),$(shell command -v python3))
VENV ?= .venv
BIN  := $(VENV)/bin
# The pins of constraints/cpu.txt hold a CPU build of torch; a machine with an NVIDIA driver gets its normal one.
CONSTRAINTS ?= $(if $(wildcard /proc/driver/nvidia/version),,-c constraints/cpu.txt)
ARGS ?= model=mamba task=selective_copy

TESTS = $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile

.PHONY: train test test-all reproduce
train: $(VENV)/.ok
	$(BIN)/python train.py $(ARGS)
test: $(VENV)/.ok  # a third of the cases of what takes long
	$(TESTS) -m "not slow"
test-all: $(VENV)/.ok
	$(TESTS)
reproduce: $(VENV)/.ok  # make reproduce NAME=parity_small
	$(BIN)/python -m seqmix.reproduce $(NAME)
$(VENV)/.ok: pyproject.toml constraints/cpu.txt
	$(PY) -m venv $(VENV)
	$(BIN)/python -m pip install -q $(CONSTRAINTS) -e '.[dev]'
	touch $@
