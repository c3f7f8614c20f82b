//! A proxy between a command and the QEMU that the command starts. The proxy can stop answering on QMP, or hold back
//! the end of the migration stream.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::spawn;

use hotlift_testkit::proxy::{Flow, Proxy, Rule, Stop};

use crate::vm::until;

/// Behaviour of the proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trick {
    /// Forwards nothing to QEMU on QMP from the first query of the migration after 'migrate-incoming' on.
    Silence,
    /// Holds the VM's description, which follows EOF, until [`QmpProxy::release`].
    HoldDescription,
}

/// Script in place of QEMU. It starts QEMU with another QMP socket than that in the last argument, whose path it writes to
/// `wanted`.
const SCRIPT: &str = r#"
folder=$1; shift
for last; do :; done
wanted=${last#unix:}
printf %s "${wanted%%,*}" > "$folder/wanted.new"
mv "$folder/wanted.new" "$folder/wanted"
count=$#
for word; do
    shift
    count=$((count - 1))
    [ $count -eq 0 ] && word="unix:$folder/real.qmp,server=on,wait=off"
    set -- "$@" "$word"
done
exec "$@"
"#;

/// Place for a proxy that is created later.
type Slot<R> = Arc<Mutex<Option<Proxy<R>>>>;

fn lock<R: Rule>(slot: &Slot<R>) -> MutexGuard<'_, Option<Proxy<R>>> {
    slot.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Proxy of QEMU's QMP socket, and of the stream for which QEMU must listen.
pub struct QmpProxy {
    folder: PathBuf,
    stream: Slot<Description>,
    _qmp: Slot<Commands>,
}

impl QmpProxy {
    /// Waits in `folder` for a QEMU that is started with [`QmpProxy::line`].
    pub fn start(folder: &Path, trick: Trick) -> Self {
        fs::write(folder.join("qemu.sh"), SCRIPT).expect("a script");
        let (folder, stream, qmp) = (folder.to_owned(), Slot::default(), Slot::default());
        let rule = Commands {
            trick,
            folder: folder.clone(),
            stream: Arc::clone(&stream),
            is_incoming: AtomicBool::new(false),
        };
        let (in_folder, slot) = (folder.clone(), Arc::clone(&qmp));
        spawn(move || {
            let wanted = until(
                || "QEMU is not started".to_owned(),
                || fs::read_to_string(in_folder.join("wanted")).ok(),
            );
            let real = in_folder.join("real.qmp");
            until(
                || "QEMU has no QMP socket".to_owned(),
                || UnixStream::connect(&real).ok(),
            );
            let proxy = Proxy::unix_with(Path::new(&wanted), &real, rule);
            *lock(&slot) = Some(proxy.expect("a socket"));
        });
        Self {
            folder,
            stream,
            _qmp: qmp,
        }
    }

    /// Returns the command that replaces the command line `qemu`.
    pub fn line(&self, qemu: &[String]) -> Vec<String> {
        let script = self.folder.join("qemu.sh").display().to_string();
        let folder = self.folder.display().to_string();
        let mut line = vec!["sh".to_owned(), script, folder];
        line.extend_from_slice(qemu);
        line
    }

    /// Waits until the description is held.
    pub fn wait_held(&self) {
        until(
            || "no description of a VM has come".to_owned(),
            || lock(&self.stream).as_ref()?.is_held().then_some(()),
        );
    }

    /// Forwards it.
    pub fn release(&self) {
        let stream = lock(&self.stream);
        stream.as_ref().expect("QEMU listens").release();
    }
}

/// Handler of QMP, line by line.
struct Commands {
    trick: Trick,
    folder: PathBuf,
    stream: Slot<Description>,
    is_incoming: AtomicBool,
}

impl Rule for Commands {
    type Direction = ();

    fn apply(&self, (): &mut (), came: &mut Vec<u8>, flow: &Flow<'_>) -> Result<(), Stop> {
        if flow.is_back() {
            return flow.pass_all(came);
        }
        while let Some(end) = came.iter().position(|&byte| byte == b'\n') {
            let line: Vec<u8> = came.drain(..=end).collect();
            let mut line = String::from_utf8(line).expect("JSON");
            if line.contains("migrate-incoming") {
                self.is_incoming.store(true, Ordering::SeqCst);
                if self.trick == Trick::HoldDescription {
                    line = self.redirect(&line);
                }
            }
            let silent = self.trick == Trick::Silence && self.is_incoming.load(Ordering::SeqCst);
            if silent && line.contains("query-migrate\"") {
                // Open and silent.
                flow.hold();
                return Err(Stop::HalfCut);
            }
            flow.pass(line.as_bytes())?;
        }
        Ok(())
    }
}

impl Commands {
    /// Listens at QEMU's address, and lets QEMU listen at another.
    fn redirect(&self, line: &str) -> String {
        let (before, rest) = line.split_once("unix:").expect("a UNIX socket");
        let (path, after) = rest.split_once('"').expect("the end of a string");
        let real = self.folder.join("real.incoming");
        let proxy = Proxy::unix_with(Path::new(path), &real, Description);
        *lock(&self.stream) = Some(proxy.expect("a socket"));
        format!("{before}unix:{}\"{after}", real.display())
    }
}

/// Handler of the migration's stream, which holds the VM's description.
struct Description;

/// Its first bytes (`qemu_savevm_state_complete_precopy_non_iterable`). Pages of the guest travel on other channels.
const BEGINS: &[u8] = b"\"page_size\"";

impl Rule for Description {
    /// The last forwarded bytes, which may contain its beginning.
    type Direction = Vec<u8>;

    fn apply(&self, passed: &mut Vec<u8>, came: &mut Vec<u8>, flow: &Flow<'_>) -> Result<(), Stop> {
        if flow.is_back() {
            return flow.pass_all(came);
        }
        let known = passed.len();
        passed.extend_from_slice(came);
        let mut found = passed.windows(BEGINS.len());
        if let Some(at) = found.position(|bytes| bytes == BEGINS) {
            // Its first bytes may already be forwarded; it only has to be incomplete.
            let rest = came.split_off(at.max(known) - known);
            flow.pass(came)?;
            flow.hold();
            *came = rest;
        }
        let kept = passed.len().min(BEGINS.len() - 1);
        passed.drain(..passed.len() - kept);
        flow.pass_all(came)
    }
}
