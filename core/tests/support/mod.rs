//! What the tests of the rules stand on: a server in miniature, and the words for what happened in it.
#![allow(dead_code, reason = "each test program uses its own part of this")]

pub(crate) mod naive;
pub(crate) mod transcript;
pub(crate) mod world;
