//! `fenced_sqlite [VALKEY_URL [FILE]]`: see [`fenced_storage`].

use fenced_storage::{Payment, play, sqlite};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let url = args.next().unwrap_or_else(|| "valkey://127.0.0.1:6379".into());
    let file = args.next().unwrap_or_else(|| "fenced.sqlite".into());
    let mut db = sqlite::open(file)?;
    play(&url, async |token| sqlite::deposit(&mut db, &Payment::ordered_now(), token)).await
}
