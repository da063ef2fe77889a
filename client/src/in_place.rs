//! Where an operation runs: at first in its caller's own future, and from the moment on that it may take long, on the client's thread.
//!
//! Most operations are one request and its answer. Such a one never leaves its caller's task: nothing is spawned for it, and its answer
//! wakes the caller and nobody between. Whatever may take longer (waiting in turn or for a connection, asking again after a silence)
//! first awaits [`leave_the_caller`]: then the operation moves as it stands to the client's thread, where no caller that is busy,
//! blocked or gone holds it up.
//!
//! A caller that does not run cannot do that. What is to be carried out in any case (a release, a conversion) is therefore listed as long
//! as it is with its caller, and the client's thread fetches what has been there for longer than an answer may take. What merely asks is
//! not fetched: a lock that is granted to a future which nobody polls is to last for its claim, and not to be kept for that future.
//!
//! Timers belong to the client's runtime, so a caller needs none, nor any runtime at all.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::future::{Future, poll_fn};
use std::mem;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError, RwLock, TryLockError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tokio::time::sleep;

use crate::mutex::lock;

/// The client's thread has ended.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the client is shut down")]
pub(crate) struct ThreadGone;

/// Who polls an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Thread,
    Caller,
    /// The caller, for the last time.
    Leaving,
}

thread_local! {
    /// Who polls the operation that is being polled.
    static SIDE: Cell<Side> = const { Cell::new(Side::Thread) };
}

/// Ends on the client's thread: to be awaited before whatever may take longer than a round trip.
pub(crate) async fn leave_the_caller() {
    poll_fn(|_| {
        if SIDE.get() == Side::Thread {
            return Poll::Ready(());
        }
        SIDE.set(Side::Leaving);
        Poll::Pending // polled next where it is going to
    })
    .await;
}

/// Whether the operation that is being polled is with its caller.
pub(crate) fn is_with_caller() -> bool {
    SIDE.get() != Side::Thread
}

/// An operation that has begun.
type Begun<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// The runtime of the client's thread, as long as that runs.
pub(crate) struct ClientThread {
    runtime: Handle,
    is_there: RwLock<bool>,
    /// To those who have left their callers and wait to be let in.
    door: mpsc::UnboundedSender<Begun<()>>,
    /// What is to be carried out and is still with its callers.
    with_callers: Mutex<WithCallers>,
}

#[derive(Default)]
struct WithCallers {
    next_number: u64,
    /// As they began: what happens when they are taken over is to follow from the seed in a simulation.
    listed: BTreeMap<u64, Listed>,
    /// Nothing is left with its caller any more.
    all_taken_over: bool,
}

struct Listed {
    operation: Arc<dyn TakeOver>,
    /// Whether the client's thread has seen it there before.
    was_there: bool,
}

impl fmt::Debug for ClientThread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientThread").field("is_there", &self.is_there).finish_non_exhaustive()
    }
}

/// Those who wait to be let in.
pub(crate) type Door = mpsc::UnboundedReceiver<Begun<()>>;

impl ClientThread {
    pub(crate) fn new(runtime: Handle) -> (Self, Door) {
        let (door, waiting) = mpsc::unbounded_channel();
        (Self { runtime, is_there: RwLock::new(true), door, with_callers: Mutex::default() }, waiting)
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

    /// For ever, takes over what has been with its caller for longer than `patience`: at the latest after twice that. An operation that is
    /// polled is over by then, or has left.
    pub(crate) async fn take_over_late(&self, patience: Duration) {
        loop {
            sleep(patience).await;
            self.take_over(|listed| mem::replace(&mut listed.was_there, true));
        }
    }

    /// Takes over all that is to be carried out, from now on too.
    pub(crate) fn take_over_all(&self) {
        lock(&self.with_callers).all_taken_over = true;
        self.take_over(|_| true);
    }

    fn take_over(&self, mut is_due: impl FnMut(&mut Listed) -> bool) {
        let mut with_callers = lock(&self.with_callers);
        let listed = &mut with_callers.listed;
        let due: Vec<_> = listed.iter_mut().filter_map(|(number, listed)| is_due(listed).then_some(*number)).collect();
        let due: Vec<_> = due.iter().filter_map(|number| listed.remove(number)).collect();
        drop(with_callers);
        for listed in due {
            listed.operation.take_over(self);
        }
    }

    /// The client's thread ends: to be said before its runtime does, whose timers must not be touched after that.
    pub(crate) fn end(&self) {
        *self.is_there.write().unwrap_or_else(PoisonError::into_inner) = false;
        let listed = mem::take(&mut lock(&self.with_callers).listed);
        drop(listed); // not under the lock
    }

    /// Runs `work`, here and then on the client's thread. If the caller stops waiting, it is dropped, and undoes itself.
    pub(crate) fn ask<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> Asked<'_, T> {
        Asked { thread: self, stage: Stage::Here(Box::pin(work)) }
    }

