//! The commands: parse, open the key once, call the core's verb, perform, reply.

use crate::ffi;
use crate::ffi::acl::CurrentUser;
use crate::ffi::args::Args;
use crate::ffi::ctx::Ctx;
use crate::ffi::key::{Key, KeyState, Mode};
use crate::ffi::reply;
use crate::ffi::string::{ServerStr, ServerString};
use crate::perform::{Listeners, Shell};
use crate::state::{self, with_table};
use crate::{apply, blocking, cluster, inspect, role};
use flock_core::refusal::Refusal;
use flock_core::request::{Acquire, Release, Renew, Revoke, Wait};
use flock_core::table::{Acquired, Caller};
use flock_core::wire::command::{Check, Command, Info, List};
use flock_core::wire::error::{ErrorCode, WireError};
use flock_core::wire::spec;
use flock_core::{Decision, Place, Table, Token};
use std::ffi::CStr;
use std::num::NonZeroU64;

type Handler = fn(&Ctx<'_>, Args<'_>) -> Result<(), WireError>;

/// What each command runs. The index is the one that [`dispatch`] is called with.
static HANDLERS: [(&str, Handler); 8] = [
    (Acquire::NAME, acquire),
    (Release::NAME, release),
    (Renew::NAME, renew),
    (Check::NAME, check),
    (Info::NAME, inspect::info),
    (List::NAME, inspect::list),
    (Revoke::NAME, revoke),
    (spec::APPLY, apply::apply),
];

/// Registers every command of the core's table.
pub(crate) fn register(ctx: &Ctx<'_>) -> Result<(), String> {
    ffi::commands::add_acl_category(ctx, ACL_CATEGORY)?;
    let specs = HANDLERS.map(|(name, _)| spec::COMMANDS.iter().find(|spec| spec.name == name));
    let specs: Option<Vec<_>> = specs.into_iter().collect();
    let specs = specs.filter(|specs| specs.len() == spec::COMMANDS.len()).ok_or("a command has no handler")?;
    ffi::commands::register(ctx, &specs)
}

/// The way in for every command.
#[inline]
pub(crate) fn dispatch(index: usize, ctx: &Ctx<'_>, args: Args<'_>) {
    let Some((_, handler)) = HANDLERS.get(index) else {
        return;
    };
    if let Err(error) = handler(ctx, args) {
        refuse(ctx, &error);
    }
}

#[cold]
fn refuse(ctx: &Ctx<'_>, error: &WireError) {
    reply::error(ctx, error.to_string().as_bytes());
}

fn acquire(ctx: &Ctx<'_>, args: Args<'_>) -> Result<(), WireError> {
    let mut request = parse::<Acquire<'_>>(args)?;
    let mut target = Target::open_for(ctx, args, request.key)?;
    prepare(ctx, &target, &mut request)?;
    let blocked = if let Wait::Block(_) = request.wait { blocking::next_number() } else { 0 };
    let answer = target.decide(ctx, |table, place| {
        let client = if request.session.is_some() || table.has_sessions() { connection(ctx) } else { None };
        table.acquire(state::now(), place, &request, Caller { blocked, client }, &mut Listeners(ctx))
    })??;
    match (answer, request.wait) {
        (Acquired::Granted(token), _) => {
            blocking::told(token);
            reply::integer(ctx, number(token));
        }
        (Acquired::Busy, _) => reply::nil(ctx),
        (Acquired::Queued { waiter, .. }, Wait::Block(_)) => {
            if !blocking::wait(ctx, waiter) {
                with_table(|table| table.left(waiter));
                return Err(CANNOT_BLOCK);
            }
        }
        (Acquired::Queued { position, .. }, Wait::Queue(_) | Wait::No) => {
            reply::array(ctx, 2);
            reply::bulk(ctx, b"QUEUED");
            reply::integer(ctx, i64::try_from(position).unwrap_or(i64::MAX));
        }
    }
    Ok(())
}

fn release(ctx: &Ctx<'_>, args: Args<'_>) -> Result<(), WireError> {
    let request = parse::<Release<'_>>(args)?;
    let mut target = Target::open_for(ctx, args, request.key)?;
    let verb = |table: &mut Table, place: Place<'_>| table.release(state::now(), place, &request, &mut Listeners(ctx));
    let reply = |answer: &Result<bool, Refusal>| {
        if let Ok(released) = answer {
            reply::integer(ctx, i64::from(*released));
        }
    };
    target.decide_and_reply(ctx, verb, reply)??;
    Ok(())
}

