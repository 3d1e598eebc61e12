# make demo   set up .venv with the package and gguf, and run the demonstration: SmolLM2-135M-Instruct is fetched (98 MB)
#             and answers a question; if it cannot be downloaded, the bundled model writes (DEMO_ARGS="--model demo")
# make test   set up .venv with the test tools and run every check
# make aot    compile memory tests and kernels ahead of time, for TPUs and, in an environment of its own, for Hopper. Needs
#             a chip's compiler but no chip; skipped without libtpu, without the CUDA plugin or ptxas
# make results  write the pages of figures. With BOOK=book.txt and LEARN=other.txt the missing rows of the real model are
#             measured first (FOLDER=where WikiText-2 is, if not from the hub)
# make gate   measure the gate's recorded rows again (ROWS=6: only six of them; SKIP=40: without the first 40, which an
#             earlier run measured) and judge its bounds
# make nightly  run what .ci/run leaves out because it takes an hour and more
# make docs   set up .venv with the documentation's tools and build site/, warnings being errors
# make notebooks  set up .venv with Jupyter's kernel and gguf, and run the notebooks in examples/ on SmolLM2-135M-Instruct,
#             or on the bundled model if that cannot be downloaded
# make colab  write the repository's address (REPOSITORY, or the git remote origin) into the notebooks and their badges
# make clean  remove everything these made
# Needs a Python >= 3.11 with venv. Override: make test PYTHON=/path/to/python VENV=/path/to/venv PYTEST_ARGS="-k kivi"

VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip -qq
USABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c "$(USABLE)" 2>/dev/null && echo $$p && break; done)
SITE := import sysconfig; print(sysconfig.get_path('purelib'))
TORCH := torch==2.13.0
ifeq ($(shell uname -s),Linux)
TORCH := $(TORCH)+cpu
endif
PYTEST_ARGS ?=
DEMO_ARGS ?=
ROWS ?= 0
SKIP ?= 0
FOLDERS := kvqjax pallas_kernels calibrate eval
# Folders count as sources too: their time changes when a file in them is deleted.
SOURCES := pyproject.toml setup.py README.md LICENSE \
	$(shell find $(FOLDERS) -not -name '__pycache__' -not -name '*.pyc' -not -name '*.swp')

.PHONY: demo test docs notebooks colab aot results gate nightly clean
.DELETE_ON_ERROR:

demo: $(VENV)/.package $(VENV)/.gguf
	$(BIN)/kvqjax demo $(DEMO_ARGS)

# Every check runs on the installed package, never on the source tree: import-linter, pyrefly and jaxtyping's hook do
# not follow the folders mapped under kvqjax. lint-imports puts the working directory on the path, hence the cd.
test: $(VENV)/.package $(VENV)/.with-test $(VENV)/.torch
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd tests && $(abspath $(BIN))/lint-imports --no-cache --config ../pyproject.toml
	$(BIN)/pyrefly check --config pyproject.toml --python-interpreter-path $(BIN)/python --output-format min-text \
		"$$($(BIN)/python -Pc 'import importlib.util as u; print(u.find_spec("kvqjax").submodule_search_locations[0])')/**/*.py"
	PYTHONSAFEPATH=1 $(BIN)/python -m pytest -n 2 --dist loadfile -ra $(PYTEST_ARGS)

docs: $(VENV)/.package $(VENV)/.with-docs
	PYTHONSAFEPATH=1 $(BIN)/python -m mkdocs build --strict --quiet

