# make demo   set up, then run the main job at laptop size: no GPU, no network needed for the data;
#             TORCH=cpu, cu126 or cu130 takes that build of torch (without an NVIDIA GPU: cpu)
# make install   set up alone
# make test   set up, then lint, types and all but the slow tests; PYTEST="..." is handed to pytest
# make lint   format, lint and types alone
# make faults   all trials with damaged files and planted faults, of which make test runs some
# make models   train every architecture of transformers in five ways, and write docs/models.md
# make test-gpu   test the code for GPUs on a stand-in whose kernels the CPU computes (6 GB, network)
# make figures   draw the published tables and figures, the tables in the pages and the notebook
# make docs   build the site of README.md and docs/ in site/, strict about links
# make notebook   set up, then open plot_values.ipynb
# Each of many processes would compile our modules again.
unexport PYTHONDONTWRITEBYTECODE
PYTHON ?= python3
BIN := .venv/bin
DEMO := outputs/demo

.PHONY: demo install test faults models test-gpu figures docs notebook lint check-python clean

demo: .venv/ready
	$(BIN)/python -m harness sweep experiments/demo.yaml --tiny --output_dir $(DEMO)
	$(BIN)/python -m harness report $(DEMO) >/dev/null
	@echo "open $(DEMO)/report/report.html: its first lines say what was found"

install: .venv/ready

test: .venv/ready-dev lint
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder $(PYTEST)

faults: .venv/ready-dev
	HARNESS_FAULTS=whole $(BIN)/python -m pytest -n 2 --dist load --timeout 3600 -m 'slow or not slow' tests/faults

models: .venv/ready-dev
	HARNESS_MODELS=whole $(BIN)/python -m pytest -m slow tests/train/loop/test_matrix.py

test-gpu: .venv/ready-dev
	tests/standin_gpu/run.sh

# Without the times of cells, and with the language alone: the same records give the same notebook.
figures: .venv/ready-notebook
	for sweep in outputs/published/sweeps/*/ outputs/published/*/sweeps/*/ records/*/sweeps/*/; do \
	  $(BIN)/python -m harness table "$$sweep" --write >/dev/null && \
	  $(BIN)/python -m harness figures "$$sweep" || exit 1; \
	done
	for page in README.md docs/*.md; do \
	  $(BIN)/python -m docs.generate.tables "$$page" || exit 1; \
	done
	$(BIN)/python -m jupyter nbconvert --to notebook --execute --inplace plot_values.ipynb \
	  --ExecutePreprocessor.record_timing=False

docs: .venv/ready-docs
	$(BIN)/python .ci/site.py

notebook: .venv/ready-notebook
	$(BIN)/python -m jupyter notebook $$([ "$$(id -u)" = 0 ] && echo --allow-root) plot_values.ipynb

lint: .venv/ready-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Where pip's own index has no such build, that of PyTorch is asked; else pip takes what it finds.
TORCH_INDEX ?= https://download.pytorch.org/whl
BUILD := $(or $(TORCH),$(if $(shell command -v nvidia-smi),,cpu))
# Without a TORCH of its own a later call keeps the build that is there.
STAMP := $(or $(TORCH:%=.venv/torch-%),$(firstword $(wildcard .venv/torch-*)),.venv/torch-$(or $(BUILD),pip))
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
VERSION_OF_TORCH = $(shell sed -n 's/^torch==//p' constraints.txt)

TAKE_TORCH = $(PIP) --no-compile --no-deps --force-reinstall --retries 1 --timeout 20 \
  torch==$(VERSION_OF_TORCH)+$(BUILD)

# Modules are compiled afterwards on all cores; pip would use one.
define install
@$(PIP) --no-compile -c constraints.txt -e '.[$(1)]' || { rm -f .venv/torch-*; exit 1; }
@$(BIN)/python -m compileall -q -j 0 -x /tests/ .venv/lib >/dev/null 2>&1 || true
@touch $@
endef

# The stamps are newer than the requirements once everything is installed: a second call skips it.
.venv/ready: pyproject.toml constraints.txt $(STAMP)
	$(call install,trackers)

# With what users need among it: one call of pip, and the stamp of that is no newer than others'.
.venv/ready-dev: pyproject.toml constraints.txt $(STAMP)
	$(call install,dev)
	@touch -r $(STAMP) .venv/ready

.venv/ready-notebook .venv/ready-docs: .venv/ready-%: .venv/ready
	$(call install,$*)

$(STAMP): | check-python
	@echo "installing into .venv (minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@rm -f .venv/torch-*
	@test -z "$(BUILD)" || $(TAKE_TORCH) 2>/dev/null || \
	  $(TAKE_TORCH) --index-url $(TORCH_INDEX)/$(BUILD) 2>/dev/null || \
	  echo "no $(BUILD) build of torch was found: pip takes the one that it finds; on Linux that is" \
	  "mostly for CUDA, of gigabytes (TORCH_INDEX=URL names another index)"
	@touch $@

check-python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: Python 3.11 or newer is needed; name one: make demo PYTHON=python3.11"; exit 2; }

clean:
	rm -rf .venv $(DEMO)
