# Each target makes .venv if it is missing and installs everything it needs there, pinned by constraints.txt.
# PYTHON chooses the interpreter that .venv is made with: make test PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
CXX_FILES = find csrc tests -type f '(' -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' ')'

.PHONY: demo test chromium lint docs bench bench-peers bench-scaling bench-training bench-distributed bench-plan bench-recovery bench-telemetry bench-watches plots gate test-triton-oldest test-torches test-gpu bench-gpu wheel wheel-beside coverage format clean

demo: $(VENV)/.installed
	$(PY) -m fastclip demo

# WORKERS processes share the tests; those marked "alone" follow in one, also if a test has failed before them.
# A thread that waits sleeps: by default those of OpenMP spin, on the core of another worker.
WORKERS ?= 2
SHARED = OMP_WAIT_POLICY=passive $(PY) -m pytest -m 'not alone' -n $(WORKERS) --dist worksteal
ALONE = $(PY) -m pytest -m alone
test: $(VENV)/.installed
	$(SHARED); shared=$$?; $(ALONE) && exit $$shared

# The browser for the tests of the report's page and of the documentation, which are skipped without it.
chromium:
	tools/chromium.sh

lint: $(VENV)/.installed
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) tools/sizes.py
	$(CXX_FILES) -exec $(VENV)/bin/clang-format --dry-run -Werror {} +

# The documentation in site/, from where it can be opened without a server or a network; a warning is an error.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo "open site/index.html"

# Every row that ends soon, raced and handed to pytest-benchmark, then compared with the committed run; 15 minutes
# on two cores. One row: make bench BENCH='-k gpt2-small-float32'. Those that take long, too: make bench BENCH=--every
BENCH :=
COMMITTED := benchmarks/results/suite.csv
SUITE = -m pytest -q -W default -r fE benchmarks/bench_suite.py --benchmark-quiet --against $(COMMITTED) $(BENCH)
bench: $(VENV)/.installed
	mkdir -p build/bench
	$(PY) $(SUITE) --csv build/bench/suite.csv --benchmark-json build/bench/suite.json

# The same beside all peers, some of which need a newer torch than constraints.txt pins: a CUDA build of it, 5.5 GB.
PEERS := .venv-peers
bench-peers: $(PEERS)/.installed
	mkdir -p build/bench
	$(PEERS)/bin/python $(SUITE) --csv build/bench/peers.csv --benchmark-json build/bench/peers.json

$(PEERS)/.installed: Makefile $(VENV)/.created
	$(PYTHON) -m venv --clear $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.14.1 timm==1.0.31 deepspeed==0.19.8 \
	  jax==0.10.2 optax==0.2.8 pytest==9.2.0 pytest-benchmark==5.3.1 setuptools
	@touch $@

bench-scaling: $(VENV)/.installed
	$(PY) -m benchmarks.scaling

plots: $(VENV)/.installed
	$(PY) -m benchmarks.plots
	$(PY) -m benchmarks.ablation_plot
	$(PY) -m benchmarks.fault_lab_plot
	$(PY) -m benchmarks.half_precision_plot

gate: $(VENV)/.installed
	$(PY) -m benchmarks.gate

bench-training: $(VENV)/.installed
	$(PY) -m benchmarks.training

bench-plan: $(VENV)/.installed
	$(PY) -m benchmarks.plan

bench-telemetry: $(VENV)/.installed
	$(PY) -m benchmarks.telemetry

bench-watches: $(VENV)/.installed
	$(PY) -m benchmarks.watches
bench-recovery: $(VENV)/.installed
	$(PY) -m benchmarks.recovery

bench-distributed: $(VENV)/.installed
	$(PY) -m benchmarks.distributed

# The tests of the Triton kernels with the oldest Triton supported; its interpreter needs an older numpy.
OLDEST := .venv-triton-oldest
test-triton-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest tests/triton_backend -k 'not case-table'

$(OLDEST)/.installed: constraints.txt $(VENV)/.created
	$(PYTHON) -m venv --clear $(OLDEST)
	grep -v -e '^triton' -e '^numpy==' constraints.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint $(OLDEST)/constraints.txt torch triton==3.4.0 numpy==2.2.6 setuptools pytest hypothesis
	@touch $@

# One wheel, built once with the torch of constraints.txt, passes the case table on the oldest torch that there
# is and on a newer one. Not part of .ci/run: they are CUDA builds of 7.0 and 5.4 GB (they do not import without
# the packages of CUDA), one of them downloaded, and all of it takes six minutes on two cores.
TORCHES ?= 2.10.0 2.14.1
TESTED := .torches/wheel
test-torches: $(TORCHES:%=.torches/%/.installed) $(VENV)/.installed
	rm -rf $(TESTED) && mkdir -p $(TESTED)
	FASTCLIP_BUILD=1 FASTCLIP_BUILD_CUDA=0 $(PY) -m pip wheel --quiet --no-build-isolation --no-deps . --wheel-dir $(TESTED)
	$(PY) -m zipfile -e $(TESTED)/*.whl $(TESTED)
	cp -r tests pyproject.toml $(TESTED)
	@for torch in $(TORCHES); do \
	  (cd $(TESTED) && export CXX=none && \
	   ../$$torch/bin/python -c 'import torch; from fastclip.backends import native; print(torch.__version__, native.description())' && \
	   ../$$torch/bin/python -m pytest -q -r fE tests/test_cases.py tests/test_backends.py tests/test_awkward.py) || exit 1; done

.torches/%/.installed:
	$(PYTHON) -m venv --clear .torches/$*
	.torches/$*/bin/python -m pip install --quiet --disable-pip-version-check torch==$* numpy pytest hypothesis
	@touch $@

# On a machine with a GPU, with whatever Python has a torch for it; of other packages: numpy and pytest, matplotlib
# for the pictures of bench-gpu, and triton and a CUDA compiler for their backends.
GPU_PYTHON ?= python3
test-gpu:
	timeout 480 $(GPU_PYTHON) -m pytest -W default tests/gpu tests/test_cases.py -k 'gpu or triton or (cuda and not reference)'

bench-gpu:
	timeout 480 $(GPU_PYTHON) -m benchmarks.gpu

# For a release: sdist and wheel, audited, and the wheel tried where there is torch alone; two minutes on two cores.
# With the CUDA kernels in it, too, if there is nvcc: make wheel FASTCLIP_BUILD_CUDA=1
wheel: $(VENV)/.installed
	$(PY) -m tools.wheel

# That wheel beside the newest transformers, accelerate and Lightning: a new environment with all of them.
wheel-beside: wheel
	$(PY) -m tools.wheel_beside

coverage: $(VENV)/.installed
	$(SHARED) --cov --cov-report=; shared=$$?; $(ALONE) --cov --cov-append && exit $$shared

format: $(VENV)/.installed
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(CXX_FILES) -exec $(VENV)/bin/clang-format -i {} +

clean:
	rm -rf $(VENV) $(PEERS) .venv-triton-oldest .torches build dist site *.egg-info .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache

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
