# Everything runs from .venv in this checkout; the targets make it when it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install -q --no-compile -c constraints.txt
# Python compiles what it imports, once, and keeps it: pip need not compile everything, but Python must be let.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-more test-gpu lint bench clean

$(VENV)/.base: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	$(INSTALL) -e .
	touch $@

$(VENV)/.kernels: $(VENV)/.base
	$(BIN)/python -m turnout.kernels.cpu
	touch $@

$(VENV)/.test: $(VENV)/.base tests/flashinfer-requirements.txt
	$(INSTALL) -e '.[test]'
	$(INSTALL) --no-deps -r tests/flashinfer-requirements.txt
	touch $@

$(VENV)/.collected: $(VENV)/.test $(VENV)/.kernels  ## compiles the tests once, which each worker would do
	-$(BIN)/python -m pytest --collect-only -q > /dev/null
	touch $@

$(VENV)/.lint: $(VENV)/.test
	$(INSTALL) -e '.[lint]'
	touch $@

demo: $(VENV)/.kernels
	@$(BIN)/python -m turnout.evals.demo

test: WORKERS = 3
test: $(VENV)/.collected
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=25

$(VENV)/.more: $(VENV)/.test
	$(INSTALL) -e '.[test,more]'
	touch $@

test-more: WORKERS = 2
test-more: $(VENV)/.more $(VENV)/.collected  ## what takes minutes: installing as the images do, building the wheel, Ray
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m more -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=25

test-gpu:  ## on a machine with GPUs, with whatever python holds torch; JUNIT=FILE.xml keeps outcomes, for tools.gpu_tests
	$(PYTHON) -m pytest -m 'gpu or multigpu' $(if $(JUNIT),--junitxml=$(JUNIT))

lint: $(VENV)/.lint
	$(BIN)/pre-commit run --all-files

bench: $(VENV)/.test $(VENV)/.kernels
	$(BIN)/python -m tools.bench_cpu $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
