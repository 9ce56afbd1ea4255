# make demo: train, fine-tune and evaluate a ViT on this machine      make test: prove the checkout
# make lint: format, style and types                                 make soak: hundreds of kills
PYTHON ?= python3
VENV ?= .venv
BIN := $(abspath $(VENV))/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
# pip shows nothing of a build that succeeds, and this one does without its C extension.
SAY_IF_SLOW = $(BIN)/python -c 'import vitscale.data._pixels' 2>/dev/null || echo "JPEGs will be \
decoded by Pillow, several times slower: a C compiler or the headers of libjpeg-turbo are missing"
# The launcher and the ranks must find this environment's commands first.
export PATH := $(BIN):$(PATH)

PRETRAINED := runs/quickstart-zero2
FINETUNED := runs/quickstart_finetune-zero2

.PHONY: demo test lint format soak clean

$(VENV)/.base: constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch (several GB, some minutes)"
	$(PIP) pip setuptools wheel
	$(PIP) torch torchvision
	@# DeepSpeed looks at the installed torch while it is built, and compiles nothing here.
	DS_BUILD_OPS=0 $(PIP) --no-build-isolation deepspeed
	@touch $@

$(VENV)/.demo: $(VENV)/.base pyproject.toml setup.py vitscale/data/_pixels.c
	$(PIP) --editable '.[demo]'
	@$(SAY_IF_SLOW)
	@touch $@

$(VENV)/.dev: $(VENV)/.base pyproject.toml setup.py vitscale/data/_pixels.c
	$(PIP) --editable '.[demo,dev]'
	@$(SAY_IF_SLOW)
	@touch $@

demo: $(VENV)/.demo
	deepspeed launchers/pretrain.py --ds-config configs/zero2.json
	deepspeed launchers/finetune.py --ds-config configs/zero2.json
	vitscale evaluate --checkpoint $(PRETRAINED) --data data/digits/test --out $(PRETRAINED)/test.json
	vitscale evaluate --checkpoint $(FINETUNED) --data data/digits/test --out $(FINETUNED)/test.json
	@echo
	@python -c 'import json, sys; [print("test top-1 %-12s %.2f %%" % (name, 100 * json.load(open(path))["top1"])) \
	  for name, path in zip(("pre-trained", "fine-tuned"), sys.argv[1:])]' $(PRETRAINED)/test.json $(FINETUNED)/test.json
	@echo "curves: $(PRETRAINED)/curves $(FINETUNED)/curves      all of it: tensorboard --logdir runs"

lint: $(VENV)/.dev
	ruff format --check .
	ruff check .
	mypy

format: $(VENV)/.dev
	ruff format .
	ruff check --fix .

test: lint
	python -m pytest

soak: $(VENV)/.dev
	python -m pytest -m soak

clean:
	rm -rf data runs build .pytest_cache .mypy_cache .ruff_cache .hypothesis
