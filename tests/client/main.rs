//! The client crate against real servers: what it promises, and what is left when connections, servers and callers fail.
//!
//! | file | promise |
//! |---|---|
//! | `acquire.rs` | locks, modes, waiting, several locks at once |
//! | `hold.rs` | keep-alive, renewal, conversion, and every way to lose a hold |
//! | `cancel.rs` | what is dropped leaves nothing behind |
//! | `faults.rs` | connections killed, silent, refused; servers restarted |
//! | `scene.rs` | a server, a client, a bound on the time of each test |

mod acquire;
mod cancel;
mod faults;
mod hold;
mod scene;
