//! A software model of one DSA queue, for tests. It accepts descriptors as a portal does, executes them in memory, and writes
//! completion records. It can be configured to fault, fail, refuse, answer late or in another order, never answer, or die. Its
//! speed is unrelated to that of a device.
//!
//! The model checks the conditions of [`Portal`] and panics if its user violates one. After a violation, a real device could
//! write to reused memory.

use std::collections::VecDeque;
use std::io;
use std::time::Duration;

use super::descriptor::{Descriptor, Opcode};
use super::portal::{Portal, Submitted};
use super::record::{Completion, Record};
use super::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, spin_loop};

/// Behaviour of a model. Chances are in thousandths, drawn from `seed` for each descriptor; in a batch, for each member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Behaviour {
    /// Seed of the draws: the same seed and the same order of descriptors give the same faults.
    pub seed: u64,
    /// Maximum number of queued descriptors. A submission beyond it finds the queue full.
    pub depth: usize,
    /// Maximum number of descriptors in a batch.
    pub max_batch: u32,
    /// Maximum bytes of a descriptor's range.
    pub max_transfer: u32,
    /// Chance that a submission reports a full queue although the queue has room.
    pub full: u32,
    /// Chance of a page fault, at a random byte.
    pub fault: u32,
    /// Chance of a failure other than a page fault (status 0x20, hardware error).
    pub fail: u32,
    /// Chance of a batch whose list has a page fault at a random member. The members from there on are not executed.
    pub list_fault: u32,
    /// Chance of a descriptor that is never answered.
    pub silent: u32,
    /// True if the model executes queued descriptors in random order.
    pub shuffled: bool,
    /// True if the kernel does not permit mapping the portal.
    pub unmapped: bool,
    /// True if the kernel accepts no batches through `write`.
    pub unbatched: bool,
    /// True if the kernel accepts no descriptors through `write`.
    pub unwritten: bool,
    /// Number of descriptors after which the model dies; 0: never.
    pub dies: u64,
    /// Delay of each answer, in microseconds.
    pub late: u32,
}

impl Behaviour {
    /// A device without faults, with the queue setup of the shipped profiles.
    pub const SOUND: Self = Self {
        seed: 1,
        depth: 128,
        max_batch: 1024,
        max_transfer: 2 << 20,
        full: 0,
        fault: 0,
        fail: 0,
        list_fault: 0,
        silent: 0,
        shuffled: false,
        unmapped: false,
        unbatched: false,
        unwritten: false,
        dies: 0,
        late: 0,
    };
}

impl Default for Behaviour {
    fn default() -> Self {
        Self::SOUND
    }
}

impl Behaviour {
    /// Returns the default behaviour with the fields in `text`: `name=number`, separated by colons; `None` if a field is
    /// unknown.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut behaviour = Self::default();
        for field in text.split(':').filter(|field| !field.is_empty()) {
            let (name, value) = field.split_once('=')?;
            let value: u64 = value.parse().ok()?;
            let small = u32::try_from(value).ok()?;
            match name {
                "seed" => behaviour.seed = value,
                "depth" => behaviour.depth = usize::try_from(value).ok()?,
                "max-batch" => behaviour.max_batch = small,
                "max-transfer" => behaviour.max_transfer = small,
                "full" => behaviour.full = small,
                "fault" => behaviour.fault = small,
                "fail" => behaviour.fail = small,
                "list-fault" => behaviour.list_fault = small,
                "silent" => behaviour.silent = small,
                "shuffled" => behaviour.shuffled = value != 0,
                "unmapped" => behaviour.unmapped = value != 0,
                "unbatched" => behaviour.unbatched = value != 0,
                "unwritten" => behaviour.unwritten = value != 0,
                "dies" => behaviour.dies = value,
                "late" => behaviour.late = small,
                _ => return None,
            }
        }
        Some(behaviour)
    }
}

