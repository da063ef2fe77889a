//! Where the server is, and the connection to it.

use std::path::Path;
use std::process::Command;
use std::{env, fs};

use flock_client::Flock;

use crate::cli::ServerArgs;
use crate::failure::{Failure, SYSTEM, USAGE};

const PASSWORD: &str = "FLOCK_PASSWORD";
const URL: &str = "FLOCK_URL";

/// Our passwords are not for the command that we run: neither that variable, nor a URL with one.
pub(crate) fn withhold_passwords(command: &mut Command) {
    command.env_remove(PASSWORD);
    if env::var_os(URL).is_some_and(|url| has_password(&url.to_string_lossy())) {
        command.env_remove(URL);
    }
}

fn has_password(url: &str) -> bool {
    let (address, query) = url.split_once('?').unwrap_or((url, ""));
    let user = address.rsplit_once('@').map_or("", |(user, _)| user);
    let user = user.split_once("://").map_or(user, |(_, user)| user);
    user.contains(':') || query.split('&').any(|field| field.starts_with("pass"))
}

impl ServerArgs {
    /// Connects, with the password of the environment if there is one.
    pub(crate) async fn connect(&self) -> Result<Flock, Failure> {
        let mut builder = Flock::builder(&self.url).connect_timeout(self.connect_timeout);
        match env::var(PASSWORD) {
            Ok(password) => builder = builder.credentials(None, &password),
            Err(env::VarError::NotPresent) => {}
            Err(env::VarError::NotUnicode(_)) => return Err(Failure::new(USAGE, "FLOCK_PASSWORD is not UTF-8")),
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn url_with_a_password_is_told_from_one_without() {
        for url in [
            "valkey://me:x@h",
            "valkey://:x@h:1/2",
            "valkey+sentinel://u:p@a,b/s",
            "unix:///s?user=me&pass=x",
            "me:p@h",
        ] {
            assert!(has_password(url), "{url}");
        }
        for url in ["valkey://h:1/2", "valkey://me@h:1", "unix:///run/v.sock?db=1", "valkey+sentinel://a:1,b:2/s", ""] {
            assert!(!has_password(url), "{url}");
        }
    }
}
