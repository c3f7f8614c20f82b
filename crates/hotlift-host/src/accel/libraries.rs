//! The vendors' libraries of the methods.

use std::ffi::OsStr;

use hotlift_accel::HARDWARE;
use hotlift_methods::device::Hardware;
use hotlift_methods::environment;
use serde::Serialize;

use super::Gap;
use super::host::Host;

/// A vendor's library.
#[derive(Debug, Serialize)]
pub struct Library {
    /// Soname.
    soname: &'static str,
    /// Environment variable that names another file.
    variable: &'static str,
    /// The opened file; `null` if none could be opened, or none was tried.
    file: Option<String>,
    /// Name and version found, as in "libqpl 1.9.0".
    found: Option<String>,
    /// Reason why it cannot be used.
    problem: Option<String>,
}

impl Library {
    /// Tries the library of a method, unless the host is a copy; `None` if the method has none.
    pub fn of(host: &Host, name: &str) -> Option<Self> {
        let hardware = HARDWARE.iter().find(|one| one.method == name)?;
        let tried = host.is_live().then(|| hardware.probe());
        let file = tried.is_some().then(|| file_of(host, hardware)).flatten();
        let (found, problem) = match tried {
            Some(Ok(found)) => (Some(found.to_string()), None),
            Some(Err(problem)) => (None, Some(problem.to_string())),
            None => (None, None),
        };
        Some(Self {
            soname: hardware.library,
            variable: hardware.variable,
            file,
            found,
            problem,
        })
    }

    /// Returns true if it works with a device; `None` if it was not tried.
    pub fn works(&self) -> Option<bool> {
        match (&self.found, &self.problem) {
            (None, None) => None,
            (found, _) => Some(found.is_some()),
        }
    }

    /// Returns its name and the result of the test in one line.
    pub fn line(&self) -> String {
        let file = self.file.as_deref().unwrap_or(self.soname);
        match (&self.found, &self.problem) {
            (Some(found), _) => format!("{found} ({file})"),
            (None, Some(problem)) => format!("{}: {problem}", self.soname),
            (None, None) => format!("{}, not tried", self.soname),
        }
    }

    /// Returns the missing part; the commands `install` install it.
    pub fn gap(&self, install: &[&str]) -> Option<Gap> {
        let problem = self.problem.as_ref()?;
        // Installation does not repair an existing library.
        let commands = if self.file.is_some() { &[] } else { install };
        Some(Gap::new(problem, commands.iter().copied()))
    }
}

/// Returns the file of the opened library. The loader searches many folders, so the path is read from the process's mappings.
fn file_of(host: &Host, hardware: &Hardware) -> Option<String> {
    let given = environment::variable(hardware.variable);
    let given = given.as_deref().and_then(OsStr::to_str);
    let wanted = given.unwrap_or(hardware.library).rsplit('/').next()?;
    // The soname is a link to a file with a longer version: libqpl.so.1 to libqpl.so.1.9.0.
    let stem = wanted.split(".so").next()?;
    let maps = host.read("/proc/self/maps")?;
    let files = maps
        .lines()
        .filter_map(|line| line.split_whitespace().nth(5));
    let is_it = |file: &&str| {
        let name = file.rsplit('/').next().unwrap_or_default();
        name == wanted || name.split(".so").next() == Some(stem) && name.contains(".so")
    };
    files.into_iter().find(is_it).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn library(file: Option<&str>, problem: Option<&str>) -> Library {
        Library {
            soname: "libqpl.so.1",
            variable: "HOTLIFT_LIBQPL",
            file: file.map(str::to_owned),
            found: problem.is_none().then(|| "libqpl 1.9.0".to_owned()),
            problem: problem.map(str::to_owned),
        }
    }

    #[test]
    fn a_missing_library_has_a_command_to_install_it() {
        let absent = library(None, Some("no such file")).gap(&["apt install libqpl1"]);
        assert_eq!(
            absent,
            Some(Gap::new("no such file", ["apt install libqpl1"]))
        );
        let there = library(Some("/usr/lib/libqpl.so.1.9.0"), Some("no queue"));
        let gap = there.gap(&["apt install libqpl1"]);
        assert_eq!(gap, Some(Gap::new::<String>("no queue", [])));
        assert_eq!(
            library(Some("/usr/lib/libqpl.so.1.9.0"), None).gap(&[]),
            None
        );
    }

    #[test]
    fn the_file_of_a_library_is_found_behind_its_soname() {
        let root = tempfile::tempdir().expect("a folder");
        std::fs::create_dir_all(root.path().join("proc/self")).expect("a folder");
        let maps = "7f00-7f10 r-xp 00000000 00:1b 1 /usr/lib/libqplx.so.1\n\
                    7f10-7f20 r-xp 00000000 00:1b 2 /usr/lib/libqatzip.so.3.1.1\n";
        std::fs::write(root.path().join("proc/self/maps"), maps).expect("write");
        let host = Host::new(root.path()).expect("a host");
        let file = |name| file_of(&host, HARDWARE.iter().find(|one| one.method == name)?);
        assert_eq!(
            file("qatzip").as_deref(),
            Some("/usr/lib/libqatzip.so.3.1.1")
        );
        assert_eq!(file("qpl"), None);
    }
}
