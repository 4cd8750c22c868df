VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: help install demo test test-slow bench lab docs lint clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

install:  ## make .venv and install everything into it
	@VENV=$(VENV) ./.ci/install

demo: install  ## real vLLM with and without reuse, and a report to look at
	@$(BIN)/kvworkbench demo $(ARGS)

test: install  ## the tests that CI runs
	$(BIN)/python -m pytest $(ARGS)

test-slow: install  ## the long versions as well
	$(BIN)/python -m pytest -m "" --timeout 3600 $(ARGS)

bench: install  ## every benchmark at short size, one table
	$(BIN)/python -m experiments.benchmarks $(ARGS)

lab: install  ## JupyterLab with the notebooks, on 127.0.0.1
	$(BIN)/kvworkbench lab $(ARGS)

docs: install  ## the documentation site, into build/docs/site
	$(BIN)/python -m experiments.docs $(ARGS)

lint: install  ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

clean:  ## remove the environment and caches, keep runs
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
