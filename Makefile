# Two commands matter: `make demo` runs the main job, `make test` checks all but what is slow. Both set up .venv first.

PYTHON ?= python3
# pip options for torch alone, such as --index-url for a CPU build; empty: the build that pip finds by itself.
TORCH_INDEX ?=
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt

# Threads that spin while they wait take the core away from what they wait for, where cores are few or shared.
export OMP_WAIT_POLICY ?= passive

.PHONY: demo docs test test-all test-transformers4 versions fuzz lint types clean

# torch goes first and pinned, so that nothing installed later chooses another build of it.
$(VENV)/.installed: pyproject.toml setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH_INDEX) "$$(grep '^torch==' constraints.txt)"
	$(PIP) -e '.[cli,demo,test,lint,docs,versions,stacks]'
	touch $@

.venv: $(VENV)/.installed

demo: $(VENV)/.installed
	$(BIN)/python -m demo.train_packed

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy cannot follow the mapping of passes/ to glue_compiler.passes, so it reads a copy laid out as installed.
types: $(VENV)/.installed
	rm -rf .types && mkdir .types
	cp -R glue_compiler demo .types/ && cp -R passes .types/glue_compiler/passes
	cd .types && ../$(BIN)/mypy --config-file ../pyproject.toml --cache-dir ../.mypy_cache -p glue_compiler -p demo

# The site, in site/; a link that leads nowhere is an error.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Tests spend their time in Python, tracing graphs, on one core each: two workers, and one torch thread in each.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test: lint types docs
	$(PYTEST) -m "not slow"

test-all: lint types docs
	$(PYTEST)

# Random programs against eager, for so many seconds, with a seed of their own that is printed.
FUZZ_SECONDS ?= 300
fuzz: $(VENV)/.installed
	$(BIN)/python -m glue_compiler.testing.fuzz --seconds $(FUZZ_SECONDS) --seed $$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')

# The loops that transformers 4 writes, in an environment of its own.
test-transformers4:
	$(PYTHON) -m venv $(VENV)4
	$(VENV)4/bin/python -m pip install -q --disable-pip-version-check $(TORCH_INDEX) "$$(grep '^torch==' constraints.txt)"
	$(VENV)4/bin/python -m pip install -q --disable-pip-version-check -c constraints-transformers4.txt -e . transformers pytest pytest-timeout
	OMP_NUM_THREADS=1 $(VENV)4/bin/python -m pytest tests/passes/group_experts/test_transformers4_experts.py

# The fast tests and the stacks on every torch and transformers that are supported, and docs/versions.md from what they did.
versions: $(VENV)/.installed
	$(BIN)/nox

clean:
	rm -rf $(VENV) $(VENV)4 .nox .types site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
