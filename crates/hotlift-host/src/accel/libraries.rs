//! The libraries of the accelerators' vendors, which compression methods use.

use std::ffi::OsStr;

use hotlift_accel::HARDWARE;
use hotlift_methods::device::Hardware;
use hotlift_methods::environment;
use serde::Serialize;

use super::Gap;
use super::host::Host;

/// A library of an accelerator's vendor, with the result of a test.
#[derive(Debug, Serialize)]
pub struct Library {
    /// Soname of the library, as in `libqpl.so.1`.
    soname: &'static str,
    /// Environment variable that can name another file.
    variable: &'static str,
    /// Path of the opened library; `null` if it was not opened.
    file: Option<String>,
    /// Name and version of a working library, as in "libqpl 1.9.0"; `null` if it does not work, or was not tried.
    found: Option<String>,
    /// Reason why the library cannot be used; `null` if it works, or was not tried.
    problem: Option<String>,
}

impl Library {
    /// Tests the library of the method `name`; does not test it on copied files of a host. Returns `None` if the method has no
    /// library.
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

    /// Returns true if the library works with a device or its emulation; `None` if it was not tried.
    pub fn works(&self) -> Option<bool> {
        match (&self.found, &self.problem) {
            (None, None) => None,
            (found, _) => Some(found.is_some()),
        }
    }

    /// Returns one line with the name of the library and the result of the test.
    pub fn line(&self) -> String {
        let file = self.file.as_deref().unwrap_or(self.soname);
        match (&self.found, &self.problem) {
            (Some(found), _) => format!("{found} ({file})"),
            (None, Some(problem)) => format!("{}: {problem}", self.soname),
            (None, None) => format!("{}, not tried", self.soname),
        }
    }

    /// Returns the gap (missing setup) if the library cannot be used; `None` otherwise. `install` are commands that install the
    /// library.
    pub fn gap(&self, install: &[&str]) -> Option<Gap> {
        let problem = self.problem.as_ref()?;
        // An installed library that does not work is not repaired by an installation.
        let commands = if self.file.is_some() { &[] } else { install };
        Some(Gap::new(problem, commands.iter().copied()))
    }
}

/// Returns the path of the opened library. The loader searches many folders, so the path is read from the process's mappings.
fn file_of(host: &Host, hardware: &Hardware) -> Option<String> {
    let given = environment::variable(hardware.variable);
    let given = given.as_deref().and_then(OsStr::to_str);
    let wanted = given.unwrap_or(hardware.library).rsplit('/').next()?;
    // The soname is a link to a file with a longer version, as from libqpl.so.1 to libqpl.so.1.9.0.
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
