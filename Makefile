# Pinned, so that everyone and CI see the same findings.
GOLANGCI_LINT_VERSION := v2.15.0

GO       ?= go
FUZZTIME ?= 1m
SOAKTIME ?= 5m
# Tests wait for brokers most of the time, so more of them run at once than there may be cores.
# More flags for go test, for example: make test TESTFLAGS='-run TestPublish -v'
TESTFLAGS ?=
# What make bench measures and where it writes: see bench/main.go. BENCHFLAGS=-quick takes two minutes and writes nothing.
BENCHFLAGS ?= -out docs/performance

GOLANGCI_LINT := $(GO) run github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI_LINT_VERSION)
WITHBROKER    := $(GO) run ./internal/cmd/withbroker --

# The race detector needs cgo and a C compiler.
RACE := $(shell test "$$($(GO) env CGO_ENABLED)" = 1 && command -v "$$($(GO) env CC)" >/dev/null && echo -race)

.DEFAULT_GOAL := help

.PHONY: help
help: ## print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: ## watch messages with all kinds of delays arrive, on a broker that it finds or installs
	@scripts/ensure-broker
	@$(WITHBROKER) $(GO) run ./examples/quickstart

.PHONY: test
test: ## run all tests on a real broker that it finds or installs
	@scripts/ensure-broker
	@$(if $(RACE),,echo 'make test: without the race detector, since no C compiler was found' >&2)
	@$(WITHBROKER) $(GO) test $(RACE) -parallel 6 -timeout 30m $(TESTFLAGS) ./... ./bench/...

.PHONY: lint
lint: ## vet, lint and check the format
	$(GO) vet ./... ./bench/...
	$(GOLANGCI_LINT) run ./... ./bench/...
	$(GOLANGCI_LINT) fmt --diff

.PHONY: bench
bench: ## measure beside other ladders and bare amqp091-go for 20 minutes; writes docs/performance
	@scripts/ensure-broker
	@$(WITHBROKER) $(GO) run ./bench $(BENCHFLAGS)

.PHONY: fuzz
fuzz: ## fuzz each target for FUZZTIME (default 1m)
	@set -e; for target in $$($(GO) test -list '^Fuzz' . | grep '^Fuzz'); do \
		echo "$$target"; \
		$(GO) test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 100x .; \
	done

.PHONY: soak
soak: ## publish and consume through cut connections for SOAKTIME (default 5m), and look for what grows
	@scripts/ensure-broker
	@$(WITHBROKER) $(GO) test -run '^TestSoak$$' -v -timeout 1h -soak $(SOAKTIME) .

.PHONY: golden
golden: ## write the golden files anew
	$(GO) test . -run TestGolden -update

.PHONY: fmt
fmt: ## format the code
	$(GOLANGCI_LINT) fmt
