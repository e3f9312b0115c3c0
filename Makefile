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

.PHONY: demo docs test test-all test-cards test-transformers4 versions fuzz lint types clean

# torch goes first and pinned, so that nothing installed later chooses another build of it.
$(VENV)/.installed: pyproject.toml setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH_INDEX) "$$(grep '^torch==' constraints.txt)"
	$(PIP) -e '.[cli,demo,test,lint,docs,versions,stacks]'
	touch $@

.venv: $(VENV)/.installed

# What the demo needs is a small part of that.
$(VENV)/.demo: pyproject.toml setup.py constraints.txt
	test -e $(VENV)/.installed || { $(PYTHON) -m venv $(VENV) && \
	$(PIP) $(TORCH_INDEX) "$$(grep '^torch==' constraints.txt)" && $(PIP) -e '.[cli,demo]'; }
	touch $@

demo: $(VENV)/.demo
	$(BIN)/python -m demo.train_packed

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy cannot follow the mapping of passes/ to glue_compiler.passes, so it reads a copy laid out as installed.
types: $(VENV)/.installed
	rm -rf .types && mkdir .types
	cp -R glue_compiler demo tools benchmarks .types/ && cp -R passes .types/glue_compiler/passes
	cd .types && ../$(BIN)/mypy --config-file ../pyproject.toml --cache-dir ../.mypy_cache -p glue_compiler -p demo -p tools

# The site, in site/. Links that lead nowhere, options and commands that do not exist, code that does not run, and pages
# above 1,200 words that nothing generates are errors.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python -m pytest -q tests/test_docs.py tests/test_own_pass.py

# Tests spend their time in Python, tracing graphs, on one core each: two workers, and one torch thread in each.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test: lint types docs
	$(PYTEST) -m "not slow"

# With MINUTES, slow tests that would begin later are skipped; another choice of them each time.
test-all: lint types docs
	$(PYTEST) $(if $(MINUTES),--minutes $(MINUTES) --seed $$(date +%s))

# Kernels are compiled for cards that are not here, by a Triton in a folder of its own: a torch for CPUs has none.
test-cards: $(VENV)/.installed
	$(PIP) --no-deps --upgrade --target .triton "triton==3.7.1"
	PYTHONPATH=.triton $(PYTEST) tests/tools/test_cards.py

# Random programs against eager, for so many seconds, with a seed of their own that is printed.
FUZZ_SECONDS ?= 300
fuzz: $(VENV)/.installed
	$(BIN)/python -m tools.fuzz --seconds $(FUZZ_SECONDS) --seed $$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')

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
	rm -rf $(VENV) $(VENV)4 .nox .types .triton site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
