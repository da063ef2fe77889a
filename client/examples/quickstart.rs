//! Take a lock, use its token, give it back; then see what a second client sees.
//!
//! `make run` starts a server; then `cargo run -p flock-client --example quickstart`. Another server: give its URL.

use std::time::Duration;

use flock_client::{AcquireError, Flock};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "valkey://127.0.0.1:7379".into());
    let flock = Flock::connect(&url).await?;

    let guard = flock.lock("order:1001").lease(Duration::from_secs(30)).wait(Duration::from_secs(3)).await?;
    println!("held under token {}", guard.token());

    // Somebody else has to wait, and here gives up.
    match flock.lock("order:1001").wait(Duration::from_millis(200)).await {
        Err(AcquireError::TimedOut) => println!("the second one timed out"),
        Err(error) => return Err(error.into()),
        Ok(_) => return Err("two hold the lock".into()),
    }

    // Work in small steps can look now and then; it costs no I/O.
    if !guard.is_valid() {
        return Err("lost: stop here".into());
    }
    println!("given back: {:?}", guard.release().await?);

    // The same in one call, for work that may be cancelled at any await.
    let token = flock.lock("order:1001").run(|token| async move { token }).await?;
    println!("held again under the higher token {token}");

    flock.shutdown(Duration::from_secs(5)).await?;
    Ok(())
}
