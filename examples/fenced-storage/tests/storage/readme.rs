//! The README shows the function that is tested here, to the letter.

#[test]
fn readme_shows_what_is_tested() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let read = |path: &str| {
        std::fs::read_to_string(format!("{root}/{path}")).unwrap_or_else(|error| panic!("{path}: {error}"))
    };
    let source = read("examples/fenced-storage/src/postgres.rs");
    let begin = source.find("pub async fn deposit").expect("the function is there");
    let end = begin + source[begin..].find("\n}\n").expect("it ends") + "\n}\n".len();
    let block = format!("```rust\n{}```\n", &source[begin..end]);
    assert!(read("README.md").contains(&block), "README.md should contain this block:\n{block}");
}
