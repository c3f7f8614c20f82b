//! A destination that behaves like a QEMU, or fails when a test demands it.

use std::collections::{HashMap, HashSet};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use hotlift::transport::Stream;
use hotlift::{Address, Listener};
use hotlift_mem::GuestRun;
use hotlift_methods::legacy::{compress::Inflater, xbzrle};
use hotlift_methods::{Accelerator, Decode, method};
use hotlift_wire::main_channel::{
    Command, DeviceLengths, MainDecoder, MainEvent, PageContent, SectionKind, Step, VmDescription,
};
use hotlift_wire::multifd::{INITIAL_PACKET_LEN, InitialPacket, Method, PacketHeader};
use hotlift_wire::multifd::{PacketLayout, PacketRules};
use hotlift_wire::return_path::ReturnMessage;
use hotlift_wire::{PAGE_SIZE, RamBlockEntry};

use super::log::{Event, Log};
use super::recording::UUID;
use super::rig::{DEADLINE, accept};

/// Stages of a destination at which it can fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// All connections are established.
    Connected,
    /// The first PING has arrived.
    Opening,
    /// The RAM blocks have arrived.
    RamStart,
    /// The END section of RAM has ended.
    RamEnd,
    /// A PING has arrived after the devices.
    Loaded,
    /// EOF has arrived.
    Eof,
}

/// Kind of failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// Closes all connections.
    Dies,
    /// Sends SHUT(1) first.
    Refuses,
    /// Stops reading, and keeps its connections until the peer closes.
    Stalls,
    /// Closes its first channel, and stops reading.
    LosesChannel,
}

/// The received guest.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Guest {
    /// Name and content of the RAM blocks.
    pub ram: Vec<(String, Vec<u8>)>,
    /// Device sections, unchanged.
    pub devices: Vec<u8>,
    /// True if SWITCHOVER_START came before the END section.
    pub switchover: bool,
}

/// Result of the migration at the destination.
#[derive(Debug)]
pub struct Arrived {
    pub guest: Guest,
    /// True if EOF arrived.
    pub eof: bool,
    /// Reason of its abort, if it aborted.
    pub ended: Result<(), String>,
}

/// A listening destination.
pub struct Destination {
    pub address: Address,
    pub listener: Listener,
    pub channels: u8,
    pub description: VmDescription,
    pub fails: Option<(Moment, Failure)>,
    /// QEMU's property `multifd-flush-after-each-section`; `None`: as in the stream.
    pub flushes_each_section: Option<bool>,
    pub log: Log,
}

type Ended = Result<(), String>;

/// Maximum RAM of the destination's machine.
const MACHINE_BYTES: u64 = 16 << 20;

#[derive(Default)]
struct Memory {
    blocks: Arc<Vec<RamBlockEntry>>,
    guest: Guest,
    /// Pages since the last barrier.
    fresh: HashSet<(usize, u64)>,
    /// Count of channels that wait at their SYNC.
    waiting: u8,
    passed: usize,
    /// Error of any thread, which ends all waits.
    over: Option<String>,
}

impl Memory {
    fn page(&mut self, block: usize, at: u64) -> &mut [u8; PAGE_SIZE] {
        let at = usize::try_from(at).unwrap();
        let page = &mut self.guest.ram[block].1[at..at + PAGE_SIZE];
        page.try_into().unwrap()
    }

    /// Stores a page. Fails if channels could have carried two different versions between the same barriers: their order would
    /// be undefined. (QEMU 7.2 sends some pages twice, unchanged.)
    fn put(&mut self, block: usize, at: u64, content: &[u8; PAGE_SIZE], channels: u8) -> Ended {
        let again = !self.fresh.insert((block, at));
        if again && channels > 0 && self.page(block, at) != content {
            return Err(format!(
                "page {at:#x} of {block} twice between two barriers"
            ));
        }
        *self.page(block, at) = *content;
        Ok(())
    }
}

