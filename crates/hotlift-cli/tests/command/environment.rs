//! Tests a command with file capabilities that an unprivileged user runs: no code of this user gets the capabilities.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

/// `nobody`, on every Linux.
const OTHER_USER: u32 = 65534;

/// Variables that name a vendor's library.
const VARIABLES: [&str; 3] = ["HOTLIFT_LIBQPL", "HOTLIFT_LIBQATZIP", "HOTLIFT_LIBWD"];

/// Creates a library that reports its load and its capabilities.
fn library(folder: &Path) {
    let source = r#"
        #include <stdio.h>
        #include <unistd.h>
        #include <sys/auxv.h>
        __attribute__((constructor)) static void loaded(void) {
            FILE *trace = fopen(TRACE, "a");
            if (trace) { fprintf(trace, "uid %d secure %lu\n", getuid(), getauxval(AT_SECURE)); fclose(trace); }
        }"#;
    fs::write(folder.join("evil.c"), source).expect("the library's source");
    let trace = folder.join("open/trace");
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .arg(folder.join("evil.so"))
        .arg(format!("-DTRACE=\"{}\"", trace.display()))
        .arg(folder.join("evil.c"))
        .status();
    assert!(built.expect("cc is there").success());
}

/// Copies the command so that all users may run it; with a capability if `privileged`.
fn command(folder: &Path, privileged: bool) -> Option<std::path::PathBuf> {
    let copy = folder.join(if privileged { "privileged" } else { "plain" });
    fs::copy(env!("CARGO_BIN_EXE_hotlift"), &copy).expect("a copy");
    fs::set_permissions(&copy, fs::Permissions::from_mode(0o755)).expect("its mode");
    if privileged {
        let set = Command::new("setcap")
            .arg("cap_sys_rawio+ep")
            .arg(&copy)
            .output();
        match set {
            Ok(set) if set.status.success() => {}
            other => {
                hotlift_testkit::skip!(
                    "setcap",
                    "it gives none (package libcap2-bin, root): {other:?}"
                );
                return None;
            }
        }
    }
    Some(copy)
}

#[test]
fn only_a_command_without_capabilities_loads_libraries_from_the_environment() {
    if !rustix::process::geteuid().is_root() {
        hotlift_testkit::skip!("root", "only root can run a command as another user");
        return;
    }
    let folder = TempDir::new().expect("a folder");
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).expect("its mode");
    let open = folder.path().join("open");
    fs::create_dir(&open).expect("a folder");
    fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).expect("its mode");
    library(folder.path());
    let evil = folder.path().join("evil.so");
    for privileged in [false, true] {
        let Some(copy) = command(folder.path(), privileged) else {
            return;
        };
        let ran = Command::new(copy)
            .arg("accel")
            .envs(VARIABLES.map(|variable| (variable, &evil)))
            .env("TMPDIR", &open)
            .uid(OTHER_USER)
            .gid(OTHER_USER)
            .output()
            .expect("it runs");
        let trace = fs::read_to_string(open.join("trace")).unwrap_or_default();
        let _ = fs::remove_file(open.join("trace"));
        let output = String::from_utf8_lossy(&ran.stdout);
        if privileged {
            assert_eq!(trace, "", "code of another user has run\n{output}");
            assert!(!output.contains("evil.so"), "{output}");
        } else {
            // Control: without privileges, the same library is loaded.
            assert!(
                trace.contains(&format!("uid {OTHER_USER} secure 0")),
                "{trace:?}\n{output}"
            );
        }
    }
}

#[test]
fn a_library_is_named_by_an_absolute_path() {
    let folder = TempDir::new().expect("a folder");
    fs::create_dir(folder.path().join("open")).expect("a folder");
    library(folder.path());
    for relative in ["evil.so", "./evil.so"] {
        let ran = Command::new(env!("CARGO_BIN_EXE_hotlift"))
            .args(["accel", "--json"])
            .env("HOTLIFT_LIBQPL", relative)
            .env("LD_LIBRARY_PATH", folder.path())
            .current_dir(folder.path())
            .output()
            .expect("it runs");
        let output = String::from_utf8_lossy(&ran.stdout);
        assert!(
            output.contains("not an absolute path"),
            "{relative}: {output}"
        );
        assert!(!folder.path().join("open/trace").exists(), "{relative}");
    }
}
