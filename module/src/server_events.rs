//! What happens to the server, translated for the table.

use crate::ffi::ctx::{Ctx, LogLevel};
use crate::ffi::events::{Event, Loading};
use crate::ffi::string::ServerStr;
use crate::perform::Shell;
use crate::state::{self, with_table};
use crate::{apply, cluster, config, data_type, propagation, role, turn};
use std::num::NonZeroU64;

/// Every event the module subscribes to.
pub(crate) fn on_event(ctx: &Ctx<'_>, event: Event<'_>) {
    match event {
        Event::BeforeSleep => turn::run(ctx),
        // The backstop where there is no timer, or it failed: at least ten times a second.
        Event::Cron => {
            propagation::look(ctx);
            cluster::look(ctx);
            turn::look_soon();
        }
        Event::RoleChanged { is_primary: true } => {
            role::may_have_changed();
            apply::forget_refusals();
            propagation::somebody_may_listen();
            turn::look_soon();
        }
        Event::RoleChanged { is_primary: false } => {
            role::may_have_changed();
            cluster::demoted();
            propagation::somebody_may_listen();
            if let Some(decision) = with_table(|table| table.demoted()) {
                Shell::in_turn(ctx).perform_keyless(decision);
            }
        }
        Event::FlushStarted { db } => {
            let flags = ctx.flags();
            let speak = flags.is_primary() && !flags.is_loading();
            // In a database above 65535 there are no locks.
            let Ok(db) = db.map(u16::try_from).transpose() else { return };
            if let Some(decision) = with_table(|table| table.flushed(db, speak)) {
                Shell::in_turn(ctx).perform_keyless(decision);
            }
        }
        Event::SwapDb(a, b) => {
            if let (Ok(a), Ok(b)) = (u16::try_from(a), u16::try_from(b)) {
                with_table(|table| table.swapped(a, b));
                turn::look_soon();
            }
        }
        // DEBUG RELOAD empties the server and loads it again, nothing is lost. (Valkey 8 says so in this order, 9 in the other.)
        Event::Loading(Loading::RdbStarted | Loading::AofStarted) => {
            role::may_have_changed();
            with_table(|table| table.reloading());
        }
        Event::Loading(Loading::Ended) => {
            with_table(|table| table.start_loaded(state::now()));
            turn::look_soon();
        }
        Event::ClientDisconnected { client_id } => {
            if let Some(client) = NonZeroU64::new(client_id) {
                with_table(|table| table.client_gone(client));
                turn::wake();
            }
        }
        Event::ForkChild { born: true } => {
            propagation::somebody_may_listen();
            turn::announce_mark_soon();
        }
        Event::SlotMigration(stage) => cluster::on_slot_migration(ctx, stage),
        Event::ConfigChanged(names) => {
            if names.iter().any(|name| name.to_bytes().starts_with(b"flock.")) {
                with_table(|table| table.set_limits(config::limits()));
            }
            if names.iter().any(|name| name.to_bytes() == b"maxmemory-policy") {
                config::warn_of_eviction(ctx);
            }
        }
        Event::Loading(Loading::Failed) => {
            ctx.log(LogLevel::Warning, "loading failed: the locks read so far are dropped")
        }
        Event::Loading(Loading::ReplicationStarted) => {
            role::may_have_changed();
            apply::forget_refusals();
        }
        Event::ForkChild { born: false } => {}
    }
}

/// The server has evicted a key, or its time to live is over. If it was a lock's, it was unlinked a moment ago in the same command, and
/// was not given up by anybody.
pub(crate) fn on_taken(ctx: &Ctx<'_>, key: ServerStr<'_>) {
    if data_type::was_unlinked_in_this_command()
        && let Ok(db) = u16::try_from(ctx.selected_db())
    {
        with_table(|table| table.taken_by_server(db, key.bytes()));
    }
}

/// A message of the module on another node of the cluster.
pub(crate) fn on_cluster_message(ctx: &Ctx<'_>, message: &[u8]) {
    cluster::on_message(ctx, message);
}
