//! `ls`, `info` and `revoke`: the locks there are, one lock, and the end of a hold.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::io::{self, BufRead, IsTerminal, Write};
use std::os::unix::ffi::OsStrExt;

use flock_client::{Flock, HeldLock, Holder, HolderState, LockInfo, Waiter};
use serde_json::{Value, json};

use crate::cli::{InfoArgs, LsArgs, RevokeArgs, ServerArgs};
use crate::failure::{Failure, NOTHING, USAGE};
use crate::output::{self, Bytes, brief, ms};
use crate::table::{Columns, cell, notable};

/// Locks asked for at once.
const PAGE: u32 = 1_000;

pub(crate) async fn ls(server: &ServerArgs, args: &LsArgs) -> Result<u8, Failure> {
    let flock = server.connect().await?;
    let mut locks = flock.list(args.pattern.as_bytes()).page_size(PAGE);
    if let Some(owner) = &args.owner {
        locks = locks.owner(owner.as_bytes());
    }
    let mut locks = locks.all().await?;
    locks.sort_by(|a, b| a.key.cmp(&b.key));
    if args.json {
        output::print_json(&locks.iter().map(held_lock_json).collect())
    } else {
        output::print(held_locks_table(&locks))
    }
}

pub(crate) async fn info(server: &ServerArgs, args: &InfoArgs) -> Result<u8, Failure> {
    let flock = server.connect().await?;
    let key = args.key.as_bytes();
    let info = flock.info(key, args.waiters).await?;
    if args.json {
        output::print_json(&info.as_ref().map_or(Value::Null, |info| info_json(key, info)))?;
    } else if let Some(info) = &info {
        output::print(info_text(key, info))?;
    } else {
        output::print(format!("{} is free\n", Bytes(key)))?;
    }
    Ok(if info.is_some() { 0 } else { NOTHING })
}

pub(crate) async fn revoke(server: &ServerArgs, args: &RevokeArgs) -> Result<u8, Failure> {
    let flock = server.connect().await?;
    let key = args.key.as_bytes();
    // The server's command knows owners only. An owner names one acquisition, so it is as exact as the token.
    let owner = match args.token {
        Some(token) => owner_of(&flock, key, token).await?,
        None => args.owner.as_deref().map(|owner| owner.as_bytes().to_vec()),
    };
    let nobody = args.token.is_some() && owner.is_none();
    if !nobody && !args.yes {
        confirm(&flock, &args.key, owner.as_deref()).await?;
    }
    let ended = match owner {
        _ if nobody => 0,
        Some(owner) => flock.revoke_owner(key, owner).await?,
        None => flock.revoke(key).await?,
    };
    if args.json {
        output::print_json(&json!({ "revoked": ended }))?;
    } else {
        output::print(format!("{ended} ended\n"))?;
    }
    Ok(if ended > 0 { 0 } else { NOTHING })
}

async fn owner_of(flock: &Flock, key: &[u8], token: u64) -> Result<Option<Vec<u8>>, Failure> {
    let info = flock.info(key, 0).await?;
    let mut holders = info.into_iter().flat_map(|info| info.holders);
    Ok(holders.find(|holder| holder.token.get() == token).map(|holder| holder.owner))
}

/// Shows what would be ended and asks. An error unless the answer is yes.
async fn confirm(flock: &Flock, key: &OsStr, owner: Option<&[u8]>) -> Result<(), Failure> {
    if !io::stdin().is_terminal() {
        return Err(Failure::new(USAGE, "without a terminal nobody can be asked: give --yes"));
    }
    let key = key.as_bytes();
    let mut holders = flock.info(key, 0).await?.map_or_else(Vec::new, |info| info.holders);
    holders.retain(|holder| owner.is_none_or(|owner| holder.owner == owner));
    let mut err = io::stderr().lock();
    let _ = write!(err, "{}End the holds of {}? [y/N] ", holders_table(&holders), Bytes(key));
    let _ = err.flush();
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer)?;
    match answer.trim().to_ascii_lowercase().as_str() {
        "y" | "yes" => Ok(()),
        _ => Err(Failure::new(NOTHING, "nothing was ended")),
    }
}

