//! Each fault, as the client and the server see it. The server answers every byte with the same byte.

use std::sync::mpsc::channel;

use super::*;
use crate::resp::{Conn, Protocol};
use crate::server::Server;
use crate::wait::wait_until;

const SOON: Duration = Duration::from_secs(5);
const A_WHILE: Duration = Duration::from_millis(30);

/// Echoes what it reads, and hands out its ends of the connections, for tests that look at them.
struct Echo {
    address: SocketAddr,
    connections: Receiver<TcpStream>,
}

impl Echo {
    fn start() -> Echo {
        let listener = TcpListener::bind("127.0.0.1:0").expect("cannot listen");
        let address = listener.local_addr().expect("a listener has an address");
        let (accepted, connections) = channel();
        // The threads end with the test process.
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let copy = stream.try_clone().expect("cannot clone a socket");
                thread::spawn(move || echo(&stream));
                let _ = accepted.send(copy);
            }
        });
        Echo { address, connections }
    }
}

fn echo(mut stream: &TcpStream) {
    let mut buffer = [0; 4096];
    while let Ok(length @ 1..) = stream.read(&mut buffer) {
        let _ = stream.write_all(&buffer[..length]);
    }
}

fn connect(proxy: &Proxy) -> TcpStream {
    let stream = TcpStream::connect(proxy.addr()).expect("cannot connect to the proxy");
    stream.set_read_timeout(Some(SOON)).expect("cannot set a timeout");
    stream
}

fn send(mut client: &TcpStream, bytes: &[u8]) {
    client.write_all(bytes).expect("cannot send");
}

#[track_caller]
fn expect(mut client: &TcpStream, bytes: &[u8]) {
    let mut got = vec![0; bytes.len()];
    client.read_exact(&mut got).expect("an answer should come");
    assert_eq!(got, bytes);
}

#[track_caller]
fn expect_silence(mut client: &TcpStream) {
    client.set_read_timeout(Some(A_WHILE)).expect("cannot set a timeout");
    let error = client.read(&mut [0]).expect_err("nothing should come");
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
    client.set_read_timeout(Some(SOON)).expect("cannot set a timeout");
}

#[test]
fn bytes_pass_and_the_end_too() {
    let echo = Echo::start();
    let proxy = Proxy::to(echo.address);
    let mut client = connect(&proxy);
    let megabyte = vec![7; 1 << 20];
    let sender = client.try_clone().expect("cannot clone a socket");
    let (bytes, length) = (megabyte.clone(), megabyte.len() as u64);
    let sending = thread::spawn(move || send(&sender, &bytes));
    expect(&client, &megabyte);
    sending.join().expect("the sender should not fail");
    // The proxy counts what it has written: a moment after the reader may have it.
    wait_until("all bytes are counted", SOON, || proxy.passed(Direction::ToClient) == length);
    client.shutdown(Shutdown::Write).expect("cannot shut down");
    // The echo server sees the end and closes too; only its copy in the test must go first.
    drop(echo.connections.recv_timeout(SOON));
    assert_eq!(client.read(&mut [0]).expect("the end should come"), 0);
    wait_until("the link has ended", SOON, || proxy.links() == 0);
}

#[test]
fn held_bytes_arrive_when_healed() {
    let echo = Echo::start();
    let proxy = Proxy::to(echo.address);
    let client = connect(&proxy);
    proxy.set(Direction::ToClient, Fault::Hold);
    send(&client, b"one");
    wait_until("the reply is held", SOON, || proxy.arrived(Direction::ToClient) == 3);
    expect_silence(&client);
    proxy.heal();
    expect(&client, b"one");
}

#[test]
fn held_old_link_does_not_hold_a_new_one() {
    let echo = Echo::start();
    let proxy = Proxy::to(echo.address);
    let old = connect(&proxy);
    send(&old, b"1");
    expect(&old, b"1");
    proxy.set_existing(Direction::ToClient, Fault::Hold);
    let new = connect(&proxy);
    send(&old, b"2");
    send(&new, b"3");
    expect(&new, b"3");
    expect_silence(&old);
}

#[test]
fn dropped_replies_never_arrive() {
    let echo = Echo::start();
    let proxy = Proxy::to(echo.address);
    let client = connect(&proxy);
    proxy.set(Direction::ToClient, Fault::Drop);
    send(&client, b"lost");
    wait_until("the reply is lost", SOON, || proxy.dropped(Direction::ToClient) == 4);
    proxy.heal();
    send(&client, b"found");
    expect(&client, b"found");
    assert_eq!(proxy.arrived(Direction::ToClient), 9);
}

#[test]
fn delay_is_once_per_byte_not_once_per_chunk() {
    let echo = Echo::start();
    let proxy = Proxy::to(echo.address);
    let client = connect(&proxy);
    let delay = Duration::from_millis(100);
    proxy.set(Direction::ToServer, Fault::Delay(delay));
    let start = Instant::now();
    for (count, byte) in (1..).zip(b"12345678") {
        send(&client, &[*byte]);
        wait_until("the byte is a chunk of its own", SOON, || proxy.arrived(Direction::ToServer) == count);
    }
    expect(&client, b"12345678");
    let took = start.elapsed();
    assert!(took >= delay, "{took:?}");
    assert!(took < delay * 6, "eight delays one after the other: {took:?}");
}