struct Shared {
    memory: Mutex<Memory>,
    changed: Condvar,
    channels: u8,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, why: String) {
        self.lock().over.get_or_insert(why);
        self.changed.notify_all();
    }

    /// Waits until `done`.
    fn wait(&self, done: impl Fn(&Memory) -> bool) -> Result<MutexGuard<'_, Memory>, String> {
        let deadline = Instant::now() + DEADLINE;
        let mut memory = self.lock();
        loop {
            if let Some(why) = &memory.over {
                return Err(why.clone());
            }
            if done(&memory) {
                return Ok(memory);
            }
            assert!(Instant::now() < deadline, "nothing came to a barrier");
            let tick = Duration::from_millis(100);
            memory = self
                .changed
                .wait_timeout(memory, tick)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    fn sync_point(&self) -> Ended {
        let mut memory = self.wait(|memory| memory.waiting == self.channels)?;
        memory.waiting = 0;
        memory.passed += 1;
        memory.fresh.clear();
        self.changed.notify_all();
        Ok(())
    }

    fn channel_arrives(&self) -> Ended {
        let here = {
            let mut memory = self.lock();
            memory.waiting += 1;
            memory.passed
        };
        self.changed.notify_all();
        self.wait(|memory| memory.passed > here).map(drop)
    }
}

impl Destination {
    /// Waits for a migration, and receives it until its end.
    pub fn run(self) -> Arrived {
        let shared = Shared {
            memory: Mutex::default(),
            changed: Condvar::new(),
            channels: self.channels,
        };
        let mut eof = false;
        let ended = self.take_in(&shared, &mut eof);
        if !eof {
            self.log.note(Event::DestinationEndsWithoutEof);
        }
        let memory = shared.memory.into_inner().unwrap();
        Arrived {
            guest: memory.guest,
            eof,
            ended,
        }
    }

    fn take_in(&self, shared: &Shared, eof: &mut bool) -> Ended {
        let mut streams = Vec::new();
        let deadline = Instant::now() + DEADLINE;
        while streams.len() <= usize::from(self.channels) {
            if let Some(stream) = accept(&self.listener, Duration::from_millis(50)) {
                streams.push(stream);
            } else if self.log.has(Event::RelaysEnded) || Instant::now() > deadline {
                return Err("no connection arrived".to_owned());
            }
        }
        let main = streams.remove(0);
        thread::scope(|scope| {
            for (id, stream) in streams.iter().enumerate() {
                scope.spawn(move || {
                    if let Err(why) = channel(stream, id, shared) {
                        shared.end(format!("channel {id}: {why}"));
                        stream.shutdown(Shutdown::Both);
                    }
                });
            }
            let ended = self.reach(Moment::Connected, &main, &streams);
            let ended = ended.and_then(|()| self.main(&main, &streams, shared, eof));
            shared.end("main ended".to_owned());
            for stream in streams.iter().chain([&main]) {
                stream.shutdown(Shutdown::Both);
            }
            ended
        })
    }

    /// Fails here, if configured.
    fn reach(&self, moment: Moment, main: &Stream, channels: &[Stream]) -> Ended {
        let Some((_, failure)) = self.fails.filter(|(when, _)| *when == moment) else {
            return Ok(());
        };
        match failure {
            Failure::Dies => {}
            Failure::Refuses => send(main, ReturnMessage::Shut(1)),
            Failure::Stalls | Failure::LosesChannel => {
                if failure == Failure::LosesChannel {
                    channels[0].shutdown(Shutdown::Both);
                }
                // A write shows the end of the connection.
                let deadline = Instant::now() + DEADLINE;
                let mut out = main;
                let pong = encode(ReturnMessage::Pong(0));
                while Instant::now() < deadline && out.write_all(&pong).is_ok() {
                    thread::sleep(Duration::from_millis(10));
                }
            }
        }
        Err(format!("{failure:?} at {moment:?}"))
    }

