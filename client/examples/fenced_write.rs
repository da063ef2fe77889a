//! Why the storage must check the token: a holder that is paused for longer than its lease writes too late, and is refused.
//!
//! `cargo run -p flock-client --example fenced_write -- valkey://127.0.0.1:7379`. The storage here is a map; with a database it is one
//! more condition: `examples/fenced-storage` has it for PostgreSQL, SQLite and Valkey itself.

use std::sync::Mutex;
use std::time::Duration;

use flock_client::{Flock, Released, Token};

/// A storage that fences: it remembers the highest token it has seen.
#[derive(Default)]
struct Storage(Mutex<Option<(Token, String)>>);

impl Storage {
    /// Accepts a write under the last token or a higher one.
    fn write(&self, token: Token, text: &str) -> Result<(), String> {
        let mut last = self.0.lock().map_err(|error| error.to_string())?;
        match &*last {
            Some((seen, _)) if token < *seen => Err(format!("token {token} is stale: {seen} has been seen")),
            _ => {
                *last = Some((token, text.to_owned()));
                Ok(())
            }
        }
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "valkey://127.0.0.1:7379".into());
    let (storage, flock) = (Storage::default(), Flock::connect(&url).await?);

    // No keep-alive: as if the whole process were stopped right after this.
    let paused = flock.lock("account").lease(Duration::from_millis(200)).keep_alive(false).await?;

    // Its lease runs out, so the next one gets the lock, and writes.
    let next = flock.lock("account").wait(Duration::from_secs(5)).await?;
    storage.write(next.token(), "from the next holder")?;

    // The first wakes up and does not look at `is_valid`, or did just before it was stopped.
    match storage.write(paused.token(), "from the paused holder") {
        Err(refusal) => println!("refused: {refusal}"),
        Ok(()) => return Err("a stale write was accepted".into()),
    }
    println!("the paused holder could have known: is_valid is {}", paused.is_valid());

    assert_eq!(next.release().await?, Released::Released);
    flock.shutdown(Duration::from_secs(5)).await?;
    Ok(())
}
