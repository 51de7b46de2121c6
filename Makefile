# make demo   trains the quickstart on this machine, evaluates, plots, and proves that same model equal on one rank
# make test   the test suite
# Both build .venv first. PYTHON=python3.12 picks another interpreter (3.10 or newer); PIP_FLAGS="..." reaches pip, PYTEST_FLAGS pytest.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP_FLAGS ?=
PYTEST_FLAGS ?= -n 2 --dist worksteal

.PHONY: demo test clean
.DELETE_ON_ERROR:

$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "ringflash needs Python >= 3.10, this is %s" % sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q $(PIP_FLAGS) -c constraints.txt -e '.[test]'
	@touch $@

demo: $(VENV)/installed
	$(PY) launch/demo.py

test: $(VENV)/installed
	$(PY) -m pytest $(PYTEST_FLAGS)

clean:
	rm -rf $(VENV) build dist *.egg-info
