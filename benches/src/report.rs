//! What is printed: goals with what was measured, and whether all are met.

use std::process::ExitCode;

use crate::measure::Summary;

/// What a number is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// How many times as much.
    Ratio,
    /// Nanoseconds, shown as microseconds.
    Time,
    /// Seconds, shown as milliseconds.
    Duration,
    /// Bytes.
    Bytes,
    /// Bytes, shown as KiB.
    Kibibytes,
    /// A number of things.
    Count,
}

impl Unit {
    fn show(self, value: f64) -> String {
        match self {
            Unit::Ratio => format!("{value:.2}"),
            Unit::Time => format!("{:.2} us", value / 1e3),
            Unit::Duration => format!("{:.1} ms", value * 1e3),
            Unit::Bytes => format!("{value:.0} B"),
            Unit::Kibibytes => format!("{:.0} KiB", value / 1024.0),
            Unit::Count => format!("{value:.0}"),
        }
    }
}

/// Prints as it goes, and remembers what was missed.
#[derive(Debug, Default)]
pub struct Report {
    goals: usize,
    missed: Vec<String>,
}

impl Report {
    /// The head of a group.
    pub fn section(&self, title: &str) {
        println!("\n{title}");
    }

    /// A line of text.
    pub fn note(&self, text: &str) {
        println!("        {text}");
    }

    /// A figure that no goal is about.
    pub fn shown(&self, what: &str, measured: Summary, unit: Unit) {
        println!("        {}", line(what, measured, unit));
    }

    /// A figure that must be at most `limit`.
    pub fn goal(&mut self, what: &str, measured: Summary, limit: f64, unit: Unit) {
        let line = format!("{}   <= {}", line(what, measured, unit), unit.show(limit));
        self.judge(measured.median <= limit, line);
    }

    /// A figure that must be at least `limit`.
    pub fn goal_at_least(&mut self, what: &str, measured: Summary, limit: f64, unit: Unit) {
        let line = format!("{}   >= {}", line(what, measured, unit), unit.show(limit));
        self.judge(measured.median >= limit, line);
    }

    fn judge(&mut self, met: bool, line: String) {
        self.goals += 1;
        let verdict = if met { "PASS" } else { "MISS" };
        println!("  {verdict}  {line}");
        if !met {
            self.missed.push(line);
        }
    }

    /// The last lines, and how the program ends: with success if every goal is met.
    pub fn verdict(&self) -> ExitCode {
        if self.missed.is_empty() {
            println!("\nall {} goals are met", self.goals);
            return ExitCode::SUCCESS;
        }
        println!("\n{} of {} goals are missed:", self.missed.len(), self.goals);
        for line in &self.missed {
            println!("  {line}");
        }
        ExitCode::FAILURE
    }
}

fn line(what: &str, measured: Summary, unit: Unit) -> String {
    let spread = if measured.low == measured.high {
        String::new()
    } else {
        format!("({} .. {})", unit.show(measured.low), unit.show(measured.high))
    };
    format!("{what:<66} {:>10}  {spread:<24}", unit.show(measured.median))
}
