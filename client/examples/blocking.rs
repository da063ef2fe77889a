//! The same without an async runtime: calls that wait on the calling thread.
//!
//! `make run` starts a server; then `cargo run -p flock-client --features blocking --example blocking -- valkey://127.0.0.1:7379`.

use std::time::Duration;

use flock_client::blocking::Flock;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "valkey://127.0.0.1:7379".into());
    let flock = Flock::connect(&url)?;

    // Each thread has its turn; the lock is renewed meanwhile, whatever the threads do.
    let threads = [1, 2, 3].map(|number| {
        let flock = flock.clone();
        std::thread::spawn(move || {
            let turn = flock.lock("order:1001").wait(Duration::from_secs(10));
            turn.run(|guard| {
                println!("thread {number} holds under token {}", guard.token());
                guard.on_lost(move |reason| println!("thread {number}: {reason}"));
                for step in 0.. {
                    // Nobody can stop a thread: it looks by itself, before each step that counts.
                    if step == 5 || !guard.is_valid() {
                        break;
                    }
                    std::thread::sleep(Duration::from_millis(20));
                }
            })
        })
    });
    for thread in threads {
        thread.join().map_err(|_| "a thread has panicked")??;
    }

    flock.shutdown(Duration::from_secs(5))?;
    Ok(())
}
