# `make serve` and `make test` do all the set-up; `make help` lists the rest.
SHELL := /bin/bash
.DEFAULT_GOAL := help

# The newest supported Python on this machine; override with PYTHON=/path/to/python.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
	&& echo $$p && break; done)
VENV := .venv
# Test processes side by side; WORKERS=0 runs in one, for a debugger.
WORKERS ?= auto
BIN := $(VENV)/bin

.PHONY: help serve test check servers lock bench bench-peers bench-memory chaos fuzz wheel clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

serve: $(VENV)/serve ## Run the broker on port 6632, on an embedded PostgreSQL unless PG_HOST is set
	@exec $(BIN)/queen-trio serve

test: $(VENV)/dev servers ## Run every test against a real PostgreSQL (narrow with T="tests/unit -k lease")
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(T)

check: $(VENV)/dev ## Lint, type-check and check the import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/flake8-async --enable ASYNC100,ASYNC101,ASYNC102,ASYNC103,ASYNC104,ASYNC105,ASYNC106,ASYNC109,ASYNC110,ASYNC111,ASYNC112,ASYNC113,ASYNC115,ASYNC116,ASYNC118,ASYNC119,ASYNC122,ASYNC125,ASYNC126 $$(git ls-files 'queen_trio/*.py' 'protocol/*.py')
	$(BIN)/mypy
	$(BIN)/lint-imports

servers: ## Fetch HAProxy, PgBouncer and nss_wrapper, which tests run, into .cache (Debian; no root)
	@./.ci/servers || [ $$? -eq 3 ]

lock: $(VENV)/dev ## Write requirements*.txt anew from pyproject.toml
	./.ci/lock

bench: $(VENV)/dev ## Measure push, drain and latency, beside PostgreSQL alone and with two workers
	$(BIN)/python -m bench --workloads a,b,c,d,wa,wb,wc

# Clients with the drivers of all peers. Their servers are the system's; what isn't there is left out.
PEERS := .cache/peers
ROUNDS ?= 3

bench-peers: $(VENV)/dev $(PEERS)/ready ## Measure us beside other queues, and print every bar (ROUNDS=3)
	@for program in rabbitmq-server nats-server redis-server; do command -v $$program > /dev/null \
		|| echo "to measure it too: apt-get install --no-install-recommends $$program"; done
	$(BIN)/python -m bench --client-python $(PEERS)/bin/python --systems all --workloads all \
		--rounds $(ROUNDS) --extra 2 --seconds 5 --backlog 100000 --samples 250 \
		--polls 10000 --idle-seconds 20 --partitions 100000

bench-memory: MINUTES = 30
bench-memory: $(VENV)/dev ## Push and drain for long, and watch the broker's memory (MINUTES=30)
	$(BIN)/python -m bench --systems queen-trio --workloads i --rounds 1 --minutes $(MINUTES) \
		--backlog 200000

# What `make chaos` does and for how long; without a seed another one each time.
SEED ?= $(shell date +%s)
MINUTES ?= 5
BROKERS ?= 3

chaos: $(VENV)/dev ## Break brokers and PostgreSQL under load and check the history (SEED=1 MINUTES=5)
	$(BIN)/python -m tests.chaos.run --seed $(SEED) --minutes $(MINUTES) --brokers $(BROKERS)

# Only for some platforms, and only for this: beside the environment, and done without where it fails.
ATHERIS := .cache/atheris
TARGET ?= all
SECONDS ?= 60

fuzz: $(VENV)/dev ## Look for bytes that break a reader (TARGET=push_body SECONDS=600; default: all, 60)
	@test -d $(ATHERIS) || $(BIN)/pip install --quiet --disable-pip-version-check --no-deps \
		--only-binary :all: --require-hashes --target $(ATHERIS) -r fuzz/requirements.txt \
		|| echo "no atheris for this platform: hypothesis only"
	PYTHONPATH=$(ATHERIS) $(BIN)/python -m fuzz $(TARGET) $(SECONDS)

wheel: $(VENV)/dev ## Build the wheel and smoke-test it in a fresh environment
	./.ci/wheel

clean: ## Remove the virtual environment and caches (never queen-data)
	rm -rf $(VENV) .cache dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(PEERS)/ready: bench/requirements-peers.txt | $(VENV)/python
	$(BIN)/python -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check --upgrade -r $<
	@touch $@

$(VENV)/python:
	@test -n "$(PYTHON)" || { echo "queen-trio needs Python 3.11, 3.12 or 3.13; none was found. Set PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/serve: requirements.txt pyproject.toml | $(VENV)/python
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

# Older releases of the public client, each in a directory of its own: tests/client runs them all.
CLIENTS := $(wildcard requirements-clients/*.txt)

$(VENV)/dev: requirements-dev.txt $(CLIENTS) $(VENV)/serve
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements-dev.txt
	@for lock in $(CLIENTS); do \
		$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --require-hashes --upgrade \
			--target $(VENV)/clients/$$(basename $$lock .txt) -r $$lock || exit 1; done
	@touch $@
