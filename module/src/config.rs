//! The module's settings, one table: `flock.<name>` in CONFIG, or `<name> <value>` after the module's path.

use crate::ffi;
use crate::ffi::config::{BoolConfig, IntConfig};
use crate::ffi::ctx::{Ctx, LogLevel};
use flock_core::deadlines::DURATION_MAX;
use flock_core::request::Limits;
use flock_core::time::Millis;
use flock_core::wire;
use std::sync::atomic::{AtomicBool, Ordering};

const DURATION_MAX_MS: i64 = DURATION_MAX.as_ms() as i64;
const DAY_MS: i64 = 24 * 3600 * 1000;
// The hard caps of the wire: what is stored or replicated is never longer.
const OWNER_BYTES_MAX: i64 = 4096;
const LABEL_BYTES_MAX: i64 = 4096;
const IDS_PER_HOLD_MAX: i64 = 1024;
const _: () = assert!(
    wire::OWNER_BYTES_MAX == 4096 && wire::LABEL_BYTES_MAX == 4096 && wire::IDS_MAX == 1024,
    "the settings' ranges are the wire's"
);

//                                                        name                    default  least            most
static LEASE_MAX_MS: IntConfig = IntConfig::new(c"lease-max-ms", DAY_MS, 1, DURATION_MAX_MS);
static WAIT_MAX_MS: IntConfig = IntConfig::new(c"wait-max-ms", DAY_MS, 1, DURATION_MAX_MS);
static WAITERS_MAX: IntConfig = IntConfig::new(c"waiters-max", 100_000, 0, 10_000_000);
static OWNER_MAX_BYTES: IntConfig = IntConfig::new(c"owner-max-bytes", 256, 1, OWNER_BYTES_MAX);
static LABEL_MAX_BYTES: IntConfig = IntConfig::new(c"label-max-bytes", 256, 0, LABEL_BYTES_MAX);
static IDS_MAX: IntConfig = IntConfig::new(c"ids-max", 64, 1, IDS_PER_HOLD_MAX);
static PROMOTION_GRACE_MS: IntConfig = IntConfig::new(c"promotion-grace-ms", 0, 0, DURATION_MAX_MS);
static FLOOR_ENABLED: BoolConfig = BoolConfig::new(c"floor-enabled", true);
/// Whether the end of a hold is published on the lock's own channel.
pub(crate) static RELEASE_NOTIFICATIONS: BoolConfig = BoolConfig::new(c"release-notifications", false);

static INTS: [&IntConfig; 7] =
    [&LEASE_MAX_MS, &WAIT_MAX_MS, &WAITERS_MAX, &OWNER_MAX_BYTES, &LABEL_MAX_BYTES, &IDS_MAX, &PROMOTION_GRACE_MS];
static BOOLS: [&BoolConfig; 2] = [&FLOOR_ENABLED, &RELEASE_NOTIFICATIONS];

/// Registers every setting; `args` (name and value in turn) are the defaults of this start.
pub(crate) fn register(ctx: &Ctx<'_>, args: &[&[u8]]) -> Result<(), String> {
    let mut given = Given::parse(args)?;
    for config in INTS {
        let default = match given.take(config.name.to_bytes()) {
            None => config.default,
            Some(text) => {
                text.parse().map_err(|_| format!("module argument {:?}: not a whole number: {text}", config.name))?
            }
        };
        config.register(ctx, default)?;
    }
    for config in BOOLS {
        let default = match given.take(config.name.to_bytes()).as_deref() {
            None => config.default,
            Some("yes") => true,
            Some("no") => false,
            Some(text) => return Err(format!("module argument {:?}: yes or no, not {text}", config.name)),
        };
        config.register(ctx, default)?;
    }
    given.finish()?;
    ffi::config::load_values(ctx)
}

/// The bounds on requests, as set now.
pub(crate) fn limits() -> Limits {
    Limits {
        lease_max: millis(&LEASE_MAX_MS),
        wait_max: millis(&WAIT_MAX_MS),
        owner_max_bytes: size(&OWNER_MAX_BYTES),
        label_max_bytes: size(&LABEL_MAX_BYTES),
        ids_max: size(&IDS_MAX),
        waiters_max: size(&WAITERS_MAX),
        floor_enabled: FLOOR_ENABLED.get(),
        ..Limits::DEFAULT
    }
}

/// For how long a new primary makes no new grants.
pub(crate) fn promotion_grace() -> Millis {
    millis(&PROMOTION_GRACE_MS)
}

static EVICTS_LOCKS: AtomicBool = AtomicBool::new(false);

/// Whether the server's `maxmemory-policy` lets it evict held locks.
pub(crate) fn evicts_locks() -> bool {
    EVICTS_LOCKS.load(Ordering::Relaxed)
}

/// If the server may evict held locks the operator must hear of it. Asked at the start, and whenever the policy is set.
pub(crate) fn warn_of_eviction(ctx: &Ctx<'_>) {
    let policy = eviction_policy(ctx).filter(|policy| policy.starts_with("allkeys"));
    EVICTS_LOCKS.store(policy.is_some(), Ordering::Relaxed);
    if let Some(policy) = policy {
        ctx.log(
            LogLevel::Warning,
            &format!(
                "maxmemory-policy {policy} may evict held locks: each is put back at once under its token, which frees no memory \
                 and costs work; use noeviction or a volatile-* policy"
            ),
        );
    }
}

/// The server's `maxmemory-policy`.
pub(crate) fn eviction_policy(ctx: &Ctx<'_>) -> Option<String> {
    ffi::info::server_field(ctx, c"memory", c"maxmemory_policy")
}

fn millis(config: &IntConfig) -> Millis {
    Millis(u32::try_from(config.get()).unwrap_or(u32::MAX))
}

fn size(config: &IntConfig) -> usize {
    usize::try_from(config.get()).unwrap_or_default()
}

/// Module arguments that nobody has taken yet.
struct Given(Vec<(String, String)>);

impl Given {
    fn parse(args: &[&[u8]]) -> Result<Self, String> {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).to_ascii_lowercase();
        args.chunks(2)
            .map(|pair| match pair {
                [name, value] => Ok((text(name).trim_start_matches("flock.").to_owned(), text(value))),
                _ => Err("module arguments come in pairs: a setting's name and its value".to_owned()),
            })
            .collect::<Result<_, _>>()
            .map(Self)
    }

    fn take(&mut self, name: &[u8]) -> Option<String> {
        let index = self.0.iter().position(|(given, _)| given.as_bytes() == name)?;
        Some(self.0.swap_remove(index).1)
    }

    fn finish(self) -> Result<(), String> {
        match self.0.first() {
            None => Ok(()),
            Some((name, _)) => Err(format!("unknown module argument {name}")),
        }
    }
}
