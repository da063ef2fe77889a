//! TLS: whom to trust, and who we are.

use std::error::Error;
use std::sync::Arc;

use redis::{Client, ClientTlsConfig, ConnectionInfo, RedisError, TlsCertificates};
use rustls::crypto::{CryptoProvider, ring};

use crate::error::ConnectError;

#[derive(Clone, Default)]
pub(crate) struct Certificates {
    /// The only ones to be trusted; unless given, the platform's. PEM.
    pub(crate) authorities: Option<Vec<u8>>,
    /// The chain and the private key to show. PEM.
    pub(crate) own: Option<(Vec<u8>, Vec<u8>)>,
}

impl Certificates {
    pub(crate) fn are_none(&self) -> bool {
        self.authorities.is_none() && self.own.is_none()
    }

    pub(crate) fn client(&self, info: ConnectionInfo) -> Result<Client, ConnectError> {
        // The `redis` crate asks for the process's cryptography, and panics if there is none. A program that has chosen one keeps it.
        if CryptoProvider::get_default().is_none() {
            let _ = ring::default_provider().install_default();
        }
        let own = self.own.clone();
        let certificates = TlsCertificates {
            client_tls: own.map(|(client_cert, client_key)| ClientTlsConfig { client_cert, client_key }),
            root_cert: self.authorities.clone(),
        };
        Client::build_with_tls(info, certificates)
            .map_err(|error| ConnectError::Config(format!("a certificate or its key cannot be read: {error}").into()))
    }
}

/// Whether that connection failed because one end does not trust the other: it would fail in the same way again.
pub(crate) fn is_distrust(error: &RedisError) -> bool {
    use rustls::AlertDescription as Alert;
    use rustls::Error::{AlertReceived, InvalidCertificate, NoCertificatesPresented};
    type Inner = Arc<dyn Error + Send + Sync>;
    let inner = error.source().and_then(|source| source.downcast_ref::<Inner>());
    let io = inner.and_then(|inner| inner.downcast_ref::<std::io::Error>());
    let tls = io.and_then(std::io::Error::get_ref).and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match tls {
        Some(InvalidCertificate(_) | NoCertificatesPresented) => true,
        // Others, as an internal error of the server, may be over a moment later.
        Some(AlertReceived(alert)) => matches!(
            alert,
            Alert::NoCertificate
                | Alert::BadCertificate
                | Alert::UnsupportedCertificate
                | Alert::CertificateRevoked
                | Alert::CertificateExpired
                | Alert::CertificateUnknown
                | Alert::UnknownCA
                | Alert::AccessDenied
                | Alert::DecryptError // of a signature: the certificate is somebody else's
                | Alert::CertificateRequired
                | Alert::BadCertificateStatusResponse
                | Alert::BadCertificateHashValue
        ),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustls::AlertDescription as Alert;

    #[test]
    fn only_an_alert_about_a_certificate_is_distrust() {
        let received =
            |alert| is_distrust(&RedisError::from(std::io::Error::other(rustls::Error::AlertReceived(alert))));
        for alert in [Alert::UnknownCA, Alert::CertificateRequired, Alert::CertificateExpired] {
            assert!(received(alert), "{alert:?}");
        }
        for alert in [Alert::InternalError, Alert::HandshakeFailure, Alert::CloseNotify] {
            assert!(!received(alert), "{alert:?}");
        }
    }
}
