//! The glob of `FLOCK.LIST MATCH`: the patterns that KEYS and SCAN take, in time bounded by pattern length x key length.
//!
//! `*` any bytes, `?` one byte, `[abc]`, `[a-z]`, `[^a]` one byte of (or not of) a set, `\x` the byte x itself. Bytes, not
//! characters. The odd cases are decided as the server decides them: an unclosed set ends with the pattern, a range may be written
//! backwards, a last `\` means itself. One difference: a pattern of stars also matches the empty key, as `*` does in SCAN.

/// Whether `text` as a whole matches `pattern`.
#[must_use]
pub fn matches(pattern: &[u8], text: &[u8]) -> bool {
    let mut pattern = pattern;
    let mut text = text;
    // Where to go on when a byte does not fit: after the latest star, which then takes one byte more. Earlier stars need no
    // second try: whatever they could take more, the latest can take as well.
    let mut retry: Option<(&[u8], &[u8])> = None;
    loop {
        if let Some(after_star) = pattern.strip_prefix(b"*") {
            pattern = after_star;
            retry = Some((pattern, text));
        } else if let Some((byte, rest)) = text.split_first() {
            if let Some(next) = one_byte(pattern, *byte) {
                pattern = next;
                text = rest;
            } else {
                let Some((after_star, [_, shorter @ ..])) = retry else {
                    return false;
                };
                pattern = after_star;
                text = shorter;
                retry = Some((after_star, shorter));
            }
        } else {
            return pattern.is_empty();
        }
    }
}

/// Matches `byte` against the first element of `pattern` and returns what follows it; `None` if it does not match.
fn one_byte(pattern: &[u8], byte: u8) -> Option<&[u8]> {
    match pattern {
        [] => None,
        [b'?', rest @ ..] => Some(rest),
        [b'[', b'^', set @ ..] => one_of(set, byte, false),
        [b'[', set @ ..] => one_of(set, byte, true),
        [b'\\', literal, rest @ ..] | [literal, rest @ ..] => (*literal == byte).then_some(rest),
    }
}

/// `set`: what follows `[` or `[^`.
fn one_of(set: &[u8], byte: u8, wanted: bool) -> Option<&[u8]> {
    let mut found = false;
    let mut set = set;
    let rest = loop {
        set = match set {
            [] => break set,
            [b'\\', literal, rest @ ..] => {
                found |= *literal == byte;
                rest
            }
            [b']', rest @ ..] => break rest,
            [first, b'-', last, rest @ ..] => {
                found |= (*first.min(last)..=*first.max(last)).contains(&byte);
                rest
            }
            [literal, rest @ ..] => {
                found |= *literal == byte;
                rest
            }
        };
    };
    (found == wanted).then_some(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_patterns_match_what_the_server_matches() {
        for (pattern, text) in [
            ("", ""),
            ("*", ""),
            ("*", "anything"),
            ("**", "x"),
            ("h?llo", "hallo"),
            ("h*llo", "heeeello"),
            ("h*llo", "hllo"),
            ("h[ae]llo", "hello"),
            ("h[^e]llo", "hallo"),
            ("h[a-c]llo", "hbllo"),
            ("h[c-a]llo", "hbllo"),
            ("lock:*:eu", "lock:a:b:eu"),
            ("*a*b*c*", "xxaxxbxxcxx"),
            ("a\\*b", "a*b"),
            ("[\\]]", "]"),
            ("[\\-x]", "-"),
            ("abc\\", "abc\\"),
            ("x[abc", "xb"),
            ("[^]", "z"),
            ("[a-]", "^"),
            ("\u{e9}", "\u{e9}"),
        ] {
            assert!(matches(pattern.as_bytes(), text.as_bytes()), "{pattern} {text}");
        }
    }

    #[test]
    fn known_patterns_refuse_what_the_server_refuses() {
        for (pattern, text) in [
            ("", "a"),
            ("a", ""),
            ("?", ""),
            ("a", "ab"),
            ("ab", "a"),
            ("h?llo", "hllo"),
            ("h[^e]llo", "hello"),
            ("h[ae]llo", "hillo"),
            ("[]", "]"),
            ("a[", "a["),
            ("a\\*b", "axb"),
            ("*a", "ab"),
            ("A", "a"),
            ("?", "\u{e9}"),
        ] {
            assert!(!matches(pattern.as_bytes(), text.as_bytes()), "{pattern} {text}");
        }
    }

    #[test]
    fn a_hostile_pattern_takes_bounded_time() {
        // A backtracking matcher needs ages for this; here it is at most pattern x text steps.
        let pattern = "a*".repeat(500) + "b";
        assert!(!matches(pattern.as_bytes(), &[b'a'; 100_000]));
    }
}