    /// Runs `work`, here and then on the client's thread. If the caller stops waiting, or polling, it goes on there.
    pub(crate) fn carry_out<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> CarriedOut<'_, T> {
        let state = State { stage: Stage::Here(Box::pin(work)), caller: None };
        CarriedOut { thread: self, operation: Arc::new(Operation(Mutex::new(state))), number: None }
    }

    /// Goes on with an operation on the client's thread. If nobody waits for the answer any more, it is dropped.
    fn go_on_asking<T: Send + 'static>(&self, work: Begun<T>) -> oneshot::Receiver<T> {
        let (mut answer, answered) = oneshot::channel();
        self.knock(Box::pin(async move {
            tokio::select! {
                // What cannot be handed over any more is dropped here, and undoes itself.
                value = work => drop(answer.send(value)),
                () = answer.closed() => {}
            }
        }));
        answered
    }

    /// Goes on with an operation on the client's thread, whoever waits for its answer.
    fn go_on_carrying_out<T: Send + 'static>(&self, work: Begun<T>) -> oneshot::Receiver<T> {
        let (answer, answered) = oneshot::channel();
        self.knock(Box::pin(async move { drop(answer.send(work.await)) }));
        answered
    }

    fn knock(&self, work: Begun<()>) {
        // If the thread has ended, the answer is that it has.
        let _ = self.door.send(work);
    }

    /// Polls on the caller's thread, with the timers of the client's.
    fn poll_here<T>(&self, work: &mut Begun<T>, context: &mut Context<'_>) -> Result<(Poll<T>, Side), ThreadGone> {
        struct Restore(Side);
        impl Drop for Restore {
            fn drop(&mut self) {
                SIDE.set(self.0);
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
        let _restore = Restore(SIDE.replace(Side::Caller));
        let polled = work.as_mut().poll(context);
        Ok((polled, SIDE.get()))
    }

    /// Lists what is with its caller, under the number that is returned; unless it may not stay there.
    fn list(&self, operation: Arc<dyn TakeOver>) -> Option<u64> {
        let mut with_callers = lock(&self.with_callers);
        if with_callers.all_taken_over {
            return None;
        }
        let number = with_callers.next_number;
        with_callers.next_number += 1;
        with_callers.listed.insert(number, Listed { operation, was_there: false });
        Some(number)
    }

    /// It is not with its caller any more.
    fn strike(&self, number: u64) {
        let struck = lock(&self.with_callers).listed.remove(&number);
        drop(struck); // not under the lock
    }
}

/// Where an operation is.
enum Stage<T> {
    Here(Begun<T>),
    There(oneshot::Receiver<T>),
    Over,
}

impl<T> Stage<T> {
    /// Polls it wherever it is; when it leaves its caller it goes on by `go_on`.
    fn poll(
        &mut self,
        thread: &ClientThread,
        context: &mut Context<'_>,
        go_on: impl FnOnce(Begun<T>) -> oneshot::Receiver<T>,
    ) -> Poll<Result<T, ThreadGone>> {
        // Taken out for as long as it is polled: what has panicked must not be polled again, here or there.
        if let Some(mut work) = self.take_begun() {
            match thread.poll_here(&mut work, context) {
                Ok((Poll::Pending, Side::Leaving)) => *self = Self::There(go_on(work)),
                Ok((Poll::Pending, Side::Caller | Side::Thread)) => {
                    *self = Self::Here(work);
                    return Poll::Pending;
                }
                Ok((Poll::Ready(value), _)) => return Poll::Ready(Ok(value)),
                Err(gone) => return Poll::Ready(Err(gone)),
            }
        }
        match self {
            Self::There(answered) => Pin::new(answered).poll(context).map_err(|_| ThreadGone),
            Self::Here(_) | Self::Over => Poll::Ready(Err(ThreadGone)),
        }
    }

    /// What has begun, if it is with its caller: there is nothing here then.
    fn take_begun(&mut self) -> Option<Begun<T>> {
        if !matches!(self, Self::Here(_)) {
            return None;
        }
        match mem::replace(self, Self::Over) {
            Self::Here(work) => Some(work),
            Self::There(_) | Self::Over => None,
        }
    }
}

/// What is asked, as the caller sees it.
#[must_use = "nothing happens until it is awaited"]
pub(crate) struct Asked<'a, T> {
    thread: &'a ClientThread,
    stage: Stage<T>,
}

impl<T: Send + 'static> Future for Asked<'_, T> {
    type Output = Result<T, ThreadGone>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { thread, stage } = self.get_mut();
        stage.poll(thread, context, |work| thread.go_on_asking(work))
    }
}

/// What is carried out, as the caller sees it.
#[must_use = "nothing happens until it is awaited"]
pub(crate) struct CarriedOut<'a, T: Send + 'static> {
    thread: &'a ClientThread,
    operation: Arc<Operation<T>>,
    /// In the list of what is with its caller.
    number: Option<u64>,
}

/// What is carried out, as its caller and the client's thread share it.
struct Operation<T>(Mutex<State<T>>);

struct State<T> {
    stage: Stage<T>,
    /// Who has polled it last.
    caller: Option<Waker>,
}

