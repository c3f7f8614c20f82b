//! A man in the middle who knows what he carries: he cuts the stream into its units (a record of the
//! main channel, a packet header, an answer) and damages one of them, or cuts the connection there.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{Builder, JoinHandle};

use hotlift::Address;
use hotlift_wire::main_channel::{Command, DeviceLengths, MainDecoder, MainEvent, Step};
use hotlift_wire::multifd::{HEADER_LEN, INITIAL_PACKET_LEN};
use hotlift_wire::return_path::ReturnMessage;
use hotlift_wire::settle::{ANSWER_MAGIC, QUESTION_MAGIC};

/// Which connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Socket {
    Main,
    Channel(u8),
}

/// One thing on the wire. `socket` is `None` for data packets, which go by any channel.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Unit {
    pub socket: Option<Socket>,
    /// From the destination to the source.
    pub back: bool,
    /// What it is, and which of its kind.
    pub name: String,
}

/// What is done to a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// XORs a byte.
    Flip { byte: usize, mask: u8 },
    /// Both directions end before this byte.
    Cut { byte: usize },
    /// This direction ends before this byte, the other goes on.
    HalfCut { byte: usize },
    /// This direction stands still before the unit, until [`Proxy::release`].
    Hold,
}

/// What is done, and where. It is done once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    pub unit: Unit,
    pub action: Action,
}

/// What was carried.
#[derive(Debug, Default)]
pub struct Log {
    /// Every unit with its length, in the order of their first bytes on each connection.
    pub units: Vec<(Unit, usize)>,
    /// Bytes towards the destination.
    pub bytes: u64,
    /// The fault was done.
    pub fired: bool,
}

/// Carries one migration.
pub struct Proxy {
    shared: Arc<Shared>,
    address: SocketAddr,
    accepting: JoinHandle<()>,
}

struct Shared {
    to: SocketAddr,
    fault: Option<Fault>,
    fired: AtomicBool,
    stopped: AtomicBool,
    bytes: AtomicU64,
    released: Mutex<bool>,
    release: Condvar,
    units: Mutex<Vec<(Unit, usize)>>,
    streams: Mutex<Vec<Arc<Pair>>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// One connection, both of its halves.
struct Pair {
    source: TcpStream,
    destination: TcpStream,
    socket: OnceLock<Socket>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn spawn(work: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
    Builder::new().name("proxy".to_owned()).spawn(work).unwrap()
}

impl Proxy {
    /// Starts between a source, which is to connect to [`Proxy::address`], and `to`.
    pub fn start(to: &Address, fault: Option<Fault>) -> Self {
        let Address::Tcp { host, port } = to else {
            panic!("the proxy speaks TCP");
        };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            to: format!("{host}:{port}").parse().unwrap(),
            fault,
            fired: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            bytes: AtomicU64::new(0),
            released: Mutex::new(false),
            release: Condvar::new(),
            units: Mutex::default(),
            streams: Mutex::default(),
            threads: Mutex::default(),
        });
        let accepting = {
            let shared = Arc::clone(&shared);
            spawn(move || shared.accept(&listener))
        };
        Self {
            shared,
            address,
            accepting,
        }
    }

    /// Where the source is to connect.
    pub fn address(&self) -> Address {
        format!("tcp:{}", self.address).parse().unwrap()
    }

    /// Whether the fault was done.
    pub fn has_fired(&self) -> bool {
        self.shared.fired.load(Ordering::SeqCst)
    }

    /// Lets go on what is held.
    pub fn release(&self) {
        *lock(&self.shared.released) = true;
        self.shared.release.notify_all();
    }

    /// Ends all connections, and tells what was carried.
    pub fn finish(self) -> Log {
        self.shared.stopped.store(true, Ordering::SeqCst);
        self.release();
        // Wakes the thread that waits for connections.
        let _ = TcpStream::connect(self.address);
        self.accepting.join().unwrap();
        for pair in lock(&self.shared.streams).drain(..) {
            let _ = pair.source.shutdown(Shutdown::Both);
            let _ = pair.destination.shutdown(Shutdown::Both);
        }
        let threads: Vec<_> = lock(&self.shared.threads).drain(..).collect();
        for thread in threads {
            thread.join().unwrap();
        }
        Log {
            units: std::mem::take(&mut lock(&self.shared.units)),
            bytes: self.shared.bytes.load(Ordering::SeqCst),
            fired: self.shared.fired.load(Ordering::SeqCst),
        }
    }
}