pub(crate) fn held_locks_table(locks: &[HeldLock]) -> String {
    let mut table = Columns::new(&["KEY", "MODE", "HOLDERS>", "WAITERS>", "TOKEN>", "LEFT", "OWNER"]);
    for lock in locks {
        table.add([
            cell(Bytes(&lock.key)),
            cell(output::mode(Some(lock.mode))),
            cell(lock.holder_count),
            notable(lock.waiter_count, lock.waiter_count > 0),
            cell(lock.token),
            cell(brief(lock.remaining)),
            cell(Bytes(&lock.owner)),
        ]);
    }
    table.text()
}

fn info_text(key: &[u8], info: &LockInfo) -> String {
    let mut text = format!(
        "{}: {}, {} holding, {} waiting\n",
        Bytes(key),
        output::mode(info.mode),
        info.holder_count,
        info.waiter_count
    );
    if !info.grace_left.is_zero() {
        let _ = writeln!(text, "no new grants for {}: the server was promoted", brief(info.grace_left));
    }
    if !info.holders.is_empty() {
        text += "\n";
        text += &holders_table(&info.holders);
    }
    if !info.waiters.is_empty() {
        text += "\n";
        text += &waiters_table(&info.waiters);
    }
    text
}

fn holders_table(holders: &[Holder]) -> String {
    let mut table = Columns::new(&["HOLDER", "TOKEN>", "STATE", "LEFT", "LEASE", "HELD FOR", "LABEL"]);
    for holder in holders {
        table.add([
            cell(Bytes(&holder.owner)),
            cell(holder.token),
            notable(output::state(holder.state), holder.state == HolderState::Expired),
            cell(brief(holder.remaining)),
            cell(brief(holder.lease)),
            cell(brief(holder.held_for)),
            cell(Bytes(&holder.label)),
        ]);
    }
    table.text()
}

fn waiters_table(waiters: &[Waiter]) -> String {
    let mut table = Columns::new(&["PLACE>", "WAITER", "MODE", "WAITING FOR", "LABEL"]);
    for waiter in waiters {
        table.add([
            cell(waiter.position),
            cell(Bytes(&waiter.owner)),
            cell(output::mode(Some(waiter.mode))),
            cell(brief(waiter.waiting_for)),
            cell(Bytes(&waiter.label)),
        ]);
    }
    table.text()
}

pub(crate) fn held_lock_json(lock: &HeldLock) -> Value {
    json!({
        "key": Bytes(&lock.key),
        "mode": output::mode(Some(lock.mode)),
        "holder_count": lock.holder_count,
        "waiter_count": lock.waiter_count,
        "owner": Bytes(&lock.owner),
        "token": lock.token.get(),
        "left_ms": ms(lock.remaining),
    })
}

fn info_json(key: &[u8], info: &LockInfo) -> Value {
    let holder = |holder: &Holder| {
        json!({
            "owner": Bytes(&holder.owner),
            "token": holder.token.get(),
            "state": output::state(holder.state),
            "lease_ms": ms(holder.lease),
            "left_ms": ms(holder.remaining),
            "held_ms": ms(holder.held_for),
            "label": Bytes(&holder.label),
            "ids": holder.ids.iter().map(|id| Bytes(id)).collect::<Vec<_>>(),
        })
    };
    let waiter = |waiter: &Waiter| {
        json!({
            "owner": Bytes(&waiter.owner),
            "mode": output::mode(Some(waiter.mode)),
            "position": waiter.position,
            "waiting_ms": ms(waiter.waiting_for),
            "label": Bytes(&waiter.label),
        })
    };
    json!({
        "key": Bytes(key),
        "mode": output::mode(info.mode),
        "holder_count": info.holder_count,
        "waiter_count": info.waiter_count,
        "grace_left_ms": ms(info.grace_left),
        "holders": info.holders.iter().map(holder).collect::<Vec<_>>(),
        "waiters": info.waiters.iter().map(waiter).collect::<Vec<_>>(),
    })
}
