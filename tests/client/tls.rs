//! TLS against the older server, which is built with it; the certificates are made here.

use std::net::{Ipv4Addr, TcpListener};
use std::time::Instant;

use flock_client::{ConnectError, Flock, LossReason, Released};
use flock_tests::args;
use flock_tests::proxy::{Cut, Proxy};
use flock_tests::reply::Reply;
use flock_tests::resp::Protocol;
use flock_tests::server::{Generation, Server};
use flock_tests::topology::Cluster;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair,
};
use tokio::time::timeout;

use crate::apart::{Apart, say, task};
use crate::scene::{
    SOON, assert_in_time, assert_kept, connections, give_back, held, held_and_waiting, is_current, kill, ms, revoke,
    wait_until_waiting, watch_the_machine, within_bounds,
};

/// A certificate and its key, PEM.
struct Certified {
    certificate: String,
    key: String,
}

/// A certificate that has the name of its issuer counts as signed by itself.
fn named(name: &str) -> DistinguishedName {
    let mut names = DistinguishedName::new();
    names.push(DnType::CommonName, name);
    names
}

struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new([]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name = named("authority");
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    fn pem(&self) -> String {
        self.0.pem()
    }

    fn certify(&self, names: &[&str], purpose: ExtendedKeyUsagePurpose) -> Certified {
        let alternatives: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(alternatives).unwrap();
        params.distinguished_name = named(names[0]);
        params.extended_key_usages = vec![purpose];
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap().pem();
        Certified { certificate, key: key.serialize_pem() }
    }
}

/// A server that speaks TLS on a second port, under a certificate for these names.
struct Secure {
    server: Server,
    authority: Authority,
    port: u16,
}

impl Secure {
    fn start(names: &[&str], wants_client_certificates: bool) -> Self {
        Self::on(Server::builder().generation(Generation::Old).start(), names, wants_client_certificates)
    }

    fn on(server: Server, names: &[&str], wants_client_certificates: bool) -> Self {
        let authority = Authority::new();
        let own = authority.certify(names, ExtendedKeyUsagePurpose::ServerAuth);
        let file = |name: &str, text: &str| {
            let path = server.dir().join(name);
            std::fs::write(&path, text).unwrap();
            path.to_str().unwrap().to_owned()
        };
        let (certificate, key) = (file("server.pem", &own.certificate), file("server.key", &own.key));
        let authorities = file("ca.pem", &authority.pem());
        let clients = if wants_client_certificates { "yes" } else { "no" };
        let mut admin = server.connect(Protocol::Resp2);
        // Somebody may take the free port before the server does; not again and again.
        let port = flock_tests::wait::wait_for("the server speaks TLS", SOON, || {
            let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr()).unwrap();
            let config = args![
                "CONFIG",
                "SET",
                "tls-cert-file",
                certificate,
                "tls-key-file",
                key,
                "tls-ca-cert-file",
                authorities,
                "tls-auth-clients",
                clients,
                "tls-port",
                free.port()
            ];
            (admin.cmd(&config) == Reply::ok()).then(|| free.port())
        });
        Self { server, authority, port }
    }

    fn url(&self) -> String {
        format!("valkeys://127.0.0.1:{}", self.port)
    }

    fn builder(&self) -> flock_client::Builder {
        Flock::builder(self.url()).ca_certificates(self.authority.pem())
    }
}

const OURS: &[&str] = &["localhost", "127.0.0.1"];

#[track_caller]
fn assert_distrust(outcome: Result<Flock, ConnectError>, began: Instant) {
    let error = outcome.unwrap_err();
    assert!(matches!(error, ConnectError::Tls(_)), "{error:?}");
    assert!(!error.is_retryable());
    assert_in_time(began, began.elapsed(), ms(2000));
}

