//! Jobs of libqpl: one per page in flight, for one encoder or decoder.
//!
//! Compression is a single pass with fixed Huffman codes, as in QEMU. Codes per page would raise the ratio by a factor of 1.39
//! (2.71 instead of 1.95 on Silesia's pages, libqpl 1.9.0). But they need a second pass through the device, which halves its
//! rate. The CPU would also have to make the codes and submit again: work that the device should save. Users who want ratio can
//! select `zstd`. The device does not verify its output, which would take another pass.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use hotlift_mem::PAGE_SIZE;
use hotlift_methods::device::{Collected, Direction, PageDevice, PageFailure, Submitted};

use super::sys::{self, Library};

/// Maximum jobs in flight of one encoder or decoder: the pages of a multifd packet. A job takes 189 KB of memory for the
/// library, which is allocated when the job is first needed.
const JOBS: usize = 128;
/// Timeout of a job, from the start of the wait. The device takes microseconds. The slowest of 25,000 page faults took half a
/// millisecond (QEMU's measurement); the timeout is a thousand times that.
const DEADLINE: Duration = Duration::from_millis(500);
/// Polls of a job before the thread yields between polls. They take about 10 us, in which an idle device completes a page.
const SPINS: u32 = 256;
/// Alignment of a job in bytes, which the completion records in the job require.
const ALIGN: usize = 64;

/// Executor of libqpl's jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Path {
    /// An IAA device.
    Hardware,
    /// libqpl itself, on the CPU.
    Software,
}

/// The jobs of one encoder or decoder.
pub(super) struct Pool {
    library: &'static Library,
    path: Path,
    direction: Direction,
    job: Layout,
    /// Maximum number of jobs.
    slots: usize,
    /// Jobs that are initialised so far.
    jobs: Vec<Memory>,
    /// Output of the jobs, a page per job. All pages are touched in advance, since page faults of the device are slow.
    output: Memory,
    /// Status of the last job on the software path: the job ends during its submission.
    done: u32,
}

// SAFETY: the memory is exclusive to this value, except for the device during a job; the library ties no job to a thread.
unsafe impl Send for Pool {}

impl Pool {
    /// Allocates the jobs of that path, and initialises the first one.
    ///
    /// # Errors
    ///
    /// The message of the loader or the library.
    pub(super) fn open(path: Path, direction: Direction) -> Result<Box<dyn PageDevice>, String> {
        let library = Library::get()?;
        let (slots, path_code) = match path {
            Path::Hardware => (JOBS, sys::PATH_HARDWARE),
            Path::Software => (1, sys::PATH_SOFTWARE),
        };
        let mut size = 0;
        // SAFETY: `size` is ours to write.
        let status = unsafe { (library.qpl_get_job_size)(path_code, &raw mut size) };
        let size = usize::try_from(size)
            .unwrap_or(0)
            .max(size_of::<sys::Job>());
        if status != sys::OK {
            return Err(format!("no size of a job: code {status}"));
        }
        let job = Layout::from_size_align(size, ALIGN).map_err(|error| error.to_string())?;
        let output = Layout::from_size_align(slots * PAGE_SIZE, PAGE_SIZE)
            .map_err(|error| error.to_string())?;
        let output = Memory::zeroed(output).ok_or("no memory for the jobs' output")?;
        // SAFETY: all of the memory, which is ours. The kernel does not allocate untouched zero pages.
        unsafe { output.ptr.write_bytes(0xff, output.layout.size()) };
        let mut pool = Self {
            library,
            path,
            direction,
            job,
            slots,
            jobs: Vec::with_capacity(slots),
            output,
            done: sys::OK,
        };
        pool.add_job().map_err(|code| match code {
            None => "no memory for a job".to_owned(),
            Some(code) => format!("no job: {} (code {code})", sys::meaning(code)),
        })?;
        Ok(Box::new(pool))
    }

    fn add_job(&mut self) -> Result<(), Option<u32>> {
        let memory = Memory::zeroed(self.job).ok_or(None)?;
        let path = match self.path {
            Path::Hardware => sys::PATH_HARDWARE,
            Path::Software => sys::PATH_SOFTWARE,
        };
        // SAFETY: zeroed memory of the size that the library requires on this path.
        match unsafe { (self.library.qpl_init_job)(path, memory.ptr.as_ptr().cast()) } {
            sys::OK => {
                self.jobs.push(memory);
                Ok(())
            }
            code => Err(Some(code)),
        }
    }

    fn job(&self, slot: usize) -> *mut sys::Job {
        self.jobs[slot].ptr.as_ptr().cast()
    }
}

impl PageDevice for Pool {
    fn slots(&self) -> usize {
        self.slots
    }

