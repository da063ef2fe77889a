//! A page of documentation: its blocks, tables, links and headings.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The folder of the project.
pub(super) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A Markdown file.
pub(super) struct Page {
    /// From the folder of the project on.
    pub(super) path: String,
    text: String,
}

/// A fenced block.
#[derive(Clone)]
pub(super) struct Block {
    /// `README.md:12`, for complaints.
    pub(super) place: String,
    /// The word after the fence.
    pub(super) kind: String,
    pub(super) lines: Vec<String>,
}

impl Page {
    #[track_caller]
    pub(super) fn read(path: &str) -> Page {
        let text = fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("cannot read {path}: {error}"));
        Page { path: path.to_owned(), text }
    }

    /// The README, and everything under docs/.
    pub(super) fn all() -> Vec<Page> {
        let mut paths = vec!["README.md".to_owned()];
        for folder in ["docs", "docs/decisions"] {
            let entries = fs::read_dir(root().join(folder)).expect("docs/ can be read");
            let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
            paths.extend(names.filter(|name| name.ends_with(".md")).map(|name| format!("{folder}/{name}")));
        }
        paths.sort();
        paths.iter().map(|path| Page::read(path)).collect()
    }

    pub(super) fn blocks(&self) -> Vec<Block> {
        blocks_of(&self.path, 1, &self.text)
    }

    /// The blocks of one section.
    #[track_caller]
    pub(super) fn blocks_under(&self, heading: &str) -> Vec<Block> {
        blocks_of(&self.path, 1, self.section(heading))
    }

    /// What stands between this heading and the next of its level or above.
    #[track_caller]
    pub(super) fn section(&self, heading: &str) -> &str {
        let mut start = None;
        let mut at = 0;
        let mut in_block = false;
        for line in self.text.split_inclusive('\n') {
            in_block ^= line.trim_start().starts_with("```");
            let level = line.chars().take_while(|letter| *letter == '#').count();
            match start {
                Some((begin, own_level)) if !in_block && (1..=own_level).contains(&level) => {
                    return &self.text[begin..at];
                }
                None if !in_block && level > 0 && line.trim_start_matches('#').trim() == heading => {
                    start = Some((at + line.len(), level));
                }
                _ => {}
            }
            at += line.len();
        }
        match start {
            Some((begin, _)) => &self.text[begin..],
            None => panic!("{} has no section \"{heading}\"", self.path),
        }
    }

    /// The headings of the second level.
    pub(super) fn sections(&self) -> Vec<&str> {
        let headings: Vec<_> = self.prose().filter_map(|(_, line)| line.strip_prefix("## ")).collect();
        assert!(!headings.is_empty(), "{} has no sections", self.path);
        headings
    }

    /// The cells of the first table of a section, without its head.
    #[track_caller]
    pub(super) fn table(&self, heading: &str) -> Vec<Vec<String>> {
        let lines = self.section(heading).lines().skip_while(|line| !line.starts_with('|'));
        let rows = lines.take_while(|line| line.starts_with('|')).skip(2);
        let rows: Vec<Vec<String>> = rows.map(cells).collect();
        assert!(!rows.is_empty(), "{} has no table under \"{heading}\"", self.path);
        rows
    }

    /// Every `span` of code outside blocks, with its line.
    pub(super) fn code_spans(&self) -> Vec<(usize, String)> {
        let spans = |line: &str| line.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>();
        self.prose().flat_map(|(number, line)| spans(line).into_iter().map(move |span| (number, span))).collect()
    }

    /// The target of every `[text](target)` outside blocks, with its line.
    pub(super) fn links(&self) -> Vec<(usize, String)> {
        let targets = |line: &str| {
            let after = line.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
            after.map(|(target, _)| target.to_owned()).collect::<Vec<_>>()
        };
        self.prose().flat_map(|(number, line)| targets(line).into_iter().map(move |target| (number, target))).collect()
    }

    /// The lines outside blocks, with their numbers.
    fn prose(&self) -> impl Iterator<Item = (usize, &str)> {
        let mut in_block = false;
        (1..).zip(self.text.lines()).filter(move |(_, line)| {
            let is_fence = line.trim_start().starts_with("```");
            in_block ^= is_fence;
            !in_block && !is_fence
        })
    }
}

/// The anchors of a page's headings, as code hosts make them.
pub(super) fn anchors(text: &str) -> BTreeSet<String> {
    let headings =
        text.lines().filter_map(|line| line.strip_prefix('#').map(|rest| rest.trim_start_matches('#').trim()));
    headings
        .map(|heading| {
            let kept = heading.to_lowercase().replace(' ', "-");
            kept.chars().filter(|letter| letter.is_alphanumeric() || "-_".contains(*letter)).collect()
        })
        .collect()
}

fn blocks_of(path: &str, first_line: usize, text: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut open: Option<Block> = None;
    for (number, line) in (first_line..).zip(text.lines()) {
        match (line.strip_prefix("```"), open.take()) {
            (Some(kind), None) => {
                open =
                    Some(Block { place: format!("{path}:{number}"), kind: kind.trim().to_owned(), lines: Vec::new() });
            }
            (Some(_), Some(block)) => blocks.push(block),
            (None, Some(mut block)) => {
                block.lines.push(line.to_owned());
                open = Some(block);
            }
            (None, None) => {}
        }
    }
    assert!(open.is_none(), "{path}: a block has no end");
    blocks
}

/// `| a | b |` as `a`, `b`; a `\|` is no border.
fn cells(row: &str) -> Vec<String> {
    let row = row.trim().trim_start_matches('|').trim_end_matches('|').replace("\\|", "\0");
    row.split('|').map(|cell| cell.trim().replace('\0', "|")).collect()
}
