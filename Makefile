# check: what CI checks · test: the tests · fix: format and mend · bench: time per step, beside peers
.PHONY: check test fix bench
check:
	ruff format --check . && ruff check . && mypy
test:
	pytest
fix:
	ruff check --fix . ; ruff format .
bench:
	deepstack bench configs/bench_narrow.yaml
