# `make train` runs the main job, `make test` passes the tests; each sets up what it needs first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: train reproduce test lint clean

train: .venv/run
	$(BIN)/python train.py $(ARGS)

# The figure at the top of README.md; goes on where it stopped.
reproduce: .venv/run
	$(BIN)/python -m experiments convergence --out=runs/reproduce \
		--cells=recall-adam-4,recall-adam-64,recall-adam-256
	cp runs/reproduce/figures/readme.png runs/reproduce/figures/readme.svg results/convergence/

test: .venv/dev
	$(BIN)/python -m pytest -n auto --maxprocesses=4 --dist loadfile $(ARGS)

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check

clean:
	rm -rf .venv

.venv/run: requirements.txt | .venv/made
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

.venv/dev: requirements.txt requirements-dev.txt | .venv/made
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		-r requirements.txt -r requirements-dev.txt
	touch $@

.venv/made:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	touch $@
