//! The wall around the server's C interface. Every `unsafe` of the module is in this folder; everything it shows is
//! safe.
//!
//! The layer is thin: it knows nothing of locks and decides nothing. One file per family of server functions:
//!
//! | file | what |
//! |---|---|
//! | [`load`] | the first call: is this a server we can live in? |
//! | [`api`] | the table of server functions; which must be there |
//! | [`barrier`] | no panic crosses into C |
//! | [`main_thread`] | state that only the server's main thread can reach; callbacks nest |
//! | [`ctx`], [`context_flags`] | the context of a call: flags, client, database, log; a detached context for callbacks without one |
//! | [`string`], [`args`] | the server's strings, the arguments of a command |
//! | [`commands`], [`command_spec`] | registering commands and their descriptions; the way in |
//! | [`reply`] | replies; the client always gets exactly one |
//! | [`key`] | one open key: empty, a lock, another type |
//! | [`data_type`], [`rdb_io`] | our value type: saving, loading, freeing, unlinking |
//! | [`replicate`] | effects to replicas, append-only file, rewritten file |
//! | [`pubsub`] | messages, keyspace events, invalidations |
//! | [`blocking`] | clients that wait inside a command |
//! | [`cluster`] | whose slot a key is in; messages between nodes |
//! | [`events`], [`keyspace_events`] | what happens to the server; keys it evicts |
//! | [`timer_fd`] | the clock since boot, and one timer on it |
//! | [`config`], [`info`], [`acl`] | settings, INFO, permissions |
//!
//! # What the layer calls
//!
//! Each on the main thread (saving: in a fork child), inside [`barrier`]; each may run while another one is on the
//! stack:
//!
//! ```text
//! crate::MODULE_VERSION: i32
//! crate::load(&Ctx, &[&[u8]]) -> Result<(), String>
//! crate::commands::dispatch(usize, &Ctx, Args)
//! crate::blocking::on_reply(&Ctx, NonZeroU64)             the client was unblocked and is there: reply
//! crate::blocking::on_timeout(&Ctx, NonZeroU64)           CLIENT UNBLOCK TIMEOUT: reply, and unblock
//! crate::blocking::on_disconnect(NonZeroU64)              gone, or CLIENT UNBLOCK ERROR, or demoted: unblock
//! crate::blocking::on_free(NonZeroU64)                    the end
//! crate::server_events::on_event(&Ctx, Event)
//! crate::server_events::on_taken(&Ctx, ServerStr)
//! crate::server_events::on_cluster_message(&Ctx, &[u8])
//! crate::data_type::load(&mut RdbReader, i32) -> Option<Handle>
//! crate::data_type::save(&mut RdbWriter, Handle) -> bool                       false: not whole, fail the save
//! crate::data_type::aof_rewrite(&mut AofWriter, ServerStr, Handle) -> bool      the same
//! crate::data_type::mem_usage(Handle) -> usize
//! crate::data_type::digest(&mut Digest, Handle)
//! crate::data_type::unlinked(Handle)
//! crate::data_type::aux_save(&mut RdbWriter)
//! crate::data_type::aux_load(&mut RdbReader, i32) -> bool
//! crate::info::report(&mut InfoWriter)
//! ```
//!
//! The one callback that may come on another thread is the freeing of a value; it never leaves this layer
//! ([`data_type::drain_freed`]).

pub(crate) mod acl;
mod api;
pub(crate) mod args;
pub(crate) mod barrier;
pub(crate) mod blocking;
pub(crate) mod cluster;
pub(crate) mod command_spec;
pub(crate) mod commands;
pub(crate) mod config;
mod context_flags;
pub(crate) mod ctx;
pub(crate) mod data_type;
pub(crate) mod events;
pub(crate) mod info;
pub(crate) mod key;
pub(crate) mod keyspace_events;
mod load;
pub(crate) mod main_thread;
pub(crate) mod pubsub;
pub(crate) mod rdb_io;
pub(crate) mod replicate;
pub(crate) mod reply;
pub(crate) mod string;
pub(crate) mod timer_fd;
