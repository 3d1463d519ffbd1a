.PHONY: lint test parity ci demo
lint:
	ruff check . && ruff format --check . && mypy
test:
	pytest
parity:
	pytest -m parity tests/parity
ci:
	bash .ci/run
demo:
	python launch/quickstart.py
