//! Libraries in C that tests give to servers.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, id};
use std::sync::{Mutex, PoisonError};

use crate::work_dir;

/// The library that `cc` makes of this source file of the tests' package; made once by each test process.
///
/// # Panics
/// If it does not compile.
#[track_caller]
pub fn c_library(source: &str) -> PathBuf {
    static MADE: Mutex<BTreeMap<String, PathBuf>> = Mutex::new(BTreeMap::new());
    let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
    made.entry(source.to_owned()).or_insert_with(|| compile(source)).clone()
}

fn compile(source: &str) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(source);
    let library = work_dir::root().join(source.with_extension("so").file_name().expect("a source file has a name"));
    std::fs::create_dir_all(work_dir::root()).expect("cannot make the directory of the tests");
    // By renaming: a server of another test process may have it loaded.
    let new = library.with_extension(id().to_string());
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o"]).arg(&new).arg(&source);
    assert!(compiler.status().expect("there is a C compiler, cc").success(), "{} does not compile", source.display());
    std::fs::rename(new, &library).expect("a library can be renamed");
    library
}
