# Every target works alone on a fresh Debian machine with Python 3.11 and make.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
PY := .venv/bin/python

.PHONY: demo demo-engine test check bench fuzz simulate model docs demo-spark test-solace

demo: $(if $(BUS)$(wildcard .venv/ready),.venv/ready,.venv/demo)
	$(PY) -m $(if $(BUS),tests.support.demo $(BUS),esp_pubsub.cli.demo)

demo-engine: $(if $(BUS)$(wildcard .venv/ready),.venv/ready,.venv/demo)
	$(PY) -m $(if $(BUS),tests.support.demo --demo demo_engine $(BUS),esp_pubsub.cli.demo_engine)

demo-spark: .venv/ready
	$(PY) -m tests.support.demo_spark

# The tests of a file share its brokers. More processes than two cores: much of what a test does is to wait for a broker.
test: .venv/ready
	$(PY) -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# What can only be shown on a broker that you have.
test-solace: .venv/ready
	$(if $(SOLACE_CFG),,$(error say which broker: make test-solace SOLACE_CFG=solace.cfg))SOLACE_CFG=$(abspath $(SOLACE_CFG)) \
	$(PY) -m pytest -v -rs -k a_broker tests/conformance/test_solace.py tests/conformance/test_elections_flow.py

check: .venv/ready
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/lint-imports

bench: .venv/ready
	$(if $(NAME),,$(error say which: make bench NAME=codec))$(PY) -m tests.bench.$(NAME)

fuzz: .venv/ready
	$(PY) -m tests.fuzz

simulate: .venv/ready
	$(PY) -m tests.simulation --seeds $(or $(SEEDS),10000)

# All worlds of the model check, or those whose name has this in it: make model NAME=retention
model: .venv/ready
	$(PY) -m tests.model $(NAME)

docs: .venv/ready
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --site-dir build/docs

# All that is for developers, or what the demo needs.
# Debian's python3 can lack venv and pip: root installs them, anyone else is told how.
.venv/ready .venv/demo: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'Python 3.11 or newer is needed: make PYTHON=...' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	|| { test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -qqy python3-venv; } \
	|| { echo 'Python has no venv: apt-get install python3-venv, then make again' >&2; exit 1; }
	@echo 'installing into .venv$(if $(filter %/ready,$@),: this takes a minute or two)'
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check --editable '.$(if $(filter %/ready,$@),[dev])'
	@touch $@
