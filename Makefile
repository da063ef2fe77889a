# FLOCK. `make` prints what there is to make; each target sets up what it needs.
# Environment: VALKEY_SERVER, VALKEY_SERVER_OLD, VALKEY_CLI, REDIS_SERVER, POSTGRES_BIN, NFT, LIBCLANG_PATH replace what set-up would fetch;
#              PORT, SERVE and DEMO steer `make run`. The contract tests see FLOCK_MODULE and FLOCK_TEST_TIER: scripts/test.sh.

.DEFAULT_GOAL := help
.PHONY: help setup libclang build run check msrv doc test test-long soak sim mutants bench bench-check bench-peers planted-bugs fuzz asan deny clean

with_tools := . target/tools/env.sh &&

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' Makefile

setup: ## fetch the pinned servers and libclang into target/tools; installs nothing
	@scripts/setup.sh

libclang:
	@scripts/setup.sh libclang

# Plain `-p`: with `--all-targets` a test feature of the bindings could replace the server's allocator in the library.
build: libclang ## build the module: target/release/libflock.so
	$(with_tools) cargo build --release -p flock-module

run: ## start a Valkey with the module; with no terminal, or DEMO=1, play a short session
	@scripts/run.sh

check: libclang ## formatting, lints, docs, and the tests that need no server
	cargo fmt --all --check
	$(with_tools) cargo clippy --workspace --all-targets -- -D warnings
	$(MAKE) --no-print-directory doc
	$(with_tools) cargo test

msrv: libclang ## check with the oldest Rust that Cargo.toml promises; needs rustup
	$(with_tools) scripts/msrv.sh

doc: libclang ## build the documentation, internals included; a warning is an error
	$(with_tools) RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --document-private-items

test: ## everything that must pass: set-up, check, build, contract tests against real servers
	@scripts/test.sh quick

test-long: ## the contract tests again, in their long tier
	@scripts/test.sh long

soak: ## the long tier with MINUTES times as many rounds (default 60)
	@MINUTES="$${MINUTES:-60}" scripts/test.sh soak

sim: ## simulated worlds, SEEDS of them (100) from the seed SEED (1): the client and the rules under faults, in one thread
	@scripts/sim.sh "$(or $(SEEDS),100)" "$(or $(SEED),1)"

mutants: ## change the core in one place at a time and see its tests fail; FILES of it, or all: hours
	@scripts/mutants.sh $(FILES)

bench: setup build ## measure the core, and the client's allocations: time and allocations per operation
	$(with_tools) cargo bench -p flock-benches --bench core
	$(with_tools) FLOCK_MODULE="$$(cd "$${CARGO_TARGET_DIR:-target}" && pwd)/release/libflock.so" \
	  cargo test --release -p flock-benches --test '*allocations' -- --nocapture --test-threads 1

bench-check: setup build ## every performance goal with its measured value; fails if one is missed
	$(with_tools) FLOCK_MODULE="$$(cd "$${CARGO_TARGET_DIR:-target}" && pwd)/release/libflock.so" \
	  cargo run --release -p flock-benches --bin bench-check

bench-peers: setup build ## FLOCK beside other lock systems; writes benches/data and benches/plots
	@scripts/bench-peers.sh

planted-bugs: ## plant each bug of core/tests/planted_bugs.md and see the named tests fail
	@scripts/planted-bugs.sh

fuzz: ## fuzz the core, SECONDS for each target (60), or one TARGET; needs rustup
	@scripts/fuzz.sh "$(or $(SECONDS),60)" $(TARGET)

asan: ## the contract tests against the module under AddressSanitizer, on both servers; needs rustup
	@scripts/asan.sh

deny: ## licences, advisories and sources of the dependencies; needs cargo-deny
	@if cargo deny --version >/dev/null 2>&1; then cargo deny check; \
	else echo "deny: skipped, cargo-deny is not installed (cargo install cargo-deny)"; fi

clean: ## remove everything built and fetched
	rm -rf target
