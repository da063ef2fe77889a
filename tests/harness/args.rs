//! The arguments of a command, and their bytes on the wire.

use std::fmt;

/// The bytes of a command, for tests that send them piece by piece.
pub fn encode<A: AsRef<[u8]>>(args: &[A]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", args.len()).into_bytes();
    for arg in args.iter().map(AsRef::as_ref) {
        bytes.extend(format!("${}\r\n", arg.len()).bytes());
        bytes.extend_from_slice(arg);
        bytes.extend_from_slice(b"\r\n");
    }
    bytes
}

/// The arguments as a person reads them, for panics.
pub(crate) struct Words<'a, A>(pub(crate) &'a [A]);

impl<A: AsRef<[u8]>> fmt::Display for Words<'_, A> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for arg in self.0 {
            write!(out, "{} ", arg.as_ref().escape_ascii())?;
        }
        Ok(())
    }
}

/// The arguments of a command: strings, bytes and numbers side by side, each becoming one argument whatever is in it.
///
/// `conn.cmd(&args!["FLOCK.ACQUIRE", key, "alice", 5000])`
#[macro_export]
macro_rules! args {
    ($($arg:expr),+ $(,)?) => {
        [$($crate::args::ToArg::to_arg(&$arg)),+]
    };
}

/// What [`args!`](crate::args!) takes.
pub trait ToArg {
    /// The bytes to send.
    fn to_arg(&self) -> Vec<u8>;
}

impl<T: ToArg + ?Sized> ToArg for &T {
    fn to_arg(&self) -> Vec<u8> {
        (**self).to_arg()
    }
}

macro_rules! bytes_are_args {
    ($($bytes:ty),+) => {$(
        impl ToArg for $bytes {
            fn to_arg(&self) -> Vec<u8> {
                AsRef::<[u8]>::as_ref(self).to_vec()
            }
        }
    )+};
}

macro_rules! numbers_are_args {
    ($($number:ty),+) => {$(
        impl ToArg for $number {
            fn to_arg(&self) -> Vec<u8> {
                self.to_string().into_bytes()
            }
        }
    )+};
}

bytes_are_args!(str, String, [u8], Vec<u8>);
numbers_are_args!(i32, i64, i128, u16, u32, u64, usize);

impl<const N: usize> ToArg for [u8; N] {
    fn to_arg(&self) -> Vec<u8> {
        self.to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_binary_safe() {
        let args = args!["SET", b"a\r\nb", String::new(), -5];
        assert_eq!(encode(&args), b"*4\r\n$3\r\nSET\r\n$4\r\na\r\nb\r\n$0\r\n\r\n$2\r\n-5\r\n");
    }
}
