# icmllab: every command of the project. `make` alone lists them.
PY := .venv/bin/python
PYTEST := $(PY) -m pytest
BOOK := $(PY) -c "import sys; from jupyter_book.cli.main import main; sys.argv[0] = 'jupyter-book'; main()"
HOST ?= 127.0.0.1
PORT ?= 8000
SEEDS ?= 20
THREADS ?= 1 2
PRESET ?= quick
WORKERS ?= 2
SEED ?= 0
SANDBOX ?= on
export PYTHONHASHSEED := 0

.DEFAULT_GOAL := help
.PHONY: help setup lab test check run book serve stress results bench bench-kernels sync lock clean \
	release collect-zip grade grades slides

help: ## list the commands
	@echo "icmllab: usage  make <command> [CHAPTER=part/slug] [PRESET=quick|full] [SEEDS=20]"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | awk -F'|' '{printf "  %-15s %s\n", $$1, $$2}'

setup: ## make .venv from the lock (the other commands do it by themselves)
	@bin/venv

lab: setup ## open JupyterLab on the book's start page ([LAB_ARGS=...])
	@$(PY) -m icmllab trust
	@echo "icmllab: opening JupyterLab on the start page; stop it with Ctrl-C"
	@$(PY) -m jupyter lab --ServerApp.root_dir="$(CURDIR)" --LabApp.default_url=/lab/tree/book/index.md --log-level=WARN $(LAB_ARGS)

ifdef CHAPTER
test: setup
	@$(PY) -m icmllab chapter-files "$(CHAPTER)" > /dev/null
	@echo "icmllab: testing $(CHAPTER)"
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PYTEST) -q $$($(PY) -m icmllab chapter-files "$(CHAPTER)") --nbval --nbval-sanitize-with book/nbval_sanitize.cfg
else
test: check ## prove the whole repo; CHAPTER=part/slug proves one chapter and its module
	@echo "icmllab: unit, kernel and notebook tests"
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PYTEST) -q -n $(WORKERS) --dist loadscope tests book --ignore=tests/e2e \
		--nbval --nbval-sanitize-with book/nbval_sanitize.cfg --durations=10
	@$(MAKE) --no-print-directory book
	@echo "icmllab: end-to-end tests in a real browser"
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PYTEST) -q tests/e2e --durations=5
	@echo "icmllab: all proven"
endif

check: setup ## lint, formatting and notebooks in step with their sources
	@echo "icmllab: lint"
	@$(PY) -m ruff check --quiet . && $(PY) -m ruff format --check --quiet .
	@$(PY) -m icmllab sync --check && $(PY) -m icmllab.course sync --check

run: setup ## execute a chapter and print its claims (CHAPTER=part/slug [PRESET=full] [SEED=0])
	@$(PY) -m icmllab run "$(CHAPTER)" --preset "$(PRESET)" --seed "$(SEED)"

book: setup ## build the book as HTML in _build/html, warnings being errors
	@echo "icmllab: building the book"
	@$(BOOK) build . -q -n -W --keep-going > _build.log 2>&1 \
		|| { grep -E 'WARNING|ERROR|Error' _build.log || cat _build.log; echo "icmllab: the book was not built"; exit 1; }
	@rm -f _build.log; echo "icmllab: the book is in _build/html"

serve: book ## build the book and serve it (PORT=8000)
	@echo "icmllab: http://$(HOST):$(PORT)/ (stop with Ctrl-C)"
	@$(PY) -m http.server "$(PORT)" --bind "$(HOST)" --directory _build/html

stress: setup ## a chapter's claims over seeds and thread counts (CHAPTER=part/slug [SEEDS=20])
	@$(PY) -m icmllab stress "$(CHAPTER)" --seeds "$(SEEDS)" --threads $(THREADS) $(if $(filter command line,$(origin WORKERS)),--workers $(WORKERS))

results: setup ## compute a chapter's shipped results anew (CHAPTER=part/slug)
	@$(PY) -m icmllab results "$(CHAPTER)"

bench: setup ## measure the package beside what people would use instead ([PART=representations])
	@$(PY) bench/run.py $(PART)

bench-kernels: setup ## the kernels' roofline table on a GPU, else what they compile to
	@$(PY) -m icmllab.kernels.bench

sync: setup ## re-run every chapter whose notebook is out of date; write the labs' notebooks
	@$(PY) -m icmllab sync && $(PY) -m icmllab.course sync

release: setup ## write the students' version of a lab (LAB=part)
	@$(PY) -m icmllab.course release "$(LAB)"

collect-zip: setup ## take submissions out of an LMS's zip files (LAB=part [ZIP=path])
	@$(PY) -m icmllab.course collect-zip "$(LAB)" $(if $(ZIP),--zip "$(ZIP)")

grade: setup ## grade the submissions of a lab, in a sandbox (LAB=part [SANDBOX=off] [WORKERS=2])
	@$(PY) -m icmllab.course grade "$(LAB)" --sandbox "$(SANDBOX)" $(if $(filter command line,$(origin WORKERS)),--workers $(WORKERS))

grades: setup ## write every mark as labs/grades.csv, for an LMS
	@$(PY) -m icmllab.course grades

slides: setup ## slides of a chapter in _build/slides (CHAPTER=part/slug)
	@$(PY) -m icmllab slides "$(CHAPTER)"

lock: setup ## write requirements.txt anew from pyproject.toml
	@echo "icmllab: resolving pyproject.toml"
	@bin/lock

clean: ## remove what was built (the environment stays)
	@rm -rf _build _build.log .icmllab .pytest_cache .ruff_cache .hypothesis build ./*.egg-info
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
	@echo "icmllab: clean"
