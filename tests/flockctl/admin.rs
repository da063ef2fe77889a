//! The client's administrative calls, on which flockctl stands, when the network does not do its part.

use std::future::Future;
use std::net::SocketAddr;

use flock_client::{AdminError, Flock};
use flock_tests::args;
use flock_tests::on_own_servers;
use flock_tests::proxy::{Cut, Direction, Fault, Proxy};
use flock_tests::resp::Protocol;
use flock_tests::server::Builder;
use flock_tests::wait::wait_until;

use crate::scene::{SOON, ask, hold, ms};

on_own_servers![
    revocation_without_an_answer_is_not_repeated,
    look_without_an_answer_is_repeated,
    lists_end_at_their_pattern_and_owner,
    refusal_of_the_server_is_told,
    nothing_is_asked_of_a_client_that_is_shut_down,
];

#[track_caller]
fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(2 * SOON, test).await }).expect("it takes too long");
}

async fn connect(address: SocketAddr) -> Flock {
    let builder = Flock::builder(format!("valkey://{address}")).response_timeout(ms(300)).operation_timeout(2 * SOON);
    builder.connect().await.expect("the server is there")
}

fn revocation_without_an_answer_is_not_repeated(builder: Builder) {
    // Carried out, and its answer lost: a second one would end the hold of the next in the queue.
    let server = builder.start();
    hold(&server, "k", "alice");
    let mut bob = server.connect(Protocol::Resp2);
    bob.send(&args!["FLOCK.ACQUIRE", "k", "bob", 60_000, "BLOCK", 0]);
    server.wait_until_blocked(&bob);
    run(async {
        let proxy = Proxy::to(server.addr());
        let flock = connect(proxy.addr()).await;
        proxy.set_existing(Direction::ToClient, Fault::Drop);
        let error = flock.revoke("k").await.unwrap_err();
        assert!(matches!(error, AdminError::Unknown(_)) && !error.is_retryable(), "{error:?}");
        let token = bob.recv().as_token().to_string();
        assert_eq!(ask(&server, &["FLOCK.CHECK", "k", &token]).as_int(), 1);
        assert_eq!(server.info("flock").number("flock_revoked"), 1);
    });
}

fn look_without_an_answer_is_repeated(builder: Builder) {
    let server = builder.start();
    let token = hold(&server, "k", "alice");
    run(async {
        let proxy = Proxy::to(server.addr());
        let flock = connect(proxy.addr()).await;
        proxy.set_existing(Direction::ToClient, Fault::Drop);
        let asking = tokio::spawn(async move { flock.info("k", 64).await });
        let asked = || server.info("commandstats").get("cmdstat_FLOCK.INFO").is_some();
        wait_until("it was asked once", SOON, asked);
        proxy.cut(Cut::Reset);
        let info = asking.await.unwrap().unwrap().expect("it is held");
        assert_eq!(info.holders[0].token.get(), token);
    });
}

fn lists_end_at_their_pattern_and_owner(builder: Builder) {
    let server = builder.start();
    for number in 0..25 {
        hold(&server, format!("a{number}"), if number % 5 == 0 { "alice" } else { "bob" });
    }
    hold(&server, "b", "alice");
    run(async {
        let flock = connect(server.addr()).await;
        assert_eq!(flock.list("*").page_size(7).all().await.unwrap().len(), 26);
        assert_eq!(flock.list("a*").page_size(7).all().await.unwrap().len(), 25);
        assert_eq!(flock.list("a*").owner("alice").page_size(1).all().await.unwrap().len(), 5);
        let mut pages = flock.list("*").page_size(7);
        let mut seen = 0;
        while let Some(page) = pages.next_page().await.unwrap() {
            assert!(page.len() <= 7);
            seen += page.len();
        }
        assert_eq!((seen, pages.next_page().await.unwrap()), (26, None));
    });
}

fn refusal_of_the_server_is_told(builder: Builder) {
    let server = builder.start();
    ask(&server, &["SET", "text", "x"]);
    ask(
        &server,
        &["ACL", "SETUSER", "reader", "on", "nopass", "~*", "resetchannels", "&flock:*", "+@flock", "+subscribe"],
    );
    run(async {
        let flock = connect(server.addr()).await;
        match flock.info("text", 0).await.unwrap_err() {
            AdminError::Server(error) => assert_eq!(error.code(), "WRONGTYPE"),
            error => panic!("{error:?}"),
        }
        let url = format!("valkey://reader:any@{}", server.addr());
        let reader = Flock::connect(url).await.unwrap();
        match reader.revoke_owner("k", "alice").await.unwrap_err() {
            AdminError::Server(error) => assert_eq!(error.code(), "NOPERM"),
            error => panic!("{error:?}"),
        }
    });
}

fn nothing_is_asked_of_a_client_that_is_shut_down(builder: Builder) {
    let server = builder.start();
    run(async {
        let flock = connect(server.addr()).await;
        flock.shutdown(SOON).await.unwrap();
        assert!(flock.stats().await.is_err());
    });
}
