//! The clock leases are measured on, and the one timer that wakes the event loop for the earliest of them.
//!
//! Both count the time since boot, sleep included; no step of the wall clock touches them. (The server's own timers use
//! the wall clock, and stop when it is set back.) The timer's callback runs outside any execution unit, also inside a
//! busy script and while loading, so it only notes that it fired: due work is done in
//! [`Event::BeforeSleep`](super::events::Event), which follows. Without a timer (an old kernel) there is still the
//! server's cron.

use std::ffi::{c_int, c_long, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};

use super::api::{OK, server_fn};
use super::barrier::{Callback, barrier};

const NO_FD: c_int = -1;
const NOT_ARMED: u64 = u64::MAX;
const US_PER_S: u64 = 1_000_000;

static FD: AtomicI32 = AtomicI32::new(NO_FD);
static CLOCK: AtomicI32 = AtomicI32::new(CLOCK_BOOTTIME);
/// When the timer will fire, on [`boottime_us`].
static ARMED_FOR: AtomicU64 = AtomicU64::new(NOT_ARMED);
static FIRED: AtomicBool = AtomicBool::new(false);

/// Makes the timer and hands it to the event loop. `false` if this system has none: then only the server's cron wakes
/// the module.
pub(crate) fn open() -> bool {
    for clock in [CLOCK_BOOTTIME, CLOCK_MONOTONIC] {
        // SAFETY: makes a file descriptor, or answers -1.
        let fd = unsafe { timerfd_create(clock, TFD_NONBLOCK | TFD_CLOEXEC) };
        if fd < 0 {
            continue;
        }
        CLOCK.store(clock, Ordering::Relaxed);
        let event_loop_add = server_fn!(RedisModule_EventLoopAdd);
        // SAFETY: an open descriptor and a callback of this library; no data goes with it.
        if unsafe { event_loop_add(fd, READABLE, Some(on_readable), ptr::null_mut()) } == OK {
            FD.store(fd, Ordering::Relaxed);
            return true;
        }
        // SAFETY: opened above, known to nobody else.
        unsafe { close_fd(fd) };
        return false;
    }
    false
}

/// Takes the timer from the event loop: for a load that fails after [`open`], whose callback would be gone with the
/// library.
pub(crate) fn close() {
    let fd = FD.swap(NO_FD, Ordering::Relaxed);
    if fd == NO_FD {
        return;
    }
    let event_loop_del = server_fn!(RedisModule_EventLoopDel);
    // SAFETY: registered by `open`, on this thread.
    unsafe { event_loop_del(fd, READABLE) };
    // SAFETY: opened by `open`, and no longer in the static.
    unsafe { close_fd(fd) };
}

/// Makes the event loop turn at `deadline_us` ([`boottime_us`]), or at once if that is past. Does nothing if it will
/// turn earlier anyway. `false` if there is no timer.
pub(crate) fn arm(deadline_us: u64) -> bool {
    ARMED_FOR.load(Ordering::Relaxed) <= deadline_us || set(deadline_us)
}

/// Did the timer fire since this was last asked?
pub(crate) fn take_fired() -> bool {
    FIRED.load(Ordering::Relaxed) && FIRED.swap(false, Ordering::Relaxed)
}

/// Microseconds since boot, sleep included; `CLOCK_MONOTONIC` where there is no `CLOCK_BOOTTIME`.
pub(crate) fn boottime_us() -> u64 {
    clock_us(CLOCK.load(Ordering::Relaxed))
}

/// The server's own note of the time at which the running command began. Two commands have two (they take longer than its unit).
pub(crate) fn command_began_us() -> i64 {
    let cached_microseconds = server_fn!(RedisModule_CachedMicroseconds);
    // SAFETY: a function without arguments that reads a number.
    unsafe { cached_microseconds() }
}

/// Microseconds since 1970 by the wall clock; 0 before that.
pub(crate) fn wall_clock_us() -> u64 {
    clock_us(CLOCK_REALTIME)
}

