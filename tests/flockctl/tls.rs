//! flockctl over TLS. The older of the two servers speaks it.

use std::net::{Ipv4Addr, TcpListener};

use flock_tests::args;
use flock_tests::reply::Reply;
use flock_tests::resp::Protocol;
use flock_tests::server::{Generation, Server};
use flock_tests::wait::wait_for;

use crate::scene::{SOON, finish, flockctl};

#[test]
fn server_is_reached_over_tls_if_it_is_trusted() {
    let server = Server::builder().generation(Generation::Old).start();
    let own = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let file = |name: &str, text: String| {
        let path = server.dir().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (certificate, key) = (file("own.pem", own.cert.pem()), file("own.key", own.signing_key.serialize_pem()));
    let mut admin = server.connect(Protocol::Resp2);
    // Somebody may take the free port before the server does; not again and again.
    let port = wait_for("the server speaks TLS", SOON, || {
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
        let files = ["tls-cert-file", &certificate, "tls-key-file", &key, "tls-ca-cert-file", &certificate];
        let port = free.to_string();
        let config = [&["CONFIG", "SET"], &files[..], &["tls-port", &port]].concat();
        (admin.cmd(&config) == Reply::ok()).then_some(free)
    });
    admin.cmd(&args!["FLOCK.ACQUIRE", "k", "alice", 60_000]).as_token();
    let url = format!("valkeys://127.0.0.1:{port}");
    let ours = ["--cert-file", &certificate, "--cert-key-file", &key];
    let ls = finish(flockctl(&server, &[&["--url", &url, "--ca-file", &certificate], &ours[..], &["ls"]].concat()));
    assert!(ls.code == Some(0) && ls.out.contains("alice"), "{ls:?}");
    let ls = finish(flockctl(&server, &[&["--url", &url], &ours[..], &["ls"]].concat()));
    assert!(ls.code == Some(76) && ls.err.contains("no trusted TLS connection"), "{ls:?}");
    let ls = finish(flockctl(&server, &["--url", &url, "--ca-file", "/nowhere.pem", "ls"]));
    assert!(ls.code == Some(71) && ls.err.contains("cannot read /nowhere.pem"), "{ls:?}");
}