    fn main(&self, main: &Stream, channels: &[Stream], shared: &Shared, eof: &mut bool) -> Ended {
        let lengths = DeviceLengths::Description(self.description.clone());
        let mut decoder = MainDecoder::new(lengths);
        let (mut buffer, mut read_here) = (Vec::new(), vec![0; 64 << 10]);
        let mut inflater = Inflater::new().unwrap();
        let (mut section, mut flush, mut opened) = (SectionKind::Start, false, false);
        let mut at = 0;
        loop {
            let step = decoder.next(&buffer[at..]).map_err(|e| e.to_string())?;
            let Step::Event { event, consumed } = step else {
                buffer.drain(..at);
                at = 0;
                let read = main.read_some(&mut read_here).map_err(|e| e.to_string())?;
                if read == 0 {
                    return Err("main was closed".to_owned());
                }
                buffer.extend_from_slice(&read_here[..read]);
                continue;
            };
            let bytes = &buffer[at..at + consumed];
            let behind_ram = section == SectionKind::Full;
            match event {
                MainEvent::Command(Command::Ping(value)) => {
                    if behind_ram {
                        self.reach(Moment::Loaded, main, channels)?;
                    } else if !std::mem::replace(&mut opened, true) {
                        self.reach(Moment::Opening, main, channels)?;
                    }
                    send(main, ReturnMessage::Pong(value));
                }
                MainEvent::Command(Command::SwitchoverStart) => {
                    shared.lock().guest.switchover = true;
                }
                MainEvent::SectionStart { kind, .. } => {
                    section = kind;
                    if kind == SectionKind::Full {
                        shared.lock().guest.devices.extend_from_slice(bytes);
                    }
                }
                MainEvent::DevicePayload(_) => {
                    shared.lock().guest.devices.extend_from_slice(bytes);
                }
                MainEvent::SectionFooter if behind_ram => {
                    shared.lock().guest.devices.extend_from_slice(bytes);
                }
                MainEvent::RamBlocks(blocks) => {
                    let bytes: u64 = blocks.iter().map(|block| block.used_length).sum();
                    if bytes > MACHINE_BYTES {
                        return Err("this machine has less RAM".to_owned());
                    }
                    let fresh = |block: &RamBlockEntry| {
                        let length = usize::try_from(block.used_length).unwrap();
                        (block.name.clone(), vec![0xdd; length])
                    };
                    let mut memory = shared.lock();
                    memory.guest.ram = blocks.iter().map(fresh).collect();
                    memory.blocks = Arc::new(blocks);
                    drop(memory);
                    self.reach(Moment::RamStart, main, channels)?;
                }
                MainEvent::RamPage {
                    block,
                    offset,
                    content,
                } => {
                    let mut memory = shared.lock();
                    let mut page = [0; PAGE_SIZE];
                    match content {
                        PageContent::Zero => {}
                        PageContent::Normal(bytes) => page = *bytes,
                        PageContent::Xbzrle(delta) => {
                            page = *memory.page(block, offset);
                            xbzrle::apply(delta, &mut page).map_err(|e| e.to_string())?;
                        }
                        PageContent::Compressed(stream) => inflater
                            .inflate(stream, GuestRun::of_buffer(&mut page))
                            .map_err(|e| e.to_string())?,
                    }
                    memory.put(block, offset, &page, self.channels)?;
                }
                MainEvent::MultifdFlush if self.flushes_each_section == Some(true) => {
                    return Err("Unknown combination of migration flags: 0x200".to_owned());
                }
                MainEvent::MultifdFlush => {
                    flush = true;
                    shared.sync_point()?;
                }
                MainEvent::RamEos => {
                    if self.flushes_each_section.unwrap_or(!flush) && self.channels > 0 {
                        shared.sync_point()?;
                    }
                    if section == SectionKind::End {
                        self.reach(Moment::RamEnd, main, channels)?;
                    }
                }
                MainEvent::Eof => {
                    *eof = true;
                    self.log.note(Event::DestinationReadsEof);
                    self.reach(Moment::Eof, main, channels)?;
                    buffer.drain(..at + consumed);
                    read_description(main, &mut buffer);
                    send(main, ReturnMessage::Shut(0));
                    return Ok(());
                }
                _ => {}
            }
            at += consumed;
        }
    }
}

