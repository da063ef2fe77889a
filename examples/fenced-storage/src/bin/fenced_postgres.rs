//! `fenced_postgres [VALKEY_URL [POSTGRES_PARAMETERS]]`: see [`fenced_storage`].

use fenced_storage::{Payment, play, postgres};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let url = args.next().unwrap_or_else(|| "valkey://127.0.0.1:6379".into());
    let params = args.next().unwrap_or_else(|| "host=localhost user=postgres".into());
    let mut db = postgres::connect(&params).await?;
    play(&url, async |token| postgres::deposit(&mut db, &Payment::ordered_now(), token).await).await
}
