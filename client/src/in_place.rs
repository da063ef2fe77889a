//! Where an operation runs: at first in its caller's own future, and from the moment on that it may take long, on the client's thread.
//!
//! Most operations are one request and its answer. Such a one never leaves its caller's task: nothing is spawned for it, and its answer
//! wakes the caller and nobody between. Whatever may take longer (waiting in turn or for a connection, asking again after a silence)
//! first awaits [`leave_the_caller`]: then the operation moves as it stands to the client's thread, where no caller that is busy,
//! blocked or gone holds it up.
//!
//! Timers belong to the client's runtime, so a caller needs none, nor any runtime at all.

use std::cell::Cell;
use std::fmt;
use std::future::{Future, poll_fn};
use std::mem;
use std::pin::Pin;
use std::sync::{PoisonError, RwLock, TryLockError};
use std::task::{Context, Poll};

use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};

/// The client's thread has ended.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the client is shut down")]
pub(crate) struct ThreadGone;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Thread,
    Caller,
    /// With the caller, and about to leave.
    Leaving,
}

thread_local! {
    /// Where the operation is that is being polled.
    static PLACE: Cell<Place> = const { Cell::new(Place::Thread) };
}

/// Ends on the client's thread: to be awaited before whatever may take longer than a round trip.
pub(crate) async fn leave_the_caller() {
    poll_fn(|_| {
        if PLACE.get() == Place::Thread {
            return Poll::Ready(());
        }
        PLACE.set(Place::Leaving);
        Poll::Pending // polled next where it is going to
    })
    .await;
}

/// Whether the operation that is being polled is with its caller.
pub(crate) fn is_with_caller() -> bool {
    PLACE.get() != Place::Thread
}

/// An operation that has begun.
type Begun<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// The runtime of the client's thread, as long as that runs.
pub(crate) struct ClientThread {
    runtime: Handle,
    is_there: RwLock<bool>,
    /// To those who have left their callers and wait to be let in.
    door: mpsc::UnboundedSender<Begun<()>>,
}

impl fmt::Debug for ClientThread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientThread").field("is_there", &self.is_there).finish_non_exhaustive()
    }
}

/// Those who wait to be let in.
pub(crate) type Door = mpsc::UnboundedReceiver<Begun<()>>;

/// What becomes of an operation whose caller stops waiting for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IfDropped {
    /// It is dropped too, and undoes itself.
    Dropped,
    /// It goes on, on the client's thread.
    GoesOn,
}

impl ClientThread {
    pub(crate) fn new(runtime: Handle) -> (Self, Door) {
        let (door, waiting) = mpsc::unbounded_channel();
        (Self { runtime, is_there: RwLock::new(true), door }, waiting)
    }

    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// Lets in who waits at the door, for ever: some at a time. If ten thousand came at once, all that is due on the thread would have to
    /// wait until each had had its first turn.
    pub(crate) async fn let_in(mut door: Door) {
        while let Some(work) = door.recv().await {
            // The channel makes way for other tasks now and then, by tokio's budget.
            tokio::spawn(work);
        }
    }

    /// The client's thread ends: to be said before its runtime does, whose timers must not be touched after that.
    pub(crate) fn end(&self) {
        *self.is_there.write().unwrap_or_else(PoisonError::into_inner) = false;
    }

    /// Runs `work`, here and then on the client's thread. If the caller stops waiting, it is dropped.
    pub(crate) fn ask<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> Visit<'_, T> {
        self.begin(Box::pin(work), IfDropped::Dropped)
    }

    /// Runs `work`, here and then on the client's thread. If the caller stops waiting, it goes on there.
    pub(crate) fn carry_out<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> Visit<'_, T> {
        self.begin(Box::pin(work), IfDropped::GoesOn)
    }

    fn begin<T: Send + 'static>(&self, work: Begun<T>, if_dropped: IfDropped) -> Visit<'_, T> {
        Visit { thread: self, stage: Stage::Here(work), if_dropped }
    }

    /// Goes on with an operation on the client's thread.
    fn go_on<T: Send + 'static>(&self, work: Begun<T>, if_dropped: IfDropped) -> oneshot::Receiver<T> {
        let (mut answer, answered) = oneshot::channel();
        let work: Begun<()> = match if_dropped {
            IfDropped::Dropped => Box::pin(async move {
                tokio::select! {
                    // What cannot be handed over any more is dropped here, and undoes itself.
                    value = work => drop(answer.send(value)),
                    () = answer.closed() => {}
                }
            }),
            IfDropped::GoesOn => Box::pin(async move { drop(answer.send(work.await)) }),
        };
        // If the thread has ended, the answer is that it has.
        let _ = self.door.send(work);
        answered
    }

    /// Polls on the caller's thread, with the timers of the client's.
    fn poll_here<T>(&self, work: &mut Begun<T>, context: &mut Context<'_>) -> Result<(Poll<T>, Place), ThreadGone> {
        struct Restore(Place);
        impl Drop for Restore {
            fn drop(&mut self) {
                PLACE.set(self.0);
            }
        }

        // The only one who writes says that the thread ends.
        let is_there = match self.is_there.try_read() {
            Ok(is_there) => is_there,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Err(ThreadGone),
        };
        if !*is_there {
            return Err(ThreadGone);
        }
        let _timers = self.runtime.enter();
        let _restore = Restore(PLACE.replace(Place::Caller));
        let polled = work.as_mut().poll(context);
        Ok((polled, PLACE.get()))
    }
}

/// An operation as its caller sees it.
#[must_use = "nothing happens until it is awaited"]
pub(crate) struct Visit<'a, T: Send + 'static> {
    thread: &'a ClientThread,
    stage: Stage<T>,
    if_dropped: IfDropped,
}

enum Stage<T> {
    Here(Begun<T>),
    There(oneshot::Receiver<T>),
    Over,
}

impl<T: Send + 'static> Future for Visit<'_, T> {
    type Output = Result<T, ThreadGone>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        if let Stage::Here(work) = &mut this.stage {
            match this.thread.poll_here(work, context) {
                Ok((Poll::Pending, Place::Leaving)) => {
                    if let Stage::Here(work) = mem::replace(&mut this.stage, Stage::Over) {
                        this.stage = Stage::There(this.thread.go_on(work, this.if_dropped));
                    }
                }
                Ok((Poll::Pending, Place::Caller | Place::Thread)) => return Poll::Pending,
                Ok((Poll::Ready(value), _)) => {
                    this.stage = Stage::Over;
                    return Poll::Ready(Ok(value));
                }
                Err(gone) => {
                    this.stage = Stage::Over;
                    return Poll::Ready(Err(gone));
                }
            }
        }
        match &mut this.stage {
            Stage::There(answered) => Pin::new(answered).poll(context).map_err(|_| ThreadGone),
            Stage::Here(_) | Stage::Over => Poll::Ready(Err(ThreadGone)),
        }
    }
}

impl<T: Send + 'static> Drop for Visit<'_, T> {
    fn drop(&mut self) {
        if let Stage::Here(work) = mem::replace(&mut self.stage, Stage::Over)
            && self.if_dropped == IfDropped::GoesOn
        {
            drop(self.thread.go_on(work, IfDropped::GoesOn));
        }
    }
}
