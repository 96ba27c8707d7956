# Every target makes what it needs: an environment in .venv from the package index, then its job.
PYTHON ?= python3
VENV ?= .venv
# Tests run in this many processes, each file in one: what it compiles is shared by its tests.
WORKERS ?= 2
BIN := $(VENV)/bin
PACKAGING := setup.cfg pyproject.toml

.PHONY: help demo test test-slow test-oldest lint format docs kernels wheel bench backends agreement conformance fuzz fuzz-shapes fuzz-tests fuzz-native check-guard check-isas check-kernels clean

help:  ## Show this list.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 18

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Subgraph needs Python 3.11 or newer; say PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

# One stamp for each set of extras; a changed setup.cfg installs anew.
$(VENV)/.has-%: $(BIN)/python $(PACKAGING)
	$(BIN)/python -m pip install --quiet --editable ".[$*]"
	@touch $@

# PoCL's compiler does not know every processor; Intel's OpenCL for CPUs stands in for it.
$(VENV)/.has-opencl: $(BIN)/python $(PACKAGING)
	$(BIN)/python -m pip install --quiet --editable ".[opencl]"
	$(BIN)/python -c 'from subgraph.opencl.runtime import find_devices; find_devices()' 2>/dev/null \
	  || $(BIN)/python -m pip install --quiet --editable ".[opencl-intel]"
	@touch $@

demo: $(VENV)/.has-demo  ## Run a real network on real images through a user's own partition.
	$(BIN)/python examples/demo.py

# A test that ends its process fails the run at once: with a new process, pytest-xdist may wait forever.
test: $(VENV)/.has-test $(VENV)/.has-opencl  ## Run the tests (the slow suites apart).
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --max-worker-restart 0 -m "not slow and not oclgrind" $(PYTEST_ARGS)

test-slow: $(VENV)/.has-test $(VENV)/.has-opencl  ## Run the slow suites: 10,000 random partitions, and so on.
	$(BIN)/python -m pytest -m slow --timeout 3600 $(PYTEST_ARGS)

# What the package requires; what tests compare with stays new.
test-oldest:  ## Run the tests with the oldest versions that setup.cfg allows of what is required.
	@mkdir -p build
	sed -nE '/^install_requires/,/^packages/s/^    ([A-Za-z0-9_-]+) >= ([0-9.]+).*/\1==\2/p' setup.cfg > build/oldest.txt
	PIP_CONSTRAINT=$(CURDIR)/build/oldest.txt $(MAKE) test VENV=.venv-oldest