fn renew(ctx: &Ctx<'_>, args: Args<'_>) -> Result<(), WireError> {
    let request = parse::<Renew<'_>>(args)?;
    let mut target = Target::open_for(ctx, args, request.key)?;
    let mut token = None;
    let renewed = target.decide(ctx, |table, place| {
        let caller = Caller { blocked: 0, client: if table.has_sessions() { connection(ctx) } else { None } };
        let decision = table.renew(state::now(), place, &request, caller, &mut Listeners(ctx));
        if decision.answer {
            let lock = decision.lock.and_then(|lock| table.lock(lock));
            token = lock.and_then(|lock| lock.held_by(request.owner)).map(|hold| hold.token);
        }
        decision
    })?;
    if let Some(token) = token {
        blocking::told(token);
    }
    reply::integer(ctx, i64::from(renewed));
    Ok(())
}

fn revoke(ctx: &Ctx<'_>, args: Args<'_>) -> Result<(), WireError> {
    let request = parse::<Revoke<'_>>(args)?;
    let mut target = Target::open_for(ctx, args, request.key)?;
    let verb = |table: &mut Table, place: Place<'_>| table.revoke(state::now(), place, &request, &mut Listeners(ctx));
    target.decide_and_reply(ctx, verb, |ended| reply::integer(ctx, i64::try_from(*ended).unwrap_or(i64::MAX)))?;
    Ok(())
}

fn check(ctx: &Ctx<'_>, args: Args<'_>) -> Result<(), WireError> {
    let request = parse::<Check<'_>>(args)?;
    if !role::is_primary(ctx) {
        return Err(WireError::READ_ONLY);
    }
    let name = args.string(1).ok_or(NO_KEY)?;
    let lock = match Key::open(ctx, name, Mode::Read).state() {
        KeyState::Empty => None,
        KeyState::OtherType => return Err(WireError::WRONG_TYPE),
        KeyState::Lock(handle) => Some(state::lock_of(handle)),
    };
    let place = Place { db: u16::try_from(ctx.selected_db()).unwrap_or(u16::MAX), key: request.key, lock };
    let held = with_table(|table| table.check(state::now(), place, request.token)).unwrap_or(false);
    reply::integer(ctx, i64::from(held));
    Ok(())
}

/// The key that a deciding command is about, open.
struct Target<'a> {
    key: Option<Key<'a>>,
    name: ServerStr<'a>,
    /// The same as `name`; asking the server for a string's bytes is a call.
    bytes: &'a [u8],
    db: u16,
}

impl<'a> Target<'a> {
    /// Opens the key in argument 1, whose name is `bytes`, on a primary that may grant.
    fn open_for(ctx: &'a Ctx<'_>, args: Args<'a>, bytes: &'a [u8]) -> Result<Self, WireError> {
        if !role::decides(ctx) {
            return Err(WireError::READ_ONLY);
        }
        let name = args.string(1).ok_or(NO_KEY)?;
        cluster::meet(ctx, name);
        let db = u16::try_from(ctx.selected_db())
            .map_err(|_| WireError::fixed(ErrorCode::Err, "locks are possible in databases 0 to 65535 only"))?;
        let key = Key::open(ctx, name, Mode::Write);
        if key.state() == KeyState::OtherType {
            return Err(WireError::WRONG_TYPE);
        }
        Ok(Self { key: Some(key), name, bytes, db })
    }

