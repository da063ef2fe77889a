//! The client crate against real servers: what it promises, and what is left when connections, servers and callers fail.
//!
//! | file | promise |
//! |---|---|
//! | `acquire.rs` | locks, modes, waiting |
//! | `several.rs` | several locks at once, conversion |
//! | `hold.rs` | keep-alive, renewal, conversion, and every way to lose a hold |
//! | `reentrant.rs` | several handles of one owner on one hold |
//! | `blocking.rs` | the same client on plain threads |
//! | `replicas.rs` | grants that count only when replicas have them |
//! | `sentinel.rs` | the primary found by Sentinel, and followed |
//! | `cluster.rs` | keys on the nodes of a cluster, slots that move, primaries that fail |
//! | `in_memory.rs` | the server in memory answers as the real one |
//! | `in_place.rs` | operations that begin with their caller, whatever becomes of it |
//! | `cancel.rs` | what is dropped leaves nothing behind |
//! | `faults.rs` | connections killed, silent, refused; servers restarted |
//! | `process.rs` | a process that is stopped; Unix sockets |
//! | `observe.rs` | spans, events and counts |
//! | `tls.rs` | TLS: whom it trusts |
//! | `apart.rs` | a process of its own for a test |
//! | `load.rs` | tasks at work, and the checker that judges them |
//! | `scene.rs` | a server, a client, a bound on the time of each test |

mod acquire;
mod apart;
mod blocking;
mod cancel;
mod cluster;
mod faults;
mod hold;
mod in_memory;
mod in_place;
mod load;
mod observe;
mod process;
mod reentrant;
mod replicas;
mod scene;
mod sentinel;
mod several;
mod tls;