#[test]
fn trickle_sends_byte_by_byte() {
    let echo = Echo::start();
    let proxy = Proxy::to(echo.address);
    let client = connect(&proxy);
    proxy.set(Direction::ToClient, Fault::Trickle(Duration::from_millis(10)));
    let start = Instant::now();
    send(&client, b"12345");
    expect(&client, b"12345");
    assert!(start.elapsed() >= Duration::from_millis(40));
}

#[test]
fn duplicate_arrives_twice() {
    let echo = Echo::start();
    let proxy = Proxy::to(echo.address);
    let client = connect(&proxy);
    proxy.set(Direction::ToServer, Fault::Duplicate);
    send(&client, b"ab");
    expect(&client, b"abab");
}

#[test]
fn cut_after_a_byte_delivers_just_that() {
    let echo = Echo::start();
    let proxy = Proxy::to(echo.address);
    for how in [Cut::Fin, Cut::Reset] {
        proxy.heal();
        let client = connect(&proxy);
        proxy.set(Direction::ToClient, Fault::CutAfter(3, how));
        send(&client, b"abcdef");
        expect(&client, b"abc");
        expect_end(&client, how);
    }
}

#[test]
fn both_sides_learn_of_a_cut() {
    let echo = Echo::start();
    let proxy = Proxy::to(echo.address);
    for how in [Cut::Fin, Cut::Reset] {
        let client = connect(&proxy);
        send(&client, b"1");
        expect(&client, b"1");
        let server = echo.connections.recv_timeout(SOON).expect("the server has the connection");
        proxy.cut(how);
        assert_eq!(proxy.links(), 0);
        expect_end(&client, how);
        // The echo thread has read the end of its side; what it cannot do any more is send.
        server.set_write_timeout(Some(SOON)).expect("cannot set a timeout");
        let fails = || (&server).write_all(b"x").is_err();
        wait_until("the server's side is dead", SOON, fails);
    }
}

#[track_caller]
fn expect_end(mut client: &TcpStream, how: Cut) {
    match (how, client.read(&mut [0])) {
        (Cut::Fin, Ok(0)) => {}
        (Cut::Reset, Err(error)) if error.kind() == ErrorKind::ConnectionReset => {}
        (how, outcome) => panic!("expected {how:?}, got {outcome:?}"),
    }
}

#[test]
fn refused_clients_learn_so_and_old_links_live_on() {
    let echo = Echo::start();
    let proxy = Proxy::to(echo.address);
    let old = connect(&proxy);
    send(&old, b"1");
    expect(&old, b"1");
    proxy.refuse();
    let error = TcpStream::connect(proxy.addr()).expect_err("nobody should listen");
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    send(&old, b"2");
    expect(&old, b"2");
    proxy.accept();
    let new = connect(&proxy);
    send(&new, b"3");
    expect(&new, b"3");
}

#[test]
fn server_that_is_down_ends_the_connection() {
    let nobody = PortLease::take();
    let proxy = Proxy::to(SocketAddr::from((Ipv4Addr::LOCALHOST, nobody.number())));
    let mut client = connect(&proxy);
    assert!(matches!(client.read(&mut [0]), Ok(0) | Err(_)));
}

#[test]
fn half_open_server_side_does_not_learn_of_the_close() {
    let server = Server::builder().without_module().start();
    let proxy = Proxy::to(server.addr());
    let mut admin = server.connect(Protocol::Resp2);
    let waiter = Conn::open(proxy.addr(), Protocol::Resp2);
    let id = waiter.id().to_string();
    proxy.half_open();
    waiter.abort();
    crate::wait::holds_for("the server knows the client", A_WHILE, || {
        !admin.cmd(&["CLIENT", "LIST", "ID", &id]).as_bytes().is_empty()
    });
    proxy.cut(Cut::Reset);
    server.wait_until_gone(id.parse().expect("an id is a number"));
}

#[test]
fn server_that_speaks_to_a_client_long_gone_learns_that_it_is() {
    let echo = Echo::start();
    let proxy = Proxy::to(echo.address);
    let client = connect(&proxy);
    send(&client, b"x");
    expect(&client, b"x");
    let mut server = echo.connections.recv_timeout(SOON).expect("the server should have a connection");
    proxy.half_open();
    drop(client);
    wait_until("the close is lost", SOON, || proxy.shared.lock().links.values().all(|link| link.ended[0]));
    proxy.heal();
    // The first byte finds the client's side closed, and only the second finds that out.
    wait_until("the link has ended", SOON, || {
        let _ = server.write_all(b"y");
        proxy.links() == 0
    });
    wait_until("nobody waits for it", SOON, || proxy.shared.lock().threads == 0);
}

#[test]
fn dropped_proxy_leaves_nothing_behind() {
    let echo = Echo::start();
    let proxy = Proxy::to(echo.address);
    let (address, client) = (proxy.addr(), connect(&proxy));
    send(&client, b"1");
    expect(&client, b"1");
    drop(proxy);
    expect_end(&client, Cut::Reset);
    assert!(TcpStream::connect(address).is_err());
}
