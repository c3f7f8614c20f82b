//! A man in the middle between a command and the QEMU that it starts: he falls silent on QMP, or holds back the end of the
//! migration's stream.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::spawn;

use crate::vm::{DEADLINE, until};

/// What he does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trick {
    /// From the first question about the migration on that follows 'migrate-incoming', nothing passes on QMP.
    Silence,
    /// The description of the VM, behind EOF, does not pass until [`QmpProxy::release`].
    HoldDescription,
}

/// How the description of a VM begins (`qemu_savevm_state_complete_precopy_non_iterable`). Pages of the guest travel on
/// other channels.
const DESCRIPTION: &[u8] = b"\"page_size\"";

/// What is put in QEMU's place: it moves QEMU's QMP socket, which is the last argument, and says where it was to be.
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

/// The man in the middle.
pub struct QmpProxy(Arc<Shared>);

struct Shared {
    folder: PathBuf,
    trick: Trick,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    is_incoming: bool,
    holds: bool,
    is_released: bool,
}

impl QmpProxy {
    /// Waits for a QEMU that is started with [`QmpProxy::line`], in `folder`.
    pub fn start(folder: &Path, trick: Trick) -> Self {
        fs::write(folder.join("qemu.sh"), SCRIPT).expect("a script");
        let shared = Arc::new(Shared {
            folder: folder.to_owned(),
            trick,
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let of_thread = Arc::clone(&shared);
        spawn(move || of_thread.serve());
        Self(shared)
    }

    /// What to start in place of the command line `qemu`.
    pub fn line(&self, qemu: &[String]) -> Vec<String> {
        let script = self.0.folder.join("qemu.sh").display().to_string();
        let folder = self.0.folder.display().to_string();
        let mut line = vec!["sh".to_owned(), script, folder];
        line.extend_from_slice(qemu);
        line
    }

    /// Waits until the description is held back.
    pub fn wait_held(&self) {
        let state = self.0.lock();
        let held = self
            .0
            .changed
            .wait_timeout_while(state, DEADLINE, |state| !state.holds)
            .unwrap_or_else(PoisonError::into_inner);
        assert!(held.0.holds, "no description of a VM has come");
    }

    /// Lets it pass.
    pub fn release(&self) {
        self.0.lock().is_released = true;
        self.0.changed.notify_all();
    }
}

impl Drop for QmpProxy {
    fn drop(&mut self) {
        self.release();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(self: &Arc<Self>) {
        let wanted = until(
            || "QEMU is not started".to_owned(),
            || fs::read_to_string(self.folder.join("wanted")).ok(),
        );
        let listener = UnixListener::bind(wanted).expect("a socket");
        while let Ok((near, _)) = listener.accept() {
            let far = until(
                || "QEMU has no QMP socket".to_owned(),
                || UnixStream::connect(self.folder.join("real.qmp")).ok(),
            );
            let back = (copy(&far), copy(&near));
            spawn(move || pass(back.0, back.1));
            let shared = Arc::clone(self);
            spawn(move || shared.carry_questions(&near, far));
        }
    }

    fn carry_questions(self: &Arc<Self>, near: &UnixStream, mut far: UnixStream) {
        for line in BufReader::new(copy(near)).lines().map_while(Result::ok) {
            let mut line = line;
            if line.contains("migrate-incoming") {
                self.lock().is_incoming = true;
                if self.trick == Trick::HoldDescription {
                    line = self.redirect(&line);
                }
            }
            let silent = self.trick == Trick::Silence && self.lock().is_incoming;
            if silent && line.contains("query-migrate\"") {
                // Open, and silent.
                let state = self.lock();
                drop(self.changed.wait_while(state, |state| !state.is_released));
                return;
            }
            if writeln!(far, "{line}").is_err() {
                return;
            }
        }
        // QEMU serves one client at a time: the next waits for this.
        let _ = far.shutdown(Shutdown::Both);
    }

    /// Listens where QEMU is to listen, and lets it listen elsewhere.
    fn redirect(self: &Arc<Self>, line: &str) -> String {
        let (before, rest) = line.split_once("unix:").expect("a UNIX socket");
        let (path, after) = rest.split_once('"').expect("the end of a string");
        let real = self.folder.join("real.incoming");
        let listener = UnixListener::bind(path).expect("a socket");
        let (shared, to) = (Arc::clone(self), real.clone());
        spawn(move || {
            while let Ok((near, _)) = listener.accept() {
                let far = UnixStream::connect(&to).expect("QEMU listens");
                let back = (copy(&far), copy(&near));
                spawn(move || pass(back.0, back.1));
                let shared = Arc::clone(&shared);
                spawn(move || shared.carry_stream(near, far));
            }
        });
        format!("{before}unix:{}\"{after}", real.display())
    }

    /// Passes the stream on, up to the description.
    fn carry_stream(&self, mut near: UnixStream, mut far: UnixStream) {
        let (mut seen, mut chunk) = (Vec::new(), vec![0; 256 << 10]);
        while let Ok(length @ 1..) = near.read(&mut chunk) {
            let known = seen.len();
            seen.extend_from_slice(&chunk[..length]);
            let mut found = seen.windows(DESCRIPTION.len());
            let passed = match found.position(|words| words == DESCRIPTION) {
                // Its first bytes may have gone already; that it is not whole is what matters.
                Some(at) => {
                    let held = at.max(known) - known;
                    if far.write_all(&chunk[..held]).is_err() {
                        return;
                    }
                    let mut state = self.lock();
                    state.holds = true;
                    self.changed.notify_all();
                    drop(self.changed.wait_while(state, |state| !state.is_released));
                    far.write_all(&chunk[held..length])
                        .and_then(|()| std::io::copy(&mut near, &mut far).map(|_| ()))
                }
                None => far.write_all(&chunk[..length]),
            };
            if passed.is_err() {
                return;
            }
            let kept = seen.len().min(DESCRIPTION.len());
            seen.drain(..seen.len() - kept);
        }
        let _ = far.shutdown(Shutdown::Write);
    }
}

fn copy(stream: &UnixStream) -> UnixStream {
    stream.try_clone().expect("a second descriptor")
}

fn pass(mut from: UnixStream, mut to: UnixStream) {
    // Ends with either of them.
    let _ = std::io::copy(&mut from, &mut to);
    let _ = to.shutdown(Shutdown::Write);
}
