# SPDX-License-Identifier: Apache-2.0
# Needs Python 3.11+ with venv, and make. Everything else is installed into .venv, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
READY := $(VENV)/.ready
BENCH_READY := $(VENV)/.ready-bench
FRAMEWORKS_READY := $(VENV)/.ready-frameworks
RELEASE_READY := $(VENV)/.ready-release
# An environment with nothing but the wheel.
CLEAN := build/clean
BENCH_ARGS ?=
UPSTREAM_ARGS ?=
DIR ?= upstream
DRAFT ?= --draft
PAGES ?=
SPDX := \# SPDX-License-Identifier: Apache-2.0
# The site needs graphviz: CI must build it, elsewhere `make test` does without.
SITE := $(if $(CI)$(shell command -v dot),site)
# A file stays in one process: tests of a file share worlds and servers. Four on two cores: they wait
# more than half of the time. In the order of their names, tests that wait run next to tests that do
# not; by default, those that wait would come last.
PARALLEL ?= -n 4 --dist loadfile --no-loadscope-reorder
# Tests start hundreds of processes: compiling the package in each takes most of their time.
export PYTHONDONTWRITEBYTECODE :=
# OpenMP threads spin while they wait: with more of them than cores, training takes three times as
# long.
test test-all: export OMP_NUM_THREADS := 1
# A test that hangs fails, with all stacks; one that hangs in C takes its worker down, with all stacks.
LIMITS := --timeout=240 -o faulthandler_timeout=480 -o faulthandler_exit_on_timeout=true

.PHONY: demo test test-all compiled-tests servers bench docs site browser changelog dist upstream-tests lint format clean

demo: $(READY)
	$(BIN)/python examples/train_resume.py
	$(BIN)/python examples/fsdp_resume.py
	$(BIN)/python examples/managed.py
	$(BIN)/python examples/exact_resume.py

# The check list: what CI and pre-commit run. pytest is last, so that its closing line is.
# CI must have the servers that the tests talk to; elsewhere tests skip what is missing.
test: lint $(SITE) $(if $(CI),servers compiled-tests)
	$(BIN)/python -m pytest -m "not slow" $(PARALLEL) $(LIMITS)

# While mypy runs, on the other core: each process of pytest would compile all tests again.
compiled-tests: $(READY)
	$(BIN)/python -m pytest --collect-only -qq > /dev/null || true

test-all: lint $(SITE) $(FRAMEWORKS_READY) $(if $(CI),servers)
	$(BIN)/python -m pytest $(PARALLEL)

# What pip does not bring of them: Debian packages, as root.
servers:
	tests/servers/install.sh

bench: $(BENCH_READY)
	$(BIN)/python -m bench $(BENCH_ARGS)

# Pages, or parts of them, that are generated from the source; then the site.
docs: $(READY)
	$(BIN)/python -m docs.generate_protocol
	$(BIN)/python -m docs.generate_reference
	$(MAKE) --no-print-directory site

# The site, in site/, with warnings as errors. Pictures need graphviz, which `make servers` installs.
# Not --quiet: warnings that are not shown are not errors, either.
site: $(READY) $(if $(CI),servers)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Every page of the site in headless Chromium, at two widths; pictures in build/browser. PAGES: some
# pages, or files that `actorsnap inspect --html` or `trace --html` wrote. Skipped without Chromium.
browser: $(READY) $(if $(shell command -v chromium),$(if $(PAGES),,site))
	@$(BIN)/python -m docs.browser build/browser $(PAGES)

# The next release's part of CHANGELOG.md, from docs/changes. `make changelog DRAFT=` writes it there,
# and deletes the fragments.
changelog: $(READY)
	$(BIN)/towncrier build $(DRAFT) --yes \
		--version "$$($(BIN)/python -c 'from actorsnap import release; print(release.RELEASE)')"

# Wheel and sdist, and whether a plain install of the wheel, which the sdist builds, does its work.
dist: $(RELEASE_READY)
	rm -rf dist $(CLEAN)
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv $(CLEAN)
	$(CLEAN)/bin/python -m pip --disable-pip-version-check --quiet install -c constraints.txt dist/*.whl
	cd build && clean/bin/python -I ../tests/plain_install.py
	$(CLEAN)/bin/python -m pip --disable-pip-version-check --quiet install -c constraints.txt \
		"$$(echo dist/*.whl)[cli]"
	cd build && PYTHONPATH= clean/bin/actorsnap verify --full ../tests/golden/v1
	rm -rf $(CLEAN)

# PyTorch's tests of torch.distributed.checkpoint, with actorsnap.interop.dcp in place of its file
# system writer and reader. DIR: files or folders of test/distributed/checkpoint in PyTorch's source
# at the tag of the installed torch; put them into upstream/, which git ignores.
upstream-tests: $(READY)
	$(PIP) install expecttest
	cd $(DIR) && OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR):$(CURDIR)/tests/interop/upstream \
		$(CURDIR)/$(BIN)/python -m pytest -c /dev/null --rootdir=. -p no:cacheprovider $(UPSTREAM_ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff check --quiet --preview --select CPY001 --extend-exclude '*.ipynb' .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict
	$(BIN)/lint-imports --no-logo

format: $(READY)
	git ls-files -co --exclude-standard '*.py' | xargs grep -L '^$(SPDX)' | xargs -r sed -i '1i $(SPDX)'
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'actorsnap needs Python 3.11 or newer: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

$(BENCH_READY): $(READY) bench/requirements.txt
	$(PIP) install -c constraints.txt -r bench/requirements.txt
	@touch $@

$(RELEASE_READY): $(READY)
	$(PIP) install -c constraints.txt -e '.[release]'
	@touch $@

$(FRAMEWORKS_READY): $(READY) tests/frameworks/requirements.txt
	$(PIP) install -c constraints.txt -r tests/frameworks/requirements.txt
	$(PIP) install --no-deps torchtitan==0.3.0
	@touch $@
