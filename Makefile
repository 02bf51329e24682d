# make demo    install everything into .venv, then watch a KV cache cross two processes
# make test    install everything into .venv, then every check except the slow tests; within five minutes on two cores
# make test-all   also the slow tests, properties with twelve times the examples, the service and the tests for devices on a fake device, and test-pythons; within 25 minutes
# make test-pythons   the tests that need neither torch nor a transport library, on each other supported Python that is found
# make test-sglang   the adapter of SGLang, driven by SGLang's own code; installs it into .cache; no GPU; five minutes
# make test-vllm   run real vLLM servers and routers on this machine's CPUs; installs them into .cache, 4 GB; three quarters of an hour
# make test-device   what needs a CUDA device, step by step, in ten minutes, with a table; installs into .cache (STEPS="events,..." runs some; FAKE_DEVICE=low rehearses it on a fake device)
# make test-transformers   the adapter of transformers alone, which is part of make test
# make fuzz    fuzz 20,000 pairs of layouts against the slow oracle, and live ranks with a million malformed messages; half an hour
# make docs    regenerate the generated parts of docs/ and deploy/
# make site    build the documents as a site in dist/site
# make simulate   100,000 seeds of whole instances in virtual time; about an hour on two cores
# make mutants     mutation-test the pure cores with 50 small changes; ten minutes
# make lock    regenerate requirements.lock: versions and hashes of everything that development and CI install
# make audit   an SBOM of the development environment in dist/, and known vulnerabilities in it
# make help    list all targets

PYTHON ?= python3
VENV := .venv
# Tests start many processes, and each would compile everything again.
export PYTHONDONTWRITEBYTECODE :=
BIN := $(VENV)/bin
# Many tests mostly wait, so that one more process than cores keeps the cores busy.
PYTEST := PYTEST_XDIST_AUTO_NUM_WORKERS=$$(expr $$(getconf _NPROCESSORS_ONLN) + 1) \
	$(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist worksteal

.PHONY: audit lock mutants demo site test test-all test-pythons test-device test-sglang test-vllm test-transformers fuzz simulate docs help install lint type imports unit clean

demo: install
	$(BIN)/kvflow demo

# mypy keeps one core busy while most tests wait.
test: install
	$(MAKE) --no-print-directory --jobs 2 lint type imports unit

# What comes first mostly installs, and its parts have nothing to do with each other.
test-all: install
	$(MAKE) --no-print-directory --jobs 3 --output-sync=target lint type imports audit site test-pythons
	sh scripts/unpack-package.sh prometheus prometheus .cache/prometheus
	sh scripts/unpack-package.sh etcd-server etcd .cache/etcd
	$(PYTEST) --hypothesis-profile=thorough
	FAKE_DEVICE=low $(PYTEST) -m "not slow" tests/service tests/device --ignore tests/device/test_contract.py

test-sglang:
	PYTHON=$(PYTHON) sh scripts/test-sglang.sh .cache/sglang

test-vllm:
	PYTHON=$(PYTHON) sh scripts/test-vllm.sh .cache/vllm

# It starts with nothing but Python: installing is one of its steps.
test-device: $(if $(FAKE_DEVICE),install)
	$(if $(FAKE_DEVICE),$(BIN)/python,$(PYTHON)) -m tests.device --steps "$(STEPS)"

test-transformers: install
	$(PYTEST) tests/engines/transformers

test-pythons: install
	sh scripts/test-pythons.sh .cache/pythons $(BIN)/python

fuzz: install
	$(BIN)/pytest --hypothesis-profile=fuzz --hypothesis-show-statistics tests/geometry/test_any_layout.py
	KVFLOW_FUZZ_MESSAGES=500000 $(BIN)/pytest tests/attack/test_fuzz.py

lock:
	sh scripts/lock.sh .cache/lock

audit: install
	sh scripts/audit.sh $(VENV) .cache/audit dist

docs: install
	$(BIN)/python -m tests.support.state_diagrams
	$(BIN)/python -m tests.support.references
	$(BIN)/python -m tests.support.dashboard

site: install
	$(PYTHON) -m venv .cache/site
	.cache/site/bin/pip install --quiet --requirement scripts/site-requirements.txt
	.cache/site/bin/python scripts/build-site.py

mutants: install
	$(BIN)/python scripts/mutants.py

simulate: install
	$(BIN)/python -m simulation run --seeds 0:100000

help:
	@sed -n 's/^# make /make /p' Makefile
	@echo "make lint | type | imports | unit   one part of make test"
	@echo "make clean                          remove what was installed"

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml requirements.lock scripts/system-packages.sh
	@echo "[1/4] system packages"
	@sh scripts/system-packages.sh $(PYTHON)
	@echo "[2/4] Python packages into $(VENV): a minute or more"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --require-hashes --no-deps --requirement requirements.lock
	@echo "[3/4] torch and kvflow"
	@$(BIN)/pip install --quiet --no-deps --constraint constraints.txt torch
	@$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	@echo "[4/4] the demo's model"
	@TQDM_DISABLE=1 $(BIN)/kvflow demo --prepare
	@touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: install
	$(BIN)/mypy

imports: install
	$(BIN)/lint-imports

# UCX patches hooks for caches of registered memory into each process: 0.4 s of CPU. In `make test-all` it does.
unit: install
	UCX_MEM_MMAP_HOOK_MODE=none $(PYTEST) -m "not slow"

clean:
	rm -rf $(VENV) .cache
