# make demo and make test set up .venv by themselves; a second run skips that.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: help setup demo test test-faults chromium test-browser bench lint check clean
BROWSER ?= $(firstword $(shell command -v chromium chromium-browser google-chrome))

help:
	@echo "make setup   .venv with the command odcluster in it (a few minutes, once)"
	@echo "make demo    train on handwritten digits, about a minute; writes runs/demo with a picture of the clusters"
	@echo "make test    lint, types, import layers and tests, under ten minutes"
	@echo "make test-faults  kills, full disks, signals, damage: all of tests/faults, under half an hour"
	@echo "make test-browser  the explorer in a real Chromium; installs Debian's if there is none and it may"
	@echo "make check   lint, types and import layers only"
	@echo "make bench   all benchmarks, one after the other, into docs/performance.md; leave the machine alone meanwhile"

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@echo "Setting up .venv: downloading and installing about 1 GB of packages, a few minutes, once."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt ruff mypy pytest pytest-xdist import-linter httpx2 playwright -e '.[explore,parquet,onnx]'
	@touch $(INSTALLED)

demo: setup
	@echo "Training on the handwritten digits of scikit-learn: about a minute on two cores."
	$(BIN)/odcluster demo

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check
	@echo "Tests: under ten minutes on two cores."
	$(BIN)/pytest -n 2

# The soak test takes two hours and is started by hand: .venv/bin/python tests/faults/soak.py
test-faults: setup
	@rm -f .faults.jsonl
	ODCLUSTER_FAULTS=$(CURDIR)/.faults.jsonl $(BIN)/pytest -n 2 -m "not slow" tests/faults
	@$(BIN)/python tests/faults/figures.py .faults.jsonl

chromium:
	@test -n "$(BROWSER)" || { echo "Installing Debian's Chromium."; \
	  { apt-get install -y -q chromium || { apt-get update -q && apt-get install -y -q chromium; }; } > /dev/null || \
	  { echo "There is no Chromium and it cannot be installed here: install one, or name it with BROWSER=..."; exit 1; }; }

test-browser: setup chromium
	ODCLUSTER_BROWSER="$$(command -v $(or $(BROWSER),chromium))" $(BIN)/pytest tests/browser

# Options go in BENCH: make bench BENCH="--images train_webp.npz --voc VOC2007"
bench: setup
	$(BIN)/python benchmarks/all.py $(BENCH)

clean:
	rm -rf .venv build *.egg-info
