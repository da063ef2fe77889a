//! Where servers are: hosts and ports, and the URLs that name several.

use std::fmt;

use redis::{ConnectionAddr, ConnectionInfo};

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Address {
    pub(crate) host: String,
    pub(crate) port: u16,
}

impl Address {
    /// `host[:port]`, an IPv6 address in brackets.
    pub(crate) fn parse(text: &str, port_unless_said: u16) -> Option<Self> {
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => rest.split_once(']')?,
            None => text.find(':').map_or((text, ""), |colon| text.split_at(colon)),
        };
        let port = match port.strip_prefix(':') {
            Some(port) => port.parse().ok()?,
            None if port.is_empty() => port_unless_said,
            None => return None,
        };
        (!host.is_empty()).then(|| Self { host: host.to_owned(), port })
    }

    /// The same connection to this address.
    pub(crate) fn put_into(&self, info: &ConnectionInfo) -> ConnectionInfo {
        let Self { host, port } = self.clone();
        let addr = match info.addr().clone() {
            ConnectionAddr::TcpTls { insecure, tls_params, .. } => {
                ConnectionAddr::TcpTls { host, port, insecure, tls_params }
            }
            _ => ConnectionAddr::Tcp(host, port),
        };
        info.clone().set_addr(addr)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

/// `valkey+kind://[user][:password@]host[:port],.../path`, in pieces.
#[derive(Debug)]
pub(crate) struct HostsUrl<'a> {
    scheme: &'a str,
    /// With the `@`, if there is one.
    user: &'a str,
    /// At least one.
    pub(crate) hosts: Vec<Address>,
    pub(crate) path: Option<&'a str>,
}

impl<'a> HostsUrl<'a> {
    pub(crate) fn is_one(url: &str, kind: &str) -> bool {
        let scheme = url.split_once("://").and_then(|(scheme, _)| scheme.strip_suffix(kind));
        scheme.is_some_and(|scheme| scheme.ends_with('+'))
    }

    pub(crate) fn parse(url: &'a str, kind: &str, port_unless_said: u16) -> Option<Self> {
        let (scheme, rest) = url.split_once("://")?;
        let scheme = scheme.strip_suffix(kind)?.strip_suffix('+')?;
        let (authority, path) = rest.split_once('/').map_or((rest, None), |(authority, path)| (authority, Some(path)));
        let (user, hosts) = authority.split_at(authority.rfind('@').map_or(0, |at| at + 1));
        let hosts = hosts.split(',').map(|host| Address::parse(host, port_unless_said)).collect::<Option<_>>()?;
        let known = ["valkey", "redis", "valkeys", "rediss"].contains(&scheme);
        (known && !rest.contains(['?', '#'])).then_some(Self { scheme, user, hosts, path })
    }

    /// The URL of a server as it would be at the first host: with the scheme, the credentials and the database of them all.
    pub(crate) fn server(&self, db: &str) -> Option<String> {
        let db: u32 = db.parse().ok()?;
        Some(format!("{}://{}{}/{db}", self.scheme, self.user, self.hosts.first()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_url_is_taken_to_pieces() {
        let url = HostsUrl::parse("rediss+cluster://me:p%40ss@a,b:1,[::1]:2", "cluster", 6379).unwrap();
        let hosts: Vec<_> = url.hosts.iter().map(Address::to_string).collect();
        assert_eq!(hosts, ["a:6379", "b:1", "[::1]:2"]);
        assert_eq!((url.path, url.server("2")), (None, Some("rediss://me:p%40ss@a:6379/2".to_owned())));
        assert_eq!(HostsUrl::parse("valkey+cluster://h/", "cluster", 1).unwrap().path, Some(""));
        for wrong in ["", "h,", "h:x", "h?a=b", "h#x", "me@", "[::1"] {
            assert!(HostsUrl::parse(&format!("valkey+cluster://{wrong}"), "cluster", 1).is_none(), "{wrong}");
        }
        assert!(HostsUrl::parse("http+cluster://h", "cluster", 1).is_none());
        assert!(HostsUrl::is_one("http+cluster://h", "cluster") && !HostsUrl::is_one("v://me:+cluster@h", "cluster"));
        assert!(!HostsUrl::is_one("valkeycluster://h", "cluster"));
    }
}
