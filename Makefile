# Each target sets itself up: a virtual environment with the tested versions (constraints.txt) and
# everything installed from this checkout. Needs Python 3.11 or later and make, nothing else.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# The demo needs the core with its data sets and two plugins: no Ray, MLflow, linters or test tools.
LIGHT  := $(VENV)/.ready-demo
BENCH_READY := $(VENV)/.ready-bench
# What `make demo` trains for. Below ENOUGH rounds no method has converged, and a comparison would only
# say which one starts fastest: `make demo ROUNDS=5` trains BPFed alone.
ROUNDS ?= 60
ENOUGH := 40
QUICK  := $(shell [ $(ROUNDS) -lt $(ENOUGH) ] && echo quick)
DEMO := --data mnist5k --clients 10 --partition labels:5 --train-per-class 50 \
	--rounds $(ROUNDS) --seed 0
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	--constraint constraints.txt
PLUGINS := $(wildcard plugins/*/pyproject.toml)
# Extras only where there are some: pip finds a plugin that another one needs by its plain name.
EDITABLE := -e '.[data,sklearn,onnx,tables,test,dev,docs,tensorboard,mlflow]' $(foreach plugin,$(PLUGINS),\
	-e '$(patsubst %/,%,$(dir $(plugin)))$(if $(shell grep '^test = ' $(plugin)),[test])')
TYPED := bflcore $(patsubst %/plugin.py,%,$(wildcard plugins/*/bfl_*/plugin.py examples/*/bfl_*/plugin.py))

# One thread per process: the test runner and the engine use processes for parallelism.
export OMP_NUM_THREADS = 1

.PHONY: help install demo test coverage test-thorough test-third-party lint format docs bench changelog clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-18s %s\n", $$1, $$2 }' Makefile

install: $(READY)  ## set up the virtual environment

$(READY): pyproject.toml constraints.txt $(PLUGINS)
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) $(EDITABLE)
	@touch $@

$(LIGHT): pyproject.toml constraints.txt plugins/bpfed/pyproject.toml plugins/baselines/pyproject.toml
	@echo "installing into $(VENV): the core, its data sets, bfl-bpfed and bfl-baselines"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt \
		-e '.[data]' -e plugins/bpfed -e plugins/baselines
	@touch $@

# Like with like: each method shares the body and leaves a head with each client.
METHODS := bpfed $(if $(QUICK),,fedper fedbabu)
TRAINED := $(METHODS:%=runs/demo-%)
define train
$(BIN)/bfl run $(1) $(DEMO) --out runs/demo-$(1)
@echo

endef
demo: $(if $(wildcard $(READY)),$(READY),$(LIGHT))  ## train on handwritten digits, compare, ask about new images
	@rm -rf $(TRAINED) runs/demo.html
	$(foreach method,$(METHODS),$(call train,$(method)))
	@$(if $(QUICK),echo "$(ROUNDS) rounds: a quick look (make demo compares methods from $(ENOUGH) rounds on)",\
		$(BIN)/bfl compare $(TRAINED))
	@$(BIN)/bfl report $(TRAINED) --out runs/demo.html
	@$(BIN)/python examples/ask.py runs/demo-predictions.png $(wordlist 1,2,$(TRAINED))

test: $(READY)  ## run the tests
	$(BIN)/python -m pytest -n 2 -q

coverage: $(READY)  ## run the tests and list the lines that none of them reached
	$(BIN)/python -m pytest -n 2 --cov --cov-report=term:skip-covered -q

test-thorough: $(READY)  ## also run the tests that take minutes
	HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest -n 2 -q -m ""

# In a fresh environment outside the checkout, from wheels, as any other author would have it.
test-third-party: $(READY)  ## check a third-party plugin, and a new one, beside the built core
	PATH="$(abspath $(BIN)):$$PATH" PYTHON="$(PYTHON)" sh examples/check.sh

lint: $(READY)  ## run ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(TYPED)
	$(BIN)/lint-imports --no-cache

format: $(READY)  ## let ruff reformat the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)  ## build the manual into site/, with warnings as errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo "open site/index.html"

$(BENCH_READY): $(READY)
	$(PIP_INSTALL) -e '.[bench]'
	@touch $@

bench: $(BENCH_READY)  ## measure speed; one JSON line per result
	@for script in startup fedavg_round variational_round workers checkpoint fusion_speed fedsi_laplace \
			superfed_step tdamp_epoch flower_round many_clients; do \
		PYTHONPATH=benchmarks $(BIN)/python benchmarks/$$script.py || exit 1; done

changelog: $(READY)  ## show the next entry of CHANGELOG.md; with RELEASE=1 write it
	$(BIN)/towncrier build $(if $(RELEASE),--yes,--draft)

clean:  ## remove the environment, runs, builds and caches
	rm -rf $(VENV) runs build dist site .coverage .coverage.* *.egg-info plugins/*/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
