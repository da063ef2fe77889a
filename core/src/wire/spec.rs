//! The table of the commands: what the server, `COMMAND DOCS`, ACLs and `valkey-cli` hints are told about them.
//!
//! The module registers from this table; a test holds it against the parsers in [`crate::wire::command`]. Why the flags are as they
//! are:
//!
//! * **`deny-oom`**: ACQUIRE only. A server above its memory limit makes no new locks, but RELEASE and RENEW must work: they give
//!   memory back, or keep what is held.
//! * **`write`**: also CHECK, which changes nothing. So it always asks the primary: cluster clients do not send it to replicas, and
//!   a replica refuses it. Its key is marked as read all the same: a user with read access to the key may check.
//! * **`fast`**: what costs O(log n) at most. INFO, LIST and REVOKE grow with holders, waiters or locks.
//! * **`blocking`** informs; `BLOCK` in MULTI and scripts acts as a plain try, so ACQUIRE is not `deny-script`.
//! * **`admin`**: REVOKE, which ends what is another's. It is then also left out of MONITOR.
//! * **Keys**: `RW` with one of update, insert, delete, as the server asks; without access, like its own EXPIRE and SREM: whoever may write the
//!   key may lock and release it.
//! * The internal command carries changes to replicas, into the AOF and to the target of a slot migration. The module refuses it
//!   from anybody else; `deny-script` and its ACL categories keep it out of the way. It has no key if its change is MARK.

use crate::request::{Acquire, Release, Renew, Revoke};
use crate::wire::command::{Check, Command, Info, List};

/// One command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommandSpec {
    /// Its name, as registered.
    pub name: &'static str,
    /// What it does.
    pub summary: &'static str,
    /// What it costs.
    pub complexity: &'static str,
    /// The version of the module that had it first.
    pub since: &'static str,
    /// How many arguments, the name included; negative: at least so many.
    pub arity: i32,
    /// The server's command flags, separated by spaces.
    pub flags: &'static str,
    /// Its ACL categories, separated by spaces.
    pub acl_categories: &'static str,
    /// Hints for clients and proxies, separated by spaces.
    pub tips: &'static str,
    /// Where its key is.
    pub key: Option<KeySpec>,
    /// Its arguments.
    pub args: &'static [ArgSpec],
}

/// Where a command's one key is, and what happens to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeySpec {
    /// The position among the arguments; the command's name is at 0.
    pub position: i32,
    /// What happens to it.
    pub flags: &'static [KeyFlag],
    /// What else to know.
    pub notes: Option<&'static str>,
}

/// What a command does to its key. One of the first two, and at most one of update, insert and delete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyFlag {
    /// Reads it.
    ReadOnly,
    /// Reads and writes it.
    ReadWrite,
    /// Returns what it contains.
    Access,
    /// Changes its content.
    Update,
    /// Adds to its content.
    Insert,
    /// Deletes from its content.
    Delete,
}

/// One argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArgSpec {
    /// What it is called.
    pub name: &'static str,
    /// What it is.
    pub kind: ArgKind,
    /// The word before it (or, for [`ArgKind::PureToken`], the word it is).
    pub token: Option<&'static str>,
    /// What it does.
    pub summary: Option<&'static str>,
    /// Whether it may be left out.
    pub optional: bool,
    /// The parts of a [`ArgKind::OneOf`] or [`ArgKind::Block`].
    pub args: &'static [ArgSpec],
}

/// What an argument is, in the words of the server's command table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArgKind {
    /// Any bytes.
    String,
    /// A whole number.
    Integer,
    /// The command's key.
    Key,
    /// A glob.
    Pattern,
    /// A word without a value.
    PureToken,
    /// One of its parts.
    OneOf,
    /// All of its parts.
    Block,
}

impl ArgSpec {
    const fn new(name: &'static str, kind: ArgKind) -> Self {
        Self { name, kind, token: None, summary: None, optional: false, args: &[] }
    }

    /// `[word name]`.
    const fn option(word: &'static str, name: &'static str, kind: ArgKind, summary: &'static str) -> Self {
        Self { name, kind, token: Some(word), summary: Some(summary), optional: true, args: &[] }
    }

    /// `[word]`.
    const fn flag(word: &'static str, name: &'static str, summary: &'static str) -> Self {
        Self::option(word, name, ArgKind::PureToken, summary)
    }

    const fn says(mut self, summary: &'static str) -> Self {
        self.summary = Some(summary);
        self
    }

    const fn required(mut self) -> Self {
        self.optional = false;
        self
    }

