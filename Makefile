# Everything runs in .venv, which the first command makes. PYTHON picks the interpreter: PYTHON=python3.12 make test
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
KEY := $(shell cat pyproject.toml constraints.txt | cksum)
ARGS ?=

.PHONY: setup train test quick lint format types docs bench clean

# Installs only when the interpreter asked for, pyproject.toml or constraints.txt changed; quiet otherwise.
setup:
ifneq ($(origin PYTHON),file)
	@test ! -x $(BIN)/python || test "$$($(PYTHON) -V)" = "$$($(BIN)/python -V)" || rm -rf .venv
endif
	@test -x $(BIN)/python || { echo "making .venv with $(PYTHON)"; $(PYTHON) -m venv .venv; }
	@test "$$(cat $(STAMP) 2>/dev/null)" = "$(KEY)" || { \
	  echo "installing accumulus and its tools into .venv (once; a few minutes)"; \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]" \
	  && echo "$(KEY)" > $(STAMP); }

train: setup  ## train the built-in language model: about 90 seconds on two cores
	@$(BIN)/accumulus train $(ARGS)

test: setup  ## the whole suite
	@$(BIN)/python -m pytest -n 2 $(ARGS)

quick: setup  ## the suite without the slow tests
	@$(BIN)/python -m pytest -n 2 -m "not slow" $(ARGS)

lint: setup
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

format: setup
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

types: setup
	@$(BIN)/mypy

docs: setup  ## runs the code of README.md and docs/
	@$(BIN)/python -m pytest -q tests/test_docs.py

bench: setup  ## measures, beside the peers it installs into .venv, and writes the README's table
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[peers]"
	@$(BIN)/python benchmarks/run_all.py $(ARGS)

clean:
	rm -rf .venv runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
