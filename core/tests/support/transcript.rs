//! Transcripts: what people do to locks, line by line, and everything that comes of it.
//!
//! ```text
//! # Whoever waits gets the lock in the step that frees it.
//! at 0ms  alice acquires order:1 for 30s               -> granted 1
//! at 5ms  bob acquires order:1 for 30s blocking 10s    -> waits, position 1
//! at 9ms  alice releases order:1                       -> yes; bob is granted 2
//! then    order:1 is held by bob (2)
//! ```
//!
//! A line is a moment, an action, and after `->` the answer and all that becomes visible, in order. What is not written must not
//! happen, what is written must; a line that cannot be read is an error. After each line the server performs what is due, as it does
//! before it sleeps; `busy` after the moment means that it does not come to sleep after this line. `time passes` is the line where
//! nobody does anything. `from 1h every 1h until 9h` repeats an action. `then` states who holds and who waits.
//! Announcements to anybody are left out unless the transcript begins with `show announcements`.
//!
//! Tokens count from the first grant. Everybody has one connection and one channel; all listen from the start. A lock in another
//! database is written `order:1@1`.

use super::world::{Happened, Spot, World};
use core::num::{NonZeroU32, NonZeroU64};
use flock_core::effect::{Ended, Notice, WaitOutcome};
use flock_core::lock::Mode;
use flock_core::request::ReleaseScope;
use flock_core::table::ClientId;
use flock_core::token::RESERVE;
use flock_core::{
    Acquire, Acquired, EndReason, Limits, LossReason, Millis, Refusal, Release, Renew, Revoke, Time, Token, Wait,
};
use std::collections::HashMap;

/// Plays a transcript; says which line is wrong, and how.
pub(crate) fn play(text: &str) -> Result<(), String> {
    let lines = read(text)?;
    let mut player = Player::new(&lines);
    for line in &lines {
        player.play(line).map_err(|fault| format!("line {}: {}\n  {fault}", line.number, line.text))?;
    }
    Ok(())
}

/// One line, cut into words.
struct Line {
    number: usize,
    text: String,
    moments: Vec<Millis>,
    busy: bool,
    words: Vec<&'static str>,
    expected: Option<Vec<String>>,
}

/// Words live as long as the test program: the world borrows its names from them.
fn words_of(text: &str) -> Vec<&'static str> {
    text.split_whitespace().map(|word| &*Box::leak(word.to_owned().into_boxed_str())).collect()
}

fn read(text: &str) -> Result<Vec<Line>, String> {
    let mut lines = Vec::new();
    let mut previous = Millis(0);
    for (index, line) in text.lines().enumerate() {
        let number = index + 1;
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let read = read_line(number, line).map_err(|fault| format!("line {number}: {line}\n  {fault}"))?;
        for moment in &read.moments {
            if *moment < previous {
                return Err(format!("line {number}: {line}\n  time runs backwards"));
            }
            previous = *moment;
        }
        lines.push(read);
    }
    if lines.is_empty() {
        return Err("an empty transcript".to_owned());
    }
    Ok(lines)
}

fn read_line(number: usize, line: &str) -> Result<Line, String> {
    let (action, expected) = match line.split_once("->") {
        Some((action, outcomes)) => {
            let outcomes = outcomes.split(';').map(|outcome| words_of(outcome).join(" ")).collect();
            (action, Some(outcomes))
        }
        None => (line, None),
    };
    let mut words = words_of(action);
    let mut moments = Vec::new();
    match words.first().copied() {
        Some("at") if words.len() > 2 => {
            moments.push(duration(words[1])?);
            words.drain(..2);
        }
        Some("from") if words.len() > 6 && words[2] == "every" && words[4] == "until" => {
            let (from, step, until) = (duration(words[1])?, duration(words[3])?, duration(words[5])?);
            if step == Millis(0) {
                return Err("every 0ms never ends".to_owned());
            }
            moments.extend((from.0..=until.0).step_by(step.0 as usize).map(Millis));
            words.drain(..6);
        }
        Some("then" | "show") => {}
        _ => return Err("a line begins with `at`, `from`, `then` or `show`".to_owned()),
    }
    let states = matches!(words.first(), Some(&("then" | "show")));
    if states == expected.is_some() {
        return Err("an action has an outcome after `->`; `then` and `show` have none".to_owned());
    }
    let busy = words.first() == Some(&"busy");
    if busy {
        words.remove(0);
    }
    Ok(Line { number, text: line.to_owned(), moments, busy, words, expected })
}

