# Everything that a person or a machine does with this repository. `make` alone lists it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Most tests wait for a server or for time to pass, so there are more of them at once than processors.
IN_PARALLEL := --numprocesses 6 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help demo test test-all bench bench-binding bench-cron bench-middleware bench-scaling bench-top chaos chaos-mixed soak check format db-dump command-pages clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(STAMP) ## Run jobs on an embedded PostgreSQL: from SQL, again, in order, by a crontab
	@$(BIN)/python examples/demo.py

test: $(STAMP) peers ## Run the tests that take a few minutes at most
	$(BIN)/pytest -m "not slow and not older" --durations=10 $(IN_PARALLEL)

test-all: $(STAMP) peers ## Run the tests that take longer, and all of them on older PostgreSQLs
	$(BIN)/pytest -m "older and not slow" --durations=10 $(IN_PARALLEL)
	$(BIN)/pytest -m slow --durations=10

bench: $(STAMP) bench-peers ## Compare with other queues, in 15 minutes; in 2 with QUICK=1
	$(BIN)/python -m benchmarks $(if $(QUICK),--quick)

bench-scaling: $(STAMP) bench-peers ## Measure how it scales, in 15 minutes; in 2 with QUICK=1
	$(BIN)/python -m benchmarks scaling $(if $(QUICK),--quick)

bench-binding: $(STAMP) ## Measure what it costs to make a task's arguments out of a payload
	$(BIN)/python -m benchmarks.binding

bench-middleware: $(STAMP) ## Measure what middleware and listeners cost a job
	$(BIN)/python -m benchmarks.middleware

bench-top: $(STAMP) ## Measure what a look of graphile-worker top costs, by the size of the queue
	$(BIN)/python -m benchmarks.looks

bench-cron: $(STAMP) ## Measure how long a worker takes to make up for a week of a hundred recurring tasks
	$(BIN)/python -m benchmarks.schedules

chaos: $(STAMP) peers ## Break everything under working workers, for MINUTES=10, by SEED=...; and audit it
	$(BIN)/python -m chaos --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED))

chaos-mixed: $(STAMP) peers ## Kill, stop and freeze Node's workers and ours on one queue, for MINUTES=10; and audit it
	$(BIN)/python -m chaos --mixed --workers 2 --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED))

soak: $(STAMP) ## Run a million jobs and see what grows, in 4 minutes; or JOBS=N
	$(BIN)/python -m benchmarks.soak $(if $(JOBS),--jobs $(JOBS))

check: $(STAMP) ## Format, lint, types, import rules, sizes, SQL files
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_sizes.py
	$(BIN)/python tools/check_sql.py

format: $(STAMP) ## Format the code and mend what the linter can
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

db-dump: $(STAMP) ## Write anew what the schema is: docs/schema.sql, and what the doctor compares with
	$(BIN)/python tools/dump_schema.py

command-pages: $(STAMP) ## Write docs/commands/ anew, from the helps
	$(BIN)/python tools/write_command_pages.py

# Other PostgreSQLs and Node's Graphile Worker, for the tests that compare with them. Without npm
# those tests are skipped.
.PHONY: peers
peers: $(STAMP)
	@$(BIN)/python tools/fetch_peers.py

# And Python's job queues, for the benchmarks alone.
.PHONY: bench-peers
bench-peers: $(STAMP)
	@$(BIN)/python tools/fetch_peers.py --python

clean: ## Remove the environment and all caches
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .import_linter_cache dist

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; try: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group dev --editable '.[embedded,pydantic,watch]'
	@touch $@
