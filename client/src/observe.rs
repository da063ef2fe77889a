//! What is told of a client's doing: spans and events by `tracing`, and with the feature `metrics` counts and times by the `metrics`
//! facade. The names are listed on the crate's page. Nothing here is a secret: neither URL nor password gets this far.
//!
//! Where nobody listens, a span is an empty value and a count is nothing.

use std::sync::atomic::{AtomicBool, Ordering};

use flock_core::Token;
use tracing::Span;
use tracing::field::{Empty, display};

use crate::clock::Clock;
use crate::error::{AcquireError, LossReason};

/// How long something takes: nothing, if nobody can ask.
#[derive(Debug)]
struct Stopwatch {
    #[cfg(feature = "metrics")]
    clock: Clock,
    #[cfg(feature = "metrics")]
    began: flock_core::Time,
}

impl Stopwatch {
    #[cfg(feature = "metrics")]
    fn start(clock: &Clock) -> Self {
        Self { clock: clock.clone(), began: clock.now() }
    }

    #[cfg(not(feature = "metrics"))]
    fn start(_: &Clock) -> Self {
        Self {}
    }

    #[cfg(feature = "metrics")]
    fn seconds(&self) -> f64 {
        std::time::Duration::from_micros(self.clock.now().us_since(self.began)).as_secs_f64()
    }
}

/// One acquisition, from being asked for to its outcome. Dropped before that, it was cancelled.
#[derive(Debug)]
pub(crate) struct Acquisition {
    span: Span,
    #[cfg_attr(not(feature = "metrics"), expect(dead_code, reason = "told as a metric only"))]
    stopwatch: Stopwatch,
    is_over: bool,
}

impl Acquisition {
    /// Called where the caller is: its span is the parent.
    pub(crate) fn begin(clock: &Clock, key: &[u8]) -> Self {
        let key = key.escape_ascii();
        let span = tracing::info_span!("flock.acquire", %key, owner = Empty, token = Empty, outcome = Empty);
        Self { span, stopwatch: Stopwatch::start(clock), is_over: false }
    }

    pub(crate) fn span(&self) -> &Span {
        &self.span
    }

    pub(crate) fn asks_as(&self, owner: &[u8]) {
        self.span.record("owner", display(owner.escape_ascii()));
    }

    pub(crate) fn granted(mut self, token: Token) {
        self.span.record("token", display(token));
        self.end("acquired");
    }

    /// It was only tried, and others hold the lock.
    pub(crate) fn found_busy(mut self) {
        self.end("busy");
    }

    pub(crate) fn failed(mut self, error: &AcquireError) {
        self.end(match error {
            AcquireError::TimedOut => "timed_out",
            AcquireError::Unavailable(_) => "unavailable",
            AcquireError::Config(_) => "bad_request",
            AcquireError::Server(_) => "refused",
            AcquireError::NotDurable { .. } => "not_durable",
            AcquireError::Lost { .. } => "lost",
            AcquireError::ShutDown => "shut_down",
        });
    }

    fn end(&mut self, outcome: &'static str) {
        self.is_over = true;
        self.span.record("outcome", outcome);
        #[cfg(feature = "metrics")]
        {
            metrics::counter!("flock_client_acquire_total", "outcome" => outcome).increment(1);
            metrics::histogram!("flock_client_acquire_seconds", "outcome" => outcome).record(self.stopwatch.seconds());
        }
    }
}

impl Drop for Acquisition {
    fn drop(&mut self) {
        if !self.is_over {
            self.end("cancelled");
        }
    }
}

/// A hold, from its grant to its end.
#[derive(Debug)]
pub(crate) struct Holding {
    span: Span,
    #[cfg_attr(not(feature = "metrics"), expect(dead_code, reason = "told as a metric only"))]
    stopwatch: Stopwatch,
    is_over: AtomicBool,
}

impl Holding {
    /// Not a child of the acquisition, which is over, but what follows from it.
    pub(crate) fn begin(clock: &Clock, key: &[u8], token: Token, acquisition: &Span) -> Self {
        let key = key.escape_ascii();
        let span = tracing::info_span!(parent: None, "flock.hold", %key, %token, ended = Empty);
        span.follows_from(acquisition);
        #[cfg(feature = "metrics")]
        metrics::gauge!("flock_client_held").increment(1);
        Self { span, stopwatch: Stopwatch::start(clock), is_over: AtomicBool::new(false) }
    }

    pub(crate) fn renewed(&self) {
        tracing::debug!(parent: &self.span, "renewed");
    }

    pub(crate) fn converted(&self, token: Token) {
        tracing::debug!(parent: &self.span, %token, "converted");
    }

    /// A renewal without an answer, or refused: it is tried again while the lease lasts.
    pub(crate) fn renewal_failed(&self) {
        tracing::debug!(parent: &self.span, "renewal failed");
        #[cfg(feature = "metrics")]
        metrics::counter!("flock_client_renew_failures_total").increment(1);
    }

    /// The event says which lock by itself: who filters warnings has no span.
    pub(crate) fn lost(&self, key: &[u8], token: Token, reason: LossReason) {
        tracing::warn!(parent: &self.span, key = %key.escape_ascii(), %token, %reason, "lock lost");
        #[cfg(feature = "metrics")]
        metrics::counter!("flock_client_lost_total", "reason" => word(reason)).increment(1);
        self.end("lost");
    }

    /// Given back by its holder, who may have heard of a loss before this did.
    pub(crate) fn given_back(&self, was_lost: bool) {
        self.end(if was_lost { "lost" } else { "given_back" });
    }

    pub(crate) fn leaked(&self, was_lost: bool) {
        self.end(if was_lost { "lost" } else { "leaked" });
    }

    fn end(&self, how: &'static str) {
        if self.is_over.swap(true, Ordering::AcqRel) {
            return;
        }
        self.span.record("ended", how);
        #[cfg(feature = "metrics")]
        {
            metrics::gauge!("flock_client_held").decrement(1);
            metrics::histogram!("flock_client_hold_seconds").record(self.stopwatch.seconds());
        }
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        self.end("abandoned");
    }
}

/// An acquisition asks again, because there was no answer or the server told it to.
pub(crate) fn retried() {
    #[cfg(feature = "metrics")]
    metrics::counter!("flock_client_acquire_retries_total").increment(1);
}

/// A lock could not be given back in time, or the server refused.
pub(crate) fn release_failed(key: &[u8], why: &dyn std::fmt::Display) {
    tracing::warn!(key = %key.escape_ascii(), %why, "a lock could not be given back");
    #[cfg(feature = "metrics")]
    metrics::counter!("flock_client_release_failures_total").increment(1);
}

pub(crate) fn connected(link: &'static str, epoch: u64) {
    tracing::debug!(link, epoch, "connected");
    #[cfg(feature = "metrics")]
    metrics::counter!("flock_client_connections_total", "link" => link).increment(1);
}

#[cfg(feature = "metrics")]
fn word(reason: LossReason) -> &'static str {
    match reason {
        LossReason::Expired => "expired",
        LossReason::Revoked => "revoked",
        LossReason::Removed => "removed",
        LossReason::Flushed => "flushed",
        LossReason::Gone => "gone",
        LossReason::Disconnected => "disconnected",
        LossReason::MaxHold => "max_hold",
        LossReason::ShutDown => "shut_down",
    }
}