    unsafe fn submit(&mut self, slot: usize, input: &[u8]) -> Submitted {
        while slot >= self.jobs.len() {
            match self.add_job() {
                Ok(()) => {}
                Err(None) => return Submitted::Failed(PageFailure::NoMemory),
                Err(Some(code)) => return Submitted::Failed(PageFailure::Code(code.into())),
            }
        }
        let Ok(available_in) = u32::try_from(input.len()) else {
            return Submitted::Failed(PageFailure::Length(input.len()));
        };
        let (op, flags, room) = match self.direction {
            // One byte less than a page: larger output is sent uncompressed.
            Direction::Compress => (sys::OP_COMPRESS, sys::FLAG_OMIT_VERIFY, PAGE_SIZE - 1),
            Direction::Decompress => (sys::OP_DECOMPRESS, 0, PAGE_SIZE),
        };
        let job = self.job(slot);
        // SAFETY: the job is initialised and not in flight (guaranteed by the caller), so it is ours; only fields at its head
        // are written. The output is the slot's own and has room for a page.
        unsafe {
            (*job).next_in = input.as_ptr();
            (*job).available_in = available_in;
            (*job).next_out = self.output.ptr.as_ptr().add(slot * PAGE_SIZE);
            (*job).available_out = u32::try_from(room).unwrap_or(0);
            (*job).total_in = 0;
            (*job).total_out = 0;
            (*job).op = op;
            (*job).flags = sys::FLAG_FIRST | sys::FLAG_LAST | flags;
            (*job).level = sys::LEVEL;
            (*job).huffman_table = std::ptr::null_mut();
            (*job).dictionary = std::ptr::null_mut();
        }
        let run = match self.path {
            Path::Hardware => self.library.qpl_submit_job,
            Path::Software => self.library.qpl_execute_job,
        };
        // SAFETY: the job is set up, and its pointers stay valid until it is collected: the caller guarantees the input, this
        // value owns the output.
        match (unsafe { run(job) }, self.path) {
            (code, Path::Software) => {
                self.done = code;
                Submitted::Accepted
            }
            (sys::OK, Path::Hardware) => Submitted::Accepted,
            (sys::QUEUES_ARE_BUSY, Path::Hardware) => Submitted::Busy,
            (code, Path::Hardware) => Submitted::Failed(PageFailure::Code(code.into())),
        }
    }

    fn collect(&mut self, slot: usize) -> Collected {
        let job = self.job(slot);
        let mut begin = None;
        let mut questions = 0u32;
        let code = loop {
            // The time is read before the poll: a thread that was not scheduled must not count a completed job as lost.
            let overdue =
                questions >= SPINS && begin.get_or_insert_with(Instant::now).elapsed() >= DEADLINE;
            let code = match self.path {
                // SAFETY: the job was submitted, and lives.
                Path::Hardware => unsafe { (self.library.qpl_check_job)(job) },
                Path::Software => self.done,
            };
            match code {
                sys::BEING_PROCESSED if overdue => return Collected::NoAnswer,
                sys::BEING_PROCESSED if questions >= SPINS => std::thread::yield_now(),
                sys::BEING_PROCESSED => std::hint::spin_loop(),
                code => break code,
            }
            questions = questions.saturating_add(1);
        };
        // SAFETY: the job has ended, so it is not written any more.
        let written = unsafe { (*job).total_out };
        match (code, usize::try_from(written)) {
            (sys::OK, Ok(written)) if written <= PAGE_SIZE => Collected::Done(written),
            (sys::OK, written) => {
                Collected::Failed(PageFailure::Length(written.unwrap_or(usize::MAX)))
            }
            (sys::MORE_OUTPUT_NEEDED, _) => Collected::DoesNotFit,
            (code, _) => Collected::Failed(PageFailure::Code(code.into())),
        }
    }

    fn output(&self, slot: usize, len: usize) -> &[u8] {
        assert!(slot < self.jobs.len() && len <= PAGE_SIZE, "a job's output");
        // SAFETY: a part of the slot's room, which is initialised; its job has ended, and no other begins without `&mut self`.
        unsafe {
            let room = self.output.ptr.as_ptr().add(slot * PAGE_SIZE);
            std::slice::from_raw_parts(room, len)
        }
    }

    fn abandon(self: Box<Self>) {
        std::mem::forget(self);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        for memory in &self.jobs {
            // SAFETY: the job is initialised and not in flight, the trait's condition.
            unsafe { (self.library.qpl_fini_job)(memory.ptr.as_ptr().cast()) };
        }
    }
}

/// Memory that a device may write to.
struct Memory {
    ptr: NonNull<u8>,
    layout: Layout,
}

impl Memory {
    /// Returns zeroed memory of that layout, which must not be empty; `None` if memory runs out.
    fn zeroed(layout: Layout) -> Option<Self> {
        // SAFETY: both callers' layouts have a size: a job's head at least, a page at least.
        let ptr = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Self { ptr, layout })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.ptr.as_ptr(), self.layout) };
    }
}