/// The id of this boot of this machine: two boottimes with the same id are on the same clock. `None` if the system does
/// not tell.
pub(crate) fn boot_id() -> Option<[u8; 16]> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let mut digits = text.chars().filter_map(|digit| digit.to_digit(16));
    let mut id = [0; 16];
    for byte in &mut id {
        let (high, low) = (digits.next()?, digits.next()?);
        *byte = u8::try_from(high * 16 + low).ok()?;
    }
    Some(id)
}

fn set(deadline_us: u64) -> bool {
    let fd = FD.load(Ordering::Relaxed);
    if fd == NO_FD {
        return false;
    }
    // All zero disarms; so a deadline is at least a microsecond.
    let at_us = if deadline_us == NOT_ARMED { 0 } else { deadline_us.max(1) };
    let seconds = c_long::try_from(at_us / US_PER_S).unwrap_or(c_long::MAX);
    let nanoseconds = c_long::try_from(at_us % US_PER_S * 1000).unwrap_or(0);
    let value = Timespec { seconds, nanoseconds };
    let timer = Itimerspec { interval: Timespec { seconds: 0, nanoseconds: 0 }, value };
    // SAFETY: our descriptor; the structure lives on this stack, and the old value is not asked for.
    let done = unsafe { timerfd_settime(fd, TFD_TIMER_ABSTIME, &raw const timer, ptr::null_mut()) } == 0;
    if done {
        ARMED_FOR.store(deadline_us, Ordering::Relaxed);
    }
    done
}

fn clock_us(clock: c_int) -> u64 {
    let mut time = Timespec { seconds: 0, nanoseconds: 0 };
    // SAFETY: the kernel fills a structure on this stack. It cannot fail for a clock that exists; if it did, the time
    // would be 0.
    unsafe { clock_gettime(clock, &raw mut time) };
    let seconds = u64::try_from(time.seconds).unwrap_or(0);
    let nanoseconds = u64::try_from(time.nanoseconds).unwrap_or(0);
    seconds.saturating_mul(US_PER_S).saturating_add(nanoseconds / 1000)
}

extern "C" fn on_readable(fd: c_int, _data: *mut c_void, _mask: c_int) {
    barrier(Callback::Timer, (), || {
        let mut expirations = [0_u8; 8];
        // SAFETY: reads at most 8 bytes into 8; the descriptor does not block.
        unsafe { read(fd, expirations.as_mut_ptr().cast(), expirations.len()) };
        ARMED_FOR.store(NOT_ARMED, Ordering::Relaxed);
        FIRED.store(true, Ordering::Relaxed);
    });
}

/// # Safety
/// `fd` is an open descriptor that nobody else uses.
unsafe fn close_fd(fd: c_int) {
    // SAFETY: the caller's promise.
    unsafe { close_descriptor(fd) };
}

// The C library's own, for 64-bit Linux: the standard library links it but does not show it.
const CLOCK_REALTIME: c_int = 0;
const CLOCK_MONOTONIC: c_int = 1;
const CLOCK_BOOTTIME: c_int = 7;
const TFD_TIMER_ABSTIME: c_int = 1;
const TFD_NONBLOCK: c_int = 0o4000;
const TFD_CLOEXEC: c_int = 0o2_000_000;
const READABLE: c_int = 1;

#[repr(C)]
struct Timespec {
    seconds: c_long,
    nanoseconds: c_long,
}

#[repr(C)]
struct Itimerspec {
    interval: Timespec,
    value: Timespec,
}

unsafe extern "C" {
    fn timerfd_create(clock: c_int, flags: c_int) -> c_int;
    fn timerfd_settime(fd: c_int, flags: c_int, new: *const Itimerspec, old: *mut Itimerspec) -> c_int;
    fn clock_gettime(clock: c_int, time: *mut Timespec) -> c_int;
    fn read(fd: c_int, buffer: *mut c_void, count: usize) -> isize;
    #[link_name = "close"]
    fn close_descriptor(fd: c_int) -> c_int;
}

const _: () = assert!(cfg!(target_os = "linux") && usize::BITS == 64, "the module is built for 64-bit Linux");