fn duration(text: &str) -> Result<Millis, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let factor = match &text[digits..] {
        "ms" => 1,
        "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return Err(format!("`{text}` is no duration: 5ms, 30s, 10m, 2h, 1d")),
    };
    let number: u32 = text[..digits].parse().map_err(|_| format!("`{text}` is no duration"))?;
    number.checked_mul(factor).map(Millis).ok_or(format!("`{text}` is too long"))
}

fn show_duration(duration: Millis) -> String {
    let ms = duration.as_ms();
    let units = [(3_600_000, "h"), (60_000, "m"), (1000, "s"), (1, "ms")];
    let fits = |(unit, _): &(u32, &str)| ms > 0 && ms.is_multiple_of(*unit);
    let (unit, name) = units.into_iter().find(fits).unwrap_or((1, "ms"));
    format!("{}{name}", ms / unit)
}

/// The words of one action, taken one after the other; none may be left over.
struct Words<'a>(&'a [&'static str]);

impl Words<'_> {
    fn next(&mut self, what: &str) -> Result<&'static str, String> {
        let (first, rest) = self.0.split_first().ok_or(format!("{what} is missing"))?;
        self.0 = rest;
        Ok(first)
    }

    fn take(&mut self, words: &[&str]) -> bool {
        let found = self.0.starts_with(words);
        if found {
            self.0 = &self.0[words.len()..];
        }
        found
    }

    fn duration(&mut self) -> Result<Millis, String> {
        duration(self.next("a duration")?)
    }

    fn finish(self) -> Result<(), String> {
        if self.0.is_empty() { Ok(()) } else { Err(format!("not understood: `{}`", self.0.join(" "))) }
    }
}

struct Player {
    world: World,
    began: Time,
    /// What tokens are counted from.
    base: u64,
    announcements: bool,
    connections: HashMap<&'static str, ClientId>,
    connections_ever: u64,
    /// The latest grant that was answered to each owner's blocked connection.
    answered: HashMap<&'static str, Token>,
}

/// A lock's name, with its database.
fn lock_name(word: &'static str) -> (u16, &'static str) {
    match word.rsplit_once('@') {
        Some((key, db)) => (db.parse().unwrap_or(u16::MAX), key),
        None => (0, word),
    }
}

fn channel_of(owner: &str) -> &'static str {
    Box::leak(format!("~{owner}").into_boxed_str())
}

