//! Libraries opened at run time.
//!
//! A missing library is a normal case. An opened library is never closed: its functions are kept for the life of the process.

use std::ffi::OsString;
use std::path::Path;

use libloading::Library;

use crate::environment;

/// Declares a struct with functions of a C library, by their C names. `get` opens the library once per process. The struct's
/// arguments are the soname, and the environment variable that can name another file: `Some(VARIABLE)`, or `None`.
///
/// The declaring code guarantees that the library's constructors are sound to run, and that the types are those of the header
/// for the soname.
#[macro_export]
macro_rules! functions {
    (
        $(#[$doc:meta])*
        $vis:vis struct $table:ident($soname:expr, $variable:expr) {
            $($(#[$about:meta])* $name:ident: fn($($argument:ty),*) $(-> $result:ty)?,)*
        }
    ) => {
        $(#[$doc])*
        $vis struct $table {
            $($(#[$about])* $vis $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl $table {
            /// Returns the library, which is opened once per process.
            ///
            /// # Errors
            ///
            /// The loader's message.
            $vis fn get() -> Result<&'static Self, String> {
                static OPENED: std::sync::OnceLock<Result<$table, String>> =
                    std::sync::OnceLock::new();
                let opened = OPENED.get_or_init(|| {
                    let (soname, variable) = ($soname, $variable);
                    // SAFETY: the declaring code guarantees that the library's constructors are sound; the operator does so for
                    // a file named in the variable.
                    let library = unsafe { $crate::library::open(soname, variable) }?;
                    // SAFETY: the declaring code guarantees the types.
                    let table = unsafe {
                        Self {
                            $($name: library.function(concat!(stringify!($name), "\0"))?,)*
                        }
                    };
                    library.keep();
                    Ok(table)
                });
                opened.as_ref().map_err(Clone::clone)
            }
        }
    };
}

/// An open library.
pub struct Opened(Library);

/// Opens the library with that soname. A file named in the environment variable replaces it if the [`environment`] is trusted.
///
/// # Errors
///
/// The loader's message, or the message that the variable's value is not an absolute path.
///
/// # Safety
///
/// The library's constructors must be sound to run; an operator who names a file is responsible for it.
pub unsafe fn open(soname: &str, variable: Option<&str>) -> Result<Opened, String> {
    let file = file(soname, variable);
    // A relative path is rejected: the loader would search for it, or resolve it in the working directory.
    if let Some(variable) = variable.filter(|_| file != soname)
        && !Path::new(&file).is_absolute()
    {
        return Err(format!(
            "{variable} is '{}', which is not an absolute path",
            file.display()
        ));
    }
    // SAFETY: guaranteed by the caller.
    let library = unsafe { Library::new(file) }.map_err(|error| reason(&error))?;
    Ok(Opened(library))
}

/// Returns the file that [`open`] opens: the variable's file, or the soname.
pub(crate) fn file(soname: &str, variable: Option<&str>) -> OsString {
    variable
        .and_then(environment::variable)
        .unwrap_or_else(|| OsString::from(soname))
}

impl Opened {
    /// Returns the function `name`, which must end with a NUL.
    ///
    /// # Errors
    ///
    /// The loader's message.
    ///
    /// # Safety
    ///
    /// `T` must be the function's type in the header for the soname.
    pub unsafe fn function<T: Copy>(&self, name: &str) -> Result<T, String> {
        // SAFETY: guaranteed by the caller.
        let symbol = unsafe { self.0.get::<T>(name.as_bytes()) };
        symbol.map(|symbol| *symbol).map_err(|error| reason(&error))
    }

    /// Keeps the library open until the process ends.
    pub fn keep(self) {
        std::mem::forget(self.0);
    }
}

fn reason(error: &libloading::Error) -> String {
    // libloading's own message names neither file nor cause.
    let source = std::error::Error::source(error).map(ToString::to_string);
    source.unwrap_or_else(|| error.to_string())
}
