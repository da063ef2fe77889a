//! The differential target is `core/tests/model.rs` itself. It is a test program: its items are private, so the target includes its
//! text into a module of its own. Inner documentation cannot be included, and the `mod` in it must say where its file is.

use std::path::Path;
use std::{env, fs};

fn main() {
    let tests = Path::new(&env::var("CARGO_MANIFEST_DIR").expect("set by cargo")).join("../core/tests");
    let model = tests.join("model.rs");
    println!("cargo::rerun-if-changed={}", model.display());
    let text = fs::read_to_string(&model).unwrap_or_else(|fault| panic!("{}: {fault}", model.display()));
    let support = format!("#[path = {:?}]\nmod support;", tests.join("support/mod.rs"));
    let text = text.replace("//!", "//").replace("mod support;", &support);
    let out = Path::new(&env::var("OUT_DIR").expect("set by cargo")).join("model.rs");
    fs::write(&out, text).unwrap_or_else(|fault| panic!("{}: {fault}", out.display()));
}
