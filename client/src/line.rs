//! A connection, and who drives it.
//!
//! A connection of the `redis` crate is two things: a handle, which puts each request into a channel, and a driver, a future that takes
//! them out of it, writes them, reads the answers and hands them over. The driver is a task of the client's thread, so that no caller
//! that is busy holds it up. But then each request wakes that thread only to have itself written. So who asks while nobody else does
//! drives the connection for one turn: the request is written by the caller, and the client's thread sleeps until the answer comes. Where
//! several ask at a time that would be a write for each; the task writes what all of them ask in one.

use std::cell::Cell;
use std::fmt;
use std::future::{Future, poll_fn};
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, TryLockError};
use std::task::{Context, Poll, Wake, Waker};

use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionAddr, FromRedisValue, Pipeline, RedisConnectionInfo, RedisError,
    Value,
};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream, lookup_host};
use tokio::task::coop::has_budget_remaining;
use tokio::task::{AbortHandle, JoinSet};

use crate::mutex::lock;

/// A connection to a server. Closed when the last of its clones is dropped, or the runtime it was opened on ends.
#[derive(Clone)]
pub(crate) struct Line {
    connection: MultiplexedConnection,
    /// None if the `redis` crate keeps the driver to itself.
    driver: Option<Arc<Driver>>,
}

impl fmt::Debug for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Line").finish_non_exhaustive()
    }
}

impl Line {
    /// Opens the connection that the client describes, on the runtime that this is polled on. To be bounded by the caller.
    pub(crate) async fn open(client: &Client, config: AsyncConnectionConfig) -> Result<Self, RedisError> {
        let info = client.get_connection_info();
        let settings = info.redis_settings();
        match info.addr() {
            ConnectionAddr::Tcp(host, port) => {
                let stream = connect(lookup_host((host.as_str(), *port)).await?, info.tcp_settings()).await?;
                Self::over(stream, settings, config).await
            }
            ConnectionAddr::Unix(path) => Self::over(UnixStream::connect(path).await?, settings, config).await,
            // The crate sets up TLS, and does not give the driver away.
            _ => {
                let connection = client.get_multiplexed_async_connection_with_config(&config).await?;
                Ok(Self { connection, driver: None })
            }
        }
    }

    /// Begins to speak over `stream`.
    pub(crate) async fn over(
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        settings: &RedisConnectionInfo,
        config: AsyncConnectionConfig,
    ) -> Result<Self, RedisError> {
        let (connection, driver) = MultiplexedConnection::new_with_config(settings, stream, config).await?;
        Ok(Self { connection, driver: Some(Arc::new(Driver::spawn(driver))) })
    }

    /// Sends a command.
    pub(crate) async fn send(&self, command: &Cmd) -> Result<Value, RedisError> {
        let mut connection = self.connection.clone();
        self.drive(pin!(connection.send_packed_command(command))).await
    }

    /// Sends a command, and reads its answer; an error reply is an error.
    pub(crate) async fn query<T: FromRedisValue>(&self, command: &Cmd) -> Result<T, RedisError> {
        Ok(T::from_redis_value(self.send(command).await?.extract_error()?)?)
    }

    /// Sends `count` commands in one go; an error reply is a value among the others.
    pub(crate) async fn send_all(&self, commands: &Pipeline, count: usize) -> Result<Vec<Value>, RedisError> {
        let mut connection = self.connection.clone();
        self.drive(pin!(connection.send_packed_commands(commands, 0, count))).await
    }

    pub(crate) async fn subscribe(&self, channel: &str) -> Result<(), RedisError> {
        self.connection.clone().subscribe(channel).await
    }

    async fn drive<T>(&self, mut request: Pin<&mut impl Future<Output = T>>) -> T {
        let Some(driver) = &self.driver else { return request.await };
        let asking = Asking::begin(&driver.shared.asking);
        if asking.alone {
            let first = poll_fn(|context| Poll::Ready(driver.shared.poll_alone(request.as_mut(), context)));
            if let Poll::Ready(answer) = first.await {
                return answer;
            }
        }
        request.await
    }
}

/// Connects to that of a host's addresses which answers first.
async fn connect(addresses: impl Iterator<Item = SocketAddr>, settings: &TcpSettings) -> io::Result<TcpStream> {
    let mut attempts: JoinSet<_> = addresses.map(TcpStream::connect).collect();
    let mut trouble = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    while let Some(attempt) = attempts.join_next().await {
        match attempt? {
            Ok(stream) => {
                stream.set_nodelay(settings.nodelay())?;
                return Ok(stream);
            }
            Err(error) => trouble = error,
        }
    }
    Err(trouble)
}

/// One who has asked and has no answer.
struct Asking<'a> {
    all: &'a AtomicUsize,
    alone: bool,
}

