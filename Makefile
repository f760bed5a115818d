# make bench   run every stage that runs here, compare, draw plots (options: ARGS="--seqlens 512,1024")
# make test    run all tests, on a GPU too if there is one         (some: ARGS="-k flash2")
# make quick   those of them that take three minutes together, kernels built
# make lab     open Jupyter: the lessons are in tutorials/
# make notebooks   execute the lessons, and write what they show into them   (some: ARGS="03 04")
# make readme  renew what is made: README's tables, the lists of stages in *.cu, the headers' lines "measured"
# make clean   delete what was built; make distclean: the virtual environment too
#
# The first of them makes a virtual environment in .venv from requirements.txt.

PYTHON ?= python3
ARGS ?=
READY := .venv/ready
# A test that ends its worker ends the run. (Given a new worker, pytest-xdist may wait for ever.)
PYTEST := .venv/bin/python -m pytest -n logical --maxprocesses 4 --dist loadgroup --max-worker-restart=0

.PHONY: bench test quick lab notebooks readme clean distclean

bench: $(READY)
	.venv/bin/python bench.py $(ARGS)

test: $(READY)
	$(PYTEST) $(ARGS)

quick: $(READY)
	$(PYTEST) -m "not slow" $(ARGS)

lab: $(READY)
	PATH="$(CURDIR)/.venv/bin:$$PATH" .venv/bin/jupyter lab $(ARGS)

notebooks: $(READY)
	.venv/bin/python -m tutorials.notebooks $(ARGS)

readme: $(READY)
	.venv/bin/python results/readme.py

$(READY): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo 'Python 3.10 or later is needed: make PYTHON=python3.12 ...'; exit 1; }
	@$(PYTHON) -m venv .venv || \
	  { echo 'Python has no venv module (Debian, Ubuntu: apt install python3-venv)'; exit 1; }
	.venv/bin/pip install --disable-pip-version-check -r requirements.txt
	@touch $@

clean:
	rm -rf build .pytest_cache

distclean: clean
	rm -rf .venv
