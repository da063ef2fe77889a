//! Where the server is, and the connection to it.

use std::path::Path;
use std::{env, fs};

use flock_client::Flock;
use url::Url;

use crate::cli::ServerArgs;
use crate::failure::{Failure, SYSTEM, USAGE};

impl ServerArgs {
    /// Connects, with the password of the environment if there is one.
    pub(crate) async fn connect(&self) -> Result<Flock, Failure> {
        let url = match env::var("FLOCK_PASSWORD") {
            Ok(password) => with_password(&self.url, &password)?,
            Err(env::VarError::NotPresent) => self.url.clone(),
            Err(env::VarError::NotUnicode(_)) => return Err(Failure::new(USAGE, "FLOCK_PASSWORD is not UTF-8")),
        };
        let mut builder = Flock::builder(url).connect_timeout(self.connect_timeout);
        if let Some(file) = &self.ca_file {
            builder = builder.ca_certificates(read(file)?);
        }
        if let (Some(chain), Some(key)) = (&self.cert_file, &self.cert_key_file) {
            builder = builder.client_certificate(read(chain)?, read(key)?);
        }
        Ok(builder.connect().await?)
    }
}

fn read(file: &Path) -> Result<Vec<u8>, Failure> {
    fs::read(file).map_err(|error| Failure::new(SYSTEM, format_args!("cannot read {}: {error}", file.display())))
}

fn with_password(url: &str, password: &str) -> Result<String, Failure> {
    // The parser's error is not shown: the URL may have a password of its own.
    let no_url = || Failure::new(USAGE, "not a URL of the form valkey://[user@]host[:port][/db]");
    let mut url = Url::parse(url).map_err(|_| no_url())?;
    if url.scheme().ends_with("unix") {
        url.query_pairs_mut().append_pair("pass", password);
    } else {
        // The one sign that the crate leaves alone: it takes it for the begin of an escape.
        url.set_password(Some(&password.replace('%', "%25"))).map_err(|()| no_url())?;
    }
    Ok(url.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn password_goes_where_the_client_reads_it() {
        assert_eq!(with_password("valkey://h:1/2", "p@ss/%41").unwrap(), "valkey://:p%40ss%2F%2541@h:1/2");
        assert_eq!(with_password("valkey://me@h", "x").unwrap(), "valkey://me:x@h");
        assert_eq!(with_password("unix:///run/v.sock", "a&b").unwrap(), "unix:///run/v.sock?pass=a%26b");
    }

    #[test]
    fn url_that_is_none_is_not_quoted() {
        let failure = with_password("secret", "x").unwrap_err();
        assert!(!format!("{failure:?}").contains("secret"));
    }
}