    /// `[part | part]` or `[part part]`.
    const fn group(name: &'static str, kind: ArgKind, args: &'static [Self]) -> Self {
        Self { name, kind, token: None, summary: None, optional: true, args }
    }
}

/// The ACL category of the module's own: `+@flock` gives all that a user of locks needs.
pub const ACL_CATEGORY: &str = "flock";
/// The name of the internal command: `FLOCK._APPLY change [key]`.
pub const APPLY: &str = "FLOCK._APPLY";

const SINCE: &str = "0.1.0";
const KEY: ArgSpec = ArgSpec::new("key", ArgKind::Key).says("the lock's name");
const OWNER: ArgSpec =
    ArgSpec::new("owner", ArgKind::String).says("who asks: names this acquisition, so it must be new for each one");
const LEASE: ArgSpec = ArgSpec::new("lease_ms", ArgKind::Integer).says("how long the grant lasts");
const READ: KeySpec = KeySpec { position: 1, flags: &[KeyFlag::ReadOnly, KeyFlag::Access], notes: None };

const fn writes(flags: &'static [KeyFlag]) -> Option<KeySpec> {
    Some(KeySpec { position: 1, flags, notes: None })
}

/// All commands.
pub const COMMANDS: &[CommandSpec] = &[
    CommandSpec {
        name: Acquire::NAME,
        summary: "Grants a lock with a lease and returns its fencing token, or waits for it, or returns nil.",
        complexity: "O(log N) with N being the holders and waiters of the lock; O(M) more if M shared waiters are granted with it.",
        since: SINCE,
        arity: -4,
        flags: "write deny-oom fast blocking",
        acl_categories: "flock write fast blocking",
        tips: "",
        key: writes(&[KeyFlag::ReadWrite, KeyFlag::Update]),
        args: &[
            KEY,
            OWNER,
            LEASE,
            ArgSpec::group(
                "shared-mode",
                ArgKind::Block,
                &[
                    ArgSpec::flag("SHARED", "shared", "together with other shared holders").required(),
                    ArgSpec::option("LIMIT", "n", ArgKind::Integer, "at most so many of them"),
                ],
            ),
            ArgSpec::group(
                "wait",
                ArgKind::OneOf,
                &[
                    ArgSpec::option(
                        "BLOCK",
                        "wait_ms",
                        ArgKind::Integer,
                        "hold the connection until granted, for so long at most; 0 is no limit",
                    )
                    .required(),
                    ArgSpec::option(
                        "QUEUE",
                        "wait_ms",
                        ArgKind::Integer,
                        "queue for so long and answer at once; the grant is published on the channel",
                    )
                    .required(),
                ],
            ),
            ArgSpec::option("CHANNEL", "channel", ArgKind::String, "where the server speaks to this owner"),
            ArgSpec::flag("NEW", "new", "refuse if this owner holds the lock"),
            ArgSpec::option(
                "REENTRANT",
                "id",
                ArgKind::String,
                "add this id to the hold, which lasts until its last id",
            ),
            ArgSpec::option("CONVERT", "token", ArgKind::Integer, "change the mode of the hold with this token"),
            ArgSpec::option("FLOOR", "token", ArgKind::Integer, "first raise the token counter to this"),
            ArgSpec::option(
                "CLAIM",
                "claim_ms",
                ArgKind::Integer,
                "the grant lasts only so long until RENEW confirms it",
            ),
            ArgSpec::option(
                "SESSION",
                "grace_ms",
                ArgKind::Integer,
                "cut the lease to this when the connection closes",
            ),
            ArgSpec::option("LABEL", "text", ArgKind::String, "shown in FLOCK.INFO"),
        ],
    },
    CommandSpec {
        name: Release::NAME,
        summary: "Gives back a hold, or one id of it, or cancels a queued request; the next waiter is granted in the same step.",
        complexity: "O(log N) with N being the holders and waiters of the lock; O(M) more if M shared waiters are granted.",
        since: SINCE,
        arity: -3,
        flags: "write fast",
        acl_categories: "flock write fast",
        tips: "",
        key: writes(&[KeyFlag::ReadWrite, KeyFlag::Delete]),
        args: &[
            KEY,
            OWNER,
            ArgSpec::option("TOKEN", "token", ArgKind::Integer, "only the hold with this token"),
            ArgSpec::group(
                "scope",
                ArgKind::OneOf,
                &[
                    ArgSpec::option("ID", "id", ArgKind::String, "this id of a re-entered hold").required(),
                    ArgSpec::flag("ALL", "all", "a re-entered hold with all its ids").required(),
                ],
            ),
        ],
    },
    CommandSpec {
        name: Renew::NAME,
        summary: "Makes a hold last lease_ms from now; with TOKEN it also confirms a claim.",
        complexity: "O(log N) with N being the holders of the lock.",
        since: SINCE,
        arity: -4,
        flags: "write fast",
        acl_categories: "flock write fast",
        tips: "",
        key: writes(&[KeyFlag::ReadWrite, KeyFlag::Update]),
        args: &[
            KEY,
            OWNER,
            LEASE,
            ArgSpec::option("TOKEN", "token", ArgKind::Integer, "only the hold with this token"),
        ],
    },
    CommandSpec {
        name: Check::NAME,
        summary: "Returns 1 if a current holder has exactly this token, else 0.",
        complexity: "O(log N) with N being the holders of the lock.",
        since: SINCE,
        arity: 3,
        flags: "write fast",
        acl_categories: "flock write fast",
        tips: "",
        key: Some(READ),
        args: &[KEY, ArgSpec::new("token", ArgKind::Integer).says("the fencing token")],
    },
    CommandSpec {
        name: Info::NAME,
        summary: "Shows who holds a lock and who waits for it.",
        complexity: "O(N) with N being the holders and waiters shown.",
        since: SINCE,
        arity: -2,
        flags: "readonly",
        acl_categories: "flock read slow",
        tips: "nondeterministic_output",
        key: Some(READ),
        args: &[KEY, ArgSpec::option("LIMIT", "n", ArgKind::Integer, "how many waiters to show")],
    },
    CommandSpec {
        name: List::NAME,
        summary: "Lists the held locks of this server, page by page.",
        complexity: "O(N) with N being COUNT.",
        since: SINCE,
        arity: -1,
        flags: "readonly",
        acl_categories: "flock read slow",
        tips: "nondeterministic_output request_policy:special response_policy:special",
        key: None,
        args: &[
            ArgSpec::option("CURSOR", "c", ArgKind::Integer, "where the last page ended"),
            ArgSpec::option("COUNT", "n", ArgKind::Integer, "how many locks to look at"),
            ArgSpec::option("MATCH", "pattern", ArgKind::Pattern, "only keys that match this glob"),
            ArgSpec::option("OWNER", "owner", ArgKind::String, "only locks that this owner holds"),
        ],
    },
    CommandSpec {
        name: Revoke::NAME,
        summary: "Ends the holds of a lock, tells their owners, and grants the next waiter.",
        complexity: "O(N log N) with N being the holders that are ended.",
        since: SINCE,
        arity: -2,
        flags: "write admin",
        acl_categories: "write slow admin dangerous",
        tips: "",
        key: writes(&[KeyFlag::ReadWrite, KeyFlag::Delete]),
        args: &[KEY, ArgSpec::option("OWNER", "owner", ArgKind::String, "only this owner's hold")],
    },
    CommandSpec {
        name: APPLY,
        summary: "Internal: applies a decided change. Refused from clients.",
        complexity: "O(log N) with N being the holders of the lock.",
        since: SINCE,
        arity: -2,
        flags: "write deny-script fast no-mandatory-keys",
        acl_categories: "write fast admin dangerous",
        tips: "",
        key: Some(KeySpec {
            position: 2,
            flags: &[KeyFlag::ReadWrite, KeyFlag::Update],
            notes: Some("Absent if the change concerns the server as a whole."),
        }),
        args: &[
            ArgSpec::new("change", ArgKind::String),
            ArgSpec { optional: true, ..ArgSpec::new("key", ArgKind::Key) },
        ],
    },
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Limits;
    use alloc::collections::BTreeSet;
    use alloc::string::ToString;
    use alloc::vec::Vec;

    fn spec(name: &str) -> &'static CommandSpec {
        COMMANDS.iter().find(|spec| spec.name == name).unwrap()
    }

    fn words(args: &[ArgSpec]) -> Vec<&'static str> {
        args.iter().flat_map(|arg| arg.token.into_iter().chain(words(arg.args))).collect()
    }

    /// The table and the parser of one command name the same options, and the parser takes each of them.
    fn agrees<'a, C: Command<'a>>(positional: &[&'a str]) {
        let spec = spec(C::NAME);
        let table: BTreeSet<&str> = words(spec.args).into_iter().collect();
        let parser: BTreeSet<&str> = C::OPTIONS.iter().copied().collect();
        assert_eq!(table, parser, "{}", C::NAME);
        for option in C::OPTIONS {
            // Alone, many options lack their value or their companion; but none may be unknown.
            let args = positional.iter().copied().chain([*option]).map(str::as_bytes);
            if let Err(error) = C::parse(args, &Limits::DEFAULT) {
                assert!(!error.message.contains("unknown option"), "{}: {error}", C::NAME);
            }
        }
        let required = spec.args.iter().filter(|arg| !arg.optional).count();
        assert_eq!(required, positional.len(), "{}", C::NAME);
        assert!(C::parse(positional.iter().copied().map(str::as_bytes), &Limits::DEFAULT).is_ok());
        for missing in 0..positional.len() {
            let args = positional[..missing].iter().copied().map(str::as_bytes);
            let error = C::parse(args, &Limits::DEFAULT).err().unwrap();
            assert_eq!(error.message, "argument ".to_string() + spec.args[missing].name + " is missing");
        }
    }

    #[test]
    fn the_table_and_the_parsers_name_the_same_arguments() {
        agrees::<Acquire<'_>>(&["k", "o", "1"]);
        agrees::<Release<'_>>(&["k", "o"]);
        agrees::<Renew<'_>>(&["k", "o", "1"]);
        agrees::<Check<'_>>(&["k", "1"]);
        agrees::<Info<'_>>(&["k"]);
        agrees::<List<'_>>(&[]);
        agrees::<Revoke<'_>>(&["k"]);
    }

    #[test]
    fn arity_follows_from_the_arguments() {
        for spec in COMMANDS {
            let required = 1 + i32::try_from(spec.args.iter().filter(|arg| !arg.optional).count()).unwrap();
            let exact = spec.args.iter().all(|arg| !arg.optional);
            assert_eq!(spec.arity, if exact { required } else { -required }, "{}", spec.name);
        }
    }

    #[test]
    fn flags_are_words_that_the_server_knows() {
        // An unknown word makes the registration, and so the loading of the module, fail.
        let known = ["write", "readonly", "admin", "deny-oom", "deny-script", "fast", "blocking", "no-mandatory-keys"];
        for spec in COMMANDS {
            assert!(spec.flags.split(' ').all(|flag| known.contains(&flag)), "{}", spec.name);
            assert!(spec.flags.contains("write") != spec.flags.contains("readonly"), "{}", spec.name);
        }
    }

    #[test]
    fn categories_agree_with_the_flags() {
        // The server derives none of a module command's categories: what is left out here, no ACL rule finds.
        for spec in COMMANDS {
            let categories: BTreeSet<&str> = spec.acl_categories.split(' ').collect();
            let flags: BTreeSet<&str> = spec.flags.split(' ').collect();
            for (category, flag) in
                [("write", "write"), ("read", "readonly"), ("fast", "fast"), ("blocking", "blocking")]
            {
                assert_eq!(categories.contains(category), flags.contains(flag), "{} {category}", spec.name);
            }
            assert_eq!(categories.contains("slow"), !flags.contains("fast"), "{}", spec.name);
            assert_eq!(categories.contains("admin"), categories.contains("dangerous"), "{}", spec.name);
            // `+@flock` is for who uses locks: it does not give what ends another's.
            assert_eq!(categories.contains(ACL_CATEGORY), !categories.contains("admin"), "{}", spec.name);
        }
    }

    #[test]
    fn only_acquire_is_refused_when_memory_is_short() {
        for spec in COMMANDS {
            assert_eq!(spec.flags.contains("deny-oom"), spec.name == Acquire::NAME, "{}", spec.name);
        }
    }

    #[test]
    fn key_flags_are_combinations_that_the_server_accepts() {
        for key in COMMANDS.iter().filter_map(|spec| spec.key) {
            let count = |wanted: &[KeyFlag]| key.flags.iter().filter(|flag| wanted.contains(flag)).count();
            assert_eq!(count(&[KeyFlag::ReadOnly, KeyFlag::ReadWrite]), 1);
            assert!(count(&[KeyFlag::Update, KeyFlag::Insert, KeyFlag::Delete]) <= 1);
        }
        for spec in COMMANDS {
            assert_eq!(spec.key.is_some(), spec.args.iter().any(|arg| arg.kind == ArgKind::Key), "{}", spec.name);
        }
    }

    #[test]
    fn groups_have_parts_and_words_have_tokens() {
        fn check(args: &[ArgSpec]) {
            for arg in args {
                let group = matches!(arg.kind, ArgKind::OneOf | ArgKind::Block);
                assert_eq!(group, !arg.args.is_empty(), "{}", arg.name);
                assert!(arg.kind != ArgKind::PureToken || arg.token.is_some(), "{}", arg.name);
                check(arg.args);
            }
        }
        COMMANDS.iter().for_each(|spec| check(spec.args));
    }
}
