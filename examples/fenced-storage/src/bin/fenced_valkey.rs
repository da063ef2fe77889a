//! `fenced_valkey [VALKEY_URL]`: see [`fenced_storage`].

use fenced_storage::{LOCK, Payment, play, valkey};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "valkey://127.0.0.1:6379".into());
    let mut db = valkey::connect(&url).await?;
    play(&url, async |token| valkey::deposit(&mut db, LOCK, &Payment::ordered_now(), token).await).await
}
