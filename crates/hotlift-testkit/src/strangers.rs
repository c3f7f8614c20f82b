//! Unknown clients: connections to the destination that belong to no migration.

use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use fastrand::Rng;

use crate::case::Stranger;
use crate::error::KitError;
use crate::namespace::{DESTINATION, Namespace};

/// Pause between two connections.
const PAUSE: Duration = Duration::from_millis(60);

/// Maximum number of open connections.
const MAX_OPEN: usize = 16;

/// Timeout for a connection attempt: the link may be down.
const CONNECT: Duration = Duration::from_millis(500);

/// Unknown clients in a background thread, which connect repeatedly until the [`Strangers`] value is dropped.
#[derive(Debug)]
pub struct Strangers {
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Strangers {
    /// Starts to connect repeatedly from `host` to the given ports of the destination.
    ///
    /// # Errors
    /// If the network namespace of the host cannot be used.
    pub fn start(
        host: &Namespace,
        ports: &[u16],
        who: Stranger,
        seed: u64,
    ) -> Result<Self, KitError> {
        let ends = Arc::new(AtomicBool::new(false));
        let (host, ports, its_ends) = (host.again()?, ports.to_vec(), Arc::clone(&ends));
        let thread = thread::spawn(move || {
            let mut rng = Rng::with_seed(seed);
            let mut open = Vec::new();
            while !its_ends.load(Ordering::SeqCst) {
                for &port in &ports {
                    let stranger = host.within(|| connect(port));
                    if let Ok(Some(mut stranger)) = stranger {
                        speak(&mut stranger, who, &mut rng);
                        open.push(stranger);
                    }
                }
                if open.len() > MAX_OPEN {
                    open.remove(0);
                }
                thread::sleep(PAUSE);
            }
        });
        Ok(Self {
            ends,
            thread: Some(thread),
        })
    }
}

fn connect(port: u16) -> Option<TcpStream> {
    let address: SocketAddr = format!("{DESTINATION}:{port}").parse().ok()?;
    TcpStream::connect_timeout(&address, CONNECT).ok()
}

fn speak(to: &mut TcpStream, who: Stranger, rng: &mut Rng) {
    let bytes: Vec<u8> = match who {
        Stranger::Idle => return,
        Stranger::Garbage => (0..rng.usize(1..200)).map(|_| rng.u8(..)).collect(),
        // The first bytes of QEMU's main stream, or of a multifd channel (magic and version).
        Stranger::HalfOpening => match rng.bool() {
            true => b"QEVM\0\0\0\x03".to_vec(),
            false => vec![0x11, 0x22, 0x33, 0x44, 0, 0, 0, 1],
        },
    };
    // The destination may have rejected the connection.
    let _ = to.write_all(&bytes);
}

impl Drop for Strangers {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