/// An operation with whatever answer.
trait TakeOver: Send + Sync {
    /// Fetches it to the client's thread, if it is with its caller.
    fn take_over(&self, thread: &ClientThread);
}

impl<T: Send + 'static> TakeOver for Operation<T> {
    fn take_over(&self, thread: &ClientThread) {
        let mut state = lock(&self.0);
        let Some(work) = state.stage.take_begun() else { return };
        state.stage = Stage::There(thread.go_on_carrying_out(work));
        let caller = state.caller.take();
        drop(state);
        if let Some(caller) = caller {
            caller.wake(); // it waits for the answer from there now
        }
    }
}

impl<T: Send + 'static> Future for CarriedOut<'_, T> {
    type Output = Result<T, ThreadGone>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { thread, operation, number } = self.get_mut();
        let mut state = lock(&operation.0);
        let polled = state.stage.poll(thread, context, |work| thread.go_on_carrying_out(work));
        let is_here = matches!(state.stage, Stage::Here(_));
        if is_here {
            match &mut state.caller {
                Some(caller) => caller.clone_from(context.waker()),
                None => state.caller = Some(context.waker().clone()),
            }
        }
        drop(state);
        if is_here {
            if number.is_none() {
                *number = thread.list(Arc::<Operation<T>>::clone(operation));
            }
            if number.is_none() {
                operation.take_over(thread);
            }
        } else if let Some(number) = number.take() {
            thread.strike(number);
        }
        polled
    }
}

impl<T: Send + 'static> Drop for CarriedOut<'_, T> {
    fn drop(&mut self) {
        if let Some(number) = self.number.take() {
            self.thread.strike(number);
        }
        let begun = lock(&self.operation.0).stage.take_begun();
        if let Some(work) = begun {
            drop(self.thread.go_on_carrying_out(work));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tokio::time::timeout;

    use super::*;

    const PATIENCE: Duration = Duration::from_millis(500);

    fn thread() -> Arc<ClientThread> {
        let (thread, door) = ClientThread::new(Handle::current());
        let thread = Arc::new(thread);
        tokio::spawn(ClientThread::let_in(door));
        tokio::spawn({
            let thread = Arc::clone(&thread);
            async move { thread.take_over_late(PATIENCE).await }
        });
        thread
    }

    /// Polls once.
    async fn begin(work: &mut (impl Future + Unpin)) {
        assert!(timeout(Duration::ZERO, work).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn caller_hears_from_what_was_taken_over() {
        let thread = thread();
        let (answer, answered) = oneshot::channel();
        let waiting = tokio::spawn({
            let thread = Arc::clone(&thread);
            async move { thread.carry_out(answered).await }
        });
        sleep(3 * PATIENCE).await;
        answer.send(7).unwrap();
        assert_eq!(timeout(PATIENCE, waiting).await.unwrap().unwrap().unwrap(), Ok(7));
    }

    #[tokio::test(start_paused = true)]
    async fn only_what_is_to_be_carried_out_goes_on_without_its_caller() {
        let thread = thread();
        let (carried_out, is_carried_out) = oneshot::channel();
        let (asked, mut is_asked) = oneshot::channel();
        let later = |done: oneshot::Sender<()>| async move {
            sleep(PATIENCE / 2).await;
            done.send(()).unwrap();
        };
        let (mut carried_out, mut asked) = (thread.carry_out(later(carried_out)), thread.ask(later(asked)));
        begin(&mut carried_out).await;
        begin(&mut asked).await;
        timeout(3 * PATIENCE, is_carried_out).await.unwrap().unwrap();
        assert!(timeout(10 * PATIENCE, &mut is_asked).await.is_err());
        asked.await.unwrap();
        carried_out.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn list_is_empty_when_nothing_is_with_its_caller() {
        let thread = thread();
        let listed = || lock(&thread.with_callers).listed.len();
        thread.carry_out(async {}).await.unwrap();
        thread.carry_out(sleep(PATIENCE / 4)).await.unwrap();
        thread.carry_out(leave_the_caller()).await.unwrap();
        assert_eq!(listed(), 0);
        let (mut dropped, mut forgotten) = (thread.carry_out(pending::<()>()), thread.carry_out(pending::<()>()));
        begin(&mut dropped).await;
        begin(&mut forgotten).await;
        assert_eq!(listed(), 2);
        drop(dropped);
        mem::forget(forgotten);
        assert_eq!(listed(), 1);
        thread.take_over_all();
        assert_eq!(listed(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn what_begins_when_all_was_taken_over_stays_with_no_caller() {
        // Of two threads, one begins a release while the other has just looked who has.
        let thread = thread();
        thread.take_over_all();
        let (done, is_done) = oneshot::channel();
        let mut late = thread.carry_out(async move {
            sleep(PATIENCE / 4).await;
            done.send(()).unwrap();
        });
        begin(&mut late).await;
        timeout(PATIENCE / 2, is_done).await.unwrap().unwrap();
        late.await.unwrap();
    }
}
