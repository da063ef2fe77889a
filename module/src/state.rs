//! The module's state: one table of locks, on the server's main thread.

use crate::config;
use crate::ffi::data_type::{Handle, drain_freed};
use crate::ffi::main_thread::MainThread;
use crate::ffi::timer_fd;
use flock_core::time::Time;
use flock_core::token::WallClock;
use flock_core::{LockId, Table};
use std::sync::OnceLock;

static TABLE: MainThread<State> = MainThread::new();

struct State {
    table: Table,
    /// Room for the handles that the server has freed.
    freed: Vec<Handle>,
}

/// Puts an empty table in place. Once, while loading the module.
pub(crate) fn install() {
    TABLE.install(State { table: Table::new(config::limits()), freed: Vec::new() });
    crate::perform::install();
    crate::blocking::install();
    crate::turn::install();
}

/// Runs `body` on the table. `None` in a callback that the server makes while another `body` is running: then there is nothing to
/// do, because the table itself caused it.
pub(crate) fn with_table<R>(body: impl FnOnce(&mut Table) -> R) -> Option<R> {
    TABLE.with(|state| {
        if drain_freed(&mut state.freed) {
            state.take_back_freed();
        }
        body(&mut state.table)
    })
}

impl State {
    #[cold]
    fn take_back_freed(&mut self) {
        for handle in self.freed.drain(..) {
            self.table.freed(lock_of(handle));
        }
    }
}

/// The server has freed this value. `false` if the table is busy further up the stack: then its number must be remembered.
pub(crate) fn freed(handle: Handle) -> bool {
    TABLE.with(|state| state.table.freed(lock_of(handle))).is_some()
}

/// The lock stored as this value.
pub(crate) fn lock_of(handle: Handle) -> LockId {
    LockId::new(handle.0)
}

/// The value to store for this lock.
pub(crate) fn handle_of(lock: LockId) -> Handle {
    Handle(lock.get())
}

/// The time that leases run on.
pub(crate) fn now() -> Time {
    Time::from_us(timer_fd::boottime_us())
}

/// The wall clock, for the token counter.
pub(crate) fn wall_clock() -> WallClock {
    WallClock::from_unix_us(timer_fd::wall_clock_us())
}

/// Which boot of which machine this is, as a number: deadlines written under the same number are on the same clock. 0 if unknown:
/// then stored deadlines are never taken as they are.
pub(crate) fn boot() -> u64 {
    static BOOT: OnceLock<u64> = OnceLock::new();
    *BOOT.get_or_init(|| {
        timer_fd::boot_id().map_or(0, |id| {
            let (high, low) = (u128::from_be_bytes(id) >> 64, u128::from_be_bytes(id) & u128::from(u64::MAX));
            u64::try_from(high ^ low).unwrap_or(0)
        })
    })
}
