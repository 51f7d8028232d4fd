# check: linters and types · fast: tests of a minute · test: all default tests
# fix: format, and make the index of `deepstack list` again
# bench: time per step, beside peers
.PHONY: check fast test fix bench
check:
	ruff format --check . && ruff check . && mypy
fast:
	pytest -m fast
test:
	pytest && pytest tests/lab
fix:
	ruff check --fix . ; ruff format . ; python -m deepstack.cli.make_index
bench:
	python -m benchmarks configs/bench_narrow.yaml
# figures: draw the figures of experiments/figures.yaml again
.PHONY: figures
figures:
	python experiments/redraw.py
