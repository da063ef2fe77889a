//! TEMPORARY
use crate::ffi::command_spec as f;
use flock_core::wire::spec as c;

fn args(list: &'static [c::ArgSpec]) -> &'static [f::ArgSpec] {
    Box::leak(
        list.iter()
            .map(|a| f::ArgSpec {
                kind: match a.kind {
                    c::ArgKind::String => f::ArgKind::String,
                    c::ArgKind::Integer => f::ArgKind::Integer,
                    c::ArgKind::Key => f::ArgKind::Key,
                    c::ArgKind::Pattern => f::ArgKind::Pattern,
                    c::ArgKind::PureToken => f::ArgKind::PureToken,
                    c::ArgKind::OneOf => f::ArgKind::OneOf,
                    c::ArgKind::Block => f::ArgKind::Block,
                },
                token: a.token.unwrap_or(""),
                summary: a.summary.unwrap_or(""),
                optional: a.optional,
                parts: args(a.args),
                key_spec: (a.kind == c::ArgKind::Key).then_some(0),
                ..f::ArgSpec::new(a.name, f::ArgKind::String)
            })
            .collect::<Vec<_>>()
            .into_boxed_slice(),
    )
}

pub(crate) fn bridge(s: &'static c::CommandSpec) -> f::CommandSpec {
    let pos = s.key.map_or(0, |k| k.position);
    f::CommandSpec {
        name: s.name,
        flags: s.flags,
        acl_categories: s.acl_categories,
        keys: (pos, pos, i32::from(pos > 0)),
        arity: s.arity,
        summary: s.summary,
        complexity: s.complexity,
        since: s.since,
        tips: s.tips,
        history: &[],
        key_specs: Box::leak(
            s.key
                .iter()
                .map(|k| f::KeySpec {
                    notes: k.notes.unwrap_or(""),
                    flags: k.flags.iter().fold(0, |acc, flag| {
                        acc | match flag {
                            c::KeyFlag::ReadOnly => f::key_flags::READ_ONLY,
                            c::KeyFlag::ReadWrite => f::key_flags::READ_WRITE,
                            c::KeyFlag::Access => f::key_flags::ACCESS,
                            c::KeyFlag::Update => f::key_flags::UPDATE,
                            c::KeyFlag::Insert => f::key_flags::INSERT,
                            c::KeyFlag::Delete => f::key_flags::DELETE,
                        }
                    }),
                    first: k.position,
                    last: 0,
                    step: 1,
                })
                .collect::<Vec<_>>()
                .into_boxed_slice(),
        ),
        args: args(s.args),
    }
}