/// Status codes that the model writes (see `record`).
mod status {
    pub const SUCCESS: u8 = 0x01;
    pub const PAGE_FAULT: u8 = 0x03;
    pub const BATCH_FAILED: u8 = 0x05;
    pub const BATCH_FAULT: u8 = 0x06;
    pub const OPCODE: u8 = 0x10;
    pub const TRANSFER_SIZE: u8 = 0x13;
    pub const DESCRIPTOR_COUNT: u8 = 0x14;
    pub const HARDWARE: u8 = 0x20;
}

/// Software model of one queue.
#[derive(Debug)]
pub struct Model {
    behaviour: Behaviour,
    state: Mutex<State>,
    arrived: Condvar,
}

#[derive(Debug)]
struct State {
    waiting: VecDeque<Descriptor>,
    draws: u64,
    dead: bool,
    closed: bool,
    accepted: u64,
    answered: u64,
    taken_back: u64,
}

impl Model {
    /// Creates a queue with this behaviour.
    #[must_use]
    pub fn new(behaviour: Behaviour) -> Self {
        Self {
            behaviour,
            state: Mutex::new(State {
                waiting: VecDeque::new(),
                // Never 0: the generator would then return only 0.
                draws: behaviour.seed | 1 << 63,
                dead: false,
                closed: false,
                accepted: 0,
                answered: 0,
                taken_back: 0,
            }),
            arrived: Condvar::new(),
        }
    }

    /// Creates a queue without the device's faults, but with the same batch limit and the same restrictions of the kernel.
    pub(crate) fn without_faults(&self) -> Self {
        let kernel = self.behaviour;
        Self::new(Behaviour {
            max_batch: kernel.max_batch,
            unmapped: kernel.unmapped,
            unbatched: kernel.unbatched,
            unwritten: kernel.unwritten,
            ..Behaviour::SOUND
        })
    }

    /// Returns the configured behaviour.
    pub(crate) fn behaviour(&self) -> &Behaviour {
        &self.behaviour
    }

    /// Returns the count of accepted descriptors.
    #[must_use]
    pub fn accepted(&self) -> u64 {
        self.lock().accepted
    }

    /// Returns the count of descriptors that the user reported as complete.
    #[must_use]
    pub fn taken_back(&self) -> u64 {
        self.lock().taken_back
    }

    /// Ends all answers. Every later submission fails.
    pub fn die(&self) {
        let mut state = self.lock();
        state.dead = true;
        state.waiting.clear();
    }

    /// Executes one queued descriptor. Returns false if the queue is empty.
    pub fn step(&self) -> bool {
        let mut state = self.lock();
        let next = if self.behaviour.shuffled && state.waiting.len() > 1 {
            let waiting = state.waiting.len();
            let at = state.below(waiting);
            state.waiting.remove(at)
        } else {
            state.waiting.pop_front()
        };
        let Some(descriptor) = next else {
            return false;
        };
        if state.chance(self.behaviour.silent) {
            return true;
        }
        state.answered += 1;
        // A working device does not block submissions.
        drop(state);
        // SAFETY: the submitter guarantees its addresses until the record is complete.
        unsafe { self.execute(&descriptor) };
        true
    }

    fn chance(&self, thousandths: u32) -> bool {
        thousandths > 0 && self.lock().chance(thousandths)
    }

    /// Executes descriptors until [`Model::close`] is called, as a device would.
    pub fn run(&self) {
        loop {
            while self.step() {
                if self.behaviour.late > 0 && !self.lock().closed {
                    std::thread::sleep(Duration::from_micros(self.behaviour.late.into()));
                }
            }
            let state = self.lock();
            if state.closed {
                return;
            }
            let has_work = |state: &mut State| state.waiting.is_empty() && !state.closed;
            drop(self.arrived.wait_while(state, has_work));
        }
    }