fn encode(message: ReturnMessage<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    message.encode(&mut bytes).unwrap();
    bytes
}

/// Reads after EOF as QEMU does before it runs the guest: a VM description with any content to its end, unless the stream ends
/// before.
fn read_description(main: &Stream, buffer: &mut Vec<u8>) {
    let mut read_here = [0; 4096];
    loop {
        let length = buffer.get(1..5).and_then(|bytes| bytes.try_into().ok());
        let end = match (buffer.first(), length.map(u32::from_be_bytes)) {
            (Some(6), None) | (None, _) => usize::MAX,
            (Some(6), Some(length)) => 5 + usize::try_from(length).unwrap(),
            (Some(_), _) => 1,
        };
        if buffer.len() >= end {
            return;
        }
        match main.read_some(&mut read_here) {
            Ok(read @ 1..) => buffer.extend_from_slice(&read_here[..read]),
            _ => return,
        }
    }
}

/// Sends a message; the error of a closed connection is ignored.
fn send(main: &Stream, message: ReturnMessage<'_>) {
    let mut out = main;
    let _ = out.write_all(&encode(message));
}

/// Reads a channel until its end.
fn channel(stream: &Stream, id: usize, shared: &Shared) -> Ended {
    let mut stream = stream;
    let broken = |error: std::io::Error| error.to_string();
    let mut opening = [0; INITIAL_PACKET_LEN];
    stream.read_exact(&mut opening).map_err(broken)?;
    let opening = InitialPacket::decode(&opening).map_err(|e| e.to_string())?;
    if opening.uuid != UUID || usize::from(opening.id) != id {
        return Err(format!("{opening:?} is not this VM's channel"));
    }
    let rules = PacketRules {
        layout: PacketLayout::QEMU,
        method: None,
        checksum_required: false,
    };
    let mut header = PacketHeader::new(rules.layout);
    let mut bytes = vec![0; rules.layout.header_len()];
    let mut decoders: HashMap<&str, Box<dyn Decode>> = HashMap::new();
    loop {
        match stream.read(&mut bytes[..1]).map_err(broken)? {
            0 => return Ok(()),
            _ => stream.read_exact(&mut bytes[1..]).map_err(broken)?,
        }
        let blocks = Arc::clone(&shared.lock().blocks);
        let decoded = header.decode(&bytes, &rules, &blocks);
        decoded.map_err(|e| e.to_string())?;
        let mut payload = vec![0; header.payload_len()];
        stream.read_exact(&mut payload).map_err(broken)?;
        let mut pages = vec![0; header.normal().len() * PAGE_SIZE];
        if header.method() == Method::None {
            pages = payload;
        } else if !pages.is_empty() {
            let name = header.method().name();
            let decoder = decoders
                .entry(name)
                .or_insert_with(|| (method(name).unwrap().decoder)(Accelerator::Off).unwrap());
            let run = GuestRun::of_buffer(&mut pages);
            decoder
                .decode(&payload, &[run])
                .map_err(|e| e.to_string())?;
        }
        let mut memory = shared.lock();
        for (at, content) in header.normal().iter().zip(pages.chunks(PAGE_SIZE)) {
            let page = content.try_into().unwrap();
            memory.put(header.block(), *at, page, shared.channels)?;
        }
        for at in header.zero() {
            memory.put(header.block(), *at, &[0; PAGE_SIZE], shared.channels)?;
        }
        drop(memory);
        if header.sync() {
            shared.channel_arrives()?;
        }
    }
}
