//! The system's allocator, which counts what it is asked for.
#![allow(dead_code, reason = "each test uses one of the two counts")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

/// Allocations so far, of the calling thread.
pub(crate) fn by_this_thread() -> u64 {
    MINE.get()
}

/// Allocations so far, of all threads.
pub(crate) fn by_all_threads() -> u64 {
    ALL.load(Ordering::Relaxed)
}

struct Counting;

static ALL: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static MINE: Cell<u64> = const { Cell::new(0) };
}

fn count_one() {
    ALL.fetch_add(1, Ordering::Relaxed);
    MINE.with(|count| count.set(count.get() + 1));
}

// SAFETY: every call goes to the system's allocator as it came; counting touches two numbers, and allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count_one();
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count_one();
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count_one();
        // SAFETY: the caller's promise.
        unsafe { System.realloc(block, layout, size) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;