# Kernels shaped for machines that this one may not be, run on this one; then compiled for them.
ISAS ?= like-avx512vnni like-avx512 like-avx512bf16 like-amx like-avxvnni like-neon avx sse
KERNEL_TESTS := \
  $(filter-out tests/ops/contrib/% tests/ops/control_flow/% tests/ops/ml/% \
    %/test_requirements.py %/test_reference.py, $(wildcard tests/ops/*/test_*.py)) \
  tests/passes/test_fuse_quantized.py tests/passes/test_fuse_quantized_images.py \
  tests/engine/codegen/test_simd.py tests/engine/codegen/test_vmath.py \
  tests/weights/test_bfloat16_weights.py tests/ops/test_bfloat16_products.py \
  tests/devices/test_half_models.py tests/devices/test_mobile_networks.py tests/devices/test_models.py \
  tests/operators/test_families.py tests/operators/test_ops_devices.py
check-isas: $(VENV)/.has-test $(VENV)/.has-opencl  ## Run and compile the kernels as for other instruction sets.
	for isa in $(ISAS); do echo "$$isa" && SUBGRAPH_ISA=$$isa $(BIN)/python -m pytest -q \
	  -m "not slow and not oclgrind" --timeout 3600 $(KERNEL_TESTS) $(PYTEST_ARGS) || exit 1; done
	$(BIN)/python benchmarks/cross_targets.py $(KERNEL_TESTS)

lint: $(VENV)/.has-lint $(VENV)/.has-test $(VENV)/.has-opencl  ## Ruff, pyright strict, mypy strict.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/mypy

format: $(VENV)/.has-lint  ## Format the code.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.has-docs  ## Build the documentation into docs/_build/html.
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html
	@echo "open docs/_build/html/index.html"

# For each level of instruction sets, into the package's folder: a wheel that is built next carries
# them. Say KERNEL_MODELS="*.onnx" for the kernels of more models.
kernels: $(VENV)/.has-test  ## Compile the usual kernels ahead, for the wheel.
	$(BIN)/python -m subgraph.tools.prebuild $(KERNEL_MODELS)

# What is released: the kernels are compiled first, from the sources that the wheel has.
wheel: kernels  ## Build the wheel, with compiled kernels, into dist.
	$(BIN)/python -m build --wheel

bench: $(VENV)/.has-bench  ## Time against ONNX Runtime and OpenVINO, side by side.
	$(BIN)/python benchmarks/models.py $(BENCH_ARGS)

BACKENDS = $(VENV)/.has-onednn $(VENV)/.has-onnxruntime $(VENV)/.has-openvino $(VENV)/.has-torch $(VENV)/.has-tvm
backends: $(VENV)/.has-test $(BACKENDS)  ## Install the libraries of other accelerators and try each.
	$(BIN)/python benchmarks/backends.py --kit $(BACKENDS_ARGS)

agreement: $(VENV)/.has-test $(VENV)/.has-opencl  ## Compare whole models on every device with CPU.
	$(BIN)/python benchmarks/agreement.py $(AGREEMENT_ARGS)

# SUITE=1.21.0: the suite of that release of onnx instead of the installed one's.
conformance: $(VENV)/.has-bench $(VENV)/.has-opencl $(SUITE:%=$(VENV)/onnx-%)  ## Run ONNX's own test suite on every device and the peers.
	$(BIN)/python benchmarks/conformance.py $(SUITE:%=--suite $(VENV)/onnx-%/onnx) $(CONFORMANCE_ARGS)

$(VENV)/onnx-%: $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-deps --target $@ onnx==$*

fuzz: $(VENV)/.has-test  ## Compare random models with ONNX Runtime.
	$(BIN)/python benchmarks/fuzz.py $(FUZZ_ARGS)

# A model runs three to four cases on average.
MODELS ?= 3000
fuzz-shapes: $(VENV)/.has-test  ## Run every operator on operands that do not fit, between guard pages.
	for mode in end begin; do SUBGRAPH_GUARD=$$mode PYTHONPATH=.:benchmarks $(BIN)/python \
	  -m wrong_sizes --count $(MODELS) $(FUZZ_ARGS) || exit 1; done

# Hypothesis keeps what failed in .hypothesis and tries it first the next time.
EXAMPLES ?= 50
FUZZ_TESTS ?= tests
fuzz-tests: $(VENV)/.has-test $(VENV)/.has-opencl  ## Run every random test on 50 times the examples.
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "hypothesis and not slow and not oclgrind" \
	  --examples $(EXAMPLES) --timeout 0 $(FUZZ_TESTS) $(PYTEST_ARGS)

# Seconds for each target; what was found lies in .fuzz/findings. Say FUZZ_TARGETS="text blobs" for some.
FUZZ_SECONDS ?= 600
FUZZ_JOBS ?= 1
fuzz-native: $(VENV)/.has-fuzz $(VENV)/.has-test  ## Fuzz readers, shapes, partitions, caches, guided by coverage.
	PYTHONPATH=.:benchmarks $(BIN)/python -m fuzz_native $(FUZZ_TARGETS) --seconds $(FUZZ_SECONDS) \
	  --jobs $(FUZZ_JOBS) $(FUZZ_ARGS)

# Whole tests, for what they do with memory; --capture=sys lets the report of a fault through.
GUARD_TESTS ?= tests
check-guard: $(VENV)/.has-test $(VENV)/.has-opencl  ## Run the tests with every operand between inaccessible pages.
	for mode in end begin; do echo "$$mode" && SUBGRAPH_GUARD=$$mode $(BIN)/python -m pytest -q \
	  --capture=sys -n $(WORKERS) --dist loadfile -m "not slow and not oclgrind" --timeout 3600 \
	  $(GUARD_TESTS) $(PYTEST_ARGS) || exit 1; done

check-kernels: $(VENV)/.has-oclgrind $(VENV)/.has-test  ## Run the OpenCL kernels under Oclgrind.
	$(BIN)/python -m pytest -m oclgrind $(PYTEST_ARGS)

clean:  ## Remove the environment and everything built.
	rm -rf $(VENV) build dist subgraph/prebuilt docs/_build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
