//! Ports nobody else takes, while a server is down too.

use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::sync::atomic::{AtomicU16, Ordering};

/// Below the range from which Linux takes the local ports of outgoing connections (32768 and up): a server that is
/// restarted finds its port free, however many connections were made meanwhile.
const FIRST: u16 = 11_000;
const COUNT: u16 = 20_000;

/// A TCP port of 127.0.0.1, reserved for one server from before its first start until its guard is gone.
///
/// The reservation is the *UDP* port of the same number, bound and held: the kernel lets one process of the machine have it,
/// and takes it back when that process dies, however it dies. So parallel test binaries never hand out one port twice.
#[derive(Debug)]
pub(crate) struct PortLease {
    port: u16,
    _reservation: UdpSocket,
}

impl PortLease {
    /// Reserves a port on which nothing listens.
    ///
    /// # Panics
    /// If there is none.
    pub(crate) fn take() -> PortLease {
        (0..COUNT)
            .find_map(|_| PortLease::try_take(next_candidate()))
            .expect("no free TCP port between 11000 and 31000")
    }

    fn try_take(port: u16) -> Option<PortLease> {
        let reservation = UdpSocket::bind((Ipv4Addr::LOCALHOST, port)).ok()?;
        // Programs that know nothing of our reservations may listen there.
        TcpListener::bind((Ipv4Addr::LOCALHOST, port)).ok()?;
        Some(PortLease { port, _reservation: reservation })
    }

    pub(crate) fn number(&self) -> u16 {
        self.port
    }
}

/// Candidates go round; processes start at different places, so that they seldom meet.
fn next_candidate() -> u16 {
    static STEP: AtomicU16 = AtomicU16::new(0);
    let step = u32::from(STEP.fetch_add(1, Ordering::Relaxed));
    let start = std::process::id().wrapping_mul(101);
    let offset = start.wrapping_add(step) % u32::from(COUNT);
    FIRST + u16::try_from(offset).expect("an offset below COUNT fits in 16 bits")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_port_is_not_taken_twice() {
        let lease = PortLease::take();
        assert!(PortLease::try_take(lease.number()).is_none());
    }

    #[test]
    fn port_with_a_listener_is_not_taken() {
        let lease = PortLease::take();
        let port = lease.number();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).expect("reserved port is free");
        drop(lease);
        assert!(PortLease::try_take(port).is_none());
        drop(listener);
    }
}