    /// Ends [`Model::run`] after the queued descriptors.
    pub fn close(&self) {
        self.lock().closed = true;
        self.arrived.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// # Safety
    ///
    /// As [`Portal::submit`].
    unsafe fn execute(&self, descriptor: &Descriptor) {
        // SAFETY: the caller guarantees the record.
        let record = unsafe { &*descriptor.record() };
        if descriptor.opcode() == Some(Opcode::Batch) {
            // SAFETY: the caller guarantees the list and all its addresses.
            unsafe { self.batch(descriptor, record) };
        } else {
            // SAFETY: guaranteed by the caller.
            unsafe { self.one(descriptor, record) };
        }
    }

    /// # Safety
    ///
    /// As [`Portal::submit`].
    unsafe fn batch(&self, descriptor: &Descriptor, record: &Record) {
        let count = descriptor.size();
        if count < 2 || count > self.behaviour.max_batch {
            return answer(record, status::DESCRIPTOR_COUNT, 0, 0, 0);
        }
        let list = descriptor.source() as *const Descriptor;
        let members = usize::try_from(count).unwrap_or(0);
        let readable = if self.chance(self.behaviour.list_fault) {
            self.lock().below(members)
        } else {
            members
        };
        let mut all_well = true;
        for at in 0..readable {
            // A concurrent reader may see some of the records written, and others not.
            spin_loop();
            // SAFETY: the list has this number of descriptors, which stay until the batch is complete.
            let member = unsafe { *list.add(at) };
            // SAFETY: the caller guarantees every member.
            let member_record = unsafe { &*member.record() };
            all_well &= if member.opcode() == Some(Opcode::Batch) {
                answer(member_record, status::OPCODE, 0, 0, 0);
                false
            } else {
                // SAFETY: guaranteed by the caller.
                unsafe { self.one(&member, member_record) }
            };
        }
        spin_loop();
        let done = u32::try_from(readable).unwrap_or(u32::MAX);
        if readable < members {
            answer(record, status::BATCH_FAULT, 0, done, list as u64);
        } else if all_well {
            answer(record, status::SUCCESS, 0, done, 0);
        } else {
            answer(record, status::BATCH_FAILED, 0, done, 0);
        }
    }

    /// Executes one descriptor; returns true on success.
    ///
    /// # Safety
    ///
    /// As [`Portal::submit`].
    unsafe fn one(&self, descriptor: &Descriptor, record: &Record) -> bool {
        if self.chance(self.behaviour.fail) {
            answer(record, status::HARDWARE, 0, 0, 0);
            return false;
        }
        let size = descriptor.size();
        if descriptor.opcode() != Some(Opcode::Noop)
            && (size == 0 || size > self.behaviour.max_transfer)
        {
            answer(record, status::TRANSFER_SIZE, 0, 0, 0);
            return false;
        }
        let bytes = usize::try_from(size).unwrap_or(0);
        let fault = self
            .chance(self.behaviour.fault)
            .then(|| self.lock().below(bytes.max(1)));
        let reach = fault.unwrap_or(bytes);
        let (source, destination) = (descriptor.source(), descriptor.destination());
        let result = match descriptor.opcode() {
            Some(Opcode::Noop) => None,
            Some(Opcode::ComparePattern) => {
                // SAFETY: the submitter guarantees the source.
                unsafe { first_other(source, reach, destination) }
            }
            Some(Opcode::Compare) => {
                // SAFETY: the submitter guarantees both ranges.
                unsafe { first(reach, |at| byte(source, at) != byte(destination, at)) }
            }
            Some(Opcode::Memmove) => {
                // SAFETY: the submitter guarantees both ranges.
                unsafe { std::ptr::copy(source as *const u8, destination as *mut u8, reach) };
                None
            }
            Some(Opcode::Fill) => {
                let pattern = source.to_le_bytes();
                for at in 0..reach {
                    // SAFETY: the submitter guarantees the destination.
                    unsafe {
                        (destination as *mut u8)
                            .add(at)
                            .write_volatile(pattern[at % 8])
                    };
                }
                None
            }
            Some(Opcode::Batch) | None => {
                answer(record, status::OPCODE, 0, 0, 0);
                return false;
            }
        };
        let done = |at: usize| u32::try_from(at).unwrap_or(u32::MAX);
        match (result, fault) {
            (Some(at), _) => answer(record, status::SUCCESS, 1, done(at), 0),
            (None, Some(at)) => {
                let address = source.wrapping_add(at as u64);
                answer(record, status::PAGE_FAULT, 0, done(at), address);
                return false;
            }
            (None, None) => answer(record, status::SUCCESS, 0, size, 0),
        }
        true
    }
}

/// Writes a record. Panics if the record is not pending, because two descriptors then use the same record.
fn answer(record: &Record, status: u8, result: u8, completed: u32, fault_address: u64) {
    let before = record.read();
    assert!(
        before == Completion::Pending,
        "a record is used twice at once: {before:?}"
    );
    record.complete(status, result, completed, fault_address);
}

/// Returns the first position below `bytes` for which `holds` returns true.
fn first(bytes: usize, holds: impl Fn(usize) -> bool) -> Option<usize> {
    (0..bytes).find(|at| holds(*at))
}

/// Returns the position of the first byte that differs from the repeated pattern; `None` if all `bytes` bytes match.
///
/// # Safety
///
/// The bytes must be mapped readable.
unsafe fn first_other(base: u64, bytes: usize, pattern: u64) -> Option<usize> {
    let is_other = |at: usize| {
        // SAFETY: guaranteed by the caller.
        unsafe { byte(base, at) != pattern.to_le_bytes()[at % 8] }
    };
    // Reads u64 by u64: reading single bytes would slow down the model's users.
    let word = |at: &usize| {
        // SAFETY: guaranteed by the caller; other threads may write it concurrently.
        unsafe { (base as *const u64).byte_add(*at).read_volatile() != pattern }
    };
    let words = if base.is_multiple_of(8) { bytes / 8 } else { 0 };
    let found = (0..words * 8).step_by(8).find(word);
    // Another thread may have changed this u64 to the pattern: then a later byte is found, or none.
    (found.unwrap_or(words * 8)..bytes).find(|at| is_other(*at))
}

/// # Safety
///
/// The byte must be mapped readable.
unsafe fn byte(base: u64, at: usize) -> u8 {
    // SAFETY: guaranteed by the caller; other threads may write it concurrently.
    unsafe { (base as *const u8).add(at).read_volatile() }
}

impl State {
    /// Returns a random number below `n`.
    fn below(&mut self, n: usize) -> usize {
        // xorshift64: Marsaglia 2003.
        self.draws ^= self.draws << 13;
        self.draws ^= self.draws >> 7;
        self.draws ^= self.draws << 17;
        usize::try_from(self.draws % n as u64).unwrap_or(0)
    }

