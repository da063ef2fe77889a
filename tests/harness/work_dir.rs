//! Directories of servers: made, cleared away, and kept when a test failed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::id;
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::SystemTime;

/// A fresh directory, removed on drop unless [`WorkDir::keep`] was called.
///
/// It is `target/flock-tests/<pid>/<n>`. Servers shared by a whole test process are in statics, which are never dropped;
/// so every test process first removes what processes that no longer run have left.
#[derive(Debug)]
pub(crate) struct WorkDir {
    path: PathBuf,
}

impl WorkDir {
    pub(crate) fn new() -> WorkDir {
        static SWEEP: Once = Once::new();
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let root = root();
        SWEEP.call_once(|| remove_left_overs(&root));
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = root.join(id().to_string()).join(number.to_string());
        fs::create_dir_all(&path).unwrap_or_else(|error| panic!("cannot make {}: {error}", path.display()));
        WorkDir { path }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Moves the directory to where nothing clears it away, and says where that is.
    pub(crate) fn keep(&mut self) -> &Path {
        let failed = root().join("failed");
        let number = self.path.file_name().unwrap_or_default().to_string_lossy();
        // The time comes first: names sort by it, and process ids come again.
        let kept = failed.join(format!("{}-{}-{number}", unix_seconds(), id()));
        if !self.is_kept() && fs::create_dir_all(&failed).is_ok() && fs::rename(&self.path, &kept).is_ok() {
            self.path = kept;
        }
        &self.path
    }

    fn is_kept(&self) -> bool {
        self.path.starts_with(root().join("failed"))
    }
}

impl Drop for WorkDir {
    fn drop(&mut self) {
        if !self.is_kept() {
            // The directory of the process stays, for the next server: a later process sweeps it.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

fn unix_seconds() -> u64 {
    let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since_1970.unwrap_or_default().as_secs()
}

/// `flock-tests` in cargo's target directory, which the running binary is in and which has a tag file of a fixed name.
pub(crate) fn root() -> PathBuf {
    let executable = std::env::current_exe().unwrap_or_default();
    executable
        .ancestors()
        .find(|directory| directory.join("CACHEDIR.TAG").exists())
        .map_or_else(std::env::temp_dir, Path::to_path_buf)
        .join("flock-tests")
}

fn remove_left_overs(root: &Path) {
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let owner = name.to_str().and_then(|name| name.parse::<u32>().ok());
        if owner.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropped_directory_is_removed() {
        let dir = WorkDir::new();
        let path = dir.path().to_path_buf();
        assert!(path.is_dir());
        drop(dir);
        assert!(!path.exists());
    }

    #[test]
    fn kept_directory_stays() {
        let mut dir = WorkDir::new();
        let kept = dir.keep().to_path_buf();
        drop(dir);
        assert!(kept.is_dir());
        fs::remove_dir_all(kept).expect("cannot remove the kept directory");
    }

    #[test]
    fn directory_of_a_dead_process_is_swept() {
        let dir = WorkDir::new();
        // Larger than any pid Linux gives out.
        let dead = dir.path().join("4194305");
        let alive = dir.path().join(id().to_string());
        fs::create_dir(&dead).and(fs::create_dir(&alive)).expect("cannot make directories");
        remove_left_overs(dir.path());
        assert!(!dead.exists());
        assert!(alive.exists());
    }
}