impl<'a> Asking<'a> {
    fn begin(all: &'a AtomicUsize) -> Self {
        Self { all, alone: all.fetch_add(1, Ordering::Relaxed) == 0 }
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.all.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A driver, and the task that it ends with; which ends when this is dropped.
struct Driver {
    shared: Arc<SharedDriver>,
    task: AbortHandle,
}

impl Driver {
    fn spawn(work: impl Future<Output = ()> + Send + 'static) -> Self {
        let bell = Arc::new(Bell(OnceLock::new()));
        let waker = Waker::from(Arc::clone(&bell));
        let shared =
            Arc::new(SharedDriver { work: Mutex::new(Some(Box::pin(work))), bell, waker, asking: AtomicUsize::new(0) });
        let task = tokio::spawn(Task(Arc::clone(&shared))).abort_handle();
        Self { shared, task }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The task of a driver. If its runtime ends it, the connection is closed, whoever has it still.
struct Task(Arc<SharedDriver>);

impl Future for Task {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let shared = &self.0;
        shared.bell.0.get_or_init(|| context.waker().clone());
        shared.poll(&mut lock(&shared.work))
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        let work = lock(&self.0.work).take();
        drop(work); // not under the lock
    }
}

type Work = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The driver, which its task and those who ask poll in turns.
struct SharedDriver {
    /// None when it has ended.
    work: Mutex<Option<Work>>,
    bell: Arc<Bell>,
    /// The bell as whoever polls passes it on.
    waker: Waker,
    /// How many have asked and have no answer.
    asking: AtomicUsize,
}

impl SharedDriver {
    /// Polls a request for the first time, which puts it into the channel, and then the driver, which takes it from there.
    fn poll_alone<T>(&self, request: Pin<&mut impl Future<Output = T>>, context: &mut Context<'_>) -> Poll<T> {
        let answer = {
            let _silence = Silence::begin();
            request.poll(context)
        };
        match self.work.try_lock() {
            Ok(mut work) => drop(self.poll(&mut work)),
            Err(TryLockError::Poisoned(poisoned)) => drop(self.poll(&mut poisoned.into_inner())),
            // It is being polled, and may have looked into the channel already.
            Err(TryLockError::WouldBlock) => self.bell.ring(),
        }
        // What tokio did not let the caller's task do any more in this turn would wait for its next, which may never come.
        if !has_budget_remaining() {
            self.bell.ring();
        }
        answer
    }

    /// Everything that it waits for wakes its task, whoever polls.
    fn poll(&self, work: &mut Option<Work>) -> Poll<()> {
        // Taken out for as long as it is polled: what has panicked must not be polled again.
        let Some(mut driver) = work.take() else { return Poll::Ready(()) };
        let polled = driver.as_mut().poll(&mut Context::from_waker(&self.waker));
        if polled.is_pending() {
            *work = Some(driver);
        }
        polled
    }
}

thread_local! {
    /// Whether this thread polls a driver next, so that its task need not.
    static SILENT: Cell<bool> = const { Cell::new(false) };
}

struct Silence;

impl Silence {
    fn begin() -> Self {
        SILENT.set(true);
        Self
    }
}

impl Drop for Silence {
    fn drop(&mut self) {
        SILENT.set(false);
    }
}

/// Wakes the task of a driver.
struct Bell(OnceLock<Waker>);

impl Bell {
    fn ring(&self) {
        // Before the task's first turn there is nobody to wake, and that turn is due.
        if let Some(task) = self.0.get() {
            task.wake_by_ref();
        }
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !SILENT.get() {
            self.ring();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
    use tokio::runtime::Runtime;
    use tokio::task::coop::consume_budget;
    use tokio::task::yield_now;
    use tokio::time::timeout;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(10);
    const PIPE_BYTES: usize = 1024;
    /// How much tokio lets a task do in a turn.
    const BUDGET: usize = 128;
    const PING: &[u8] = b"*1\r\n$4\r\nPING\r\n";

    /// A connection whose client's thread runs only when a test says so, and its other end.
    struct Ends {
        thread: Runtime,
        line: Line,
        server: DuplexStream,
    }

    impl Ends {
        fn new() -> Self {
            let thread = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
            let (ours, server) = duplex(PIPE_BYTES);
            let settings = RedisConnectionInfo::default().set_skip_set_lib_name();
            let config = AsyncConnectionConfig::new().set_connection_timeout(None).set_response_timeout(None);
            let line = thread.block_on(Line::over(ours, &settings, config)).unwrap();
            let mut ends = Self { thread, line, server };
            ends.let_run();
            ends
        }

        fn let_run(&mut self) {
            self.thread.block_on(async {
                for _ in 0..10 {
                    yield_now().await;
                }
            });
        }

        /// How many tasks the thread is woken for.
        fn woken(&self) -> usize {
            self.thread.metrics().global_queue_depth()
        }

        /// What has come to the server.
        fn read(&mut self) -> Vec<u8> {
            let mut come = Vec::new();
            while let Poll::Ready(Ok(1..)) = poll_once(pin!(self.server.read_buf(&mut come))) {}
            come
        }
    }

    fn poll_once<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    fn ping(line: &Line) -> Pin<Box<impl Future<Output = Result<Value, RedisError>> + use<>>> {
        ask(line, redis::cmd("PING"))
    }

    fn ask(line: &Line, command: Cmd) -> Pin<Box<impl Future<Output = Result<Value, RedisError>> + use<>>> {
        let line = line.clone();
        let mut asked = Box::pin(async move { line.send(&command).await });
        assert!(poll_once(asked.as_mut()).is_pending());
        asked
    }

    #[test]
    fn who_asks_alone_writes_and_who_asks_beside_others_leaves_it_to_the_thread() {
        let mut ends = Ends::new();
        let first = ping(&ends.line);
        assert_eq!((ends.woken(), &*ends.read()), (0, PING));
        let second = ping(&ends.line);
        let third = ping(&ends.line);
        assert_eq!((ends.woken(), &*ends.read()), (1, &b""[..]));
        ends.let_run();
        assert_eq!(ends.read(), [PING, PING].concat());
        ends.thread.block_on(async {
            ends.server.write_all(b"+1\r\n+2\r\n+3\r\n").await.unwrap();
            for (asked, answer) in [(first, "1"), (second, "2"), (third, "3")] {
                assert_eq!(asked.await.unwrap(), Value::SimpleString(answer.into()));
            }
        });
        let _alone_again = ping(&ends.line);
        assert_eq!((ends.woken(), &*ends.read()), (0, PING));
    }

    #[test]
    fn request_is_written_though_the_driver_is_being_polled_elsewhere() {
        let mut ends = Ends::new();
        let shared = Arc::clone(&ends.line.driver.as_ref().unwrap().shared);
        let elsewhere = lock(&shared.work);
        let _asked = ping(&ends.line);
        drop(elsewhere);
        assert_eq!(ends.read(), b"");
        ends.let_run();
        assert_eq!(ends.read(), PING);
    }

    #[test]
    fn request_is_written_by_the_thread_if_its_caller_has_used_up_what_tokio_lets_a_task_do_in_a_turn() {
        let mut asked = Vec::new();
        for left in 1..10 {
            let mut ends = Ends::new();
            let caller = tokio::runtime::Builder::new_current_thread().build().unwrap();
            caller.block_on(async {
                for _ in left..BUDGET {
                    consume_budget().await;
                }
                asked.push(ping(&ends.line));
            }); // and the caller runs no more
            ends.let_run();
            assert_eq!(ends.read(), PING, "{left} left");
        }
    }

    #[test]
    fn request_that_was_dropped_leaves_nobody_who_asks() {
        let mut ends = Ends::new();
        drop(ping(&ends.line));
        assert_eq!(ends.read(), PING);
        let _alone = ping(&ends.line);
        assert_eq!(ends.read(), PING);
    }

    #[test]
    fn connection_is_closed_with_its_last_clone_whatever_is_on_its_way() {
        let ends = Ends::new();
        let mut long = redis::cmd("PING");
        long.arg(&[0_u8; 4 * PIPE_BYTES][..]);
        let asked = ask(&ends.line, long);
        let Ends { thread, line, mut server } = ends;
        let mut come = vec![0; 2 * PIPE_BYTES]; // more than lies in the pipe: the driver lives
        drop(line);
        thread.block_on(server.read_exact(&mut come)).unwrap(); // what is asked has a clone
        drop(asked);
        thread.block_on(async { timeout(PATIENCE, server.read_to_end(&mut come)).await.unwrap().unwrap() });
        assert!(come.len() < 4 * PIPE_BYTES, "nobody waits for the rest");
    }

    #[test]
    fn connection_is_closed_when_the_thread_ends_whoever_has_it_still() {
        let ends = Ends::new();
        let mut asked = ping(&ends.line);
        let Ends { thread, line: _line, mut server } = ends;
        drop(thread);
        let mut come = Vec::new();
        assert!(matches!(poll_once(pin!(server.read_to_end(&mut come))), Poll::Ready(Ok(_))));
        assert!(matches!(poll_once(asked.as_mut()), Poll::Ready(Err(_))));
    }

    #[tokio::test]
    async fn host_with_several_addresses_is_reached_at_the_one_that_answers() {
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let there = listener.local_addr().unwrap();
        let nobody = SocketAddr::from(([127, 0, 0, 2], there.port()));
        for addresses in [[there, nobody], [nobody, there]] {
            for nodelay in [true, false] {
                let settings = TcpSettings::default().set_nodelay(nodelay);
                let stream = connect(addresses.into_iter(), &settings).await.unwrap();
                assert_eq!((stream.peer_addr().unwrap(), stream.nodelay().unwrap()), (there, nodelay));
            }
        }
        let refused = connect([nobody, nobody].into_iter(), &TcpSettings::default()).await.unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
    }
}
