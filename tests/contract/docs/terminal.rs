//! What a person at a terminal types and sees: the words of a command line, and a reply as valkey-cli prints it.

use flock_tests::reply::Reply;

/// A reply as the lines that valkey-cli prints on a terminal.
pub(super) fn lines_of(reply: &Reply) -> Vec<String> {
    printed(reply, "").lines().map(|line| line.trim_end().to_owned()).collect()
}

fn printed(reply: &Reply, indent: &str) -> String {
    match reply {
        Reply::Nil => "(nil)\n".into(),
        Reply::Int(number) => format!("(integer) {number}\n"),
        Reply::Bulk(bytes) => format!("{}\n", quoted(bytes)),
        Reply::Simple(text) => format!("{text}\n"),
        Reply::Error { text, .. } => format!("(error) {text}\n"),
        Reply::Bool(truth) => format!("({truth})\n"),
        Reply::Double(number) => format!("(double) {number}\n"),
        Reply::Array(items) if items.is_empty() => "(empty array)\n".into(),
        Reply::Push(items) if items.is_empty() => "(empty push)\n".into(),
        Reply::Map(pairs) if pairs.is_empty() => "(empty hash)\n".into(),
        Reply::Array(items) | Reply::Push(items) => {
            let separator = if matches!(reply, Reply::Push(_)) { '>' } else { ')' };
            let width = items.len().to_string().len();
            let deeper = format!("{indent}{}", " ".repeat(width + 2));
            let lines = (1..).zip(items).map(|(number, item)| {
                let indent = if number == 1 { "" } else { indent };
                format!("{indent}{number:>width$}{separator} {}", printed(item, &deeper))
            });
            lines.collect()
        }
        Reply::Map(pairs) => {
            let width = pairs.len().to_string().len();
            let deeper = format!("{indent}{}", " ".repeat(width + 2));
            let lines = (1..).zip(pairs).map(|(number, (name, value))| {
                let indent = if number == 1 { "" } else { indent };
                let value = printed(value, &deeper);
                let gap = if value.lines().count() > 1 { format!("\n{deeper}") } else { String::new() };
                let name = printed(name, &deeper);
                format!("{indent}{number:>width$}# {} => {gap}{value}", name.trim_end())
            });
            lines.collect()
        }
    }
}

fn quoted(bytes: &[u8]) -> String {
    let letters = bytes.iter().map(|byte| match byte {
        b'\n' => "\\n".into(),
        b'\r' => "\\r".into(),
        b'\t' => "\\t".into(),
        b'\\' | b'"' => format!("\\{}", char::from(*byte)),
        b' '..=b'~' => char::from(*byte).to_string(),
        other => format!("\\x{other:02x}"),
    });
    format!("\"{}\"", letters.collect::<String>())
}

/// The words of a command line; quotes keep spaces.
pub(super) fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    for letter in line.chars() {
        match (quote, letter) {
            (Some(open), _) if letter == open => quote = None,
            (None, '"' | '\'') => {
                quote = Some(letter);
                word.get_or_insert_default();
            }
            (None, ' ') => words.extend(word.take()),
            _ => word.get_or_insert_default().push(letter),
        }
    }
    assert!(quote.is_none(), "a quote has no end: {line}");
    words.extend(word);
    words
}

/// The arguments of a call in some language: its strings and numbers from the command's name on; names of variables stand for
/// themselves, those of tokens and times for a number.
pub(super) fn call_args(line: &str) -> Vec<String> {
    let call = line.find("FLOCK.").map_or("", |at| &line[at - 1..]);
    let call = call.split(')').next().unwrap_or_default();
    call.split(',')
        .map(|arg| match arg.trim().trim_matches(['"', '\'']) {
            "token" => "1".to_owned(),
            arg => arg.to_owned(),
        })
        .collect()
}
