# Everything runs in .venv, which is made from constraints.txt on first use.

PYTHON ?= python3
BIN    := .venv/bin

# The part of the rules (kvps/core, kvps/protocol) that the unit tests and scenarios
# have to reach, in percent of lines and branches; tests/conftest.py names their folders.
COVERAGE_GATE := 100
COVERED       := --cov --cov-fail-under=$(COVERAGE_GATE)
PURE_TESTS    := tests/unit tests/scenarios

# How much `make soak` plays: seeds of the simulation, hypothesis examples, rounds of the large
# cluster, processes of one run that are killed.
KVPS_SEEDS        ?= 5000
KVPS_EXAMPLES     ?= 3000
KVPS_SCALE_ROUNDS ?= 100
KVPS_KILLS        ?= 50

# How many tests `make test` runs side by side: twice as many as there are processors, as many wait for others.
# Those of `make cover` wait for nobody.
CORES := $(shell nproc 2>/dev/null || echo 2)
JOBS  ?= $(shell expr 2 \* $(CORES))

# To compile all tests takes 13 s of a processor, in each process that runs some: keep the bytecode,
# also in an environment that asks Python not to.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint size prose cover check soak bench gpu docs lock lock-base audit wheel release test-docker clean
.DELETE_ON_ERROR:

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	    "kvps needs Python 3.11 or later, this is %d.%d: make PYTHON=python3.12 ..." % sys.version_info[:2])'
	@echo "Installing kvps and its dependencies into .venv: some minutes, once. From PyPI, torch"
	@echo "brings 5.5 GB of CUDA; its CPU build has 0.9 GB, with"
	@echo "  PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make ..."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

.venv/.installed-docs: .venv/.installed
	@echo "Installing Sphinx into .venv ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

# The largest layer has 65,536 numbers. By default only from 100,000 on each server has a part of a tensor.
demo: .venv/.installed  ## train a ConvNet on handwritten digits: 2 workers, 2 servers
	$(BIN)/kvps-launch -n 2 -s 2 --env KVPS_BIGARRAY_BOUND=10000 -- \
		$(BIN)/python examples/digits.py --store dist_sync --save demo.safetensors
	@echo
	@echo "Next, after '. .venv/bin/activate':"
	@echo "  kvps demo              a job that loses a worker and a server, and no update"
	@echo "  kvps-launch -n 2 -s 2 --http 127.0.0.1:9464 -- python examples/digits.py --epochs 500"
	@echo "                         the same for longer, with a page that shows the job"
	@echo "  docs/quickstart.md     look inside a job, kill its processes, continue from a checkpoint"
	@echo "  examples/README.md     other scripts to start from"

test: .venv/.installed  ## run the everyday tests; COVER=1 unit tests and scenarios under coverage
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(if $(COVER),$(COVERED))

test-all: .venv/.installed  ## run all tests and all seeds: before a release
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --all

lint: .venv/.installed  ## check format, style, types and layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/map.py
	$(BIN)/python docs/diagrams.py
	$(BIN)/python docs/notebooks.py
	$(BIN)/python .ci/prose.py
	$(BIN)/python .ci/size.py

size:  ## count the code of each package, and compare with its budget; VERBOSE=1 lists small files
	$(PYTHON) .ci/size.py $(if $(VERBOSE),--verbose)

prose:  ## check the prose for phrases that are banned: see CONTRIBUTING.md
	$(PYTHON) .ci/prose.py

cover: .venv/.installed  ## check that unit tests and scenarios cover the rules
	$(BIN)/python -m pytest --quiet -n $(CORES) --dist worksteal $(COVERED) $(PURE_TESTS)

check: lint  ## lint, test and cover: run it before a commit
	$(MAKE) --no-print-directory test COVER=1

soak: .venv/.installed  ## play many more faults, and longer: half an hour of one core
	KVPS_SEEDS=$(KVPS_SEEDS) $(BIN)/python -m pytest -q --maxfail=10 tests/simulation/test_swarm.py
	KVPS_EXAMPLES=$(KVPS_EXAMPLES) $(BIN)/python -m pytest -q tests/simulation/test_machine.py
	KVPS_SCALE_ROUNDS=$(KVPS_SCALE_ROUNDS) $(BIN)/python -m pytest -q --all --timeout=3600 tests/simulation/test_scale.py
	KVPS_SEEDS=$(KVPS_SEEDS) $(BIN)/python -m pytest -q --maxfail=10 tests/simulation/test_returns.py
	KVPS_REPLICAS=0 KVPS_KILLS=$(KVPS_KILLS) $(BIN)/python -m pytest -q --log-cli-level=info tests/faults/test_soak.py
	KVPS_REPLICAS=1 KVPS_KILLS=$(KVPS_KILLS) $(BIN)/python -m pytest -q --log-cli-level=info tests/faults/test_soak.py
	$(BIN)/python -m pytest -q -m slow tests/faults

bench: .venv/.installed  ## measure kvps beside its peers, and print a table: ten minutes
	$(BIN)/kvps bench --full

# On a machine whose Python has torch and kvps (pip install --no-deps -e .): make gpu GPU_PYTHON=python3
GPU_PYTHON ?= $(BIN)/python
gpu: $(if $(filter $(BIN)/%,$(GPU_PYTHON)),.venv/.installed)  ## check and measure kvps on a GPU (rehearse without), and write gpu.json and gpu.md: eight minutes at most
	$(GPU_PYTHON) -m benchmarks.gpu

docs: .venv/.installed-docs  ## build the documentation into docs/_build
	$(BIN)/sphinx-build -n -W --keep-going -q -b html docs docs/_build
	@echo "Open docs/_build/index.html"

lock: .venv/.installed  ## write the lock files of the image anew, for this Python and processor
	$(BIN)/python deploy/lock.py

audit: .venv/.installed  ## look for known vulnerabilities in what the image installs (asks a public database, and fails without its answer)
	@$(BIN)/python -m venv build/audit && build/audit/bin/pip install --quiet --disable-pip-version-check pip-audit
	@for name in requirements build; do sed 's/^\([^# ]*\)+[^ ]*/\1/' deploy/$$name.lock > build/audit/$$name.txt; done
	@build/audit/bin/pip-audit --strict --disable-pip --require-hashes -r build/audit/requirements.txt -r build/audit/build.txt || \
		{ echo "make audit failed: a package above is vulnerable, or is not in the database, where pip-audit stops." >&2; \
		  echo "'not found' of the first package of the lock: PyPI's JSON API does not answer here, and nothing was audited." >&2; exit 1; }

lock-base:  ## pin the base image of deploy/Dockerfile by the digest that its registry has now (writes deploy/.env)
	deploy/lock-base.sh

wheel: .venv/.installed  ## build the wheel into dist/, and check its metadata and its files
	$(BIN)/python deploy/release.py

release: .venv/.installed  ## also install it in a fresh environment of each Python on PATH; RELEASE_FLAGS='--no-torch --python ...'
	$(BIN)/python deploy/release.py --install $(RELEASE_FLAGS)

test-docker:  ## build the image and train in containers
	deploy/test.sh

clean:  ## remove .venv and everything that was built
	rm -rf .venv build dist docs/_build .coverage .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache demo.safetensors
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
