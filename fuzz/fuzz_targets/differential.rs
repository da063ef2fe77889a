//! The core against the naive server of `core/tests/model.rs`: the same comparison, with sequences that coverage chooses instead of
//! chance. After each step both must have answered alike, told the same people the same, and hold the same; the invariants hold.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| model::sequence::play(bytes));

#[allow(dead_code, unused_imports, reason = "what the property test alone needs")]
mod model {
    include!(concat!(env!("OUT_DIR"), "/model.rs")); // core/tests/model.rs: see build.rs

    pub(crate) mod sequence {
        use super::*;
        use arbitrary::Unstructured;

        const STEPS_MAX: usize = 100;

        /// Plays the steps that `bytes` describe.
        pub(crate) fn play(bytes: &[u8]) {
            let mut choice = Choice(Unstructured::new(bytes));
            let now = World::new(Limits::DEFAULT, &KEYS, &NAMES).now.as_us();
            let server = Server::new(now, KEYS.len(), WAITERS_MAX, IDS_MAX);
            let mut naive = Reference { server, connections: [1, 2, 3, 4], closed: None, undelivered: None };
            let mut core = Comparison::init_test(&naive);
            for _ in 0..STEPS_MAX {
                if choice.0.is_empty() {
                    break;
                }
                let step = step(&mut choice, naive.server.last_token());
                naive = <Reference as ReferenceStateMachine>::apply(naive, &step);
                core = <Comparison as StateMachineTest>::apply(core, &naive, step);
                <Comparison as StateMachineTest>::check_invariants(&core, &naive);
            }
        }

        fn step(choice: &mut Choice<'_>, last: u64) -> Step {
            // Mostly one key: sequences are about who meets whom.
            let key = choice.of(&[0, 0, 0, 1]);
            let owner = choice.below(OWNERS.len());
            match choice.below(32) {
                0..10 => {
                    let floor = choice.rarely(|choice| choice.of(&[1, 7, 2000]));
                    Step::Acquire { key, owner, ask: ask(choice, last), floor }
                }
                10..14 => {
                    let token = choice.rarely(|choice| token(choice, last));
                    let scope = match choice.below(4) {
                        0..2 => Scope::Plain,
                        2 => Scope::All,
                        _ => Scope::Id(choice.of(&IDS)),
                    };
                    Step::Release { key, owner, token, scope }
                }
                14..16 => {
                    let token = choice.often(|choice| token(choice, last));
                    Step::Renew { key, owner, lease_ms: lease_ms(choice), token }
                }
                16 => Step::Revoke { key, owner: choice.often(|_| owner) },
                17 => Step::Check { key, token: token(choice, last) },
                18..21 => Step::Pass { ms: choice.of(&[0, 1, 50, 99, 100, 200, 86_400_000]) },
                21..23 => Step::Wake,
                23 => Step::Delete { key },
                24 => Step::Evict { key },
                25 => Step::Carry { from: key, to: choice.below(KEYS.len()) },
                26 => Step::Swap,
                27 => Step::Flush { key: choice.often(|_| key) },
                28 => Step::Close { owner },
                29 => Step::Unblock { key, owner },
                30 => match choice.below(4) {
                    3 => Step::FailOver { grace_ms: choice.of(&[0, 100]) },
                    index => Step::Undelivered { index },
                },
                _ => Step::Listen { owner, deaf: choice.of(&[true, false]) },
            }
        }

        fn ask(choice: &mut Choice<'_>, last: u64) -> Ask {
            let lease_ms = lease_ms(choice);
            let convert = choice.rarely(|choice| token(choice, last));
            let patience = match choice.below(3) {
                // A conversion never waits.
                _ if convert.is_some() => Patience::None,
                0 => Patience::None,
                1 => Patience::Block(choice.of(&[Some(1), Some(100), Some(300), None])),
                _ => Patience::Queue(choice.of(&[1, 100, 300])),
            };
            let shared = choice.of(&[true, false]);
            Ask {
                lease_ms,
                shared,
                limit: choice.rarely(|choice| 1 + choice.below(3)).filter(|_| shared),
                patience,
                has_channel: matches!(patience, Patience::Queue(_)) || choice.of(&[false, false, true]),
                new: choice.of(&[false, false, false, true]),
                id: choice.rarely(|choice| choice.of(&IDS)),
                convert,
                claim_ms: choice.rarely(|choice| choice.of(&[1, 50, 100]).min(lease_ms)),
                session_ms: choice.rarely(|choice| choice.of(&[1, 50, 500])),
                label: choice.rarely(|choice| choice.of(&LABELS)),
            }
        }

        fn lease_ms(choice: &mut Choice<'_>) -> u64 {
            choice.of(&[1, 100, 200, 1000])
        }

        /// A token that was given, or none that ever was.
        fn token(choice: &mut Choice<'_>, last: u64) -> u64 {
            match choice.below(5) {
                4 => u64::MAX,
                back => last.saturating_sub(back as u64),
            }
        }

        /// The input as a sequence of choices of one byte each; where it ends, the first is chosen.
        struct Choice<'a>(Unstructured<'a>);

        impl Choice<'_> {
            fn below(&mut self, bound: usize) -> usize {
                usize::from(self.0.arbitrary::<u8>().unwrap_or_default()) % bound
            }

            fn of<T: Copy>(&mut self, from: &[T]) -> T {
                from[self.below(from.len())]
            }

            fn rarely<T>(&mut self, make: impl FnOnce(&mut Self) -> T) -> Option<T> {
                (self.below(4) == 3).then(|| make(self))
            }

            fn often<T>(&mut self, make: impl FnOnce(&mut Self) -> T) -> Option<T> {
                (self.below(4) != 0).then(|| make(self))
            }
        }
    }
}
