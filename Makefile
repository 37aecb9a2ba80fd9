# `make quickstart` trains a small model, `make test` checks everything; both set themselves up on a machine with only Python and make.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
RUN := runs/quickstart-$(shell date +%Y%m%d-%H%M%S)

# Tests start hundreds of processes: what they import is compiled once, not by each of them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup quickstart test test-slow test-clusters test-soak lint types contracts tests bench planner-accuracy planner-fit docs outputs page site test-browser clean

setup: $(STAMP)

# torch goes first and by its exact version, so that the CPU build is taken where one is offered; what follows finds it there.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

quickstart: setup
	$(BIN)/phalanx train examples/quickstart.toml --run-dir $(RUN)
	@echo && echo "A sample of what it has learned:" && echo
	@$(BIN)/phalanx generate $(RUN) "def test_" --tokens 240
	@echo && echo "Look at $(RUN)/loss.png and $(RUN)/events.jsonl, change examples/quickstart.toml, and read README.md."

test: lint types contracts tests

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

contracts: setup
	$(BIN)/lint-imports

# Files of tests are dealt to one process per core, in the order of tests/conftest.py.
WORKERS ?= auto

tests: setup
	$(BIN)/python -m pytest -m "not slow and not clusters and not soak" --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

# Proofs that take minutes: run before an issue is resolved.
test-slow: setup
	$(BIN)/python -m pytest -m slow

# Hosts as network namespaces, with ssh, Slurm, Ray and Kubernetes. Needs root and Debian's packages, which it installs where it may; without, tests skip.
test-clusters: setup
	-command -v sshd slurmctld munged nft >/dev/null || { [ $$(id -u) = 0 ] && apt-get install --yes --quiet openssh-server slurm-wlm munge nftables; }
	-$(BIN)/python -m pip install --quiet --constraint constraints.txt 'ray[default]>=2.40' 'kubernetes-validate>=1.34' jax
	$(BIN)/python -m pytest -m clusters tests/clusters

# 2,000 steps on three such hosts, with a random fault every 20 seconds.
test-soak: setup
	$(BIN)/python -m pytest -m soak tests/clusters

# Steps per second and start-up beside hand-written loops; needs a quiet machine.
bench: setup
	$(BIN)/python benchmarks/ddp.py
	$(BIN)/python benchmarks/parallel.py

# How far predicted step times are from published ones: whole sources left out, or `CSV=FILE` of the same columns; `FIT=FILE` fits to
# another file than the repository's, `BY=publication` leaves out all editions and tables of a document together.
planner-accuracy: setup
	@$(BIN)/python benchmarks/planner_accuracy.py $(if $(CSV),--csv $(CSV)) $(if $(FIT),--fit $(FIT)) $(if $(BY),--by $(BY))

# The constants that plans use, fitted anew to the published steps.
planner-fit: setup
	$(BIN)/python benchmarks/planner_fit.py

# Pages that are made from the code: the reference of the run file, the messages, published runs; the picture of the README.
docs: setup
	$(BIN)/python docs/make_run_file.py
	$(BIN)/python docs/make_protocol.py
	$(BIN)/python docs/make_history.py
	$(BIN)/python docs/make_cli.py
	$(BIN)/python docs/make_pictures.py
	$(BIN)/python docs/make_cuts_picture.py

# The outputs that the README and the documentation show, where they are no longer what the commands print; `PAGE=FILE`: of one page.
outputs: setup
	$(BIN)/python docs/make_outputs.py $(PAGE)

# The page of `phalanx watch`, from frontend/ into phalanx/watch/static, which is committed: a clone without npm works. Needs npm.
page:
	cd frontend && npm ci --no-audit --no-fund && npm run check && npm run build

# The page in a real browser: needs npm and Debian's package chromium.
test-browser: setup
	cd frontend && npm ci --no-audit --no-fund
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[browser]'
	$(BIN)/python -m pytest -m slow tests/browser

# The documentation as a site with search, in site/. A warning, such as a link that leads nowhere, is an error.
site: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[site]'
	$(BIN)/mkdocs build --strict

clean:
	rm -rf .venv build site *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