# Each notebook runs from its first cell to its last; an error in one ends with its traceback.
notebooks: $(VENV)/.package $(VENV)/.with-examples $(VENV)/.gguf
	MPLBACKEND=agg $(BIN)/jupyter-execute --timeout=300 examples/*.ipynb

colab: $(VENV)/.base
	$(BIN)/python examples/colab.py $(REPOSITORY)

# Two workers, each test to whichever is free: these share no programs, and each keeps one core busy.
aot: $(VENV)/.package $(VENV)/.with-test $(VENV)/.libtpu $(VENV)-gpu/.plugin
	ALLOW_MULTIPLE_LIBTPU_LOAD=1 PYTHONSAFEPATH=1 $(BIN)/python -m pytest -n 2 --dist worksteal -ra -m slow tests/aot
	PYTHONSAFEPATH=1 $(VENV)-gpu/bin/python -m pytest -n 2 --dist worksteal -ra -m slow \
		-k "gpu or h100" tests/aot

# From the root, so that benchmarks is found; -P keeps the source tree from shadowing the installed package.
BENCHMARK := PYTHONSAFEPATH=1 $(BIN)/python -c "import sys, runpy; sys.path.append('.'); sys.argv = sys.argv[1:]; \
	runpy.run_module(sys.argv[0], run_name='__main__')"

results: $(VENV)/.package $(VENV)/.with-plots
	$(BENCHMARK) benchmarks.results $(if $(BOOK),--book '$(BOOK)' --learn '$(LEARN)',--page-only) $(if $(FOLDER),--folder '$(FOLDER)')
	$(BENCHMARK) benchmarks.figures

gate: $(VENV)/.package
	$(BENCHMARK) benchmarks.gate --check $(ROWS) --skip $(SKIP)

nightly:
	bash .ci/nightly

$(VENV)/.base:
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 with venv and ensurepip found (Debian: apt install python3-venv)"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) install --upgrade pip 'setuptools>=77' wheel
	touch $@

# build/ is removed because setuptools would install what an older build left there.
$(VENV)/.package: $(VENV)/.base $(SOURCES)
	rm -rf build
	$(PIP) install --no-build-isolation .
	rm -rf build kvqjax.egg-info
	touch $@

# The package with one of its extras: test, docs, examples, plots.
EXTRAS := $(VENV)/.with-test $(VENV)/.with-docs $(VENV)/.with-examples $(VENV)/.with-plots
$(EXTRAS): $(VENV)/.with-%: pyproject.toml | $(VENV)/.package
	$(PIP) install --no-build-isolation '.[$*]'
	rm -rf build kvqjax.egg-info
	touch $@

# What decodes the weights of a GGUF file. Without it the demonstration and the notebooks run on the bundled model.
$(VENV)/.gguf: pyproject.toml | $(VENV)/.package
	$(PIP) install --no-build-isolation '.[gguf]' && touch $@ \
		|| echo "gguf cannot be installed here: the demonstration and the notebooks use the bundled model"
	rm -rf build kvqjax.egg-info

# Only torch's CPU build: the default Linux build brings gigabytes of CUDA libraries.
$(VENV)/.torch: | $(VENV)/.base
	$(PIP) install '$(TORCH)' 2>/dev/null \
		|| echo "$(TORCH) cannot be installed here: the tests against transformers' torch models will be skipped"
	touch $@

$(VENV)/.libtpu: | $(VENV)/.with-test
	$(PIP) install "jax[tpu]==$$($(BIN)/python -c 'import jax; print(jax.__version__)')" 2>/dev/null || echo "libtpu cannot be installed here: its tests will be skipped"
	touch $@

# The packages of $(VENV) and the CUDA plugin: apart, because with it JAX looks for a GPU at every import.
$(VENV)-gpu/.plugin: | $(VENV)/.with-test
	$(BIN)/python -m venv --clear $(VENV)-gpu
	$(BIN)/python -c "$(SITE)" >"$$($(VENV)-gpu/bin/python -c "$(SITE)")/base.pth"
	version=$$($(BIN)/python -c 'import jax; print(jax.__version__)'); $(VENV)-gpu/bin/python -m pip -qq install --no-deps \
		jax-cuda13-plugin==$$version jax-cuda13-pjrt==$$version 2>/dev/null \
		|| echo "the CUDA plugin cannot be installed here: its tests will be skipped"
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-gpu .venv-newest .venv-wheel .venv-jax .jax_cache build dist site kvqjax.egg-info
