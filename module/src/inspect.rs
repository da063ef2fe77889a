//! INFO and LIST: who holds what, since when, and who waits. They change nothing, and work on replicas.

use crate::commands;
use crate::ffi::acl::CurrentUser;
use crate::ffi::args::Args;
use crate::ffi::ctx::Ctx;
use crate::ffi::key::{Key, KeyState, Mode};
use crate::ffi::reply;
use crate::ffi::string::ServerString;
use crate::state::{self, with_table};
use flock_core::Place;
use flock_core::wire::command::{Info, List};
use flock_core::wire::error::{ErrorCode, WireError};
use flock_core::wire::report::{self, Reply};

/// `FLOCK.INFO key [LIMIT n]`.
pub(crate) fn info(ctx: &Ctx<'_>, args: Args<'_>) -> Result<(), WireError> {
    let request = commands::parse::<Info<'_>>(args)?;
    let name = args.string(1).ok_or(WireError::fixed(ErrorCode::Err, "no key given"))?;
    let lock = match Key::open(ctx, name, Mode::Read).state() {
        KeyState::OtherType => return Err(WireError::WRONG_TYPE),
        KeyState::Empty => None,
        KeyState::Lock(handle) => Some(state::lock_of(handle)),
    };
    let place = Place { db: db_of(ctx), key: request.key, lock };
    with_table(|table| report::info(&mut ToCaller(ctx), table, place, &request, state::now()));
    Ok(())
}

/// `FLOCK.LIST [CURSOR c] [COUNT n] [MATCH pattern] [OWNER owner]`.
pub(crate) fn list(ctx: &Ctx<'_>, args: Args<'_>) -> Result<(), WireError> {
    let request = commands::parse::<List<'_>>(args)?;
    let user = CurrentUser::of(ctx);
    let may_see = |key: &[u8]| user.may_read_key(ServerString::new(key).as_str());
    with_table(|table| report::list(&mut ToCaller(ctx), table, db_of(ctx), &request, may_see, state::now()));
    Ok(())
}

fn db_of(ctx: &Ctx<'_>) -> u16 {
    u16::try_from(ctx.selected_db()).unwrap_or(u16::MAX)
}

/// The reply of the command that runs.
struct ToCaller<'c>(&'c Ctx<'c>);

impl Reply for ToCaller<'_> {
    fn nil(&mut self) {
        reply::nil(self.0);
    }

    fn integer(&mut self, number: u64) {
        reply::integer(self.0, i64::try_from(number).unwrap_or(i64::MAX));
    }

    fn bulk(&mut self, bytes: &[u8]) {
        reply::bulk(self.0, bytes);
    }

    fn array(&mut self, len: usize) {
        reply::array(self.0, len);
    }

    fn map(&mut self, len: usize) {
        reply::map(self.0, len);
    }
}
