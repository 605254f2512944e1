# make demo   install and run the main job on embedded data (about a minute after installation)
# make test   install what the tests need and run them; COVERAGE=1 measures coverage, which takes half as long again
# make test-browser   the report in headless Chromium; says how to get one where there is none
# make test-soak   twenty minutes of kills, full disks and clients that raise, lie and dawdle; MINUTES=2 is a short one
# make fuzz   a million mutated files for everything that is read; TOTAL=20000 is a short one
# make test-zoo   models of torchvision, timm and transformers, in an environment of their own, about half an hour; docs/zoo.md is made by it
# make bench   rounds beside the bare training steps, a plain loop, pfl and Flower's simulation, in an environment of their own; ONLY=W4 is a short one
# make docs   the documentation as a site: site/index.html
# make lint   ruff and mypy

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Runs and tests start many processes: without bytecode each of them compiles the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: bench demo docs test test-slow test-soak test-zoo fuzz test-browser lint format clean

$(VENV)/.runtime: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[report]'
	touch $@

$(VENV)/.development: $(VENV)/.runtime
	$(PIP) --editable '.[dev]'
	touch $@

demo: $(VENV)/.runtime
	$(BIN)/fedtailor compare configs/demo.toml --methods 'tailor,fedavg:width=1/8,fedavg:only_able=true' --seeds 3 --report runs/demo/report.html --overwrite

test: $(VENV)/.development
	$(BIN)/python -m pytest -n 2 -m 'not slow and not browser and not zoo' $(if $(COVERAGE),--cov --cov-fail-under=90)

$(VENV)/.deploy: $(VENV)/.development
	$(PIP) --editable '.[deploy-onnx,deploy-executorch]'
	touch $@

test-slow: $(VENV)/.deploy
	$(BIN)/python -m pytest -m slow

test-soak: $(VENV)/.development
	$(BIN)/python tools/soak.py --minutes $(or $(MINUTES),20)

fuzz: $(VENV)/.development
	$(BIN)/python tools/fuzz_files.py --total $(or $(TOTAL),1000000)

# torchvision and timm come without their dependencies: they would bring another PyTorch.
ZOO := .venv-zoo
$(ZOO)/.installed: pyproject.toml constraints.txt
	test -x $(ZOO)/bin/python || $(PYTHON) -m venv $(ZOO)
	$(ZOO)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable . hypothesis pillow peft pytest pytest-xdist transformers
	$(ZOO)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps timm torchvision
	touch $@

test-zoo: $(ZOO)/.installed
	OMP_NUM_THREADS=1 $(ZOO)/bin/python -m pytest -n 2 -m zoo tests/zoo
	$(ZOO)/bin/python tools/zoo_page.py

BENCH := .venv-bench
$(BENCH)/.installed: benchmarks/peers.txt
	test -x $(BENCH)/bin/python || $(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python -m pip install --quiet --disable-pip-version-check --requirement benchmarks/peers.txt
	touch $@

bench: $(VENV)/.development $(BENCH)/.installed
	$(BIN)/python benchmarks/rounds/run.py --peers $(BENCH)/bin/python $(if $(ONLY),--only $(ONLY)) $(if $(RECORD),--record)

$(VENV)/.browser: $(VENV)/.development
	$(PIP) --editable '.[browser]'
	touch $@

test-browser: $(VENV)/.browser
	$(BIN)/python -m pytest -m browser tests/browser

$(VENV)/.docs: $(VENV)/.runtime
	$(PIP) --editable '.[docs]'
	touch $@

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo site/index.html

lint: $(VENV)/.development
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.development
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(ZOO) $(BENCH) build dist site .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
