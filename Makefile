# `make quickstart` shows that it runs here, `make test` is for every change, and `make nightly` is what takes long. CI runs
# `make test` and a sample of the nightly tests (.ci/run).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PUBLISHED := .venv-published
QUICK := $(VENV)/.quickstart

.PHONY: quickstart test nightly nightly-sample test-versions faults fuzz lint types audit unit published aio format gpu gpu-wheels docs release-check clean

quickstart: $(QUICK)
	$(BIN)/python -m cli fit --config recipes/quickstart.yaml

# What takes one core or waits for a network goes side by side.
test: $(STAMP)
	$(MAKE) --no-print-directory --jobs 3 lint types audit
	$(MAKE) --no-print-directory unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/bandit --quiet --recursive --configfile pyproject.toml lightning_memfit cli

# What pip-audit finds is printed, and is no failure: it changes from day to day, and needs a network.
audit: $(STAMP)
	@$(BIN)/pip-audit --progress-spinner off --timeout 10 2>/dev/null | grep -E "(PYSEC|GHSA|CVE)-" \
		|| echo "pip-audit: no known vulnerability, as far as it could ask"

types: $(STAMP)
	MYPY_NUM_WORKERS=2 $(BIN)/mypy lightning_memfit cli

# Hundreds of processes of the tests would each compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

# Kernels have to be built and loaded with one ninja: another version finds every command changed, and builds them again.
WITH_OWN_NINJA := PATH=$(abspath $(BIN)):$$PATH

SIDE_BY_SIDE := -n 2 --dist loadfile --no-loadscope-reorder
COUNTED := tests/contract tests/truth/benchmarks

# Tests that count Python calls come first: Python 3.11.2 never comes back from `sys.setprofile` in a process in which
# steps were traced in several threads.
unit: $(STAMP)
	$(WITH_OWN_NINJA) python -m pytest -q -m own_process $(COUNTED)
	$(WITH_OWN_NINJA) python -m pytest $(SIDE_BY_SIDE) -m "not gpu and not nightly and not own_process"

# Full products of options, kills and full drives, fuzz, pages in a browser, examples, the whole zoo, and what
# `tests/nightly` has.
nightly: $(STAMP) $(PUBLISHED)/.installed
	$(WITH_OWN_NINJA) python -m pytest $(SIDE_BY_SIDE) -m "nightly and not gpu"
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz

# Modules that people published, with five techniques; a nightly test runs it, too. `python -m tests.published --write`
# there writes the table.
published: $(PUBLISHED)/.installed
	OMP_NUM_THREADS=1 $(PUBLISHED)/bin/python -m tests.published

# Their packages lie in an environment of their own, over that of $(VENV): torch and Lightning are the same. What the
# index lacks is left out, and the verdicts say so.
$(PUBLISHED)/.installed: $(STAMP) tests/published/requirements.txt
	$(BIN)/python -m venv $(PUBLISHED)
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" \
		> $$($(PUBLISHED)/bin/python -c "import site; print(site.getsitepackages()[0])")/project.pth
	$(PUBLISHED)/bin/python -m pip install --quiet --no-deps --requirement tests/published/requirements.txt \
		|| grep -v "^#" tests/published/requirements.txt | xargs -n 1 $(PUBLISHED)/bin/python -m pip install --quiet --no-deps \
		|| echo "Some packages of tests/published/requirements.txt can't be installed."
	touch $@

# The first nightly test of each file that needs no time limit of its own: what CI runs.
nightly-sample: $(STAMP)
	$(WITH_OWN_NINJA) python -m pytest $(SIDE_BY_SIDE) -m nightly_sample

# 300 mutated recipes and command lines; `make test` has a sample of them.
fuzz: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz

# Everything that may go wrong, provoked; writes docs/reliability.md.
faults: $(STAMP)
	$(WITH_OWN_NINJA) python -m tests.faults

# Tests of rules, techniques, numerics and strategies under older and the newest supported versions, each in an environment of its
# own in .venv-versions (some gigabytes each); `make test-versions ONLY=oldest` takes one.
ONLY ?=
test-versions: $(STAMP)
	$(BIN)/python -m tests.versions $(ONLY)

# Compile what offloading to disk needs, once (minutes; libaio-dev, g++); its tests run from then on.
aio: $(STAMP)
	$(WITH_OWN_NINJA) python -m lightning_memfit.nvme.extensions

# On a machine with a CUDA device and an environment of its own: PYTHON names its interpreter, FOLDER takes the results.
# Goes on where it stopped; MORE=--more adds what is asked last. Without a package index, carry the wheels that
# `make gpu-wheels` collects.
FOLDER ?= benchmarks/results/gpu
MINUTES ?= 14
MORE ?=
gpu:
	$(PYTHON) -m benchmarks.gpu.suite --folder $(FOLDER) --minutes $(MINUTES) $(MORE)

gpu-wheels: $(STAMP)
	$(BIN)/python -m benchmarks.gpu.pack wheels

# The site, in build/site. It opens from files, and searches where it is served. `make test` builds it, too.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	MEMFIT_NOTEBOOK=1 $(BIN)/python -m pytest -q tests/truth/docs/test_site.py
	@echo "The site is in build/site. Read it with $(BIN)/python -m http.server --directory build/site"

# Build wheel and sdist, install the wheel without extras in a bare environment, and run doctor, estimate and quickstart.
release-check: $(STAMP)
	$(BIN)/python -m tests.release_check

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# What the package itself needs. torch first and alone, so that the constraints decide which build is taken before
# anything else asks for one.
$(QUICK): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --constraint constraints.txt torch
	$(BIN)/python -m pip install --constraint constraints.txt --editable .
	touch $(QUICK)

$(STAMP): $(QUICK)
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,all,docs]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) .venv-versions $(PUBLISHED) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
