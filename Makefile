# The tasks of this repository. `make` without a target lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.docs-installed
# Most tests wait for a server or a timer, so more of them run at once than there are cores.
IN_PARALLEL := --numprocesses 8 --dist worksteal

# Otherwise each process of a test run would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-all bench bench-binding bench-cron bench-middleware bench-scaling bench-telemetry bench-top bench-web chaos chaos-mixed soak check format db-dump dashboard command-pages settings-page docs docs-serve docs-top docs-dashboard clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

demo: $(STAMP) ## Run example jobs on an embedded PostgreSQL: from SQL, a retry, a serial queue, a crontab
	@$(BIN)/python examples/demo.py

test: $(STAMP) peers ## Run the fast tests, in a few minutes
	$(BIN)/pytest -m "not slow and not older" --durations=10 $(IN_PARALLEL)

test-all: $(STAMP) peers ## Run the slow tests, and all tests on older PostgreSQL versions
	$(BIN)/pytest -m "older and not slow" --durations=10 $(IN_PARALLEL)
	$(BIN)/pytest -m "slow and not alone" --durations=10 --numprocesses 3 --dist worksteal
	$(BIN)/pytest -m "slow and alone" --durations=10

bench: $(STAMP) bench-peers ## Compare with other queues: 15 minutes, or 2 with QUICK=1
	$(BIN)/python -m benchmarks $(if $(QUICK),--quick)
	$(BIN)/python -m benchmarks.telemetry --only prometheus $(if $(QUICK),--rounds 4)

bench-scaling: $(STAMP) bench-peers ## Measure scaling: 15 minutes, or 2 with QUICK=1
	$(BIN)/python -m benchmarks scaling $(if $(QUICK),--quick)

bench-binding: $(STAMP) ## Measure the time from a payload to a task's arguments
	$(BIN)/python -m benchmarks.binding

bench-middleware: $(STAMP) ## Measure the cost of middleware and listeners per job
	$(BIN)/python -m benchmarks.middleware

bench-telemetry: $(STAMP) ## Measure the cost of metrics, traces and Sentry per job
	$(BIN)/python -m benchmarks.telemetry

bench-top: $(STAMP) ## Measure a refresh of graphile-worker top, by the size of the queue
	$(BIN)/python -m benchmarks.top_view

bench-web: $(STAMP) ## Measure the dashboard's pages on a million jobs, and what they cost a worker
	$(BIN)/python -m benchmarks.web_view

bench-cron: $(STAMP) ## Measure the backfill of a week of a hundred recurring tasks
	$(BIN)/python -m benchmarks.schedules

chaos: $(STAMP) peers ## Inject faults while workers run jobs, and audit the outcome [MINUTES=10 SEED=random]
	$(BIN)/python -m chaos --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED))

chaos-mixed: $(STAMP) peers ## Kill, stop and freeze Node and Python workers on one queue, and audit the outcome [MINUTES=10]
	$(BIN)/python -m chaos --mixed --workers 2 --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED))

soak: $(STAMP) ## Run a million jobs, and fail if memory, tables or latency grow: 4 minutes [JOBS=1000000]
	$(BIN)/python -m benchmarks.soak $(if $(JOBS),--jobs $(JOBS))

check: $(STAMP) ## Check format, lint, types, import rules, sizes, SQL files and words
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_sizes.py
	$(BIN)/python tools/check_sql.py
	$(BIN)/python tools/check_words.py

format: $(STAMP) ## Format the code, and apply the linter's fixes
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

db-dump: $(STAMP) ## Write docs/reference/schema.sql, and the schema description that the doctor compares with
	$(BIN)/python tools/dump_schema.py

dashboard: $(STAMP) ## Write deploy/grafana-dashboard.json
	$(BIN)/python tools/write_dashboard.py

command-pages: $(STAMP) ## Write docs/reference/cli/ from the help texts
	$(BIN)/python tools/write_command_pages.py

settings-page: $(STAMP) ## Write the tables of docs/reference/settings.md from the option declarations
	$(BIN)/python tools/write_settings_page.py

docs: $(DOCS_STAMP) ## Build the documentation in site/, with warnings as errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(DOCS_STAMP) ## Serve the documentation at http://127.0.0.1:8000, and rebuild it on each change
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --watch src/graphile_worker --watch README.md --watch CHANGELOG.md --watch ARCHITECTURE.md

docs-top: $(STAMP) ## Draw docs/assets/top.svg, a screenshot of graphile-worker top, from a real run
	$(BIN)/python tools/draw_top.py

docs-dashboard: $(STAMP) ## Draw docs/assets/dashboard/, pictures of the web dashboard, from its demo
	$(BIN)/python tools/draw_dashboard.py

# Old PostgreSQL versions and Node's Graphile Worker, for the tests that need them. Without npm these tests are
# skipped.
.PHONY: peers
peers: $(STAMP)
	@$(BIN)/python tools/fetch_peers.py

# Other Python job queues, for the benchmarks only.
.PHONY: bench-peers
bench-peers: $(STAMP)
	@$(BIN)/python tools/fetch_peers.py --python

clean: ## Remove the environment and all caches
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .import_linter_cache dist site

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is required; try: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group dev --editable '.[embedded,otel,prometheus,pydantic,sentry,watch,web]'
	@touch $@

# The docs use the same environment but have their own stamp, so that `make test` does not wait for them.
$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group docs
	@touch $@