impl Player {
    fn new(lines: &[Line]) -> Self {
        let words = || lines.iter().flat_map(|line| line.words.iter().copied());
        let mut keys: Vec<(u16, &'static str)> = Vec::new();
        for key in words().filter(|word| word.contains(':')).map(lock_name) {
            // SWAPDB needs the twin of every key.
            for twin in [(0, key.1), (1, key.1), key] {
                if !keys.contains(&twin) {
                    keys.push(twin);
                }
            }
        }
        // Any word may be an owner: what is none will never come back as one.
        let mut names: Vec<&'static str> = words().collect();
        let channels: Vec<&'static str> = names.iter().map(|name| channel_of(name)).collect();
        names.extend(&channels);
        let mut world = World::new(Limits::DEFAULT, &keys, &names);
        channels.into_iter().for_each(|channel| world.listeners.come(channel));
        Self {
            began: world.now,
            base: world.primary.table.counter().value(),
            world,
            announcements: false,
            connections: HashMap::new(),
            connections_ever: 0,
            answered: HashMap::new(),
        }
    }

    fn play(&mut self, line: &Line) -> Result<(), String> {
        match line.words.first() {
            Some(&"show") if line.words == ["show", "announcements"] => {
                self.announcements = true;
                return Ok(());
            }
            Some(&"then") => return self.state(Words(&line.words[1..])),
            _ => {}
        }
        for moment in &line.moments {
            let now = self.began.after(*moment);
            self.world.now = now;
            self.world.forget();
            let mut outcomes = self.act(Words(&line.words))?;
            if !line.busy {
                self.world.wake();
            }
            self.world.check_always();
            outcomes.extend(self.outcomes());
            if outcomes.is_empty() {
                outcomes.push("nothing".to_owned());
            }
            let expected = line.expected.as_deref().unwrap_or_default();
            if outcomes != expected {
                let at = show_duration(*moment);
                return Err(format!("at {at} expected {}\n  but it was {}", expected.join("; "), outcomes.join("; ")));
            }
        }
        Ok(())
    }

    fn spot(&self, word: &'static str) -> Result<Spot, String> {
        let (db, key) = lock_name(word);
        if !key.contains(':') {
            return Err(format!("`{word}` is no lock: a lock's name has a colon"));
        }
        Ok(self.world.spot(db, key))
    }

    fn token(&self, word: &str) -> Result<Token, String> {
        let (reserves, rest) = match word.split_once("2^20+") {
            Some(("", rest)) => (1, rest),
            Some((times, rest)) => (times.trim_end_matches('*').parse::<u64>().unwrap_or(0), rest),
            None => (0, word),
        };
        let number: u64 = rest.parse().map_err(|_| format!("`{word}` is no token"))?;
        Token::new(self.base + reserves * RESERVE + number).ok_or(format!("`{word}` is no token"))
    }

    fn show_token(&self, token: Token) -> String {
        let number = token.get() - self.base;
        match number / RESERVE {
            0 => number.to_string(),
            1 => format!("2^20+{}", number % RESERVE),
            reserves => format!("{reserves}*2^20+{}", number % RESERVE),
        }
    }

    fn connection(&mut self, name: &'static str) -> ClientId {
        let ever = &mut self.connections_ever;
        *self.connections.entry(name).or_insert_with(|| {
            *ever += 1;
            NonZeroU64::new(*ever).expect("counted from one")
        })
    }

    /// Performs an action; returns its answer, if it has one.
    fn act(&mut self, mut words: Words<'_>) -> Result<Vec<String>, String> {
        let subject = words.next("somebody")?;
        let verb = words.next("a verb")?;
        let answer = match (subject, verb) {
            ("time", "passes") => None,
            ("storage", "checks") => {
                let spot = self.spot(words.next("a lock")?)?;
                if !words.take(&["token"]) {
                    return Err("`checks LOCK token N`".to_owned());
                }
                let token = self.token(words.next("a token")?)?;
                Some(yes(self.world.check(spot, token)))
            }
            ("admin", "revokes") => {
                let lock = words.next("a lock")?;
                let spot = self.spot(lock)?;
                let owner = if words.take(&["of"]) { Some(words.next("an owner")?) } else { None };
                let request = Revoke { key: lock_name(lock).1.as_bytes(), owner: owner.map(str::as_bytes) };
                Some(format!("ended {}", self.world.revoke(spot, &request)))
            }
            ("somebody", "deletes") => {
                let spot = self.spot(words.next("a lock")?)?;
                self.world.delete(spot);
                None
            }
            ("server", "evicts") => {
                let spot = self.spot(words.next("a lock")?)?;
                self.world.evict(spot);
                None
            }
            ("somebody", "overwrites") => {
                let spot = self.spot(words.next("a lock")?)?;
                self.world.overwrite(spot);
                None
            }
            ("somebody", "renames") => {
                let from = self.spot(words.next("a lock")?)?;
                if !words.take(&["to"]) {
                    return Err("`renames LOCK to LOCK`".to_owned());
                }
                let to = self.spot(words.next("a lock")?)?;
                self.world.rename(from, to);
                None
            }
            ("somebody", "flushes") if words.take(&["everything"]) => {
                self.world.flush(None);
                None
            }
            ("somebody", "swaps") if words.take(&["databases", "0", "and", "1"]) => {
                self.world.swap(0, 1);
                None
            }
            ("slot", "of") => {
                let spot = self.spot(words.next("a lock")?)?;
                if !words.take(&["moves", "away"]) {
                    return Err("`slot of LOCK moves away`".to_owned());
                }
                self.world.dismiss(spot, EndReason::Moved);
                self.world.delete(spot);
                None
            }
            ("replica", "takes") if words.take(&["over"]) => {
                let grace = if words.take(&["with", "grace"]) { words.duration()? } else { Millis(0) };
                self.world.fail_over(grace);
                None
            }
            ("grant", "to") => {
                let owner = words.next("an owner")?;
                if !words.take(&["is", "not", "delivered"]) {
                    return Err("`grant to OWNER is not delivered`".to_owned());
                }
                let token = self.answered.remove(owner).ok_or(format!("no connection of {owner} was answered"))?;
                self.world.undelivered(token);
                None
            }
            (owner, "listens") => {
                self.world.listeners.come(channel_of(owner));
                None
            }
            (owner, "stops") if words.take(&["listening"]) => {
                self.world.listeners.leave(channel_of(owner));
                None
            }
            (owner, "disconnects") => {
                let client = self.connections.remove(owner).ok_or(format!("{owner} has not connected"))?;
                self.world.close(client);
                None
            }
            (owner, "is") if words.take(&["unblocked"]) => {
                if !self.world.unblock(owner) {
                    return Err(format!("{owner} is not blocked"));
                }
                None
            }
            (owner, "acquires") => Some(self.acquire(owner, &mut words)?),
            (owner, "releases") => Some(self.release(owner, &mut words)?),
            (owner, "renews") => Some(self.renew(owner, &mut words)?),
            _ => return Err(format!("`{subject} {verb}` is no action")),
        };
        words.finish()?;
        Ok(answer.into_iter().collect())
    }

    fn acquire(&mut self, owner: &'static str, words: &mut Words<'_>) -> Result<String, String> {
        let lock = words.next("a lock")?;
        let spot = self.spot(lock)?;
        if !words.take(&["for"]) {
            return Err("`acquires LOCK for DURATION`".to_owned());
        }
        let mut request = Acquire::new(lock_name(lock).1.as_bytes(), owner.as_bytes(), words.duration()?);
        let mut connection = owner;
        while let Some(option) = words.0.first().copied() {
            words.next("an option")?;
            match option {
                "shared" => request.mode = Mode::Shared,
                "limit" => {
                    let limit = words.next("a number")?.parse().map_err(|_| "`limit` needs a number")?;
                    request.limit = Some(NonZeroU32::new(limit).ok_or("`limit 0` admits nobody")?);
                }
                "blocking" if words.take(&["forever"]) => request.wait = Wait::Block(None),
                "blocking" => request.wait = Wait::Block(Some(words.duration()?)),
                "queueing" => {
                    request.wait = Wait::Queue(words.duration()?);
                    request.channel = Some(channel_of(owner).as_bytes());
                }
                "telling" => request.channel = Some(channel_of(words.next("an owner")?).as_bytes()),
                "new" => request.new = true,
                "reentrant" => request.id = Some(words.next("an id")?.as_bytes()),
                "converting" => request.convert = Some(self.token(words.next("a token")?)?),
                "floor" => request.floor = Some(self.token(words.next("a token")?)?.get()),
                "claiming" => request.claim = Some(words.duration()?),
                "session" => request.session = Some(words.duration()?),
                "labelled" => request.label = Some(words.next("a label")?.as_bytes()),
                "over" => connection = words.next("a connection")?,
                _ => return Err(format!("`{option}` is no option")),
            }
        }
        let client = self.connection(connection);
        Ok(match self.world.acquire(spot, &request, Some(client)) {
            Ok(Acquired::Granted(token)) => format!("granted {}", self.show_token(token)),
            Ok(Acquired::Busy) => "nil".to_owned(),
            Ok(Acquired::Queued { position, .. }) => format!("waits, position {position}"),
            Err(refusal) => refused(refusal),
        })
    }

    fn release(&mut self, owner: &'static str, words: &mut Words<'_>) -> Result<String, String> {
        let lock = words.next("a lock")?;
        let spot = self.spot(lock)?;
        let token = if words.take(&["token"]) { Some(self.token(words.next("a token")?)?) } else { None };
        let scope = if words.take(&["all"]) {
            ReleaseScope::All
        } else if words.take(&["id"]) {
            ReleaseScope::Id(words.next("an id")?.as_bytes())
        } else {
            ReleaseScope::Plain
        };
        let request = Release { key: lock_name(lock).1.as_bytes(), owner: owner.as_bytes(), token, scope };
        Ok(self.world.release(spot, &request).map_or_else(refused, yes))
    }

    fn renew(&mut self, owner: &'static str, words: &mut Words<'_>) -> Result<String, String> {
        let lock = words.next("a lock")?;
        let spot = self.spot(lock)?;
        if !words.take(&["for"]) {
            return Err("`renews LOCK for DURATION`".to_owned());
        }
        let lease = words.duration()?;
        let token = if words.take(&["token"]) { Some(self.token(words.next("a token")?)?) } else { None };
        let connection = if words.take(&["over"]) { words.next("a connection")? } else { owner };
        let client = self.connection(connection);
        let request = Renew { key: lock_name(lock).1.as_bytes(), owner: owner.as_bytes(), lease, token };
        Ok(yes(self.world.renew(spot, &request, Some(client))))
    }

    /// What became visible, in words.
    fn outcomes(&mut self) -> Vec<String> {
        let happened = core::mem::take(&mut self.world.happened);
        let mut outcomes = Vec::new();
        for event in &happened {
            match event {
                Happened::Changed(..) | Happened::Marked => {}
                Happened::Answered { owner, outcome, .. } => outcomes.push(match outcome {
                    WaitOutcome::Granted(token) => {
                        self.answered.insert(*owner, *token);
                        format!("{owner} is granted {}", self.show_token(*token))
                    }
                    WaitOutcome::TimedOut => format!("{owner} is answered nil"),
                    WaitOutcome::Ended(reason) => format!("{owner} is refused: {}", ended(*reason)),
                }),
                Happened::Told { owner, notice, .. } => outcomes.push(match notice {
                    Notice::Granted { token, lasts, claim } => {
                        let until = if *claim { "to be confirmed within" } else { "for" };
                        format!(
                            "{owner} is told: granted {} {until} {}",
                            self.show_token(*token),
                            show_duration(*lasts)
                        )
                    }
                    Notice::TimedOut => format!("{owner} is told: timed out"),
                    Notice::Ended(reason) => format!("{owner} is told: {}", ended(*reason)),
                    Notice::Lost { token, reason } => {
                        let reason = match reason {
                            LossReason::Expired => "expired",
                            LossReason::Revoked => "revoked",
                            LossReason::Removed => "removed",
                            LossReason::Flushed => "flushed",
                        };
                        format!("{owner} is told: lost {}, {reason}", self.show_token(*token))
                    }
                }),
                Happened::Announced { ended, token, handed_to, .. } if self.announcements => {
                    let ended = match ended {
                        Ended::Released => "released",
                        Ended::Expired => "expired",
                        Ended::Revoked => "revoked",
                        Ended::Undelivered => "not delivered",
                    };
                    let next = handed_to.map(|to| format!(", next is {}", self.show_token(to))).unwrap_or_default();
                    outcomes.push(format!("all hear: {} {ended}{next}", self.show_token(*token)));
                }
                Happened::Announced { .. } => {}
            }
        }
        outcomes
    }

    /// Checks who holds, or who waits.
    fn state(&self, mut words: Words<'_>) -> Result<(), String> {
        let spot = self.spot(words.next("a lock")?)?;
        let (what, is) = if words.take(&["is", "free"]) {
            let free = if self.world.primary.exists(spot) { "kept" } else { "free" };
            return if free == "free" { words.finish() } else { Err("the key exists".to_owned()) };
        } else if words.take(&["is", "held", "by"]) {
            let holds = self.world.primary.holds(spot).map(|hold| {
                let owner = String::from_utf8_lossy(&hold.owner).into_owned();
                let mut notes = vec![self.show_token(hold.token)];
                notes.extend((hold.mode() == Mode::Shared).then(|| "shared".to_owned()));
                notes.extend(hold.ids().map(|id| format!("id {}", String::from_utf8_lossy(id))));
                notes.extend(hold.claim().map(|_| "unconfirmed".to_owned()));
                format!("{owner} ({})", notes.join(", "))
            });
            ("held by", holds.collect::<Vec<_>>())
        } else if words.take(&["is", "waited", "for", "by"]) {
            let waiters = self.world.primary.waiters(spot);
            ("waited for by", waiters.map(|(_, waiter)| String::from_utf8_lossy(&waiter.owner).into_owned()).collect())
        } else {
            return Err("`then LOCK is free`, `is held by ...`, `is waited for by ...`".to_owned());
        };
        let is = if is.is_empty() { "nobody".to_owned() } else { is.join(", ") };
        let expected = words.0.join(" ");
        if is == expected { Ok(()) } else { Err(format!("expected it {what} {expected}\n  but it was by {is}")) }
    }
}

fn yes(yes: bool) -> String {
    if yes { "yes" } else { "no" }.to_owned()
}

fn ended(reason: EndReason) -> &'static str {
    match reason {
        EndReason::Superseded => "superseded",
        EndReason::Cancelled => "cancelled",
        EndReason::Flushed => "flushed",
        EndReason::RoleChanged => "role changed",
        EndReason::Moved => "moved",
        EndReason::ClusterDown => "cluster down",
        EndReason::WrongType => "wrong type",
    }
}

fn refused(refusal: Refusal) -> String {
    let reason = match refusal {
        Refusal::AlreadyHeld => "held already",
        Refusal::HeldWithoutIds => "held without ids",
        Refusal::HeldShared => "held shared",
        Refusal::NotHeld => "not held",
        Refusal::NeedsIdOrAll => "needs an id or all",
        Refusal::TooManyIds { .. } => "too many ids",
        Refusal::QueueFull { .. } => "queue full",
        Refusal::FloorTooHigh { .. } => "floor too high",
        Refusal::TokensExhausted => "no token left",
        Refusal::NotReady => "not ready",
    };
    format!("refused: {reason}")
}
