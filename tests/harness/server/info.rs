//! What INFO says.

use std::collections::BTreeMap;

use crate::resp::Conn;

/// A section of INFO.
#[derive(Clone, Debug)]
pub struct Info(BTreeMap<String, String>);

impl Info {
    /// Asks over `conn`.
    ///
    /// # Panics
    /// If there is no answer.
    #[track_caller]
    pub fn ask(conn: &mut Conn, section: &str) -> Info {
        let reply = conn.cmd(&["INFO", section]);
        let fields = reply.as_str().lines().filter_map(|line| line.split_once(':'));
        Info(fields.map(|(name, value)| (name.to_owned(), value.to_owned())).collect())
    }

    /// The value of a field, if there is such a field.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// The value of a field.
    ///
    /// # Panics
    /// If there is no such field.
    #[track_caller]
    pub fn text(&self, name: &str) -> &str {
        match self.get(name) {
            Some(value) => value,
            None => panic!("INFO has no field {name}, only {:?}", self.0.keys()),
        }
    }

    /// The value of a field that is a whole number.
    ///
    /// # Panics
    /// If it is none.
    #[track_caller]
    pub fn number(&self, name: &str) -> i64 {
        let text = self.text(name);
        match text.parse() {
            Ok(number) => number,
            Err(_) => panic!("expected INFO's {name} to be a number, got {text}"),
        }
    }
}