    /// Runs a verb on the key and performs what it decided.
    fn decide<T>(
        &mut self,
        ctx: &Ctx<'_>,
        verb: impl FnOnce(&mut Table, Place<'_>) -> Decision<T>,
    ) -> Result<T, WireError> {
        self.decide_and_reply(ctx, verb, |_| ())
    }

    /// The same, and replies before it is performed: of all whom it has something for, the server writes last to whom it was given
    /// first. Who has waited comes before who has released.
    fn decide_and_reply<T>(
        &mut self,
        ctx: &Ctx<'_>,
        verb: impl FnOnce(&mut Table, Place<'_>) -> Decision<T>,
        reply: impl FnOnce(&T),
    ) -> Result<T, WireError> {
        let key = self.key.take().ok_or(REENTERED)?;
        let lock = match key.state() {
            KeyState::Lock(handle) => Some(state::lock_of(handle)),
            KeyState::Empty | KeyState::OtherType => None,
        };
        let place = Place { db: self.db, key: self.bytes, lock };
        let decision = with_table(|table| verb(table, place)).ok_or(REENTERED)?;
        reply(&decision.answer);
        Ok(Shell::in_command(ctx).perform(key, self.name, decision))
    }
}

/// The request that a command's arguments make.
pub(crate) fn parse<'a, C: Command<'a>>(args: Args<'a>) -> Result<C, WireError> {
    with_table(|table| C::parse(args.iter_from(1), table.limits())).unwrap_or(Err(REENTERED))
}

/// What CHANNEL, SESSION, BLOCK and FLOOR need before the decision.
fn prepare(ctx: &Ctx<'_>, target: &Target<'_>, request: &mut Acquire<'_>) -> Result<(), WireError> {
    if let Some(channel) = request.channel {
        may_speak_on(ctx, target, channel)?;
    }
    if request.session.is_some() || request.wait != Wait::No {
        may_bind(ctx, request)?;
    }
    match request.floor {
        Some(floor) => raise(ctx, floor),
        None => Ok(()),
    }
}

#[inline(never)]
fn raise(ctx: &Ctx<'_>, floor: u64) -> Result<(), WireError> {
    let raised = with_table(|table| table.floor(floor, state::wall_clock())).ok_or(REENTERED)?;
    Ok(Shell::in_command(ctx).perform_keyless(raised)?)
}

/// The server publishes on the channel in the user's name, so the user must have the permission. In cluster mode messages stay within
/// the shard, so the channel must be in the key's slot.
#[inline(never)]
fn may_speak_on(ctx: &Ctx<'_>, target: &Target<'_>, channel: &[u8]) -> Result<(), WireError> {
    let channel = ServerString::new(channel);
    if ctx.flags().is_cluster() && ctx.key_slot(channel.as_str()) != ctx.key_slot(target.name) {
        return Err(WireError::fixed(
            ErrorCode::CrossSlot,
            "in cluster mode the channel given to CHANNEL must hash to the key's slot: use the key's hash tag",
        ));
    }
    if CurrentUser::of(ctx).may_access_channel(channel.as_str()) {
        Ok(())
    } else {
        Err(WireError::fixed(ErrorCode::NoPerm, "this user may not use the channel given to CHANNEL"))
    }
}

/// What ties a request to its connection needs one that can bear it.
#[inline(never)]
fn may_bind(ctx: &Ctx<'_>, request: &mut Acquire<'_>) -> Result<(), WireError> {
    if request.session.is_some() && (ctx.flags().in_script() || ctx.connection().is_none()) {
        return Err(WireError::fixed(
            ErrorCode::Err,
            "SESSION is not possible in a script: a script has no connection",
        ));
    }
    if let Wait::Block(_) = request.wait {
        if ctx.flags().denies_blocking() {
            request.wait = Wait::No; // in MULTI and in scripts: a plain try
        } else if ctx.connection().is_none_or(|connection| connection.has_subscriptions) {
            return Err(CANNOT_BLOCK);
        }
    }
    Ok(())
}

/// The connection that asks; a script is none.
fn connection(ctx: &Ctx<'_>) -> Option<NonZeroU64> {
    if ctx.flags().in_script() { None } else { NonZeroU64::new(ctx.client_id()) }
}

fn number(token: Token) -> i64 {
    i64::try_from(token.get()).unwrap_or(i64::MAX)
}

/// `flock_core::wire::spec::ACL_CATEGORY`, as C text.
const ACL_CATEGORY: &CStr = c"flock";
const NO_KEY: WireError = WireError::fixed(ErrorCode::Err, "no key given");
const REENTERED: WireError = WireError::fixed(ErrorCode::TryAgain, "the module is in the middle of another command");
const CANNOT_BLOCK: WireError = WireError::fixed(
    ErrorCode::Err,
    "BLOCK is not possible on this connection: it has subscriptions; use QUEUE, or another one",
);