#[test]
fn everything_works_over_tls() {
    within_bounds(async {
        let secure = Secure::start(OURS, false);
        for url in [secure.url(), format!("rediss://localhost:{}/0", secure.port)] {
            let flock = Flock::builder(url).ca_certificates(secure.authority.pem()).connect().await.unwrap();
            let first = held(&flock, "k").await;
            let waiting = tokio::spawn(held(&flock, "k"));
            wait_until_waiting(&secure.server, 1);
            give_back(first).await;
            let second = waiting.await.unwrap();
            assert!(is_current(&secure.server, &second));
            second.renew().await.unwrap();
            revoke(&secure.server, "k");
            assert_eq!(timeout(SOON, second.lost()).await.unwrap(), Some(LossReason::Revoked));
            flock.shutdown(SOON).await.unwrap();
            assert_eq!(held_and_waiting(&secure.server), (0, 0));
        }
    });
}

#[test]
fn nodes_of_a_cluster_speak_tls() {
    // A node names the ports for TLS to who asks by TLS.
    let mut cluster = Cluster::start(&Server::builder().generation(Generation::Old), 1);
    within_bounds(async {
        let secure = Secure::on(cluster.nodes.remove(0), OURS, true);
        // One that has begun to speak TLS while it runs must be told to tell.
        let announce = args!["CONFIG", "SET", "cluster-announce-tls-port", secure.port];
        assert_eq!(secure.server.connect(Protocol::Resp2).cmd(&announce), Reply::ok());
        let url = format!("valkeys+cluster://localhost:{},127.0.0.1:{}", secure.port, secure.port);
        let builder = Flock::builder(url).ca_certificates(secure.authority.pem());
        let me = secure.authority.certify(&["me"], ExtendedKeyUsagePurpose::ClientAuth);
        let flock = builder.clone().client_certificate(me.certificate, me.key).connect().await.unwrap();
        let first = held(&flock, "k").await;
        let waiting = tokio::spawn(held(&flock, "k"));
        wait_until_waiting(&secure.server, 1);
        assert_eq!(first.release().await.unwrap(), Released::Released);
        assert!(is_current(&secure.server, &waiting.await.unwrap()));
        assert_distrust(builder.connect().await, Instant::now());
    });
}

#[test]
fn sentinels_and_the_primary_speak_tls() {
    within_bounds(async {
        let secure = Secure::start(OURS, false);
        let file = |name: &str| secure.server.dir().join(name).display().to_string();
        let builder = Server::builder()
            .generation(Generation::Old)
            .sentinel()
            .config("tls-cert-file", file("server.pem"))
            .config("tls-key-file", file("server.key"))
            .config("tls-ca-cert-file", file("ca.pem"))
            .config("tls-auth-clients", "no")
            .config("tls-replication", "yes")
            .config("sentinel", format!("monitor main 127.0.0.1 {} 1", secure.port));
        let (_sentinel, port) = flock_tests::wait::wait_for("a sentinel speaks TLS", SOON, || {
            let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr()).unwrap();
            builder.clone().config("tls-port", free.port()).try_start().ok().map(|sentinel| (sentinel, free.port()))
        });
        let builder = Flock::builder(format!("valkeys+sentinel://127.0.0.1:{port}/main"));
        let flock = builder.clone().ca_certificates(secure.authority.pem()).connect().await.unwrap();
        assert!(is_current(&secure.server, &held(&flock, "k").await));
        let began = Instant::now();
        assert_distrust(builder.ca_certificates(Authority::new().pem()).connect().await, began);
    });
}

#[test]
fn unknown_authority_is_refused_at_once() {
    within_bounds(async {
        let secure = Secure::start(OURS, false);
        let began = Instant::now();
        let stranger = Authority::new().pem();
        assert_distrust(Flock::builder(secure.url()).ca_certificates(stranger).connect().await, began);
        // Nor does the platform know it.
        let began = Instant::now();
        assert_distrust(Flock::connect(secure.url()).await, began);
    });
}