    fn chance(&mut self, thousandths: u32) -> bool {
        thousandths > 0 && self.below(1000) < usize::try_from(thousandths).unwrap_or(usize::MAX)
    }
}

impl Portal for Arc<Model> {
    unsafe fn submit(&self, descriptor: &Descriptor) -> io::Result<Submitted> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.as_ref().submit(descriptor) }
    }

    fn completed(&self) {
        self.as_ref().completed();
    }
}

impl Portal for Model {
    unsafe fn submit(&self, descriptor: &Descriptor) -> io::Result<Submitted> {
        let mut state = self.lock();
        if state.dead {
            return Err(io::ErrorKind::NotConnected.into());
        }
        if state.waiting.len() >= self.behaviour.depth || state.chance(self.behaviour.full) {
            return Ok(Submitted::Full);
        }
        state.waiting.push_back(*descriptor);
        state.accepted += 1;
        if state.accepted == self.behaviour.dies {
            state.dead = true;
            state.waiting.clear();
        }
        drop(state);
        self.arrived.notify_one();
        Ok(Submitted::Accepted)
    }

    fn completed(&self) {
        let mut state = self.lock();
        state.taken_back += 1;
        assert!(
            state.taken_back <= state.answered,
            "complete before the answer, or twice"
        );
    }
}