impl Shared {
    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        while let Ok((source, _)) = listener.accept() {
            if self.stopped.load(Ordering::SeqCst) {
                return;
            }
            // A destination that is gone refuses: dropping the source's end says the same.
            let Ok(destination) = TcpStream::connect(self.to) else {
                continue;
            };
            for stream in [&source, &destination] {
                stream.set_nodelay(true).unwrap();
            }
            let pair = Arc::new(Pair {
                source,
                destination,
                socket: OnceLock::new(),
            });
            lock(&self.streams).push(Arc::clone(&pair));
            for back in [false, true] {
                let (shared, pair) = (Arc::clone(self), Arc::clone(&pair));
                lock(&self.threads).push(spawn(move || shared.carry(&pair, back)));
            }
        }
    }

    /// Carries one direction of one connection, unit by unit.
    fn carry(&self, pair: &Pair, back: bool) {
        let (mut from, mut to) = match back {
            false => (&pair.source, &pair.destination),
            true => (&pair.destination, &pair.source),
        };
        let mut splitter = back.then(Splitter::answers);
        let mut held: Vec<u8> = Vec::new();
        let mut buffer = vec![0; 64 << 10];
        let mut deaf = false;
        // A question is none of the migration's connections, and has one unit.
        let mut is_question = false;
        'reading: while let Ok(read @ 1..) = from.read(&mut buffer) {
            if deaf {
                continue;
            }
            held.extend_from_slice(&buffer[..read]);
            let asks = splitter.is_none() && held.starts_with(&QUESTION_MAGIC);
            is_question |= asks || back && held.starts_with(&ANSWER_MAGIC);
            if is_question {
                if to.write_all(&held).is_err() {
                    break;
                }
                held.clear();
                continue;
            }
            if splitter.is_none() {
                let Some(magic) = held.first_chunk::<4>() else {
                    continue;
                };
                splitter = Some(match magic {
                    b"QEVM" => {
                        let _ = pair.socket.set(Socket::Main);
                        Splitter::main()
                    }
                    _ => {
                        let Some(id) = held.get(24) else { continue };
                        let _ = pair.socket.set(Socket::Channel(*id));
                        Splitter::channel()
                    }
                });
            }
            let Some(splitter) = &mut splitter else {
                continue;
            };
            let mut done = 0;
            while let Some((name, length)) = splitter.next(&held[done..]) {
                let bytes = &mut held[done..done + length];
                done += length;
                let unit = Unit {
                    socket: pair
                        .socket
                        .get()
                        .copied()
                        .filter(|_| !name.starts_with("data")),
                    back,
                    name,
                };
                lock(&self.units).push((unit.clone(), length));
                let here = self.fault.as_ref().filter(|fault| fault.unit == unit);
                let action = here
                    .filter(|_| !self.fired.swap(true, Ordering::SeqCst))
                    .map(|fault| fault.action);
                if action == Some(Action::Hold) {
                    let released = lock(&self.released);
                    let released = self.release.wait_while(released, |released| !*released);
                    drop(released);
                }
                // A payload is not as long in every migration.
                let rest = match action {
                    None | Some(Action::Hold) => length,
                    Some(Action::Flip { byte, mask }) => {
                        bytes[byte.min(length - 1)] ^= mask;
                        length
                    }
                    Some(Action::Cut { byte } | Action::HalfCut { byte }) => byte.min(length),
                };
                if !back {
                    self.bytes.fetch_add(rest as u64, Ordering::SeqCst);
                }
                let written = to.write_all(&bytes[..rest]);
                match action {
                    Some(Action::Cut { .. }) => {
                        let _ = from.shutdown(Shutdown::Both);
                        let _ = to.shutdown(Shutdown::Both);
                        return;
                    }
                    // What still comes is read and dropped, so that only the reader notices.
                    Some(Action::HalfCut { .. }) => {
                        let _ = to.shutdown(Shutdown::Write);
                        deaf = true;
                        continue 'reading;
                    }
                    _ => {}
                }
                if written.is_err() {
                    // As a direct connection would tell its writer.
                    let _ = from.shutdown(Shutdown::Both);
                    deaf = true;
                    continue 'reading;
                }
            }
            held.drain(..done);
        }
        let _ = to.write_all(&held);
        let _ = to.shutdown(Shutdown::Write);
    }
}

