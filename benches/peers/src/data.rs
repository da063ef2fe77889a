//! Tables in files: what was measured, one row each.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

/// A table that is written row by row.
pub(crate) struct Table {
    file: File,
}

impl Table {
    /// With these columns, separated by commas. The last, of all tables, is the load average of the machine.
    pub(crate) fn new(name: &'static str, columns: &str) -> Table {
        let path = folder("data").join(name).with_extension("csv");
        let file = File::create(&path).unwrap_or_else(|error| panic!("cannot write {}: {error}", path.display()));
        let mut table = Table { file };
        table.line(&format!("{columns},load"));
        table
    }

    /// Adds a row, and prints it.
    pub(crate) fn row(&mut self, row: &str) {
        let row = format!("{row},{}", load());
        println!("  {row}");
        self.line(&row);
    }

    fn line(&mut self, line: &str) {
        writeln!(self.file, "{line}").expect("there is room on the disk");
    }
}

/// The rows of a table that was written, as named fields.
pub(crate) fn read(name: &str) -> Vec<Row> {
    let path = folder("data").join(name).with_extension("csv");
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()));
    let mut lines = text.lines().map(|line| line.split(',').map(str::to_owned).collect::<Vec<_>>());
    let columns = lines.next().unwrap_or_default();
    lines.map(|fields| Row(columns.iter().cloned().zip(fields).collect())).collect()
}

/// A row.
pub(crate) struct Row(Vec<(String, String)>);

impl Row {
    pub(crate) fn text(&self, column: &str) -> &str {
        let field = self.0.iter().find(|(name, _)| name == column);
        field.map_or_else(|| panic!("there is no column {column}"), |(_, value)| value)
    }

    pub(crate) fn number(&self, column: &str) -> f64 {
        self.text(column).parse().unwrap_or(f64::NAN)
    }
}

/// A folder of `benches/`.
pub(crate) fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name);
    fs::create_dir_all(&folder).expect("the folder can be made");
    folder
}

/// The load average over the last minute.
pub(crate) fn load() -> String {
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    load.split_whitespace().next().unwrap_or("?").to_owned()
}

/// The value below which this part of the sorted samples is.
pub(crate) fn quantile(sorted: &[f64], part: f64) -> f64 {
    let last = sorted.len().saturating_sub(1) as f64;
    sorted.get((last * part).round() as usize).copied().unwrap_or(f64::NAN)
}
