# Each target makes .venv if it is missing and installs everything it needs there, pinned by constraints.txt.
# PYTHON chooses the interpreter that .venv is made with: make test PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
CXX_FILES = find csrc tests -type f '(' -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' ')'

.PHONY: demo test lint bench test-triton-oldest test-gpu bench-gpu bench-plan coverage format clean

demo: $(VENV)/.installed
	$(PY) -m fastclip demo

test: $(VENV)/.installed
	$(PY) -m pytest

lint: $(VENV)/.installed
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) tools/sizes.py
	$(CXX_FILES) -exec $(VENV)/bin/clang-format --dry-run -Werror {} +

bench: $(VENV)/.installed
	$(PY) -m benchmarks.cpu

bench-plan: $(VENV)/.installed
	$(PY) -m benchmarks.plan

# The tests of the Triton kernels with the oldest Triton supported; its interpreter needs an older numpy.
OLDEST := .venv-triton-oldest
test-triton-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest tests/triton_backend -k 'not case-table and not gpu'

$(OLDEST)/.installed: constraints.txt $(VENV)/.created
	$(PYTHON) -m venv --clear $(OLDEST)
	grep -v -e '^triton==' -e '^numpy==' constraints.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint $(OLDEST)/constraints.txt torch triton==3.4.0 numpy==2.2.6 setuptools pytest hypothesis
	@touch $@

# On a machine with a GPU, with whatever Python has a torch for it; of other packages: triton, numpy, pytest.
GPU_PYTHON ?= python3
test-gpu:
	timeout 480 $(GPU_PYTHON) -m pytest -W default tests/triton_backend/gpu tests/gpu tests/test_cases.py -k 'gpu or triton'

bench-gpu:
	timeout 480 $(GPU_PYTHON) -m benchmarks.gpu

coverage: $(VENV)/.installed
	$(PY) -m pytest --cov

format: $(VENV)/.installed
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(CXX_FILES) -exec $(VENV)/bin/clang-format -i {} +

clean:
	rm -rf $(VENV) .venv-triton-oldest build dist *.egg-info .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache

# FASTCLIP_BUILD=0: in a checkout the C++ is compiled at first use, so that it is never older than csrc.
$(VENV)/.installed: pyproject.toml setup.py constraints.txt $(VENV)/.created
	@echo "installing into $(VENV), pinned by constraints.txt"
	$(PIP) setuptools
	FASTCLIP_BUILD=0 $(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "error: '$(PYTHON)' is not Python 3.10 or newer; choose another: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "error: '$(PYTHON)' cannot make a virtual environment (no ensurepip);" \
	         "on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@
