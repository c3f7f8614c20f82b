//! Libraries that are opened at run time.
//!
//! One that is missing is a normal case. One that is opened is never closed: its functions are kept
//! for the life of the process.

use std::ffi::OsString;
use std::path::Path;

use libloading::Library;

use crate::environment;

/// Declares a table of the functions of a library, each by its name in C: `get` opens the library
/// once in the process's life. A variable that names another file for it may follow its soname.
///
/// Who declares one vouches that the library's constructors are sound to run, and that the types are
/// those of the header for the soname.
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
            /// The library, opened once in the process's life.
            ///
            /// # Errors
            ///
            /// The loader's message.
            $vis fn get() -> Result<&'static Self, String> {
                static OPENED: std::sync::OnceLock<Result<$table, String>> =
                    std::sync::OnceLock::new();
                let opened = OPENED.get_or_init(|| {
                    // SAFETY: whoever declares the table vouches for the library's constructors; who
                    // names another file, for those of that.
                    let library = unsafe { $crate::library::open($soname, $variable) }?;
                    // SAFETY: who declares the table vouches for the types.
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
pub(crate) use functions;

/// An open library.
pub(crate) struct Opened(Library);

/// Opens the library with that soname, or the file that the environment variable names instead, where the
/// environment is trusted ([`environment`]).
///
/// # Errors
///
/// What the loader said, or that the file is named by no absolute path.
///
/// # Safety
///
/// The library's constructors must be sound to run; an operator who names a file vouches for it.
pub(crate) unsafe fn open(soname: &str, variable: Option<&str>) -> Result<Opened, String> {
    let file = file(soname, variable);
    // The loader looks up what has no slash, and takes what has one from the working folder.
    if let Some(variable) = variable.filter(|_| file != soname)
        && !Path::new(&file).is_absolute()
    {
        return Err(format!(
            "{variable} is '{}', which is no absolute path",
            file.display()
        ));
    }
    // SAFETY: the caller's promise.
    let library = unsafe { Library::new(file) }.map_err(|error| reason(&error))?;
    Ok(Opened(library))
}

/// What [`open`] opens: the file that the environment variable names, or the soname.
pub(crate) fn file(soname: &str, variable: Option<&str>) -> OsString {
    variable
        .and_then(environment::variable)
        .unwrap_or_else(|| OsString::from(soname))
}

impl Opened {
    /// The function called `name`, which ends with a NUL.
    ///
    /// # Errors
    ///
    /// What the loader said.
    ///
    /// # Safety
    ///
    /// `T` must be the function's type in the header for the soname.
    pub(crate) unsafe fn function<T: Copy>(&self, name: &str) -> Result<T, String> {
        // SAFETY: the caller's promise.
        let symbol = unsafe { self.0.get::<T>(name.as_bytes()) };
        symbol.map(|symbol| *symbol).map_err(|error| reason(&error))
    }

    /// Keeps the library for the life of the process.
    pub(crate) fn keep(self) {
        std::mem::forget(self.0);
    }
}

fn reason(error: &libloading::Error) -> String {
    // libloading's own text names neither file nor cause.
    let source = std::error::Error::source(error).map(ToString::to_string);
    source.unwrap_or_else(|| error.to_string())
}
