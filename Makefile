# Everything runs in .venv, which these targets make themselves. Only Python 3.11+, make and a package index are needed.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
UV     := $(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt
WORKERS ?= 2
FILES ?= 20000
READER ?= pyav
# Where Python may not write bytecode, every process that a test starts would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test test-slow test-all coverage mutants fuzz lint types format docs bench clean

help:  ## what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.uv: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "sosampler needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; name another one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
	@touch $@

# The light core, as a user gets it: no torch.
$(VENV)/.core: $(VENV)/.uv pyproject.toml constraints.txt
	$(UV) --editable .
	@touch $@

# All extras that are tested, and the tools. Compiled now, for where Python may not write: torch would be at each start.
$(VENV)/.dev: $(VENV)/.core pyproject.toml constraints.txt
	$(UV) --compile-bytecode --editable '.[dev]'
	@touch $@

# What training needs, torch among it.
$(VENV)/.train: $(VENV)/.core pyproject.toml constraints.txt
	$(UV) --compile-bytecode --editable '.[train]'
	@touch $@

# What makes a site of the pages in docs; no torch, since docstrings are read and not imported.
$(VENV)/.docs: $(VENV)/.core pyproject.toml constraints.txt
	$(UV) --editable '.[docs]'
	@touch $@

setup: $(VENV)/.dev  ## make .venv with the package and all that development needs

demo: $(VENV)/.train  ## videos, a classifier, a bank, a sampler, and demo/report/index.html, in some minutes
	$(BIN)/sosampler demo --out demo

test: setup lint types  ## lint, types and tests
	$(BIN)/python -m pytest -n $(WORKERS)

test-slow: setup  ## the slow tests alone
	$(BIN)/python -m pytest -n $(WORKERS) --slow -m slow

test-all: setup lint types  ## lint, types and all tests, as CI runs them
	$(BIN)/python -m pytest -n $(WORKERS) --slow

coverage: setup  ## which errors of the package the tests reach: a table by folder
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest -n $(WORKERS)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage json --quiet -o coverage.json
	$(BIN)/python -m tests.error_paths coverage.json

# mutmut 3 does not work with pytest 9 yet, so it has an environment of its own.
.venv-mutants/.done: $(VENV)/.uv pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-mutants
	grep -v '^pytest==' constraints.txt > .venv-mutants/constraints.txt
	$(BIN)/uv pip install --quiet --python .venv-mutants/bin/python --constraint .venv-mutants/constraints.txt '.[dev]' 'pytest<9' mutmut==3.8.0
	$(BIN)/uv pip uninstall --quiet --python .venv-mutants/bin/python sosampler
	@touch $@

mutants: .venv-mutants/.done  ## which changes of the arithmetic no test notices; resumes, takes an hour or more
	OMP_NUM_THREADS=1 .venv-mutants/bin/mutmut run --max-children $(WORKERS)
	.venv-mutants/bin/mutmut results
	.venv-mutants/bin/mutmut export-cicd-stats

fuzz: setup  ## 20,000 damaged files, in some minutes; goes on where it stopped: make fuzz READER=torchcodec FILES=2000
	$(BIN)/python -m tests.fuzz --files $(FILES) --reader $(READER) --workers $(WORKERS) --out .fuzz

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

format: setup  ## put the code into its format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.docs  ## the documentation as a site: site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: setup  ## decode benchmark: make bench CLIP=video.mp4
	@test -n "$(CLIP)" || { echo "name a natural video: make bench CLIP=video.mp4"; exit 2; }
	$(BIN)/sosampler bench decode "$(CLIP)" --work .bench --out .bench/decode.json

clean:
	rm -rf $(VENV) .venv-mutants mutants demo site .bench .fuzz .coverage* coverage.json .mypy_cache .pytest_cache .ruff_cache
