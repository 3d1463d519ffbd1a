.PHONY: lint test parity docs ci demo
lint:
	ruff check . && ruff format --check .
test:
	pytest
parity:
	pytest -m parity tests/parity
docs:
	sphinx-build -E -W --keep-going -c docs . results/local/site
ci:
	bash .ci/run
demo:
	python launch/quickstart.py
