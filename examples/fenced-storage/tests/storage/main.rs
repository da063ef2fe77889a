//! The storages refuse who comes too late: against real servers, with holders that are really stopped.
//!
//! | file | what |
//! |---|---|
//! | `postgres.rs`, `sqlite.rs`, `valkey.rs` | one storage each |
//! | `scene.rs` | a Valkey with the module; who holds the lock, who lost it; programs that are stopped while they hold it |
//! | `postgres_server.rs` | a PostgreSQL of the test's own |
//! | `readme.rs` | the README shows the code that is tested here |

mod postgres;
mod postgres_server;
mod readme;
mod scene;
mod sqlite;
mod valkey;
