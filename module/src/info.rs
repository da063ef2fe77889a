//! The module's sections of INFO: plain counters, nothing that costs on the hot path.

use crate::ffi::barrier::panics_caught;
use crate::ffi::info::InfoWriter;
use crate::state::{self, with_table};
use crate::{blocking, config, turn};
use flock_core::Table;
use flock_core::stats::Histogram;
use std::ffi::CStr;

/// Names of the histograms' buckets: the upper bound in milliseconds.
static BUCKETS: [&CStr; flock_core::stats::BUCKETS] = [
    c"lt_1",
    c"lt_2",
    c"lt_4",
    c"lt_8",
    c"lt_16",
    c"lt_32",
    c"lt_64",
    c"lt_128",
    c"lt_256",
    c"lt_512",
    c"lt_1024",
    c"lt_2048",
    c"lt_4096",
    c"lt_8192",
    c"lt_16384",
    c"lt_32768",
    c"lt_65536",
    c"lt_131072",
    c"lt_262144",
    c"lt_524288",
    c"lt_1048576",
    c"lt_2097152",
    c"lt_4194304",
    c"inf",
];

/// What `INFO flock` shows.
pub(crate) fn report(writer: &mut InfoWriter<'_>) {
    with_table(|table| {
        locks(writer, table);
        tokens(writer, table);
        if !writer.for_crash_report() {
            times(writer, table);
        }
    });
}

fn locks(writer: &mut InfoWriter<'_>, table: &Table) {
    if !writer.section(c"locks") {
        return;
    }
    let stats = table.stats();
    let fields = [
        (c"held", table.held() as u64),
        (c"waiters", table.queues().len() as u64),
        (c"blocked_clients", blocking::count() as u64),
        (c"table_bytes", table.heap_bytes() as u64),
        (c"grants", stats.grants),
        (c"handoffs", stats.handoffs),
        (c"releases", stats.releases),
        (c"renewals", stats.renewals),
        (c"renewals_lost", stats.renewals_lost),
        (c"expired", stats.expired),
        (c"revoked", stats.revoked),
        (c"removed", stats.removed),
        (c"put_back", stats.put_back),
        (c"evictable", u64::from(config::evicts_locks())),
        (c"undelivered", stats.undelivered),
        (c"busy", stats.busy),
        (c"timed_out", stats.timed_out),
        (c"waits_ended", stats.wait_ended),
        (c"refused", stats.refused),
        (c"panics_caught", panics_caught()),
    ];
    for (name, value) in fields {
        writer.field_u64(name, value);
    }
}

fn tokens(writer: &mut InfoWriter<'_>, table: &Table) {
    if !writer.section(c"tokens") {
        return;
    }
    let counter = table.counter();
    writer.field_u64(c"counter", counter.value());
    writer.field_u64(c"mark", counter.mark());
    // Units of 10 us: positive if more tokens were handed out than the clock covers.
    writer.field_str(c"lead_over_clock", &counter.lead(state::wall_clock()).to_string());
}

fn times(writer: &mut InfoWriter<'_>, table: &Table) {
    if !writer.section(c"times") {
        return;
    }
    let (last, worst) = turn::lateness_us();
    writer.field_u64(c"lateness_last_us", last);
    writer.field_u64(c"lateness_max_us", worst);
    histogram(writer, c"wait_ms", &table.stats().wait_ms);
    histogram(writer, c"hold_ms", &table.stats().hold_ms);
}

fn histogram(writer: &mut InfoWriter<'_>, name: &'static CStr, histogram: &Histogram) {
    writer.dict(name, |writer| {
        for (bucket, count) in BUCKETS.iter().zip(histogram.buckets()) {
            writer.field_u64(bucket, *count);
        }
    });
}
