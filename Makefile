# What people and CI type. `make up` needs Python 3.11 or later and a package index, nothing else.

VENV := .venv
BIN  := $(VENV)/bin
AUDIT := .venv-audit
ARGS ?=

# Commands named python3.x may exist and not run, and some lack the modules to make an environment: try each.
define FIND_PYTHON
for python in python3.13 python3.12 python3.11 python3; do \
	if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then break; fi; \
	python=; \
done; \
if [ -z "$$python" ]; then \
	echo "error: no Python 3.11 or later with venv was found" >&2; \
	echo "next:  install one (on Debian and Ubuntu: apt install python3-venv), then make again" >&2; \
	exit 1; \
fi
endef

# `quietly "what it does" command...`: one line with a clock on a terminal, one plain line elsewhere. What the command says
# is shown only if it fails.
define QUIETLY
quietly() { \
	what=$$1; shift; said=$$(mktemp); began=$$(date +%s); \
	"$$@" >"$$said" 2>&1 & job=$$!; \
	trap 'kill $$job 2>/dev/null; rm -f "$$said"; exit 130' INT TERM; \
	if [ -t 2 ]; then \
		while kill -0 $$job 2>/dev/null; do \
			printf '\r  %s  %d s ' "$$what" $$(($$(date +%s) - began)) >&2; sleep 0.2; \
		done; \
		printf '\r%*s\r' $$(($${#what} + 12)) '' >&2; \
	else echo "penstock: $$what" >&2; fi; \
	if ! wait $$job; then \
		cat "$$said" >&2; rm -f "$$said"; \
		echo "error: this failed: $$what" >&2; exit 1; \
	fi; \
	rm -f "$$said"; trap - INT TERM; \
}
endef

# Every package is checked by hash, and nothing is compiled here.
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet --require-hashes --only-binary :all:

# What kubectl is given; the kustomizations and KEDA's object have no schema among Kubernetes' own.
MANIFESTS = $(filter-out %/kustomization.yaml,$(wildcard docker/kubernetes/base/*.yaml docker/kubernetes/overlays/*/*.yaml))

.PHONY: help up test test-fast check lock clean
.DELETE_ON_ERROR:

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' Makefile

up: $(VENV)/.runtime ## install once, then run everything here; ARGS="--port 9000" passes flags
	@exec $(BIN)/penstock up $(ARGS)

test: $(VENV)/.dev ## the whole test suite, six files at a time, for many tests wait; ARGS="-k relay" passes flags
	@exec $(BIN)/python -m pytest --numprocesses 6 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 $(ARGS)

test-fast: $(VENV)/.dev ## the tests that take no seconds, about a minute; ARGS="tests/api" passes flags
	@exec $(BIN)/python -m pytest --quiet --numprocesses 3 --dist loadfile -m "not slow" $(ARGS)

check: $(VENV)/.dev ## style, types, import rules, and all of docker/
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/hadolint docker/Dockerfile docker/Dockerfile.others docker/Dockerfile.tensorrt-llm
	@$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec docker/compose/compose.yaml examples/compose.yaml
	@$(BIN)/kubernetes-validate --strict --quiet $(MANIFESTS)
	@$(BIN)/python -m pytest --quiet tests/docker

lock: $(VENV)/.dev ## resolve all dependencies anew into the three lock files
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet uv
	@printf 'hatchling\neditables\n' | $(COMPILE) --extra llamacpp --extra embedded --extra kubernetes --extra oidc \
		pyproject.toml - --output-file requirements.lock
	@$(COMPILE) --group dev --constraint requirements.lock --output-file requirements-dev.lock
	@$(COMPILE) --group audit --output-file requirements-audit.lock

clean: ## remove the environment and all caches; .penstock (queue, results, weights) stays
	rm -rf $(VENV) $(AUDIT) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

COMPILE = $(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
	--only-binary :all: --no-emit-index-url --no-header

# Only the locks decide what is installed; of pyproject.toml, an editable install needs the commands and their packages.
$(VENV)/.packages: requirements.lock
	@$(FIND_PYTHON); $(QUIETLY); \
	quietly "once: making an environment in $(VENV) with $$($$python --version)" $$python -m venv --clear $(VENV); \
	quietly "once: installing $$(grep -c == requirements.lock) packages, 340 MB, about a minute" $(INSTALL) --requirement requirements.lock
	@touch $@

$(VENV)/.runtime: $(VENV)/.packages pyproject.toml
	@$(QUIETLY); quietly "once: installing penstock" $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps \
		--no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.packages requirements-dev.lock | $(VENV)/.runtime
	@$(QUIETLY); quietly "once: installing the tools for tests and checks" $(INSTALL) --requirement requirements-dev.lock
	@touch $@

# The tools that look for known vulnerabilities, secrets and faults see the project's packages from outside.
$(AUDIT)/.tools: requirements-audit.lock
	@$(FIND_PYTHON); \
	echo "penstock: making an environment for the audit in $(AUDIT) with $$($$python --version), once"; \
	$$python -m venv --clear $(AUDIT)
	@$(AUDIT)/bin/python -m pip install --disable-pip-version-check --quiet --require-hashes --only-binary :all: \
		--requirement requirements-audit.lock
	@touch $@

.PHONY: audit sbom fuzz
audit: $(VENV)/.dev $(AUDIT)/.tools ## known vulnerabilities of the locked packages; ARGS="--vulnerability-service osv"
	@for lock in requirements*.lock; do echo "$$lock:"; \
		$(AUDIT)/bin/pip-audit --requirement $$lock --require-hashes --disable-pip $(ARGS) || exit 1; done

sbom: $(AUDIT)/.tools ## what the packages are made of, as CycloneDX in build/sbom
	@mkdir -p build/sbom; for lock in requirements*.lock; do \
		$(AUDIT)/bin/cyclonedx-py requirements --output-reproducible --pyproject pyproject.toml \
			--output-file build/sbom/$${lock%.lock}.cdx.json $$lock || exit 1; done

fuzz: $(AUDIT)/.tools ## send requests made from /openapi.json to the server that runs here; ARGS="--seed 7"
	@exec $(AUDIT)/bin/schemathesis run http://127.0.0.1:8000/openapi.json --continue-on-failure $(ARGS)

.PHONY: bench
bench: $(VENV)/.dev ## measure gateways, jobs and recovery in turn; write plots and the README's table anew
	@$(BIN)/penstock bench gateway --all
	@for program in jobs recovery; do $(BIN)/penstock bench $$program || exit 1; done
	@exec $(BIN)/python -m bench.document

.PHONY: planted
planted: $(VENV)/.dev ## plant known bugs in copies of the tree: the suite must catch each; ARGS="--only fence --jobs 2"
	@exec $(BIN)/python -m bench.planted $(ARGS)

.PHONY: mutants
mutants: $(VENV)/.dev $(AUDIT)/.tools ## change the product by chance, in copies: the suite must notice; ARGS="--seed 7"
	@exec $(BIN)/python -m bench.mutants $(ARGS)

.PHONY: properties
properties: $(VENV)/.dev ## the property tests on examples drawn by chance; ARGS="--hypothesis-seed 7" repeats a round
	@seed=$$(od -An -N4 -tu4 /dev/urandom | tr -d ' '); echo "--hypothesis-seed $$seed"; \
		PENSTOCK_TEST_PROPERTIES=random exec $(BIN)/python -m pytest -q -m hypothesis --hypothesis-seed $$seed $(ARGS)

.PHONY: chaos chaos-long
chaos: $(VENV)/.dev ## kill, stop, cut, fill and flood everything, and judge what clients saw; ARGS="--rows F01,F10"
	@exec $(BIN)/python -m bench.chaos $(ARGS)

chaos-long: $(VENV)/.dev ## the same with five times the trials
	@exec $(BIN)/python -m bench.chaos --long $(ARGS)

.PHONY: soak
soak: $(VENV)/.dev ## half an hour of load and kills: keys and memory must not grow; ARGS="--minutes 3"
	@exec $(BIN)/python -m bench.chaos.soak $(ARGS)

.PHONY: images stack test-stack
images: ## build every image with docker, podman or buildah, and print the sizes; ARGS="--no-cache" passes flags
	@exec sh docker/build-images $(ARGS)

stack: ## start the compose deployment, of these images, and wait until every role is ready
	@exec sh docker/stack $(ARGS)

test-stack: $(VENV)/.dev ## try a copy of it: kill and stop containers under streams, restart all; ARGS="--leave"
	@exec $(BIN)/python -m bench.stack $(ARGS)

.PHONY: test-rabbitmq
test-rabbitmq: $(VENV)/.dev ## events through a RabbitMQ of the tests' own (Debian: apt-get install rabbitmq-server)
	@PENSTOCK_TEST_RABBITMQ=1 exec $(BIN)/python -m pytest tests/system/test_rabbitmq.py $(ARGS)

.PHONY: test-kubernetes
test-kubernetes: $(VENV)/.dev ## the manifests before a real API server (kube-apiserver, etcd and kubectl on the PATH)
	@PENSTOCK_TEST_KUBERNETES=1 exec $(BIN)/python -m pytest tests/docker/test_api_server.py $(ARGS)

.PHONY: test-hosts
test-hosts: $(VENV)/.dev ## hosts that vanish and networks that part, with podman and the images; ARGS="--rows H02"
	@exec $(BIN)/python -m bench.hosts $(ARGS)

.PHONY: test-browser
test-browser: $(VENV)/.dev ## a real browser: a hostile page, and the console (Debian: apt-get install chromium)
	@PENSTOCK_TEST_BROWSER=1 exec $(BIN)/python -m pytest tests/system/test_browser.py tests/system/test_console.py $(ARGS)