#[test]
fn authority_of_the_platform_is_trusted() {
    // The platform's store is what these variables name, and the process's: so it is another process that connects.
    if let Some(url) = task() {
        return within_bounds(async {
            let outcome = Flock::connect(url).await;
            say(if outcome.is_ok() { "trusted" } else { "not trusted" });
        });
    }
    watch_the_machine();
    let secure = Secure::start(OURS, false);
    let (name, store) = ("tls::authority_of_the_platform_is_trusted", secure.server.dir().join("ca.pem"));
    let empty = secure.server.dir().join("empty.pem");
    std::fs::write(&empty, "").unwrap();
    for (store, verdict) in [(store, "trusted"), (empty, "not trusted")] {
        let worker = Apart::start_in(name, &secure.url(), &[("SSL_CERT_FILE", &store)]);
        assert_eq!(worker.hear(SOON), verdict);
    }
}

#[test]
fn certificate_for_another_host_is_refused() {
    within_bounds(async {
        let secure = Secure::start(&["other.example"], false);
        let began = Instant::now();
        assert_distrust(secure.builder().connect().await, began);
    });
}

#[test]
fn server_that_wants_a_certificate_gets_one() {
    within_bounds(async {
        let secure = Secure::start(OURS, true);
        let began = Instant::now();
        assert_distrust(secure.builder().connect().await, began);
        let strangers = Authority::new().certify(&["client"], ExtendedKeyUsagePurpose::ClientAuth);
        let began = Instant::now();
        let builder = secure.builder().client_certificate(strangers.certificate, strangers.key);
        assert_distrust(builder.connect().await, began);
        let own = secure.authority.certify(&["client"], ExtendedKeyUsagePurpose::ClientAuth);
        let flock = secure.builder().client_certificate(own.certificate, own.key).connect().await.unwrap();
        assert!(held(&flock, "k").await.is_valid());
    });
}

#[test]
fn certificates_that_cannot_be_read_are_told_without_the_key() {
    within_bounds(async {
        let secure = Secure::start(OURS, false);
        let own = secure.authority.certify(&["client"], ExtendedKeyUsagePurpose::ClientAuth);
        let builder = secure.builder().client_certificate(own.certificate, "not a key");
        let shown = format!("{builder:?}");
        assert!(!shown.contains("not a key"), "{shown}");
        let error = builder.connect().await.unwrap_err();
        assert!(matches!(error, ConnectError::Config(_)), "{error:?}");
        let error = Flock::builder(format!("{}/#insecure", secure.url())).connect().await.unwrap_err();
        assert!(matches!(error, ConnectError::Config(_)), "{error:?}");
    });
}

#[test]
fn plain_and_secure_ports_do_not_understand_each_other() {
    within_bounds(async {
        let secure = Secure::start(OURS, false);
        let plain = format!("valkey://127.0.0.1:{}", secure.port);
        assert!(Flock::builder(plain).connect_timeout(ms(500)).connect().await.is_err());
        let wrong = format!("valkeys://{}", secure.server.addr());
        let builder = Flock::builder(wrong).ca_certificates(secure.authority.pem());
        assert!(builder.connect_timeout(ms(500)).connect().await.is_err());
    });
}

#[test]
fn broken_tls_connections_are_made_anew() {
    within_bounds(async {
        let secure = Secure::start(OURS, false);
        let proxy = Proxy::to((Ipv4Addr::LOCALHOST, secure.port).into());
        let url = format!("valkeys://{}", proxy.addr());
        let flock = Flock::builder(url).ca_certificates(secure.authority.pem()).connect().await.unwrap();
        let guard = flock.lock("k").lease(ms(2000)).await.unwrap();
        let began = Instant::now();
        for round in 0..4 {
            if round % 2 == 0 {
                proxy.cut(Cut::Reset);
            } else {
                kill(&secure.server, &[false, true].map(|listening| connections(&secure.server, listening)).concat());
            }
            give_back(held(&flock, "other").await).await;
            tokio::time::sleep(ms(600)).await;
            assert_kept(&secure.server, &guard, began, ms(2000));
        }
    });
}
