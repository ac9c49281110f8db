# make demo   set up, then run the main job at laptop size: no GPU, no network needed for the data
# make test   set up, then run all tests
# make figures   draw the published tables and figures, the README's tables and the notebook
PYTHON ?= python3
BIN := .venv/bin
DEMO := outputs/demo

.PHONY: demo test figures lint check-python clean

demo: .venv/ready
	$(BIN)/python -m harness sweep experiments/demo.yaml --tiny --output_dir $(DEMO)

test: .venv/ready-dev lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

# Without the times of cells, and with the language alone: the same records give the same notebook.
figures: .venv/ready
	for sweep in outputs/published/sweeps/*/; do \
	  $(BIN)/python -m harness table "$$sweep" --write >/dev/null && \
	  $(BIN)/python -m harness figures "$$sweep" || exit 1; \
	done
	$(BIN)/python -m harness.read.tables.files README.md
	$(BIN)/python -m jupyter nbconvert --to notebook --execute --inplace plot_values.ipynb \
	  --ExecutePreprocessor.record_timing=False

lint: .venv/ready-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The stamps are newer than the requirements once everything is installed: a second call skips it.
.venv/ready: requirements.txt | check-python
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

.venv/ready-dev: requirements-dev.txt .venv/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

check-python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: Python 3.11 or newer is needed; name one: make demo PYTHON=python3.11"; exit 2; }

clean:
	rm -rf .venv $(DEMO)