/// Finds the units in the bytes of one direction.
struct Splitter {
    kind: Kind,
    counts: HashMap<String, usize>,
}

enum Kind {
    Main(Box<MainDecoder>),
    /// With the SYNC packets so far, and the payload that is due.
    Channel {
        opened: bool,
        syncs: usize,
        payload: usize,
    },
    Answers,
}

impl Splitter {
    fn new(kind: Kind) -> Self {
        Self {
            kind,
            counts: HashMap::new(),
        }
    }

    fn main() -> Self {
        Self::new(Kind::Main(Box::new(MainDecoder::new(
            DeviceLengths::LengthPrefixed,
        ))))
    }

    fn channel() -> Self {
        Self::new(Kind::Channel {
            opened: false,
            syncs: 0,
            payload: 0,
        })
    }

    fn answers() -> Self {
        Self::new(Kind::Answers)
    }

    /// The name and the length of the unit that `bytes` begin with, if it is whole.
    fn next(&mut self, bytes: &[u8]) -> Option<(String, usize)> {
        let (name, length) = match &mut self.kind {
            Kind::Main(decoder) => match decoder.next(bytes) {
                Ok(Step::Event { event, consumed }) => (record_name(&event), consumed),
                _ => return None,
            },
            Kind::Channel {
                opened,
                syncs,
                payload,
            } => {
                if !*opened {
                    bytes.get(..INITIAL_PACKET_LEN)?;
                    *opened = true;
                    ("opening".to_owned(), INITIAL_PACKET_LEN)
                } else if *payload > 0 {
                    let length = *payload;
                    bytes.get(..length)?;
                    *payload = 0;
                    (format!("data payload of round {syncs}"), length)
                } else {
                    let header = bytes.get(..HEADER_LEN)?;
                    let be32 = |at: usize| u32::from_be_bytes(*header[at..].first_chunk().unwrap());
                    let round = *syncs;
                    let is_sync = be32(8) & 1 == 1;
                    if is_sync {
                        *syncs += 1;
                        (format!("sync of round {round}"), HEADER_LEN)
                    } else {
                        *payload = usize::try_from(be32(20)).unwrap();
                        (format!("data header of round {round}"), HEADER_LEN)
                    }
                }
            }
            Kind::Answers => match ReturnMessage::decode(bytes) {
                Ok((message, length)) => (answer_name(&message).to_owned(), length),
                Err(_) => return None,
            },
        };
        let number = self.counts.entry(name.clone()).or_default();
        *number += 1;
        Some((format!("{name} #{number}"), length))
    }
}

fn record_name(event: &MainEvent<'_>) -> String {
    match event {
        MainEvent::Header => "file header",
        MainEvent::Configuration(_) => "configuration",
        MainEvent::Command(Command::Ping(_)) => "PING",
        MainEvent::Command(_) => "command",
        MainEvent::SectionStart { kind, .. } => return format!("{kind:?} section"),
        MainEvent::RamBlocks(_) => "list of RAM blocks",
        MainEvent::RamPage { .. } => "page",
        MainEvent::MultifdFlush => "flush",
        MainEvent::RamEos => "EOS",
        MainEvent::DevicePayload(_) => "device payload",
        MainEvent::SectionFooter => "footer",
        MainEvent::Eof => "EOF",
        MainEvent::VmDescription(_) => "VM description",
    }
    .to_owned()
}

fn answer_name(message: &ReturnMessage<'_>) -> &'static str {
    match message {
        ReturnMessage::Hello { .. } => "HELLO",
        ReturnMessage::Pong(_) => "PONG",
        ReturnMessage::Shut(_) => "SHUT",
        ReturnMessage::ErrorText(_) => "ERROR_TEXT",
        _ => "another answer",
    }
}
