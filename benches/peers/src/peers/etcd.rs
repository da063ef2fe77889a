//! The lock service of etcd: a request waits in the server. It is asked through etcd's own JSON gateway, which is a little slower than
//! gRPC. `$PEERS_ETCD` is its address. What it grants is in its log on disk first.

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use super::{Contender, LEASE};

/// `lock`, in base 64.
const NAME: &str = "bG9jaw==";

/// A connection with a lease.
pub(crate) struct Session {
    stream: BufReader<TcpStream>,
    lease: String,
    key: String,
}

/// `count` connections; none if there is no server.
pub(crate) async fn sessions(count: usize) -> Option<Vec<Session>> {
    let address = std::env::var("PEERS_ETCD").ok()?;
    let mut all = Vec::new();
    for _ in 0..count {
        let stream = TcpStream::connect(&address).await.expect("etcd listens");
        stream.set_nodelay(true).expect("a TCP socket takes TCP_NODELAY");
        let mut session = Session { stream: BufReader::new(stream), lease: String::new(), key: String::new() };
        let granted = session.ask("lease/grant", &format!("{{\"TTL\":{}}}", LEASE.as_secs() * 10)).await;
        session.lease = field(&granted, "ID");
        all.push(session);
    }
    Some(all)
}

/// The text of a field of a flat JSON object.
fn field(json: &str, name: &str) -> String {
    let value = json.split_once(&format!("\"{name}\":\"")).and_then(|(_, rest)| rest.split_once('"'));
    value.unwrap_or_else(|| panic!("there is no {name} in {json}")).0.to_owned()
}

impl Session {
    async fn ask(&mut self, what: &str, body: &str) -> String {
        let length = body.len();
        let request = format!("POST /v3/{what} HTTP/1.1\r\nHost: etcd\r\nContent-Length: {length}\r\n\r\n{body}");
        self.stream.get_mut().write_all(request.as_bytes()).await.expect("etcd reads");
        let status = self.line().await;
        let mut length = 0;
        loop {
            let line = self.line().await.to_ascii_lowercase();
            if line.is_empty() {
                break;
            }
            if let Some(value) = line.strip_prefix("content-length:") {
                length = value.trim().parse().expect("a length is a number");
            }
        }
        let mut answer = vec![0; length];
        self.stream.read_exact(&mut answer).await.expect("etcd answers");
        let answer = String::from_utf8_lossy(&answer).into_owned();
        assert!(status.contains(" 200 "), "{status}: {answer}");
        answer
    }

    async fn line(&mut self) -> String {
        let mut line = String::new();
        self.stream.read_line(&mut line).await.expect("etcd answers");
        line.trim_end().to_owned()
    }
}

impl Contender for Session {
    async fn acquire(&mut self) {
        let answer = self.ask("lock/lock", &format!("{{\"name\":\"{NAME}\",\"lease\":\"{}\"}}", self.lease)).await;
        self.key = field(&answer, "key");
    }

    async fn release(&mut self) {
        let key = std::mem::take(&mut self.key);
        self.ask("lock/unlock", &format!("{{\"key\":\"{key}\"}}")).await;
    }
}
