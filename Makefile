# `make demo` and `make test` need Python 3.11 and a package index; `.venv` is made once.
PYTHON ?= python3.11
BIN := .venv/bin
SOURCES := benchmarks cluster drafter kernels protos verifier tests outrider
PACKAGES := cluster drafter kernels protos verifier

.PHONY: demo test lint serve protos clean

.venv: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[demo,test]'
	touch $@

demo: .venv
	$(BIN)/python -m outrider.cluster.cli demo $(ARGS)

serve: .venv
	$(BIN)/python -m outrider.cluster.cli serve $(ARGS)

test: .venv
	$(BIN)/python -m pytest $(ARGS)

# mypy follows no import hooks, so it gets a tree in which the folders stand under `outrider`.
lint: .venv
	$(BIN)/python -m ruff check $(SOURCES)
	$(BIN)/python -m ruff format --check $(SOURCES)
	mkdir -p build/typing/outrider
	ln -sfn ../../../outrider/__init__.py build/typing/outrider/__init__.py
	for name in $(PACKAGES); do ln -sfn ../../../$$name build/typing/outrider/$$name; done
	$(BIN)/python -m mypy build/typing/outrider tests
	.ci/protos --check

protos: .venv
	.ci/protos

clean:
	rm -rf build *.egg-info .mypy_cache .pytest_cache .ruff_cache
